// SPDX-License-Identifier: Apache-2.0
// launch.cuh - the one way to launch a kernel, and the one place that says when a launch may begin.
//
// A launch waits: it begins when everything before it in the stream has ended. From compute capability 9.0 on it can
// begin under the tail of the launch before it (programmatic dependent launch), and then only what the kernels do
// orders the two. A mistake there is a silent race, so nothing but the two tables below grants it.
//
// kProducts: the kernel is OVERLAPPED. Its blocks come in as those of the launch before leave, and every one of them
// calls depend_wait() before it touches anything that an earlier launch reads or writes. (The kernels of a decode step
// call it later: what they touch before it, no launch but the first of the step can still be at work on, and that one
// waited.)
//
// kEarly: a Hopper product may go further and read results of the launch before while that one is still running
// (sm90/sched.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

// What a launch does. The products of the layer have these names only on the Hopper kernels; on the general one they
// are GEMM.
enum class Product {
    NONE, // nothing was launched in this call
    ROUTE,
    ROUTE_SMALL,
    SORT,
    CLEAR_READY,
    SIZES,
    LIST,
    GEMM,
    LORA_ADD,
    LORA_ROWS,
    LORA_SCALE,
    LORA_WGRAD,
    ACT,
    COMBINE,
    SCATTER,
    ZERO,
    DOT,
    DP,
    DP_BIAS,
    COLSUM,
    DECODE,
    GATHER, // gathered rows x weights, no activation: up or da
    UP,     // with the activation
    DOWN,
    DH,
    DX,
    DW1,
    DW2,
    DW1_BORROWED, // FMOE_BORROW_DW1: over p*a and the rows of dx
    LORA_IN,      // rows x the first factor of an adapter, whose rank is large
    LORA_DB2,     // the gradient of an adapter's factor B2, rank large
    LORA_D,       // and of the others
    GMM_ROWS,
    GMM_WGRAD,
    COUNT
};

enum When { WAITS, OVERLAPPED };

struct ProductTraits {
    Product product;
    When when;
    bool lets_in_early; // lets the next launch in when the results of the first half of the experts are in memory
};
static constexpr ProductTraits kProducts[] = {
    {Product::NONE, WAITS, false},
    {Product::ROUTE, WAITS, false},
    {Product::ROUTE_SMALL, OVERLAPPED, false},
    {Product::SORT, OVERLAPPED, false},
    {Product::CLEAR_READY, OVERLAPPED, false},
    {Product::SIZES, WAITS, false},
    {Product::LIST, WAITS, false},
    {Product::GEMM, WAITS, false},
    {Product::LORA_ADD, WAITS, false},
    {Product::LORA_ROWS, WAITS, false},
    {Product::LORA_SCALE, WAITS, false},
    {Product::LORA_WGRAD, WAITS, false},
    {Product::ACT, WAITS, false},
    {Product::COMBINE, OVERLAPPED, false},
    {Product::SCATTER, WAITS, false},
    {Product::ZERO, WAITS, false},
    {Product::DOT, WAITS, false},
    {Product::DP, OVERLAPPED, false},
    {Product::DP_BIAS, WAITS, false},
    {Product::COLSUM, WAITS, false},
    {Product::DECODE, OVERLAPPED, false},
    {Product::GATHER, OVERLAPPED, false},
    {Product::UP, OVERLAPPED, true},
    {Product::DOWN, OVERLAPPED, false},
    {Product::DH, OVERLAPPED, true},
    {Product::DX, OVERLAPPED, false},
    {Product::DW1, OVERLAPPED, false},
    {Product::DW2, OVERLAPPED, false},
    {Product::DW1_BORROWED, OVERLAPPED, false},
    {Product::LORA_IN, OVERLAPPED, false},
    {Product::LORA_DB2, OVERLAPPED, false},
    {Product::LORA_D, OVERLAPPED, false},
    {Product::GMM_ROWS, OVERLAPPED, false},
    {Product::GMM_WGRAD, OVERLAPPED, false},
};
static constexpr bool in_order()
{
    for (int i = 0; i < (int)Product::COUNT; i++)
        if ((int)kProducts[i].product != i) return false;
    return sizeof kProducts / sizeof *kProducts == (size_t)Product::COUNT;
}
static_assert(in_order(), "kProducts has a line for each product, in their order");

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
