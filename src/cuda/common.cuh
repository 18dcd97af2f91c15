// SPDX-License-Identifier: Apache-2.0
// common.cuh - what every file of the CUDA backend shares: element types, strided matrices, the row map, the plan.
#pragma once
#include "launch.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
#include "backend.h"
#include "tune.h"
#include "util.h"
}

#define DEV __device__ __forceinline__

typedef __nv_bfloat16 bf16;
typedef __half f16;

// ---- Elements ----

DEV float to_float(float v) { return v; }
DEV float to_float(bf16 v) { return __bfloat162float(v); }
DEV float to_float(f16 v) { return __half2float(v); }
template <class T> DEV T from_float(float v);
template <> DEV float from_float<float>(float v) { return v; }
template <> DEV bf16 from_float<bf16>(float v) { return __float2bfloat16(v); }
template <> DEV f16 from_float<f16>(float v) { return __float2half(v); }

// V elements of a row at once, 16 bytes an access, where the layout allows.
template <class T, int V> struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Pack {
    T v[V];
};

// One element of a small tensor whose type is known at run time only (routing weights, biases, ids).
DEV float load_float(const void *p, int dtype, int64_t i)
{
    if (dtype == FMOE_F32) return ((const float *)p)[i];
    if (dtype == FMOE_BF16) return to_float(((const bf16 *)p)[i]);
    return to_float(((const f16 *)p)[i]);
}
DEV void store_float(void *p, int dtype, int64_t i, float v)
{
    if (dtype == FMOE_F32) ((float *)p)[i] = v;
    else if (dtype == FMOE_BF16) ((bf16 *)p)[i] = from_float<bf16>(v);
    else ((f16 *)p)[i] = from_float<f16>(v);
}
DEV int64_t load_int(const void *p, int dtype, int64_t i)
{
    return dtype == -32 ? ((const int32_t *)p)[i] : ((const int64_t *)p)[i];
}
DEV void store_int(void *p, int dtype, int64_t i, int64_t v)
{
    if (dtype == -32) ((int32_t *)p)[i] = (int32_t)v;
    else ((int64_t *)p)[i] = v;
}

// Pairs of 16-bit elements.
template <class T> DEV uint32_t pack2(float a, float b);
template <> DEV uint32_t pack2<bf16>(float a, float b)
{
    const __nv_bfloat162 t = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&t;
}
template <> DEV uint32_t pack2<f16>(float a, float b)
{
    const __half2 t = __floats2half2_rn(a, b);
    return *(const uint32_t *)&t;
}
template <class T> DEV float2 unpack2(uint32_t v);
template <> DEV float2 unpack2<bf16>(uint32_t v) { return __bfloat1622float2(*(const __nv_bfloat162 *)&v); }
template <> DEV float2 unpack2<f16>(uint32_t v) { return __half22float2(*(const __half2 *)&v); }

// 16 bytes at once, which the compiler, left alone, makes four of under pressure.
DEV void store_global16(void *p, const uint4 &v)
{
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// A tensor of small elements addressed by two indices.
struct View {
    void *p;
    int dtype;
    int64_t s0, s1;
};

// ---- Matrices ----

struct MatEntry { // one matrix of a list
    void *p;
    int64_t r, c; // strides in elements
    int64_t rows;
};

// Rows x columns, one matrix an expert: a stack, or a list in device memory. Rows from `split` on are in a second part
// (gate and up): `delta` elements after the first, or in a list of their own.
struct Mat {
    void *p;
    int64_t g, r, c;
    int64_t split, delta;
    const MatEntry *list, *list2;
    // a list of equal strides r, c: its matrices lie at p (the lowest) plus multiples of 2^shift bytes; else 0.
    int shift;
    int64_t span; // and the furthest at this multiple
    int64_t skip; // of a list: rows before the first, in either part (sm80/gemm.cu alone)
};

// ---- The row map: routed rows sorted by expert, each expert's segment beginning at a multiple of FMOE_CUDA_ALIGN (or
// 1) ----

// Of a product that lets the next one in early (sm90/sched.cuh): its CTAs that have the first half of the experts in
// memory, and whether all have. Zero before its launch.
struct Ready {
    unsigned ctas, all;
};
static constexpr int kReady = 2; // such products of a pass: up, which a backward may have to repeat, and dh

struct RowMap {
    int *off;     // [E+1] first row of each segment
    int *cnt;     // [E] rows of each expert, padding not counted
    int *tok;     // [rows] token of each row; a pad row repeats one of its own expert
    float *prob;  // [rows] routing weight; a pad row has 0
    int *slot;    // [R] row of each (token, choice), -1 when skipped
    int *ntile;   // [1]
    int2 *tile;   // tiles of FMOE_CUDA_TILE_M rows: expert, first row
    int first;    // the expert of off[0], cnt[0]: not 0 where a product has some of the experts
    int *part;    // [blocks][E] scratch
    Ready *ready; // [kReady], or NULL: the sort makes them zero
};

// Errors found on the device, in memory both sides see.
struct DeviceError {
    uint32_t code; // 0, or 1 + what
    int32_t pad;
    int64_t index, value;
};
enum { DEVERR_ID = 1, DEVERR_SIZE = 2, DEVERR_MAP = 3 };

struct Plan {
    int device, cc, sms;
    int stages;    // of the fast general products
    size_t shared; // bytes that a block may have
    int64_t ring;  // and decoded experts (quant/)
    bool inside;   // products of many rows decode codes themselves (sm90/coded/inside.cuh)
    fmoe_cuda_shape shape;
    fmoe_cuda_path path;
    const char *why;
    DeviceError *error;     // as the host sees it
    DeviceError *error_dev; // as the device sees it
};

extern const fmoe_core *fmoe_cuda_core;
#define FAIL(...) (fmoe_cuda_core->fail(__VA_ARGS__))

static inline Plan *plan_of(const fmoe_plan_impl *p) { return (Plan *)p->priv; }
static inline Stream stream_of(const Plan *plan, const fmoe_run *run)
{
    return Stream{(cudaStream_t)run->stream, plan->cc >= 90, Product::NONE, plan->sms, plan->stages};
}

// Translate the state of the runtime after launches.
fmoe_status fmoe_cuda_launched(const char *what);
fmoe_status fmoe_cuda_there(int device); // or an error

// ---- What an overlapped kernel (launch.cuh) calls ----
//
// depend_wait() in every block before it reads or writes anything that an earlier launch touches, and depend_launch()
// as soon as the next one may be brought in. (Some products begin earlier: sm90/sched.cuh.)

DEV void depend_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void depend_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Entry points between the files; every one only launches ----

// rowmap.cu
struct SortArgs {
    View ids;      // [T,k]
    const View *p; // [T,k] or NULL
    int64_t T, k, E;
    uint32_t flags; // FMOE_SKIP_*
    int align;
    int chunk;
    DeviceError *error;
};
size_t rowmap_part_count(int64_t R, int64_t E);
void rowmap_sort(const SortArgs &a, const RowMap &m, Stream &s);
void rowmap_clear(Ready *ready, Stream &s); // [kReady], where there is no sort to do it
// The same, with the map and the counts written to the caller's tensors too.
void rowmap_sort_into(const SortArgs &a, const RowMap &m, const View &map, const View &counts, Stream &s);
void rowmap_from_sizes(const View &sizes, int64_t E, int64_t R, int cumulative, const RowMap &m, DeviceError *error,
                       Stream &s);
void rowmap_list(MatEntry *dst, const fmoe_tensor *list, int64_t n, Stream &s);
// A list of matrices as one: a stack after all where the distances are equal, else by a copy of its pointers on the
// device. size: of an element.
Mat rowmap_mat(const fmoe_tensor *list, int64_t n, size_t size, MatEntry *copy, Stream &s);

// sm80/gemm.cu
struct GemmArgs {
    Mat A, B, D;
    const int *gather_a, *gather_b; // token of each row of A or B, or NULL
    // [E,N]: bias_g an expert, bias_n a column, columns from bias_split on bias_delta further.
    const void *bias;
    int bias_dtype;
    int64_t bias_g, bias_n, bias_split, bias_delta;
    int64_t M, N, K;  // M: weight gradients only; K: rows form only
    int64_t E, R;     // R: most rows
    int b_rows_are_k; // rows form: the contraction runs over the rows of B
    int wgrad;        // contraction over the expert's rows: D[e] = A^T B
    int out_f32, accumulate;
    int a_f32, b_f32; // an operand is f32 whatever the plan's dtype
    RowMap map_value; // off == NULL: one group of R rows
};
void gemm_sm80(int dtype, const GemmArgs &a, Stream &s);
// sm80/products.cu: the same on the fast general products. False: the operands do not allow it, and nothing was
// launched.
bool mma_gemm(int dtype, const GemmArgs &a, Stream &s);
// sm80/lora_add.cu, sm80/lora_rows.cu: the same where few k are added to rows, or the result has few columns, or a
// weight gradient few rows or columns. False: it is not that, and nothing was launched.
bool lora_add(int dtype, const GemmArgs &a, Stream &s);
bool lora_rows(int dtype, const GemmArgs &a, float scale, Stream &s);
void lora_scale(int dtype, void *rows, int64_t n, float by, Stream &s); // of n elements
bool lora_wgrad(int dtype, const GemmArgs &a, Stream &s);

// act.cu
struct ActArgs {
    int act;
    float alpha, limit;
    int64_t rows, I;
    const int *rows_dev; // number of rows on the device, or NULL: `rows`
    const void *h;       // gate of (r,i) at r*h_r + i*h_i, up h_u further
    int64_t h_r, h_i, h_u;
    void *a; // [rows, a_r]
    int64_t a_r;
    const void *da; // backward
    int64_t da_r;
    void *dh;
    int64_t dh_r, dh_i, dh_u;
    const float *prob; // backward in experts: scale of each row
    void *pa;          // prob * a
    float *dp;         // <da, a>
};
void act_forward(int dtype, int gated, const ActArgs &a, Stream &s);
void act_backward(int dtype, int gated, const ActArgs &a, Stream &s);

// combine.cu
struct CombineArgs {
    int64_t T, k, H, R;
    const void *y;
    int64_t y_r;
    View map;      // [T*k] row of each slot
    const View *p; // weights or NULL
    void *out;
    int64_t out_r;
    int add;
    DeviceError *error; // bounds of map are checked where this is given
};
void combine_rows(int dtype, const CombineArgs &a, Stream &s);
struct ScatterArgs { // out[map[t,j]] = p[t,j] * x[t]
    int64_t T, k, H, R;
    const void *x;
    int64_t x_r;
    View map;
    const View *p;
    void *out;
    int64_t out_r;
    DeviceError *error;
};
void scatter_rows(int dtype, const ScatterArgs &a, Stream &s);
void zero_rows(void *p, int64_t rows, int64_t row_bytes, int64_t pitch_bytes, const int *first, Stream &s);
// dots: out[t,j] = <x[t], y[map[t,j]]>
void dot_rows(int dtype, const CombineArgs &a, const View &out, Stream &s);
// dweights[t,j] = sum over parts of dp[part][slot] + (b2: <dout[t], b2[id]>)
struct DpArgs {
    int64_t T, k, H, E, parts, pitch;
    const float *dp;
    const int *slot;
    View ids, out;
    const void *dout, *bias;
    int64_t dout_r, bias_g, bias_n;
};
void dp_reduce(int dtype, const DpArgs &a, Stream &s);
// out[e][n] = sum over the expert's rows of (prob) * a[gather(r)][n]
struct ColsumArgs {
    int64_t E, N, rows; // rows: where the map has no groups
    const void *a;
    int a_dtype;
    int64_t a_r;
    const int *gather;
    const float *prob;
    RowMap map_value;
    void *out;
    int out_dtype, accumulate;
    int64_t out_g, out_n, out_split, out_delta;
};
void colsum_rows(const ColsumArgs &a, Stream &s);
