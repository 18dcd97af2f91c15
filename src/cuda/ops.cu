// SPDX-License-Identifier: Apache-2.0
// ops.cu - route, permute, unpermute and activation behind the backend table.
#include "ops.cuh"

// ---- route ----

static RouteArgs route_args(const fmoe_plan_impl *p, const fmoe_route_args *a)
{
    RouteArgs r = {};
    r.T = a->logits->shape[0];
    r.E = p->d.E;
    r.k = p->d.k;
    r.rule = p->d.route;
    r.flags = p->d.flags;
    r.logits = view(a->logits);
    r.ids = view(a->ids);
    if (a->select_bias) r.bias = (const float *)fmoe_data(a->select_bias), r.bias_s = fmoe_stride(a->select_bias, 0);
    r.error = plan_of(p)->error_dev;
    return r;
}

fmoe_status route_forward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    BEGIN(p);
    RouteArgs r = route_args(p, a);
    r.weights = view(a->weights);
    r.replay = (run->flags & FMOE_REPLAY) != 0;
    if (a->bad_rows) {
        r.bad_rows = fmoe_data(a->bad_rows);
        cudaMemsetAsync(r.bad_rows, 0, 8, s.handle);
    }
    route_run(r, true, s);
    return fmoe_cuda_launched("route forward");
}

fmoe_status route_backward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    BEGIN(p);
    RouteArgs r = route_args(p, a);
    r.weights = view(a->dweights);
    r.dlogits = view(a->dlogits);
    route_run(r, false, s);
    return fmoe_cuda_launched("route backward");
}

// ---- permute ----

static RowMap carve_sort(fmoe_carve *c, int64_t R, int64_t E)
{
    RowMap m = {};
    m.off = (int *)fmoe_carve_take(c, E + 1, 4);
    m.cnt = (int *)fmoe_carve_take(c, E, 4);
    m.slot = (int *)fmoe_carve_take(c, R, 4);
    m.part = (int *)fmoe_carve_take(c, (int64_t)rowmap_part_count(R, E), 4);
    return m;
}

fmoe_status permute_forward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    BEGIN(p);
    SortArgs q = {};
    q.ids = view(a->ids);
    q.T = a->x->shape[0];
    q.k = p->d.k;
    q.E = p->d.E;
    q.flags = p->d.flags;
    q.align = 1;
    q.error = plan->error_dev;
    fmoe_carve c = fmoe_carve_begin(run->workspace, kOpsAlign);
    const RowMap m = carve_sort(&c, q.T * q.k, q.E);
    rowmap_sort_into(q, m, view(a->map), view(a->counts), s);
    ScatterArgs g = {};
    g.T = q.T, g.k = q.k, g.H = p->d.H, g.R = a->xp->shape[0];
    g.x = fmoe_data(a->x);
    g.x_r = fmoe_stride(a->x, 0);
    g.map = View{m.slot, -32, 1, 1};
    g.out = fmoe_data(a->xp);
    g.out_r = fmoe_stride(a->xp, 0);
    scatter_rows(p->d.dtype, g, s);
    const int64_t size = (int64_t)fmoe_dtype_size(p->d.dtype);
    zero_rows(g.out, g.R, g.H * size, g.out_r * size, m.off + q.E, s);
    return fmoe_cuda_launched("permute forward");
}

static CombineArgs sum_args(const fmoe_plan_impl *p, const fmoe_tensor *rows, const fmoe_tensor *map,
                            const fmoe_tensor *out)
{
    CombineArgs g = {};
    g.T = out->shape[0], g.k = p->d.k, g.H = p->d.H;
    g.R = map->shape[0];
    if (rows) {
        g.R = rows->shape[0];
        g.y = fmoe_data(rows);
        g.y_r = fmoe_stride(rows, 0);
    }
    g.map = view(map);
    g.out = fmoe_data(out);
    g.out_r = fmoe_stride(out, 0);
    g.error = plan_of(p)->error_dev;
    return g;
}

fmoe_status permute_backward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    BEGIN(p);
    combine_rows(p->d.dtype, sum_args(p, a->xp, a->map, a->x), s);
    return fmoe_cuda_launched("permute backward");
}

fmoe_status unpermute_forward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    BEGIN(p);
    CombineArgs g = sum_args(p, a->y, a->map, a->out);
    const View w = view(a->weights);
    if (a->weights) g.p = &w;
    combine_rows(p->d.dtype, g, s);
    return fmoe_cuda_launched("unpermute forward");
}

fmoe_status unpermute_backward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    BEGIN(p);
    const CombineArgs g = sum_args(p, a->y, a->map, a->dout);
    const View w = view(a->weights);
    if (a->dy) {
        ScatterArgs q = {};
        q.T = g.T, q.k = g.k, q.H = g.H, q.R = a->dy->shape[0];
        q.x = g.out;
        q.x_r = g.out_r;
        q.map = g.map;
        q.p = a->weights ? &w : nullptr;
        q.out = fmoe_data(a->dy);
        q.out_r = fmoe_stride(a->dy, 0);
        q.error = g.error;
        const int64_t size = (int64_t)fmoe_dtype_size(p->d.dtype);
        zero_rows(q.out, q.R, q.H * size, q.out_r * size, nullptr, s); // rows nobody maps to
        scatter_rows(p->d.dtype, q, s);
    }
    if (a->dweights) dot_rows(p->d.dtype, g, view(a->dweights), s);
    return fmoe_cuda_launched("unpermute backward");
}

fmoe_status ops_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    (void)pass;
    fmoe_carve c = fmoe_carve_begin(nullptr, kOpsAlign);
    const int64_t k = p->d.op == FMOE_OP_PERMUTE ? p->d.k : 1;
    if (T > INT32_MAX / k)
        return FAIL(FMOE_ERR_OVERFLOW, "T = %lld rows do not fit the CUDA backend's 2^31", (long long)T);
    if (p->d.op == FMOE_OP_PERMUTE) carve_sort(&c, T * k, p->d.E);
    if (p->d.op == FMOE_OP_GROUPED_MATMUL) gmm_carve(&c, T, p);
    if (c.overflow) return FAIL(FMOE_ERR_OVERFLOW, "the workspace of T = %lld does not fit 64 bits", (long long)T);
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    *saved = 0;
    return FMOE_OK;
}

// ---- activation ----

static ActArgs act_args(const fmoe_plan_impl *p, const fmoe_activation_args *a)
{
    const bool inter = p->d.flags & FMOE_INTERLEAVED;
    ActArgs v = {};
    v.act = p->d.act;
    v.alpha = p->d.act_alpha;
    v.limit = p->d.act_limit;
    v.rows = a->h->shape[0];
    v.I = p->d.I;
    v.h = fmoe_data(a->h);
    v.h_r = fmoe_stride(a->h, 0);
    v.h_i = v.dh_i = p->gated && inter ? 2 : 1;
    v.h_u = v.dh_u = inter ? 1 : p->d.I;
    if (!p->gated) v.h_u = v.dh_u = 0;
    return v;
}

fmoe_status activation_forward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    BEGIN(p);
    ActArgs v = act_args(p, a);
    v.a = fmoe_data(a->a);
    v.a_r = fmoe_stride(a->a, 0);
    act_forward(p->d.dtype, p->gated, v, s);
    return fmoe_cuda_launched("activation forward");
}

fmoe_status activation_backward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    BEGIN(p);
    ActArgs v = act_args(p, a);
    v.da = fmoe_data(a->da);
    v.da_r = fmoe_stride(a->da, 0);
    v.dh = fmoe_data(a->dh);
    v.dh_r = fmoe_stride(a->dh, 0);
    act_backward(p->d.dtype, p->gated, v, s);
    return fmoe_cuda_launched("activation backward");
}
