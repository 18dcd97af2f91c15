/* SPDX-License-Identifier: Apache-2.0
 * check_gmm.c - grouped matmul through the public API, stacked and as lists, against an f64 plan on the values (the
 * result) and on their magnitudes (the sum in the bound). */
#include "check.h"

typedef struct gmm_draw {
    fmoe_desc d;
    fmoe_plan plan, ref;
    int64_t E, K, N, R;
    int dtype, y_dtype, grad;
    fmoe_tensor *sizes;
    int32_t cumulative;
} gmm_draw;

static int plan_or_f32(int dtype) { return check_below(2) ? dtype : FMOE_F32; }

/* Every fourth draw: one group with more rows than any block of rows has, and little else to do. */
static bool many_rows(int64_t index) { return index % 4 == 2; }

/* Sizes with empty groups, one that takes all, and rows past the last group. */
static void draw_sizes(gmm_draw *g, int64_t index)
{
    int64_t total = 0, *size = check_alloc((size_t)g->E * sizeof *size);
    const int64_t kind = check_below(4), one = check_below(g->E);
    for (int64_t e = 0; e < g->E; e++) {
        size[e] = index == 0                     ? 0
                  : e == one && many_rows(index) ? 500 + check_below(600)
                  : kind == 0                    ? (e == one ? 1 + check_below(70) : 0)
                  : check_below(3)               ? check_below(14)
                                                 : 0;
        total += size[e];
    }
    g->R = total + (check_below(3) ? 0 : check_below(4));
    g->cumulative = (int32_t)check_below(2);
    g->sizes = check_tensor((int)CHECK_PICK(CHECK_I32, CHECK_I64), CHECK_SHAPE(g->E), NULL);
    int64_t sum = 0;
    for (int64_t e = 0; e < g->E; e++) {
        sum += size[e];
        check_set(g->sizes, e, (double)(g->cumulative ? sum : size[e]));
    }
    if (g->E == 1 && check_below(2)) g->sizes = NULL;
}

static void begin(gmm_draw *g, int64_t index, bool list)
{
    *g = (gmm_draw){.d = FMOE_DESC_INIT, .E = CHECK_PICK(1, 2, 3, 5, 9), .K = check_size(200), .N = check_size(200)};
    if (many_rows(index)) g->K = check_size(20), g->N = check_size(20);
    else if (check_below(12) == 0 && !check_quick) g->K = CHECK_PICK(511, 512, 513, 1023, 1025);
    g->dtype = (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    g->y_dtype = plan_or_f32(g->dtype);
    g->grad = plan_or_f32(g->dtype);
    g->d.op = FMOE_OP_GROUPED_MATMUL;
    g->d.dtype = g->dtype;
    g->d.E = g->E;
    g->d.K = list ? 0 : g->K;
    g->d.N = list ? 0 : g->N;
    g->d.threads = (int32_t)CHECK_PICK(1, 2, 3);
    g->plan = check_plan(&g->d);
    fmoe_desc f64 = g->d;
    f64.dtype = FMOE_F64;
    g->ref = check_plan(&f64);
    draw_sizes(g, index);
    check_note("E=%" PRId64 " K=%" PRId64 " N=%" PRId64 " R=%" PRId64 " dtype=%d y=%d grad=%d cumulative=%d list=%d",
               g->E, g->K, g->N, g->R, g->dtype, g->y_dtype, g->grad, g->cumulative, list);
}

static fmoe_tensor *f64_like(const fmoe_tensor *t) /* NaN everywhere */
{
    return t ? check_tensor(FMOE_F64, t->ndim, t->shape, NULL) : NULL;
}

static void draw_gmm_forward(int64_t index)
{
    gmm_draw g;
    begin(&g, index, false);
    fmoe_tensor *x = check_fill(check_rows(g.dtype, g.R, g.K, check_below(3)), 1);
    fmoe_tensor *w = check_fill(check_stack(g.dtype, g.E, g.K, g.N, check_below(2)), 1);
    fmoe_tensor *bias =
        check_below(2) ? check_fill(check_rows(plan_or_f32(g.dtype), g.E, g.N, check_below(2)), 1) : NULL;
    fmoe_tensor *y = check_rows(g.y_dtype, g.R, g.N, check_below(3));
    const fmoe_gmm_args a = {
        .size = sizeof a, .x = x, .w = w, .bias = bias, .sizes = g.sizes, .y = y, .cumulative = g.cumulative};
    fmoe_gmm_args r = a, m = a;
    r.x = check_f64(x), r.w = check_f64(w), r.bias = check_f64(bias), r.y = f64_like(y);
    m.x = check_magnitudes(x), m.w = check_magnitudes(w), m.bias = check_magnitudes(bias), m.y = f64_like(y);
    const fmoe_run run = check_run(g.plan, FMOE_FORWARD, g.R, 0), run_ref = check_run(g.ref, FMOE_FORWARD, g.R, 0);
    CHECK_OK(fmoe_grouped_matmul_forward(g.plan, &a, &run));
    CHECK_OK(fmoe_grouped_matmul_forward(g.ref, &r, &run_ref));
    CHECK_OK(fmoe_grouped_matmul_forward(g.ref, &m, &run_ref));
    check_sums("y", y, r.y, m.y, check_c(g.K + 1)); /* rows past the groups stay NaN in both */
}

/* An output that is overwritten (poisoned) or added to (the same numbers in the f64 twin). */
static fmoe_tensor *start(fmoe_tensor *t, bool add, fmoe_tensor **twin, fmoe_tensor **magnitude)
{
    if (add) check_fill(t, 1);
    *twin = add ? check_f64(t) : f64_like(t);
    *magnitude = add ? check_magnitudes(t) : f64_like(t);
    return t;
}

static void draw_gmm_backward(int64_t index)
{
    gmm_draw g;
    begin(&g, index, false);
    const bool accumulate = check_below(2), add = check_below(2);
    const uint32_t flags = (accumulate ? FMOE_ACCUMULATE : 0) | (add ? FMOE_ADD_DX : 0);
    fmoe_tensor *x = check_fill(check_rows(g.dtype, g.R, g.K, check_below(3)), 1);
    fmoe_tensor *w = check_fill(check_stack(g.dtype, g.E, g.K, g.N, check_below(2)), 1);
    fmoe_tensor *dy = check_fill(check_rows(g.y_dtype, g.R, g.N, check_below(3)), 1);
    const int64_t left_out = check_below(6); /* one output may be missing */
    fmoe_tensor *dx = check_rows(g.dtype, g.R, g.K, check_below(3)),
                *dw = check_stack(g.grad, g.E, g.K, g.N, check_below(2));
    fmoe_tensor *db = check_rows(plan_or_f32(g.dtype), g.E, g.N, check_below(2)), *twin[3], *size[3];
    start(dx, add, &twin[0], &size[0]);
    start(dw, accumulate, &twin[1], &size[1]);
    start(db, accumulate, &twin[2], &size[2]);
    const fmoe_gmm_args a = {.size = sizeof a,
                             .x = left_out == 1 ? NULL : x,
                             .w = left_out == 0 ? NULL : w,
                             .sizes = g.sizes,
                             .dy = dy,
                             .dx = left_out == 0 ? NULL : dx,
                             .dw = left_out == 1 ? NULL : dw,
                             .dbias = left_out == 2 ? NULL : db,
                             .cumulative = g.cumulative};
    fmoe_gmm_args r = a, m = a;
    r.x = check_f64(x), r.w = check_f64(w), r.dy = check_f64(dy), r.dx = twin[0], r.dw = twin[1], r.dbias = twin[2];
    m.x = check_magnitudes(x), m.w = check_magnitudes(w), m.dy = check_magnitudes(dy), m.dx = size[0], m.dw = size[1],
    m.dbias = size[2];
    const fmoe_run run = check_run(g.plan, FMOE_BACKWARD, g.R, flags),
                   run_ref = check_run(g.ref, FMOE_BACKWARD, g.R, flags);
    CHECK_OK(fmoe_grouped_matmul_backward(g.plan, &a, &run));
    CHECK_OK(fmoe_grouped_matmul_backward(g.ref, &r, &run_ref));
    CHECK_OK(fmoe_grouped_matmul_backward(g.ref, &m, &run_ref));
    if (a.dx) check_sums("dx", dx, r.dx, m.dx, check_c(g.N + 1));
    if (a.dw) check_sums("dw", dw, r.dw, m.dw, check_c(g.R + 1));
    if (a.dbias) check_sums("dbias", db, r.dbias, m.dbias, check_c(g.R + 1));
}

/* ---- the list form: every group has its own sizes ---- */

typedef struct list_tensors {
    fmoe_tensor *x, *w, *bias, *y, *dy, *dx, *dw, *dbias;
} list_tensors;

static void draw_gmm_list(int64_t index)
{
    gmm_draw g;
    begin(&g, index, true);
    const bool accumulate = check_below(2), add = check_below(2);
    const uint32_t flags = (accumulate ? FMOE_ACCUMULATE : 0) | (add ? FMOE_ADD_DX : 0);
    const int bias_dtype = plan_or_f32(g.dtype), db_dtype = plan_or_f32(g.dtype);
    const size_t bytes = (size_t)g.E * sizeof(fmoe_tensor);
    list_tensors t[3]; /* ours, the reference's, and magnitudes */
    for (int v = 0; v < 3; v++)
        t[v] = (list_tensors){check_alloc(bytes), check_alloc(bytes), check_alloc(bytes), check_alloc(bytes),
                              check_alloc(bytes), check_alloc(bytes), check_alloc(bytes), check_alloc(bytes)};
    int64_t rows = 0, most = 0;
    for (int64_t e = 0; e < g.E; e++) {
        const int64_t m = check_below(4) ? check_below(20) : 0, K = check_size(100), N = check_size(100);
        const int64_t turned[] = {1, K};
        const bool turn = check_below(2);
        rows += m;
        most = fmoe_max(most, fmoe_max(m, fmoe_max(K, N)));
        fmoe_tensor *one = check_fill(check_rows(g.dtype, m, K, check_below(2)), 1);
        t[0].x[e] = *one, t[1].x[e] = *check_f64(one), t[2].x[e] = *check_magnitudes(one);
        one = check_fill(check_tensor(g.dtype, CHECK_SHAPE(K, N), turn ? turned : NULL), 1);
        t[0].w[e] = *one, t[1].w[e] = *check_f64(one), t[2].w[e] = *check_magnitudes(one);
        one = check_fill(check_tensor(bias_dtype, CHECK_SHAPE(N), NULL), 1);
        t[0].bias[e] = *one, t[1].bias[e] = *check_f64(one), t[2].bias[e] = *check_magnitudes(one);
        one = check_fill(check_rows(g.y_dtype, m, N, check_below(2)), 1);
        t[0].dy[e] = *one, t[1].dy[e] = *check_f64(one), t[2].dy[e] = *check_magnitudes(one);
        fmoe_tensor *twin, *size;
        t[0].y[e] = *start(check_rows(g.y_dtype, m, N, check_below(2)), false, &twin, &size), t[1].y[e] = *twin,
        t[2].y[e] = *size;
        t[0].dx[e] = *start(check_rows(g.dtype, m, K, check_below(2)), add, &twin, &size), t[1].dx[e] = *twin,
        t[2].dx[e] = *size;
        t[0].dw[e] = *start(check_tensor(g.grad, CHECK_SHAPE(K, N), turn ? NULL : turned), accumulate, &twin, &size);
        t[1].dw[e] = *twin, t[2].dw[e] = *size;
        t[0].dbias[e] = *start(check_tensor(db_dtype, CHECK_SHAPE(N), NULL), accumulate, &twin, &size);
        t[1].dbias[e] = *twin, t[2].dbias[e] = *size;
    }
    for (int v = 0; v < 3; v++) {
        const fmoe_plan plan = v ? g.ref : g.plan;
        const fmoe_gmm_args f = {.size = sizeof f, .x = t[v].x, .w = t[v].w, .bias = t[v].bias, .y = t[v].y, .list = 1};
        const fmoe_gmm_args b = {.size = sizeof b,
                                 .x = t[v].x,
                                 .w = t[v].w,
                                 .dy = t[v].dy,
                                 .dx = t[v].dx,
                                 .dw = t[v].dw,
                                 .dbias = t[v].dbias,
                                 .list = 1};
        const fmoe_run forward = check_run(plan, FMOE_FORWARD, rows, 0),
                       backward = check_run(plan, FMOE_BACKWARD, rows, flags);
        CHECK_OK(fmoe_grouped_matmul_forward(plan, &f, &forward));
        CHECK_OK(fmoe_grouped_matmul_backward(plan, &b, &backward));
    }
    const double c = check_c(most + 1);
    for (int64_t e = 0; e < g.E; e++) {
        check_sums("y", &t[0].y[e], &t[1].y[e], &t[2].y[e], c);
        check_sums("dx", &t[0].dx[e], &t[1].dx[e], &t[2].dx[e], c);
        check_sums("dw", &t[0].dw[e], &t[1].dw[e], &t[2].dw[e], c);
        check_sums("dbias", &t[0].dbias[e], &t[1].dbias[e], &t[2].dbias[e], c);
    }
}

const check_case check_gmm_cases[] = {
    {"gmm_forward", draw_gmm_forward, 30, 1, 0},
    {"gmm_backward", draw_gmm_backward, 30, 1, 0},
    {"gmm_list", draw_gmm_list, 20, 1, 0},
    {NULL, NULL, 0, 0, 0},
};
