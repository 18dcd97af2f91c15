// SPDX-License-Identifier: Apache-2.0
// gmm.cu - the grouped matmul behind the backend table: a stack of matrices, or a list; quantised ones chunk by chunk.
#include "ops.cuh"

#include "quant/chunks.cuh"

static RowMap carve_groups(fmoe_carve *c, int64_t R, int64_t E)
{
    RowMap m = {};
    m.off = (int *)fmoe_carve_take(c, E + 1, 4);
    m.cnt = (int *)fmoe_carve_take(c, E, 4);
    m.ntile = (int *)fmoe_carve_take(c, 1, 4);
    m.tile = (int2 *)fmoe_carve_take(c, fmoe_cuda_tiles(R, E, FMOE_CUDA_TILE_M) + 1, 8);
    return m;
}

struct GmmLists { // copies on the device: of the rows, the weights and their gradients
    MatEntry *rows, *w, *dw;
};
static GmmLists carve_lists(fmoe_carve *c, int64_t E)
{
    MatEntry *p = (MatEntry *)fmoe_carve_take(c, 3 * E, sizeof(MatEntry));
    return GmmLists{p, p + E, p + 2 * E};
}

void gmm_carve(fmoe_carve *c, int64_t R, const fmoe_plan_impl *p)
{
    gmm_ring_carve(c, plan_of(p), p->d);
    carve_lists(c, p->d.E);
    carve_groups(c, R, p->d.E);
}

static Mat matrix(const fmoe_tensor *t, int first) // the two dimensions from `first` on
{
    Mat m = {};
    m.p = fmoe_data(t);
    m.g = first ? fmoe_stride(t, 0) : 0;
    m.r = fmoe_stride(t, first);
    m.c = fmoe_stride(t, first + 1);
    m.split = INT64_MAX;
    return m;
}

// One set of groups: all of them over the row map, or one group of a list.
struct Groups {
    const fmoe_tensor *x, *w, *bias, *y, *dy, *dx, *dw, *dbias;
    int64_t E;
    int stacked; // w, bias, dw and dbias have a leading dimension
    Mat w_mat, dw_mat;
    RowMap map;
    Coded coded; // no parts: w is not quantised
};

static int64_t gmm_K(const Groups &g) { return (g.x ? g.x : g.dx)->shape[1]; }
static int64_t gmm_N(const Groups &g) { return (g.y ? g.y : g.dy)->shape[1]; }

static GemmArgs gmm_args(const Layer &l, int64_t R) // l: all groups, or some
{
    GemmArgs a = {};
    a.E = l.E;
    a.R = R;
    a.map_value = l.map;
    return a;
}

static int is_f32(const fmoe_tensor *t) { return fmoe_tensor_dtype(t) == FMOE_F32; }

static int64_t gmm_count(const Groups &g) { return (g.x ? g.x : g.dy)->shape[0]; } // rows; dx alone does not need x

// The groups as the Hopper products want them.
static Layer gmm_layer(const fmoe_plan_impl *p, const Groups &g, Stream &s)
{
    Layer l = {};
    l.plan = plan_of(p);
    l.stream = &s;
    l.dtype = p->d.dtype;
    l.E = l.all = g.E;
    l.R = l.rows = g.map.off ? gmm_count(g) : 0; // without a row map it is the general kernel's
    l.map = g.map;
    l.ragged = true;
    return l;
}

static Weight gmm_weight(const Groups &g)
{
    Weight w = {};
    w.whole = g.w_mat;
    w.parts = 1;
    w.single = true;
    w.rows = gmm_K(g);
    w.cols = gmm_N(g);
    w.coded = coded(g.coded);
    return w;
}

static Rows rows_of(const fmoe_tensor *t)
{
    return Rows{fmoe_stride(t, 1) == 1 ? fmoe_data(t) : nullptr, t->shape[1], fmoe_stride(t, 0)};
}

static fmoe_status gmm_forward_groups(const fmoe_plan_impl *p, const Groups &g, Stream &s)
{
    Layer l = gmm_layer(p, g, s);
    const int64_t N = gmm_N(g);
    by_chunks(l, gmm_weight(g), Bias{}, Lora{}, fmoe_ceil_div(N, 256),
              [&](Layer &some, const Weight &w, const Bias &, const Lora &) {
                  GemmArgs a = gmm_args(some, g.x->shape[0]);
                  a.A = matrix(g.x, 0);
                  a.B = g.w_mat;
                  a.b_rows_are_k = 1;
                  a.D = matrix(g.y, 0);
                  a.K = gmm_K(g);
                  a.N = N;
                  a.out_f32 = is_f32(g.y);
                  Bias b = {};
                  if (g.bias) {
                      a.bias_dtype = fmoe_tensor_dtype(g.bias);
                      b.g = a.bias_g = g.stacked ? fmoe_stride(g.bias, 0) : 0;
                      b.n = a.bias_n = fmoe_stride(g.bias, g.stacked);
                      b.split = a.bias_split = INT64_MAX;
                      b.p = a.bias = (const char *)fmoe_data(g.bias) +
                                     some.map.first * b.g * (int64_t)fmoe_dtype_size(a.bias_dtype);
                  }
                  const bool same = !a.out_f32 && (!g.bias || a.bias_dtype == l.dtype);
                  if (!same || !gmm_rows(some, rows_of(g.x), w, true, b, rows_of(g.y))) gemm_sm80(l.dtype, a, s);
              });
    return l.status;
}

static void gmm_dx(const Groups &g, Layer &l, bool add, Stream &s)
{
    const int64_t R = gmm_count(g), K = gmm_K(g);
    by_chunks(l, gmm_weight(g), Bias{}, Lora{}, fmoe_ceil_div(K, 256),
              [&](Layer &some, const Weight &w, const Bias &, const Lora &) {
                  GemmArgs a = gmm_args(some, R);
                  a.A = matrix(g.dy, 0);
                  a.a_f32 = is_f32(g.dy);
                  a.B = g.w_mat;
                  a.D = matrix(g.dx, 0);
                  a.K = gmm_N(g);
                  a.N = K;
                  a.out_f32 = is_f32(g.dx);
                  a.accumulate = add;
                  const bool same = !a.a_f32 && !a.out_f32 && !a.accumulate;
                  if (!same || !gmm_rows(some, rows_of(g.dy), w, false, Bias{}, rows_of(g.dx)))
                      gemm_sm80(l.dtype, a, s);
              });
    if (!g.map.off || add) return;
    const int64_t size = (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(g.dx));
    zero_rows(fmoe_data(g.dx), R, K * size, fmoe_stride(g.dx, 0) * size, g.map.off + g.E, s);
}

static fmoe_status gmm_backward_groups(const fmoe_plan_impl *p, const Groups &g, uint32_t flags, Stream &s)
{
    const int64_t R = gmm_count(g);
    const int add = (flags & FMOE_ACCUMULATE) != 0;
    Layer l = gmm_layer(p, g, s);
    if (g.dx) gmm_dx(g, l, flags & FMOE_ADD_DX, s);
    if (g.dw) {
        GemmArgs a = gmm_args(l, R);
        a.wgrad = 1;
        a.A = matrix(g.x, 0);
        a.B = matrix(g.dy, 0);
        a.b_f32 = is_f32(g.dy);
        a.D = g.dw_mat;
        a.M = g.dw->shape[g.stacked];
        a.N = g.dw->shape[g.stacked + 1];
        a.out_f32 = is_f32(g.dw);
        a.accumulate = add;
        // Adding in 16 bits would round twice there.
        if (a.b_f32 || (add && !a.out_f32) || !gmm_wgrad(l, rows_of(g.x), rows_of(g.dy), a.D, a.out_f32, add))
            gemm_sm80(p->d.dtype, a, s);
    }
    if (g.dbias) {
        ColsumArgs a = {};
        a.E = g.E;
        a.N = g.dbias->shape[g.stacked];
        a.rows = R;
        a.a = fmoe_data(g.dy);
        a.a_dtype = fmoe_tensor_dtype(g.dy);
        a.a_r = fmoe_stride(g.dy, 0);
        a.map_value = g.map;
        a.out = fmoe_data(g.dbias);
        a.out_dtype = fmoe_tensor_dtype(g.dbias);
        a.accumulate = add;
        a.out_g = g.stacked ? fmoe_stride(g.dbias, 0) : 0;
        a.out_n = fmoe_stride(g.dbias, g.stacked);
        a.out_split = INT64_MAX;
        colsum_rows(a, s);
    }
    return l.status;
}

// sizes: none is one group of all rows. The row map is what is left of the workspace.
static fmoe_status gmm_groups(const fmoe_plan_impl *p, Groups &g, const View &sizes, int cumulative,
                              fmoe_carve workspace, const fmoe_run *run, bool forward, Stream &s)
{
    if (sizes.p || g.coded.parts || plan_of(p)->path == FMOE_PATH_SM90) {
        const int64_t R = gmm_count(g);
        g.map = carve_groups(&workspace, R, g.E);
        rowmap_from_sizes(sizes, g.E, R, cumulative, g.map, plan_of(p)->error_dev, s);
    }
    return forward ? gmm_forward_groups(p, g, s) : gmm_backward_groups(p, g, run->flags, s);
}

// Quantised weights: w is the ring. Codes lie [out,in], or (FMOE_QUANT_IN_OUT) as w does. i: of one matrix of a list,
// without a launch; -1: of the stack or the whole list.
static fmoe_status gmm_decoded(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const GmmRing &ring, int64_t i,
                               Groups &g, Stream &s)
{
    if (!a->quant || !(g.y || g.dx)) return FMOE_OK;
    const bool in_out = a->quant->flags & FMOE_QUANT_IN_OUT;
    const int64_t K = gmm_K(g), N = gmm_N(g), rows = in_out ? K : N, cols = in_out ? N : K;
    const Layer l = gmm_layer(p, g, s);
    FMOE_TRY(i < 0 ? gmm_coded(l, ring, a->w, a->list, a->quant, rows, cols, &g.coded)
                   : gmm_coded_one(l, ring, a->w, i, a->quant, rows, cols, &g.coded));
    g.w_mat = ring_mat(g.coded, rows, cols);
    if (!in_out) g.w_mat.r = 1, g.w_mat.c = cols;
    return FMOE_OK;
}

// ---- lists ----

// Rows of a list that lie one after the other, as one tensor of rows.
struct Joined {
    fmoe_tensor t;
    int64_t shape[2], strides[2];
};

static bool join(const fmoe_tensor *list, int64_t n, Joined *j)
{
    if (!list) return true;
    const fmoe_tensor *first = nullptr; // that has rows: an empty tensor lies nowhere
    int64_t rows = 0;
    for (int64_t i = 0; i < n; i++) {
        const fmoe_tensor *t = list + i;
        if (!t->shape[0]) continue;
        if (!first) first = t;
        const char *next = (const char *)fmoe_data(first) + rows * fmoe_stride(first, 0) * (first->dtype.bits / 8);
        if (fmoe_data(t) != next || t->shape[1] != first->shape[1] || fmoe_stride(t, 0) != fmoe_stride(first, 0) ||
            fmoe_stride(t, 1) != fmoe_stride(first, 1) || fmoe_tensor_dtype(t) != fmoe_tensor_dtype(first))
            return false;
        rows += t->shape[0];
    }
    if (!first) return false;
    j->t = *first;
    j->shape[0] = rows, j->shape[1] = first->shape[1];
    j->strides[0] = fmoe_stride(first, 0), j->strides[1] = fmoe_stride(first, 1);
    return true;
}

static bool alike(const fmoe_tensor *list, int64_t n)
{
    bool same = true;
    for (int64_t i = 1; list && i < n; i++)
        same = same && list[i].shape[0] == list->shape[0] && list[i].shape[1] == list->shape[1] &&
               fmoe_tensor_dtype(list + i) == fmoe_tensor_dtype(list);
    return same;
}

static const fmoe_tensor *whole(Joined &j, const fmoe_tensor *list)
{
    j.t.shape = j.shape, j.t.strides = j.strides;
    return list ? &j.t : nullptr;
}

static const fmoe_tensor *nth(const fmoe_tensor *t, int64_t i) { return t ? t + i : nullptr; }

// A list whose rows lie one after the other and whose matrices are alike runs as a stack does, in one launch; any other
// group by group.
static fmoe_status gmm_list(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run, bool forward,
                            Stream &s)
{
    const int64_t E = p->d.E;
    const fmoe_quant *const q = a->quant;
    fmoe_carve c = fmoe_carve_begin(run->workspace, kOpsAlign);
    const GmmRing ring = gmm_ring_carve(&c, plan_of(p), p->d);
    const GmmLists lists = carve_lists(&c, E);
    Joined x, y, dy, dx;
    if (!a->bias && !a->dbias && alike(a->w, E) && alike(a->dw, E) &&
        (!q || (alike(q->scale, E) && alike(q->zeros, E))) && join(a->x, E, &x) && join(a->y, E, &y) &&
        join(a->dy, E, &dy) && join(a->dx, E, &dx)) {
        Groups g = {whole(x, a->x),
                    a->w,
                    nullptr,
                    whole(y, a->y),
                    whole(dy, a->dy),
                    whole(dx, a->dx),
                    a->dw,
                    nullptr,
                    E,
                    0,
                    {},
                    {},
                    {},
                    {}};
        FMOE_TRY(gmm_decoded(p, a, ring, -1, g, s));
        if (g.w && !q) g.w_mat = rowmap_mat(a->w, E, fmoe_dtype_size(p->d.dtype), lists.w, s);
        if (g.dw) g.dw_mat = rowmap_mat(a->dw, E, fmoe_dtype_size(fmoe_tensor_dtype(a->dw)), lists.dw, s);
        rowmap_list(lists.rows, a->x ? a->x : a->dy, E, s);
        const View sizes = {&lists.rows->rows, -64, sizeof(MatEntry) / 8, 1};
        return gmm_groups(p, g, sizes, 0, c, run, forward, s);
    }
    for (int64_t i = 0; q && i < E; i++) { // what does not fit the ring, before anything is written
        Groups g = {};
        g.x = nth(a->x, i), g.y = nth(a->y, i), g.dy = nth(a->dy, i), g.dx = nth(a->dx, i), g.E = 1;
        FMOE_TRY(gmm_decoded(p, a, ring, i, g, s));
    }
    for (int64_t i = 0; i < E; i++) {
        Groups g = {nth(a->x, i),
                    nth(a->w, i),
                    nth(a->bias, i),
                    nth(a->y, i),
                    nth(a->dy, i),
                    nth(a->dx, i),
                    nth(a->dw, i),
                    nth(a->dbias, i),
                    1,
                    0,
                    {},
                    {},
                    {},
                    {}};
        if (g.w && !q) g.w_mat = matrix(g.w, 0);
        FMOE_TRY(gmm_decoded(p, a, ring, i, g, s));
        if (g.dw) g.dw_mat = matrix(g.dw, 0);
        FMOE_TRY(gmm_groups(p, g, View{}, 0, c, run, forward, s));
    }
    return FMOE_OK;
}

static fmoe_status gmm_stack(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run, bool forward,
                             Stream &s)
{
    Groups g = {a->x, a->w, a->bias, a->y, a->dy, a->dx, a->dw, a->dbias, p->d.E, 1, {}, {}, {}, {}};
    fmoe_carve c = fmoe_carve_begin(run->workspace, kOpsAlign);
    const GmmRing ring = gmm_ring_carve(&c, plan_of(p), p->d);
    if (g.w && !a->quant) g.w_mat = matrix(g.w, 1);
    FMOE_TRY(gmm_decoded(p, a, ring, -1, g, s));
    if (g.dw) g.dw_mat = matrix(g.dw, 1);
    return gmm_groups(p, g, view(a->sizes), a->cumulative, c, run, forward, s);
}

static fmoe_status gmm_run(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run, bool forward)
{
    BEGIN(p);
    fmoe_gmm_args given = *a; // what this pass does not read may be anything
    if (forward) given.dy = given.dx = given.dw = given.dbias = nullptr;
    else given.y = given.bias = nullptr;
    FMOE_TRY((a->list ? gmm_list : gmm_stack)(p, &given, run, forward, s));
    return fmoe_cuda_launched("grouped matmul");
}

fmoe_status gmm_forward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    return gmm_run(p, a, run, true);
}
fmoe_status gmm_backward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    return gmm_run(p, a, run, false);
}
