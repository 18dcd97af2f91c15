// SPDX-License-Identifier: Apache-2.0
// narrow.cu - factors of adapters that are f32 beside a plan of 16 bits: those of the experts that have rows, rounded
// into the workspace, lying as the weights do.
#include "narrow.cuh"

struct NarrowFactor {
    const float *from;
    void *to;
    int64_t g, r, c; // strides of `from`
    int rows, cols;  // as it is written, without gaps: `cols` is the inner one
    bool flat;       // `from` lies the same way: fours at once
};

struct NarrowArgs {
    NarrowFactor factor[4];
    const int *cnt; // [E] rows of each expert, or NULL: blockIdx.y is a slot
    View ids;
    int k, E;
};

static constexpr int THREADS = 256;

template <class T> __global__ void __launch_bounds__(THREADS) narrow_kernel(const __grid_constant__ NarrowArgs a)
{
    depend_wait();
    depend_launch();
    const NarrowFactor &f = a.factor[blockIdx.z];
    if (!f.from) return;
    int64_t e = blockIdx.y;
    if (a.cnt) {
        if (!a.cnt[e]) return;
    } else {
        e = load_int(a.ids.p, a.ids.dtype, e / a.k * a.ids.s0 + e % a.k * a.ids.s1);
        if (e < 0 || e >= a.E) return;
    }
    const int n = f.rows * f.cols, step = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
    const float *const from = f.from + e * f.g;
    T *const to = (T *)f.to + e * n;
    if (f.flat) {
        for (int i = first; i < n / 4; i += step) {
            const float4 v = ((const float4 *)from)[i];
            ((uint2 *)to)[i] = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
        }
        return;
    }
    for (int i = first; i < n; i += step) {
        const int row = i / f.cols, col = i - row * f.cols;
        to[i] = from_float<T>(from[row * f.r + col * f.c]);
    }
}

NarrowRoom narrow_carve(fmoe_carve *c, const fmoe_desc &d, int64_t h_cols)
{
    NarrowRoom room = {};
    const int64_t size[4] = {d.rank1 * d.H, d.rank1 * h_cols, d.rank2 * d.I, d.rank2 * d.H};
    for (int i = 0; i < 4; i++)
        room.at[i] = size[i] && d.dtype != FMOE_F32 ? fmoe_carve_take(c, d.E, (size_t)size[i] * 2) : nullptr;
    return room;
}

bool narrow_factors(const fmoe_desc &d, const fmoe_experts_args *args, const int *cnt, NarrowRoom &room,
                    fmoe_weights *w, Stream &s)
{
    NarrowArgs a = {};
    const fmoe_tensor **const factor[4] = {&w->lora_a1, &w->lora_b1, &w->lora_a2, &w->lora_b2};
    const fmoe_tensor *const weight[2] = {w->quant1 ? nullptr : w->w1, w->quant2 ? nullptr : w->w2};
    bool any = false;
    int64_t most = 0;
    for (int i = 0; i < 4; i++) {
        const fmoe_tensor *const t = *factor[i];
        if (!t || !room.at[i] || fmoe_tensor_dtype(t) != FMOE_F32) continue;
        const fmoe_tensor *const v = weight[i / 2];
        const bool turn = v && fmoe_stride(v, 2) != 1 && fmoe_stride(v, 1) == 1; // the weights are [in,out]
        const int64_t rows = t->shape[1], cols = t->shape[2], n = rows * cols;
        NarrowFactor &f = a.factor[i];
        f = {(const float *)fmoe_data(t),
             room.at[i],
             fmoe_stride(t, 0),
             fmoe_stride(t, turn ? 2 : 1),
             fmoe_stride(t, turn ? 1 : 2),
             (int)(turn ? cols : rows),
             (int)(turn ? rows : cols),
             false};
        f.flat =
            n % 4 == 0 && f.c == 1 && (f.r == f.cols || f.rows == 1) && f.g % 4 == 0 && (uintptr_t)f.from % 16 == 0;
        room.strides[i][0] = n, room.strides[i][1] = turn ? 1 : cols, room.strides[i][2] = turn ? rows : 1;
        room.t[i] = *t;
        room.t[i].data = room.at[i];
        room.t[i].byte_offset = 0;
        room.t[i].strides = room.strides[i];
        room.t[i].dtype = fmoe_datatype{(uint8_t)(d.dtype == FMOE_BF16 ? 4 : 2), 16, 1};
        *factor[i] = &room.t[i];
        any = true;
        most = fmoe_max(most, n);
    }
    if (!any) return false;
    a.cnt = cnt;
    a.E = (int)d.E, a.k = (int)d.k;
    const fmoe_tensor *const ids = args->ids;
    a.ids = View{fmoe_data(ids), fmoe_tensor_dtype(ids), fmoe_stride(ids, 0), fmoe_stride(ids, 1)};
    const int64_t groups = cnt ? d.E : ids->shape[0] * d.k;
    const Grid grid = {dim3((unsigned)fmoe_min(fmoe_ceil_div(most, 4 * THREADS), 16), (unsigned)groups, 4), THREADS};
    if (d.dtype == FMOE_BF16) launch(s, Product::NARROW, narrow_kernel<bf16>, grid, a);
    else launch(s, Product::NARROW, narrow_kernel<f16>, grid, a);
    return true;
}
