// SPDX-License-Identifier: Apache-2.0
// coded.cu - descriptors of quantised weights, checked by the core, as kernels take them; and the ring.
#include "coded.cuh"

extern "C" {
#include "codes.h"
}

static ScaleKind kind_of(const fmoe_tensor *t, int scale_type)
{
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F32: return SCALE_F32;
    case FMOE_BF16: return SCALE_BF16;
    case FMOE_F16: return SCALE_F16;
    default: break;
    }
    return scale_type == FMOE_SCALE_E8M0 ? SCALE_E8M0 : scale_type == FMOE_SCALE_E4M3 ? SCALE_E4M3 : SCALE_U8;
}

static CodedGrid grid_of(const fmoe_tensor *t, bool list, int scale_type, int64_t E, MatEntry *copy, Stream &s)
{
    CodedGrid g = {};
    if (!t) return g;
    g.kind = kind_of(t, scale_type);
    if (list) {
        rowmap_list(copy, t, E, s);
        g.list = copy;
        return g;
    }
    g.p = fmoe_data(t);
    g.g = fmoe_stride(t, 0), g.r = fmoe_stride(t, 1), g.c = fmoe_stride(t, 2);
    return g;
}

// Whether all rows of a stack or list begin at whole multiples of so many bytes, and have no gaps inside.
static bool rows_ok(const fmoe_tensor *t, bool list, int64_t E, uintptr_t bytes)
{
    const uintptr_t size = fmoe_dtype_size(fmoe_tensor_dtype(t));
    uintptr_t all = 0;
    bool unit = true;
    for (int64_t e = 0; e < (list ? E : 1); e++) {
        const int row = list ? 0 : 1;
        all |= (uintptr_t)fmoe_data(t + e);
        if (t[e].shape[row] > 1) all |= (uintptr_t)fmoe_stride(t + e, row) * size;
        unit = unit && (fmoe_stride(t + e, row + 1) == 1 || t[e].shape[row + 1] == 1);
        if (!list && E > 1) all |= (uintptr_t)fmoe_stride(t, 0) * size;
    }
    return unit && all % bytes == 0;
}

// Codes of a stack, or (list) of a list, as part i of c. lists: of this matrix.
static void coded_part(Coded *c, int i, const Layer &l, const fmoe_tensor *codes, bool list, const fmoe_quant *q,
                       int64_t N, int64_t K, MatEntry *const (&lists)[4])
{
    CodedMatrix m = {};
    const bool small = fmoe_code_is_4bit(q->code), halves = q->flags & FMOE_QUANT_HALVES;
    if (list) {
        rowmap_list(lists[0], codes, l.E, *l.stream);
        m.list = lists[0];
    } else {
        m.codes = (const uint8_t *)fmoe_data(codes);
        m.g = fmoe_stride(codes, 0);
        m.r = fmoe_stride(codes, 1);
    }
    m.scale = grid_of(q->scale, list, q->scale_type, l.E, lists[1], *l.stream);
    m.zeros = grid_of(q->zeros, list, 0, l.E, lists[2], *l.stream);
    if (q->scale2 && list) {
        rowmap_list(lists[3], q->scale2, l.E, *l.stream);
        m.scale2_list = lists[3];
    } else if (q->scale2) {
        m.scale2 = (const float *)fmoe_data(q->scale2);
        m.scale2_g = q->scale2->shape[0] > 1;
    }
    m.N = (int)N;
    m.K = (int)K;
    m.code = q->code;
    m.high_first = q->flags & FMOE_QUANT_HIGH_FIRST ? 1 : 0;
    m.group_rows = q->group_rows;
    m.group_cols = q->group_cols;
    m.half = (int)(halves ? N / 2 : N);
    m.lower_groups = (int)(q->group_rows ? fmoe_ceil_div(m.half, q->group_rows) : 1);
    m.zero = q->zero;
    const float *const table = fmoe_code_table(q->code, q->lut);
    for (int j = 0; small && j < 16; j++) m.table[j] = table[j] - q->zero;
    m.vectors = K % 8 == 0 && q->group_cols % 8 == 0 && rows_ok(codes, list, l.E, small ? 4 : 8);
    c->part[i] = m;
    c->parts = i + 1;
}

CodedMatrix coded_stack(const fmoe_tensor *codes, const fmoe_quant *q, int64_t E, int64_t N, int64_t K)
{
    Layer l = {};
    Stream none = {}; // of lists alone
    Coded c = {};
    l.E = E, l.stream = &none;
    coded_part(&c, 0, l, codes, false, q, N, K, {});
    return c.part[0];
}

// ---- The ring ----

// As many experts as it has room for, one at least. Returns the bytes of all of them. (Two halves, of which one is
// decoded into under the tail of the product that reads the other, take longer: docs/notes/hopper.md.)
static int64_t share(Coded *c, const Layer &l, int64_t elements)
{
    c->each = elements * (l.dtype == FMOE_F32 ? 4 : 2);
    c->chunk = fmoe_max(fmoe_min(l.E, l.plan->ring / fmoe_max(c->each, 1)), 1);
    return c->chunk * c->each;
}

Quant quant_carve(fmoe_carve *c, const Layer &l, const fmoe_desc &d)
{
    Quant q = {};
    if (!(d.flags & FMOE_QUANT)) return q;
    for (auto &matrix : q.lists)
        for (MatEntry *&list : matrix) list = (MatEntry *)fmoe_carve_take(c, l.E, sizeof(MatEntry));
    const int64_t first = share(&q.w1, l, l.HC * l.H), second = share(&q.w2, l, l.H * l.I);
    q.ring = q.w1.ring = q.w2.ring = fmoe_carve_take(c, 1, (size_t)fmoe_max(first, second));
    return q;
}

void quant_describe(const Layer &l, bool gated, const fmoe_weights *w, Quant &q)
{
    const bool list = !w->w1;
    if (w->quant1 && !list) coded_part(&q.w1, 0, l, w->w1, false, w->quant1, l.HC, l.H, q.lists[0]);
    if (w->quant1 && list && gated) coded_part(&q.w1, 0, l, w->gate, true, w->quant_gate, l.I, l.H, q.lists[0]);
    if (w->quant1 && list) coded_part(&q.w1, gated ? 1 : 0, l, w->up, true, w->quant1, l.I, l.H, q.lists[1]);
    if (w->quant2) coded_part(&q.w2, 0, l, list ? w->down : w->w2, list, w->quant2, l.H, l.I, q.lists[2]);
}

// ---- The grouped matmul ----

GmmRing gmm_ring_carve(fmoe_carve *c, const Plan *plan, const fmoe_desc &d)
{
    GmmRing r = {};
    if (!(d.flags & FMOE_QUANT)) return r;
    r.bytes = plan->ring;
    if (d.K) {
        Layer l = {};
        Coded stack = {};
        l.plan = plan, l.dtype = d.dtype, l.E = d.E;
        r.bytes = share(&stack, l, d.K * d.N);
    } else {
        for (MatEntry *&list : r.lists) list = (MatEntry *)fmoe_carve_take(c, d.E, sizeof(MatEntry));
    }
    r.p = fmoe_carve_take(c, 1, (size_t)r.bytes);
    return r;
}

fmoe_status gmm_coded(const Layer &l, const GmmRing &r, const fmoe_tensor *codes, bool list, const fmoe_quant *q,
                      int64_t rows, int64_t cols, Coded *c)
{
    *c = {};
    share(c, l, rows * cols);
    if (c->each > r.bytes)
        return FAIL(FMOE_ERR_UNSUPPORTED,
                    "CUDA: a matrix of the list w is %lld bytes when decoded, the workspace has room for %lld "
                    "(FMOE_CUDA_RING)",
                    (long long)c->each, (long long)r.bytes);
    c->ring = r.p;
    coded_part(c, 0, l, codes, list, q, rows, cols, r.lists);
    return FMOE_OK;
}

// A tensor of a list as a stack of one.
struct One {
    fmoe_tensor t;
    int64_t shape[3], strides[3];
    explicit One(const fmoe_tensor &of) : t(of)
    {
        shape[0] = 1, shape[1] = of.shape[0], shape[2] = of.ndim > 1 ? of.shape[1] : 1;
        strides[0] = 0, strides[1] = fmoe_stride(&of, 0), strides[2] = of.ndim > 1 ? fmoe_stride(&of, 1) : 1;
        t.shape = shape, t.strides = strides, t.ndim = 3;
    }
};

fmoe_status gmm_coded_one(const Layer &l, const GmmRing &r, const fmoe_tensor *codes, int64_t i, const fmoe_quant *q,
                          int64_t rows, int64_t cols, Coded *c)
{
    const One code(codes[i]), scale(q->scale[i]), zeros(q->zeros ? q->zeros[i] : q->scale[i]);
    fmoe_quant one = *q;
    one.scale = &scale.t;
    if (q->zeros) one.zeros = &zeros.t;
    if (q->scale2) one.scale2 = q->scale2 + i;
    return gmm_coded(l, r, &code.t, false, &one, rows, cols, c);
}
