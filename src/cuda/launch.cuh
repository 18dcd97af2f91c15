// SPDX-License-Identifier: Apache-2.0
// launch.cuh - the one way to launch a kernel, and the one place that says when a launch may begin.
//
// A launch waits: it begins when everything before it in the stream has ended. From compute capability 9.0 on it can
// begin under the tail of the launch before it (programmatic dependent launch), and then only what the kernels do
// orders the two. A mistake there is a silent race, so nothing but the two tables below grants it.
//
// PRODUCTS: the kernel is OVERLAPPED. Its blocks come in as those of the launch before leave, and every one of them
// calls depend_wait() before it touches anything that an earlier launch reads or writes. (The kernels of a decode step
// call it later: what they touch before it, no launch but the first of the step can still be at work on, and that one
// waited.)
//
// kEarly: a Hopper product may go further and read results of the launch before while that one is still running
// (sm90/sched.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

enum When { WAITS, OVERLAPPED };

// What a launch does, when it begins, and whether it lets the next launch in as soon as the results of the first half
// of the experts are in memory. The products of the layer have these names on the Hopper kernels only; on the general
// kernels they are MMA or GEMM.
// clang-format off
#define PRODUCTS(X)                                                                                      \
    X(NONE,         WAITS,      false) /* nothing was launched in this call */                           \
    X(ROUTE,        WAITS,      false)                                                                   \
    X(ROUTE_SMALL,  OVERLAPPED, false) /* up to 512 experts, no groups */                                \
    X(SORT,         OVERLAPPED, false)                                                                   \
    X(CLEAR_READY,  OVERLAPPED, false)                                                                   \
    X(SIZES,        WAITS,      false) /* of a grouped matmul */                                         \
    X(LIST,         WAITS,      false) /* pointers of a list of matrices */                              \
    X(DEQUANT,      OVERLAPPED, false) /* codes to weights, of some experts */                           \
    X(QUANTISE,     WAITS,      false) /* weights to codes */                                            \
    X(NARROW,       OVERLAPPED, false) /* f32 factors of adapters to 16 bits */                          \
    X(GEMM,         WAITS,      false) /* sm80/gemm.cu */                                                \
    X(MMA,          OVERLAPPED, false) /* sm80/gemm_mma.cuh */                                           \
    X(LORA_ADD,     WAITS,      false) /* sm80/lora_add.cu */                                            \
    X(LORA_ROWS,    WAITS,      false) /* sm80/lora_rows.cu, as the next two */                          \
    X(LORA_SCALE,   WAITS,      false)                                                                   \
    X(LORA_WGRAD,   WAITS,      false)                                                                   \
    X(ACT,          WAITS,      false)                                                                   \
    X(COMBINE,      OVERLAPPED, false)                                                                   \
    X(SCATTER,      WAITS,      false)                                                                   \
    X(ZERO,         WAITS,      false)                                                                   \
    X(EP,           WAITS,      false) /* ep/ep_rows.cu, FMOE_NEW_WEIGHTS */                             \
    X(DOT,          WAITS,      false)                                                                   \
    X(DP,           OVERLAPPED, false) /* gradients of routing weights, from their parts */              \
    X(DP_BIAS,      WAITS,      false) /* and where W2 has a bias */                                     \
    X(COLSUM,       WAITS,      false)                                                                   \
    X(DECODE,       OVERLAPPED, false)                                                                   \
    X(GATHER,       OVERLAPPED, false) /* gathered rows x weights, no activation: up or da */            \
    X(UP,           OVERLAPPED, true)  /* with the activation */                                         \
    X(DOWN,         OVERLAPPED, false)                                                                   \
    X(DH,           OVERLAPPED, true)  /* da with the backward of the activation: dh, p*a and dp */      \
    X(DX,           OVERLAPPED, false)                                                                   \
    X(DW1,          OVERLAPPED, false)                                                                   \
    X(DW2,          OVERLAPPED, false)                                                                   \
    X(DW1_BORROWED, OVERLAPPED, false) /* FMOE_BORROW_DW1: over p*a and the rows of dx */                \
    X(LORA_IN,      OVERLAPPED, false) /* rows x the first factor of an adapter, whose rank is large */  \
    X(LORA_DB2,     OVERLAPPED, false) /* the gradient of an adapter's factor B2, rank large */          \
    X(LORA_D,       OVERLAPPED, false) /* and of the others */                                           \
    X(GMM_ROWS,     OVERLAPPED, false) /* grouped matmul */                                              \
    X(GMM_WGRAD,    OVERLAPPED, false)
// clang-format on

#define PRODUCT_NAME(name, when, early) name,
#define PRODUCT_TRAITS(name, when, early) {when, early},
enum class Product { PRODUCTS(PRODUCT_NAME) };

struct ProductTraits {
    When when;
    bool lets_in_early;
};
static constexpr ProductTraits kProducts[] = {PRODUCTS(PRODUCT_TRAITS)};

static constexpr const ProductTraits &traits(Product product) { return kProducts[(int)product]; }

// Early starts: `after` reads rows of the first half of the experts while `before`, the launch before it, is at work on
// the second half; then it waits for `before` as a whole, and only after that it lets the next launch in. So of all
// earlier launches only `before` can still be running. A pair is safe if `after` writes nothing that `before` reads or
// writes, and reads of what `before` writes only the rows it multiplies, in the order of experts.
static constexpr struct {
    Product before, after;
} kEarly[] = {
    {Product::UP, Product::DOWN},      // reads a, which up writes; writes y, which up does not know
    {Product::DH, Product::DW2},       // reads p*a, which dh writes; writes dW2
    {Product::DH, Product::DW1},       // reads dh; writes dW1
    {Product::DW2, Product::DW1},      // reads dh, complete since dW2 let it in; dW2 itself nobody reads
    {Product::LORA_DB2, Product::DW1}, // the same: a gradient nobody reads
    // Reads dh; writes the rows of dx over p*a, whose readers had ended when dW1 let it in.
    {Product::DW1, Product::DX},
    // Not here, though they look alike:
    //   DH or DW2, DX: the rows of dx lie where p*a is, which dh writes and dW2 reads.
    //   DW1_BORROWED after anything: it lies over p*a and the rows of dx, which the launch before reads or writes.
    //   An adapter's products: the launch before wrote the rows of its rank, all of which they read from the start.
};
static constexpr bool may_begin_early(Product before, Product after)
{
    for (const auto &pair : kEarly)
        if (pair.before == before && pair.after == after) return true;
    return false;
}

// Where the launches of one call go.
struct Stream {
    cudaStream_t handle;
    bool overlap; // 9.0 and later
    Product last; // the launch before the next one
    int sms;      // that are used
    int stages;   // of the fast general products (sm80/product.cuh), 0: there is no room for them
};

struct Grid {
    dim3 blocks;
    unsigned threads;
    size_t shared = 0;
    int cluster = 1;
};

template <class... P, class... A>
static inline cudaError_t launch(Stream &s, Product product, void (*kernel)(P...), const Grid &g, const A &...args)
{
    cudaLaunchConfig_t c = {};
    c.gridDim = g.blocks;
    c.blockDim = dim3(g.threads);
    c.dynamicSmemBytes = g.shared;
    c.stream = s.handle;
    cudaLaunchAttribute at[2] = {};
    if (g.cluster > 1) {
        at[c.numAttrs].id = cudaLaunchAttributeClusterDimension;
        at[c.numAttrs].val.clusterDim.x = (unsigned)g.cluster;
        at[c.numAttrs].val.clusterDim.y = at[c.numAttrs].val.clusterDim.z = 1;
        c.numAttrs++;
    }
    if (s.overlap && traits(product).when == OVERLAPPED) {
        at[c.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        at[c.numAttrs].val.programmaticStreamSerializationAllowed = 1;
        c.numAttrs++;
    }
    c.attrs = at;
    // A list of pointers is no product: it begins when all before it has ended, and who reads lists does not begin
    // early.
    if (product != Product::LIST) s.last = product;
    return cudaLaunchKernelEx(&c, kernel, (P)args...);
}
