// SPDX-License-Identifier: Apache-2.0
// quantise.cu - weights to codes and back, of a stack in the caller's memory (fmoe_quantize, fmoe_dequantize). The
// bytes are those of cpu/ops/quantize.c: the same operations in the same order, none of them contracted.
//
// Two launches: the scales of all groups, and then codes, which are made for the scales as they were stored.
#include "cuda/ops.cuh"
#include "values.cuh"

extern "C" {
#include "codes.h"
}

static constexpr int THREADS = 256, WARPS = THREADS / 32;
static constexpr int MOST_EXPERTS = 65535; // of a launch

struct QuantiseArgs {
    CodedMatrix m;
    const void *w;
    int dtype, first; // first: expert
    int64_t w_g, w_r;
    int64_t rows, cols;           // of groups
    float most;                   // the largest magnitude of a code
    float bounds[15];             // of 4 bits: what separates neighbours by size,
    uint8_t order[16];            // and their codes
    bool scales_in_bytes, zeroed; // E8M0; zero points are written
};

// ---- Scales ----

struct Range {
    float lowest, highest; // below zero, above
    bool nan;
    DEV void take(const Range &r)
    {
        lowest = fminf(lowest, r.lowest), highest = fmaxf(highest, r.highest), nan = nan || r.nan;
    }
};

// Rows and columns of group (g, c).
struct Group {
    int n0, n1, k0, k1;
    DEV Group(const CodedMatrix &m, int64_t g, int64_t c)
    {
        const bool second = m.half < m.N && g >= m.lower_groups;
        const int from = second ? m.half : 0, end = second ? m.N : m.half;
        const int64_t at = from + (second ? g - m.lower_groups : g) * m.group_rows;
        n0 = (int)at, n1 = m.group_rows ? (int)fmoe_least(end, at + m.group_rows) : end;
        k0 = (int)(c * m.group_cols), k1 = m.group_cols ? (int)fmoe_least(m.K, (c + 1) * m.group_cols) : m.K;
    }
    static DEV int64_t fmoe_least(int64_t a, int64_t b) { return a < b ? a : b; }
};

DEV uint8_t e8m0_of(float most, float code_most)
{
    int of_most, of_code;
    if (!isfinite(most)) return 255;
    if (most == 0) return 0;
    frexpf(most, &of_most);
    frexpf(code_most, &of_code);
    return (uint8_t)min(max(of_most - of_code + 127, 0), 254);
}

DEV float second_scale(const CodedMatrix &m, int e) { return m.scale2 ? m.scale2[e * m.scale2_g] : 1; }

// bitsandbytes' INT8: the scale is the magnitude itself.
DEV bool is_by_magnitude(const CodedMatrix &m, float scale2) { return m.code == FMOE_CODE_S8 && scale2 == 1.0f / 127; }

DEV void store_scale(const QuantiseArgs &a, int e, int64_t g, int64_t c, const Range &r)
{
    const CodedMatrix &m = a.m;
    const float most = r.nan ? NAN : fmaxf(fabsf(r.lowest), r.highest), scale2 = second_scale(m, e);
    const bool magnitude = is_by_magnitude(m, scale2);
    float s = magnitude ? most : __fdiv_rn(most, a.most);
    if (a.zeroed) {
        s = r.nan ? NAN : __fdiv_rn(r.highest - r.lowest, 15);
        const float z = s > 0 ? rintf(__fdiv_rn(-r.lowest, s)) : 0;
        ((uint8_t *)m.zeros.p)[e * m.zeros.g + g * m.zeros.r + c * m.zeros.c] = (uint8_t)fminf(fmaxf(z, 0), 15);
    }
    if (m.scale2 && !magnitude) s = __fdiv_rn(s, scale2);
    const int64_t at = e * m.scale.g + g * m.scale.r + c * m.scale.c;
    void *const to = (void *)m.scale.p;
    if (a.scales_in_bytes) ((uint8_t *)to)[at] = e8m0_of(most, a.most);
    else if (m.scale.kind == SCALE_F32) ((float *)to)[at] = s;
    else if (m.scale.kind == SCALE_BF16) ((bf16 *)to)[at] = from_float<bf16>(s);
    else ((f16 *)to)[at] = from_float<f16>(s);
}

// A group is a warp's, or (WHOLE) a block's.
template <bool WHOLE> __global__ void __launch_bounds__(THREADS) scales_kernel(const __grid_constant__ QuantiseArgs a)
{
    __shared__ Range parts[WARPS];
    const int e = a.first + blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = WHOLE ? THREADS : 32, own = WHOLE ? threadIdx.x : lane;
    const int64_t per_block = WHOLE ? 1 : WARPS;
    for (int64_t i = blockIdx.x * per_block + (WHOLE ? 0 : warp); i < a.rows * a.cols; i += gridDim.x * per_block) {
        const int64_t g = i / a.cols, c = i % a.cols;
        const Group group(a.m, g, c);
        const int64_t width = group.k1 - group.k0, n = (group.n1 - group.n0) * width;
        Range r = {0, 0, false};
        for (int64_t j = own; j < n; j += each) {
            const int64_t row = group.n0 + j / width;
            const float x = load_float(a.w, a.dtype, e * a.w_g + row * a.w_r + group.k0 + j % width);
            r.take({x, x, x != x});
        }
#pragma unroll
        for (int d = 16; d; d /= 2)
            r.take({__shfl_xor_sync(~0u, r.lowest, d), __shfl_xor_sync(~0u, r.highest, d),
                    __shfl_xor_sync(~0u, (int)r.nan, d) != 0});
        if (WHOLE) {
            if (lane == 0) parts[warp] = r;
            __syncthreads();
            for (int w = 0; threadIdx.x == 0 && w < WARPS; w++) r.take(parts[w]);
            __syncthreads();
        }
        if (own == 0) store_scale(a, e, g, c, r);
    }
}

// ---- Codes ----

DEV uint8_t to_e4m3(float x)
{
    const uint8_t sign = x < 0 ? 0x80 : 0;
    return sign | __nv_cvt_float_to_fp8(fminf(fabsf(x), 448), __NV_SATFINITE, __NV_E4M3); // NaN: 448
}

// Nearest, to even in the middle.
DEV uint8_t to_e2m1(float x)
{
    const float a = fabsf(x);
    const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5);
    return (uint8_t)(code | (x < 0 ? 8 : 0));
}

DEV uint8_t nearest(const QuantiseArgs &a, float x)
{
    int n = 0;
#pragma unroll
    for (int b = 0; b < 15; b++) n += a.bounds[b] < x;
    return a.order[n];
}

// What weights of a group are multiplied by to be codes, and what is added.
struct ToCode {
    float inverse, zero;
    DEV ToCode(const CodedMatrix &m, int e, int row, int col)
    {
        const int g = group_row(m, row);
        const float scale = scale_value(m.scale.p, m.scale.kind, e * m.scale.g + g * m.scale.r + col * m.scale.c);
        const float scale2 = second_scale(m, e);
        zero =
            m.zeros.p ? scale_value(m.zeros.p, m.zeros.kind, e * m.zeros.g + g * m.zeros.r + col * m.zeros.c) : m.zero;
        if (is_by_magnitude(m, scale2)) inverse = scale > 0 ? __fdiv_rn(127, scale) : 0;
        else if (scale == 0 && m.code != FMOE_CODE_NF4 && m.code != FMOE_CODE_FP4) inverse = 0;
        else inverse = __fdiv_rn(1, __fmul_rn(fmaxf(scale, 1e-38f), scale2));
    }
    DEV uint8_t operator()(const QuantiseArgs &a, float x) const
    {
        const float v = __fmul_rn(x, inverse);
        switch (a.m.code) {
        case FMOE_CODE_E4M3: return to_e4m3(v);
        case FMOE_CODE_S8: return (uint8_t)(int8_t)fminf(fmaxf(rintf(__fadd_rn(v, zero)), -127), 127);
        case FMOE_CODE_E2M1: return to_e2m1(v);
        case FMOE_CODE_U4: return (uint8_t)fminf(fmaxf(__fadd_rn(rintf(v), zero), 0), 15);
        default: return nearest(a, v);
        }
    }
};

// A warp has a row, a lane a byte.
__global__ void __launch_bounds__(THREADS) codes_kernel(const __grid_constant__ QuantiseArgs a)
{
    const CodedMatrix &m = a.m;
    const int e = a.first + blockIdx.y, per_byte = m.code >= FMOE_CODE_E2M1 ? 2 : 1;
    for (int64_t row = blockIdx.x * WARPS + threadIdx.x / 32; row < m.N; row += gridDim.x * WARPS)
        for (int64_t k = threadIdx.x % 32 * per_byte; k < m.K; k += 32 * per_byte) {
            uint32_t byte = 0;
            for (int i = 0; i < per_byte && k + i < m.K; i++) {
                const int col = m.group_cols ? (int)((k + i) / m.group_cols) : 0;
                const uint32_t code =
                    ToCode(m, e, (int)row, col)(a, load_float(a.w, a.dtype, e * a.w_g + row * a.w_r + k + i));
                byte |= per_byte == 2 && (i == 1) != (m.high_first != 0) ? code << 4 : code;
            }
            ((uint8_t *)m.codes)[e * m.g + row * m.r + k / per_byte] = (uint8_t)byte;
        }
}

// Values by size; equal ones (the two zeros of a code) stay in order.
static void sort_values(QuantiseArgs &a, const float *table)
{
    float sorted[16];
    for (int i = 0, j; i < 16; i++) {
        for (j = i; j > 0 && sorted[j - 1] > table[i]; j--) sorted[j] = sorted[j - 1], a.order[j] = a.order[j - 1];
        sorted[j] = table[i], a.order[j] = (uint8_t)i;
        a.most = fmaxf(a.most, fabsf(table[i]));
    }
    for (int i = 0; i < 15; i++) a.bounds[i] = (sorted[i] + sorted[i + 1]) / 2;
}

// ---- Calls ----

static fmoe_status begin(const fmoe_quant_args *a)
{
    FMOE_TRY(fmoe_cuda_there(a->w->device.id));
    static const char *const names[] = {"experts", "rows", "columns"};
    for (int i = 0; i < 3; i++)
        if (a->w->shape[i] > INT32_MAX / 2)
            return FAIL(FMOE_ERR_UNSUPPORTED, "CUDA: w has %lld %s, at most %d are supported",
                        (long long)a->w->shape[i], names[i], INT32_MAX / 2);
    return FMOE_OK;
}

// A launch waits for all before it.
static Stream plain(void *stream) { return Stream{(cudaStream_t)stream, false, Product::NONE, 0, 0}; }

fmoe_status quantise_stack(const fmoe_quant_args *given)
{
    FMOE_TRY(begin(given));
    const fmoe_tensor *w = given->w;
    const fmoe_quant *q = given->quant;
    const int64_t E = w->shape[0], N = w->shape[1], K = w->shape[2];
    DeviceScope scope(w->device.id);
    Stream s = plain(given->stream);
    if (!E || !N || !K) return FMOE_OK;
    QuantiseArgs a = {};
    a.m = coded_stack(given->codes, q, E, N, K);
    a.w = fmoe_data(w), a.dtype = fmoe_tensor_dtype(w), a.w_g = fmoe_stride(w, 0), a.w_r = fmoe_stride(w, 1);
    a.rows = q->scale->shape[1], a.cols = q->scale->shape[2];
    a.scales_in_bytes = q->scale_type == FMOE_SCALE_E8M0;
    a.zeroed = q->zeros != nullptr;
    if (fmoe_code_is_4bit(q->code)) sort_values(a, fmoe_code_table(q->code, q->lut));
    if (q->code == FMOE_CODE_E4M3) a.most = 448;
    if (q->code == FMOE_CODE_S8) a.most = 127;
    if (q->code == FMOE_CODE_U4) a.most = 7.5f; // half of the codes on each side of the zero
    const int64_t group =
        (q->group_rows ? fmoe_min(q->group_rows, N) : N) * (q->group_cols ? fmoe_min(q->group_cols, K) : K);
    const bool whole = group > 2048;
    auto blocks = [](int64_t n, int64_t each) { return (unsigned)fmoe_min(fmoe_ceil_div(n, each), 1 << 20); };
    for (int64_t e = 0; e < E; e += MOST_EXPERTS) {
        const unsigned experts = (unsigned)fmoe_min(E - e, MOST_EXPERTS);
        a.first = (int)e;
        const Grid scales = {dim3(blocks(a.rows * a.cols, whole ? 1 : WARPS), experts), THREADS};
        launch(s, Product::QUANTISE, whole ? scales_kernel<true> : scales_kernel<false>, scales, a);
        launch(s, Product::QUANTISE, codes_kernel, Grid{dim3(blocks(N, WARPS), experts), THREADS}, a);
    }
    return fmoe_cuda_launched("fmoe_quantize");
}

fmoe_status dequantise_stack(const fmoe_quant_args *given)
{
    FMOE_TRY(begin(given));
    const fmoe_tensor *w = given->w;
    const int64_t E = w->shape[0], N = w->shape[1], K = w->shape[2],
                  size = (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(w));
    DeviceScope scope(w->device.id);
    Stream s = plain(given->stream);
    if (!E || !N || !K) return FMOE_OK;
    DequantArgs a = {};
    a.m = coded_stack(given->codes, given->quant, E, N, K);
    a.out_g = fmoe_stride(w, 0), a.out_r = fmoe_stride(w, 1);
    const bool aligned =
        ((uintptr_t)fmoe_data(w) | (uintptr_t)(a.out_r * size) | (uintptr_t)(E > 1 ? a.out_g * size : 0)) % 16 == 0;
    a.m.vectors = a.m.vectors && aligned;
    for (int64_t e = 0; e < E; e += MOST_EXPERTS) {
        a.first = (int)e, a.n = (int)fmoe_min(E - e, MOST_EXPERTS);
        a.out = (char *)fmoe_data(w) + e * a.out_g * size;
        dequantise(fmoe_tensor_dtype(w), a, s);
    }
    return fmoe_cuda_launched("fmoe_dequantize");
}
