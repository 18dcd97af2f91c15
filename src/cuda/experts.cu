// SPDX-License-Identifier: Apache-2.0
// experts.cu - the layer: which buffers, which products, in which order.
//
// forward:  row map | up (gather, activation) | down | combine
// backward: dh (gather, slope, p*a, dp) | dW2 | dW1 | dx rows | gather-sum, or (FMOE_BORROW_DW1) dW1 at the end
//
// Kept for the backward: the row map and h. Workspace holds what lives within one pass; p*a and da lie where dx rows
// come later.
//
// Adapters: before a product its rows pass through one factor, into rows of `rank` columns, which with the other factor
// are further steps of the product. l1 = x A1 is kept too; p*l2 is made of p*a.
#include "decode/decode.cuh"
#include "ops.cuh"
#include "quant/coded.cuh"
#include "quant/narrow.cuh"

static constexpr size_t kAlign = 4096; // rows of large buffers begin with a page of memory
// As the API asks of it: offsets do not depend on the address, so that a caller may move it.
static constexpr size_t kSavedAlign = 256;

// ---- Buffers: one walk gives sizes and pointers ----

static RowMap carve_map(fmoe_carve *c, int64_t R, int64_t rows, int64_t E)
{
    RowMap m = {};
    m.off = (int *)fmoe_carve_take(c, E + 1, 4);
    m.cnt = (int *)fmoe_carve_take(c, E, 4);
    m.ntile = (int *)fmoe_carve_take(c, 1, 4);
    m.tile = (int2 *)fmoe_carve_take(c, fmoe_cuda_tiles(R, E, FMOE_CUDA_TILE_M) + 1, 8);
    m.slot = (int *)fmoe_carve_take(c, R, 4);
    m.tok = (int *)fmoe_carve_take(c, rows + FMOE_CUDA_SLACK, 4);
    m.prob = (float *)fmoe_carve_take(c, rows, 4);
    return m;
}

static void *take_rows(fmoe_carve *c, const Layer &l, int64_t cols)
{
    return fmoe_carve_take(c, l.rows, (size_t)cols * (l.dtype == FMOE_F32 ? 4 : 2));
}

// Rows of an adapter, their pitch a multiple of 16 bytes; none for rank 0.
static Rows take_lora(fmoe_carve *c, const Layer &l, int64_t rank)
{
    const int64_t pitch = (rank + 7) / 8 * 8;
    return Rows{take_rows(c, l, pitch), rank, pitch};
}

struct Lists { // device copies of lists of matrices
    MatEntry *w[3], *dw[3];
};
static Lists carve_lists(fmoe_carve *c, int64_t E, bool backward)
{
    Lists s = {};
    for (int i = 0; i < 3; i++) s.w[i] = (MatEntry *)fmoe_carve_take(c, E, sizeof(MatEntry));
    for (int i = 0; backward && i < 3; i++) s.dw[i] = (MatEntry *)fmoe_carve_take(c, E, sizeof(MatEntry));
    return s;
}

struct Forward {
    RowMap map;
    Ready *ready;
    Lists lists;
    int *part, *done;
    void *a, *h, *y;
    Rows l1, l2;
    Quant quant;
    NarrowRoom narrow;
};
static Forward carve_forward(fmoe_carve *c, const Layer &l, const fmoe_desc &d, bool map)
{
    Forward f = {};
    f.part = (int *)fmoe_carve_take(c, (int64_t)rowmap_part_count(l.R, l.E), 4);
    f.ready = (Ready *)fmoe_carve_take(c, kReady, sizeof(Ready));
    f.done = (int *)fmoe_carve_take(c, fmoe_ceil_div(l.H, 8), 4);
    f.lists = carve_lists(c, l.E, false);
    if (map) f.map = carve_map(c, l.R, l.rows, l.E);
    f.a = take_rows(c, l, l.I);
    // Slices of h are used up when y is written. Few tokens may leave parts of sums there, and what they need so do all
    // larger batches: a workspace for one is enough for the other.
    const int64_t columns = slice_columns(l), few = fmoe_min(l.T, fmoe_cuda_most_decode_nmajor(&l.plan->shape)) * l.k;
    const int64_t rows = fmoe_ceil_div(few * (l.HC + l.H) * DECODE_PARTS * (int64_t)sizeof(float), columns * 2);
    f.h = f.y = fmoe_carve_take(c, fmoe_max(l.rows, rows), (size_t)columns * (l.dtype == FMOE_F32 ? 4 : 2));
    f.l1 = take_lora(c, l, d.rank1);
    f.l2 = take_lora(c, l, d.rank2);
    f.quant = quant_carve(c, l, d);
    f.narrow = narrow_carve(c, d, l.HC);
    return f;
}

// FMOE_BORROW_DW1: whether dW1's memory, wherever it begins, has room for p*a and dx rows.
static bool borrows(const Layer &l, const fmoe_desc &d)
{
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2, room = l.E * l.HC * l.H * size - (int64_t)kAlign;
    return (d.flags & FMOE_BORROW_DW1) && l.rows <= room / (fmoe_max(l.H, l.I) * size);
}

struct Backward {
    RowMap map; // of no tokens
    Ready *ready;
    Lists lists;
    void *h, *dh, *dxr, *pa, *da;
    float *dp;
    Rows l1, l2, m1, m2;
    Quant quant;
    NarrowRoom narrow;
};
static Backward carve_backward(fmoe_carve *c, const Layer &l, const fmoe_desc &d)
{
    Backward b = {};
    const uint32_t flags = d.flags;
    b.ready = (Ready *)fmoe_carve_take(c, kReady, sizeof(Ready));
    b.lists = carve_lists(c, l.E, true);
    // What a thread has read for the last time it writes over: dh where h was, if h is ours; p*a where da was (and dx
    // where p*a was).
    if (flags & FMOE_RECOMPUTE) b.h = b.dh = take_rows(c, l, l.HC);
    else if (!(flags & FMOE_REUSE_SAVED)) b.dh = take_rows(c, l, l.HC);
    if (!borrows(l, d)) b.dxr = b.pa = b.da = take_rows(c, l, fmoe_max(l.H, l.I));
    b.dp = (float *)fmoe_carve_take(c, l.rows * ((l.I + 63) / 64), 4); // of Hopper's tiles half of it
    if (flags & FMOE_RECOMPUTE) b.l1 = take_lora(c, l, d.rank1);
    b.l2 = take_lora(c, l, d.rank2);
    b.m1 = take_lora(c, l, d.rank1);
    b.m2 = take_lora(c, l, d.rank2);
    if (l.T == 0) b.map = carve_map(c, 0, 0, l.E);
    b.quant = quant_carve(c, l, d);
    b.narrow = narrow_carve(c, d, l.HC);
    return b;
}

static Layer make_layer(const fmoe_plan_impl *p, int64_t T, Stream *stream)
{
    Layer l = {};
    l.plan = plan_of(p);
    l.stream = stream;
    l.dtype = p->d.dtype;
    l.T = T;
    l.H = p->d.H;
    l.I = p->d.I;
    l.HC = p->h_cols;
    l.E = l.all = p->d.E;
    l.k = p->d.k;
    l.R = T * p->d.k;
    l.rows = fmoe_cuda_rows(l.R, l.E, FMOE_CUDA_ALIGN);
    l.same_bits = p->d.flags & FMOE_SAME_BITS;
    l.act = fast_act(p->d.act, p->d.act_alpha, p->d.act_limit);
    l.status = FMOE_OK;
    return l;
}

fmoe_status experts_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    if (T > (INT32_MAX - FMOE_CUDA_ALIGN * p->d.E) / p->d.k)
        return FAIL(FMOE_ERR_OVERFLOW, "T = %lld times k = %lld routed rows do not fit the CUDA backend's 2^31",
                    (long long)T, (long long)p->d.k);
    const Layer l = make_layer(p, T, nullptr);
    const bool recompute = p->d.flags & FMOE_RECOMPUTE;
    fmoe_carve c = fmoe_carve_begin(nullptr, kAlign), s = fmoe_carve_begin(nullptr, kSavedAlign);
    if (pass == FMOE_FORWARD) carve_forward(&c, l, p->d, true);
    else carve_backward(&c, l, p->d);
    carve_map(&s, l.R, l.rows, l.E);
    if (!recompute) take_rows(&s, l, l.HC), take_lora(&s, l, p->d.rank1);
    if (c.overflow || s.overflow)
        return FAIL(FMOE_ERR_OVERFLOW, "the workspace of T = %lld tokens does not fit 64 bits", (long long)T);
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    *saved = s.used;
    return FMOE_OK;
}

// ---- Weights ----

static Mat stack_mat(const fmoe_tensor *t)
{
    Mat m = {};
    m.p = fmoe_data(t);
    m.g = fmoe_stride(t, 0);
    m.r = fmoe_stride(t, 1);
    m.c = fmoe_stride(t, 2);
    m.split = INT64_MAX;
    return m;
}

// W1 (or its gradient) in the order of h: all gates, then all ups, or (l.interleaved) as an interleaved stack has them.
// coded: where W1 is quantised.
static Weight w1_weight(const Layer &l, const fmoe_plan_impl *p, const fmoe_weights *w, MatEntry *const list[3],
                        size_t size, const Coded *coded = nullptr)
{
    Weight v = {};
    v.rows = l.HC;
    v.cols = l.H;
    v.parts = p->gated ? 2 : 1;
    v.coded = coded;
    if (coded && p->gated && !w->w1) { // gate and up of a list: one after the other in the ring
        v.strided = true;
        v.whole = v.part[0] = v.part[1] = ring_mat(*coded, l.HC, l.H);
        v.whole.split = l.I;
        v.whole.delta = l.I * l.H;
        v.part[1].p = (char *)v.part[0].p + (size_t)(l.I * l.H) * size;
        return v;
    }
    if (w->w1 || coded) {
        const Mat m = coded ? ring_mat(*coded, l.HC, l.H) : stack_mat(w->w1);
        const bool inter = p->gated && (p->d.flags & FMOE_INTERLEAVED);
        v.single = !inter || l.interleaved;
        v.strided = true;
        v.whole = v.part[0] = v.part[1] = m;
        v.part[1].p = (char *)m.p + (size_t)((inter ? 1 : l.I) * m.r) * size;
        if (inter) v.part[0].r = v.part[1].r = 2 * m.r;
        if (!v.single) {
            v.whole.r = 2 * m.r;
            v.whole.split = l.I;
            v.whole.delta = m.r;
        }
        return v;
    }
    if (!p->gated) {
        v.single = v.strided = true;
        v.whole = v.part[0] = rowmap_mat(w->up, l.E, size, list[0], *l.stream);
        return v;
    }
    // Either may be absent in a gradient.
    v.strided = w->gate && w->up;
    if (w->gate) v.part[0] = rowmap_mat(w->gate, l.E, size, list[0], *l.stream);
    if (w->up) v.part[1] = rowmap_mat(w->up, l.E, size, list[1], *l.stream);
    // The general kernel takes both as one matrix of 2I rows.
    if (w->gate && !v.part[0].list) rowmap_list(list[0], w->gate, l.E, *l.stream);
    if (w->up && !v.part[1].list) rowmap_list(list[1], w->up, l.E, *l.stream);
    v.whole.list = w->gate ? list[0] : nullptr;
    v.whole.list2 = w->up ? list[1] : nullptr;
    v.whole.split = l.I;
    return v;
}

static Weight w2_weight(const Layer &l, const fmoe_weights *w, MatEntry *list, size_t size,
                        const Coded *coded = nullptr)
{
    Weight v = {};
    v.rows = l.H;
    v.cols = l.I;
    v.parts = 1;
    v.single = v.strided = true;
    v.coded = coded;
    v.whole = v.part[0] = coded   ? ring_mat(*coded, l.H, l.I)
                          : w->w2 ? stack_mat(w->w2)
                                  : rowmap_mat(w->down, l.E, size, list, *l.stream);
    return v;
}

// A factor of an adapter, [E, rows, cols]; B1's rows come in the order of h.
static Weight factor_weight(const fmoe_tensor *t)
{
    Weight v = {};
    v.parts = 1;
    v.single = v.strided = true;
    if (!t) return v;
    v.rows = t->shape[1];
    v.cols = t->shape[2];
    v.whole = v.part[0] = stack_mat(t);
    return v;
}

// B1, in parts too where h has all gates, then all ups.
static Weight b1_factor(const Layer &l, const fmoe_plan_impl *p, const fmoe_tensor *t)
{
    Weight v = factor_weight(t);
    if (!p->gated) return v;
    v.parts = 2;
    v.part[1] = v.whole;
    v.part[1].p = (char *)v.whole.p + (size_t)(l.I * v.whole.r) * fmoe_dtype_size(l.dtype);
    return v;
}

// Biases in the order of h.
static Bias b1_bias(const Layer &l, const fmoe_plan_impl *p, const fmoe_tensor *b)
{
    Bias v = {};
    v.split = INT64_MAX;
    if (!b) return v;
    const bool apart = p->gated && (p->d.flags & FMOE_INTERLEAVED) && !l.interleaved;
    v.p = fmoe_data(b);
    v.g = fmoe_stride(b, 0);
    v.n = (apart ? 2 : 1) * fmoe_stride(b, 1);
    if (apart) v.split = l.I, v.delta = fmoe_stride(b, 1);
    return v;
}

static Bias b2_bias(const fmoe_tensor *b)
{
    Bias v = {};
    v.split = INT64_MAX;
    if (!b) return v;
    v.p = fmoe_data(b);
    v.g = fmoe_stride(b, 0);
    v.n = fmoe_stride(b, 1);
    return v;
}

// ---- Passes ----

static ActArgs act_args(const Layer &l, const fmoe_plan_impl *p, const void *h)
{
    ActArgs a = {};
    a.act = p->d.act;
    a.alpha = p->d.act_alpha;
    a.limit = p->d.act_limit;
    a.rows = l.rows;
    a.rows_dev = l.map.off + l.E;
    a.I = l.I;
    a.h = h;
    a.h_r = a.dh_r = l.HC;
    a.h_i = a.dh_i = l.interleaved ? 2 : 1;
    a.h_u = a.dh_u = l.interleaved ? 1 : l.I;
    a.a_r = a.da_r = l.I;
    return a;
}

// Whether the forward fuses the activation with gates and ups apart; if it does not, h takes the order of an
// interleaved stack. Forward and backward decide this alike, from x and the weights.
static bool decide_fused(Layer &l, const fmoe_plan_impl *p, const fmoe_experts_args *a, MatEntry *const list[3],
                         const Quant &q, const Lora &lora, Weight *w1)
{
    const size_t size = fmoe_dtype_size(l.dtype);
    *w1 = w1_weight(l, p, &a->w, list, size, coded(q.w1));
    const bool alternate = !w1->single && a->w.w1; // B1's rows too then: no fused product takes them
    if (!(alternate && lora.rows.cols) && up_fused_ok(l, fmoe_data(a->x), fmoe_stride(a->x, 0), *w1, lora)) return true;
    if (alternate) {
        l.interleaved = true;
        *w1 = w1_weight(l, p, &a->w, list, size, coded(q.w1));
    }
    return false;
}

static void sort_rows(const Layer &l, const fmoe_plan_impl *p, const fmoe_experts_args *a, int *part)
{
    const View probs = view(a->weights);
    SortArgs s = {};
    s.ids = view(a->ids);
    s.p = &probs;
    s.T = l.T;
    s.k = l.k;
    s.E = l.E;
    s.flags = p->d.flags;
    s.align = FMOE_CUDA_ALIGN;
    s.error = l.plan->error_dev;
    RowMap m = l.map;
    m.part = part;
    rowmap_sort(s, m, *l.stream);
}

static void combine(const Layer &l, const void *y, const View *p, const fmoe_tensor *out, int add)
{
    CombineArgs c = {};
    c.T = l.T;
    c.k = l.k;
    c.H = l.H;
    c.R = l.rows;
    c.y = y;
    c.y_r = l.H;
    c.map = View{l.map.slot, -32, 1, 1};
    c.p = p;
    c.out = fmoe_data(out);
    c.out_r = fmoe_stride(out, 0);
    c.add = add;
    combine_rows(l.dtype, c, *l.stream);
}

fmoe_status experts_forward(const fmoe_plan_impl *p, const fmoe_experts_args *given, const fmoe_run *run)
{
    fmoe_experts_args args = *given;
    const fmoe_experts_args *const a = &args;
    const Plan *plan = plan_of(p);
    DeviceScope scope(plan->device);
    FMOE_TRY(plan_report(plan));
    Stream stream = stream_of(plan, run);
    Layer l = make_layer(p, a->x->shape[0], &stream);
    if (l.T == 0) return FMOE_OK;
    const size_t size = fmoe_dtype_size(l.dtype);
    const bool recompute = p->d.flags & FMOE_RECOMPUTE;
    fmoe_carve c = fmoe_carve_begin(run->workspace, kAlign), s = fmoe_carve_begin(a->saved, kSavedAlign);
    Forward f = carve_forward(&c, l, p->d, !a->saved);
    const bool quant = a->w.quant1 || a->w.quant2;
    const bool decode = !a->saved && (quant ? a->w.w1 && fmoe_cuda_use_decode_coded(&plan->shape, l.T)
                                            : fmoe_cuda_use_decode(&plan->shape, l.T)),
               narrowed = decode && narrow_factors(p->d, a, nullptr, f.narrow, &args.w, stream);
    stream.overlap &= !narrowed; // decode kernels begin to read before the launch before them has ended
    if (decode && quant) quant_describe(l, p->gated, &a->w, f.quant);
    const DecodeScratch scratch = {f.a, f.y, f.done, f.h, {f.l1.p, f.l2.p}};
    if (decode && decode_run(p, a, run, scratch, quant ? &f.quant : nullptr, stream))
        return fmoe_cuda_launched("experts forward (decode)");
    stream.overlap = plan->cc >= 90;
    if (a->saved) f.map = carve_map(&s, l.R, l.rows, l.E);
    void *h = nullptr;
    if (a->saved && !recompute) h = take_rows(&s, l, l.HC), f.l1 = take_lora(&s, l, p->d.rank1);
    l.map = f.map;
    l.map.ready = l.ready = f.ready;
    sort_rows(l, p, a, f.part);
    if (!narrowed) narrow_factors(p->d, a, l.map.cnt, f.narrow, &args.w, stream);
    if (quant) quant_describe(l, p->gated, &a->w, f.quant);

    Weight w1;
    const Lora lora1 = {f.l1, b1_factor(l, p, a->w.lora_b1)}, lora2 = {f.l2, factor_weight(a->w.lora_b2)};
    const bool apart = decide_fused(l, p, a, f.lists.w, f.quant, lora1, &w1);
    const Weight w2 = w2_weight(l, &a->w, f.lists.w[2], size, coded(f.quant.w2));
    const void *x = fmoe_data(a->x);
    const int64_t ldx = fmoe_stride(a->x, 0);
    const Bias b1 = b1_bias(l, p, p->d.flags & FMOE_BIAS ? a->w.b1 : nullptr);
    const bool fused = apart || up_pairs_ok(l, x, ldx, w1, b1, lora1);
    if (p->d.rank1)
        lora_in_product(l, Rows{x, l.H, ldx}, true, factor_weight(a->w.lora_a1), false, a->w.lora_scale1, f.l1);
    if (fused) {
        up_fused(l, x, ldx, w1, b1, lora1, h, f.a);
    } else if (!h) {
        up_in_slices(l, p->d.act, p->d.act_alpha, p->d.act_limit, x, ldx, w1, b1, lora1, f.h, f.a);
    } else {
        up_product(l, x, ldx, w1, b1, lora1, h);
        ActArgs act = act_args(l, p, h);
        act.a = f.a;
        act_forward(l.dtype, p->gated, act, *l.stream);
    }
    if (p->d.rank2)
        lora_in_product(l, Rows{f.a, l.I, l.I}, false, factor_weight(a->w.lora_a2), false, a->w.lora_scale2, f.l2);
    down_product(l, f.a, w2, b2_bias(p->d.flags & FMOE_BIAS ? a->w.b2 : nullptr), lora2, f.y);
    const View probs = view(a->weights);
    combine(l, f.y, &probs, a->out, run->flags & FMOE_ADD_OUT ? 1 : 0);
    FMOE_TRY(l.status);
    return fmoe_cuda_launched("experts forward");
}

static int grad_f32(const fmoe_tensor *t) { return fmoe_tensor_dtype(t) == FMOE_F32; }

static fmoe_status weight_grads(Layer &l, const fmoe_plan_impl *p, const fmoe_experts_args *a, const Backward &b,
                                int add, bool second)
{
    const fmoe_weights *dw = &a->dw;
    const void *x = fmoe_data(a->x), *dout = fmoe_data(a->dout);
    const int64_t ldx = fmoe_stride(a->x, 0), ldd = fmoe_stride(a->dout, 0);
    const bool list = !dw->w1 && (dw->gate || dw->up);
    if (second && (dw->w2 || dw->down)) {
        const int f32 = grad_f32(dw->w2 ? dw->w2 : dw->down);
        dw2_product(l, dout, ldd, b.pa, w2_weight(l, dw, b.lists.dw[2], f32 ? 4 : 2), f32, add);
    }
    if (!second && (dw->w1 || list)) {
        const int f32 = grad_f32(dw->w1 ? dw->w1 : dw->gate ? dw->gate : dw->up);
        dw1_product(l, borrows(l, p->d) ? Product::DW1_BORROWED : Product::DW1, b.dh, x, ldx,
                    w1_weight(l, p, dw, b.lists.dw, f32 ? 4 : 2), f32, add);
    }
    ColsumArgs s = {};
    s.E = l.E;
    s.map_value = l.map;
    s.a_dtype = l.dtype;
    s.accumulate = add;
    if (second && dw->b2) {
        s.N = l.H;
        s.a = dout;
        s.a_r = ldd;
        s.gather = l.map.tok;
        s.prob = l.map.prob;
        const Bias o = b2_bias(dw->b2);
        s.out = (void *)o.p, s.out_dtype = fmoe_tensor_dtype(dw->b2), s.out_g = o.g, s.out_n = o.n,
        s.out_split = o.split, s.out_delta = o.delta;
        colsum_rows(s, *l.stream);
    }
    if (!second && dw->b1) {
        s.N = l.HC;
        s.a = b.dh;
        s.a_r = l.HC;
        const Bias o = b1_bias(l, p, dw->b1);
        s.out = (void *)o.p, s.out_dtype = fmoe_tensor_dtype(dw->b1), s.out_g = o.g, s.out_n = o.n,
        s.out_split = o.split, s.out_delta = o.delta;
        colsum_rows(s, *l.stream);
    }
    return l.status;
}

// The gradients of an adapter's factors.
static void factor_grads(Layer &l, const fmoe_experts_args *a, const Backward &b, int add, bool second)
{
    const fmoe_weights *w = &a->w, *dw = &a->dw;
    const Rows x = {fmoe_data(a->x), l.H, fmoe_stride(a->x, 0)},
               dout = {fmoe_data(a->dout), l.H, fmoe_stride(a->dout, 0)};
    const Rows dh = {b.dh, l.HC, l.HC}, pa = {b.pa, l.I, l.I};
    if (second && dw->lora_b2) {
        lora_in_product(l, pa, false, factor_weight(w->lora_a2), false, w->lora_scale2, b.l2);
        lora_grad_product(l, Product::LORA_DB2, dout, true, b.l2, false, stack_mat(dw->lora_b2), grad_f32(dw->lora_b2),
                          add);
    }
    if (second && dw->lora_a2)
        lora_grad_product(l, Product::LORA_D, b.m2, false, pa, false, stack_mat(dw->lora_a2), grad_f32(dw->lora_a2),
                          add);
    if (!second && dw->lora_b1)
        lora_grad_product(l, Product::LORA_D, dh, false, b.l1, false, stack_mat(dw->lora_b1), grad_f32(dw->lora_b1),
                          add);
    if (!second && dw->lora_a1)
        lora_grad_product(l, Product::LORA_D, b.m1, false, x, true, stack_mat(dw->lora_a1), grad_f32(dw->lora_a1), add);
}

fmoe_status experts_backward(const fmoe_plan_impl *p, const fmoe_experts_args *given, const fmoe_run *run)
{
    fmoe_experts_args args = *given;
    const fmoe_experts_args *const a = &args;
    const Plan *plan = plan_of(p);
    DeviceScope scope(plan->device);
    FMOE_TRY(plan_report(plan));
    Stream stream = stream_of(plan, run);
    Layer l = make_layer(p, a->x->shape[0], &stream);
    const bool recompute = p->d.flags & FMOE_RECOMPUTE;
    const int add = run->flags & FMOE_ACCUMULATE ? 1 : 0;
    if (l.T == 0 && add) return FMOE_OK;

    fmoe_carve c = fmoe_carve_begin(run->workspace, kAlign), s = fmoe_carve_begin(a->saved, kSavedAlign);
    Backward b = carve_backward(&c, l, p->d);
    l.map = carve_map(&s, l.R, l.rows, l.E);
    if (!recompute) b.h = take_rows(&s, l, l.HC), b.l1 = take_lora(&s, l, p->d.rank1);
    if (!b.dh) b.dh = b.h;
    const bool borrow = borrows(l, p->d);
    if (borrow) b.dxr = b.pa = b.da = (void *)(((uintptr_t)fmoe_data(a->dw.w1) + kAlign - 1) / kAlign * kAlign);
    void *const h = b.h;
    if (run->flags & FMOE_NEW_WEIGHTS) rowmap_weigh(view(a->weights), l.T, l.k, l.map, *l.stream);
    if (l.T == 0) { // the forward had nothing to write down: empty segments here, so that gradients become zero
        l.map = b.map;
        sort_rows(l, p, a, nullptr);
    }

    narrow_factors(p->d, a, l.map.cnt, b.narrow, &args.w, stream);
    const fmoe_weights *dw = &a->dw;
    Weight w1;
    const Lora lora1 = {b.l1, b1_factor(l, p, a->w.lora_b1)}, back1 = {b.m1, factor_weight(a->w.lora_a1)},
               back2 = {b.m2, factor_weight(a->w.lora_a2)};
    if (a->w.quant1 || a->w.quant2) quant_describe(l, p->gated, &a->w, b.quant);
    const bool fused = decide_fused(l, p, a, b.lists.w, b.quant, lora1, &w1);
    const Weight w2 = w2_weight(l, &a->w, b.lists.w[2], fmoe_dtype_size(l.dtype), coded(b.quant.w2));
    const void *x = fmoe_data(a->x), *dout = fmoe_data(a->dout);
    const int64_t ldx = fmoe_stride(a->x, 0), ldd = fmoe_stride(a->dout, 0);
    const bool bias = p->d.flags & FMOE_BIAS;
    const bool any_dw1 = dw->w1 || dw->gate || dw->up || dw->b1, any_dw2 = dw->w2 || dw->down || dw->b2;
    const bool any_lora1 = dw->lora_a1 || dw->lora_b1, any_lora2 = dw->lora_a2 || dw->lora_b2;

    int parts = 1;
    const bool fused_dh = dh_fused_ok(l, dout, ldd, w2, back2);
    l.ready = b.ready;
    if (plan->path == FMOE_PATH_SM90 && (fused || fused_dh)) rowmap_clear(l.ready, *l.stream);
    if (a->dx || a->dweights || any_dw1 || dw->w2 || dw->down || any_lora1 || any_lora2) {
        if (recompute) {
            const Bias b1 = b1_bias(l, p, bias ? a->w.b1 : nullptr);
            if (p->d.rank1)
                lora_in_product(l, Rows{x, l.H, ldx}, true, factor_weight(a->w.lora_a1), false, a->w.lora_scale1, b.l1);
            if (fused && !w1.single) up_fused(l, x, ldx, w1, b1, lora1, h, b.pa);
            else up_product(l, x, ldx, w1, b1, lora1, h);
        }
        if (p->d.rank2)
            lora_in_product(l, Rows{dout, l.H, ldd}, true, factor_weight(a->w.lora_b2), true, a->w.lora_scale2, b.m2);
        if (fused_dh) {
            parts = dh_fused(l, dout, ldd, w2, back2, h, b.dh, b.pa, b.dp);
        } else {
            da_product(l, dout, ldd, w2, back2, b.da);
            ActArgs act = act_args(l, p, h);
            act.da = b.da;
            act.dh = b.dh;
            act.prob = l.map.prob;
            act.pa = b.pa;
            act.dp = a->dweights ? b.dp : nullptr;
            act_backward(l.dtype, p->gated, act, *l.stream);
        }
    }
    if (any_dw2) FMOE_TRY(weight_grads(l, p, a, b, add, true));
    if (any_lora2) factor_grads(l, a, b, add, true);
    if (any_dw1 && !borrow) FMOE_TRY(weight_grads(l, p, a, b, add, false));
    const bool through1 = p->d.rank1 && (a->dx || dw->lora_a1);
    if (through1)
        lora_in_product(l, Rows{b.dh, l.HC, l.HC}, false, factor_weight(a->w.lora_b1), true, a->w.lora_scale1, b.m1);
    if (any_lora1) factor_grads(l, a, b, add, false);
    if (a->dx) { dx_product(l, b.dh, w1, back1, b.dxr); }
    if (a->dweights) {
        DpArgs d = {};
        d.T = l.T, d.k = l.k, d.H = l.H, d.E = l.E;
        d.parts = parts;
        d.pitch = l.rows;
        d.dp = b.dp;
        d.slot = l.map.slot;
        d.ids = view(a->ids);
        d.out = view(a->dweights);
        d.dout = dout;
        d.dout_r = ldd;
        if (bias && a->w.b2)
            d.bias = fmoe_data(a->w.b2), d.bias_g = fmoe_stride(a->w.b2, 0), d.bias_n = fmoe_stride(a->w.b2, 1);
        dp_reduce(l.dtype, d, *l.stream);
    }
    if (a->dx) combine(l, b.dxr, nullptr, a->dx, run->flags & FMOE_ADD_DX ? 1 : 0);
    if (borrow) FMOE_TRY(weight_grads(l, p, a, b, add, false));
    FMOE_TRY(l.status);
    return fmoe_cuda_launched("experts backward");
}
