/* SPDX-License-Identifier: Apache-2.0
 * permute.c - rows to their experts and back: copies, weighted sums, and their gradients. */
#include <inttypes.h>

#include "cpu/ops/ops.h"

enum { GRAIN = 16 }; /* tokens of one piece of work */

typedef struct permute_buffers {
    fmoe_groups g;
} permute_buffers;

static void permute_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c, permute_buffers *b)
{
    int64_t R;
    if (__builtin_mul_overflow(T, p->d.k, &R)) {
        c->overflow = true;
        return;
    }
    fmoe_groups_carve(&b->g, c, p->d.E, R);
}

void fmoe_cpu_permute_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c)
{
    permute_buffers b;
    permute_carve(p, T, c, &b);
}

static permute_buffers permute_buffers_of(const fmoe_plan_impl *p, int64_t T, const fmoe_run *run)
{
    permute_buffers b;
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    permute_carve(p, T, &c, &b);
    return b;
}

static char *row_of(const fmoe_tensor *t, int64_t r)
{
    return (char *)fmoe_data(t) + r * fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
}

static int64_t map_at(const fmoe_tensor *map, int64_t i)
{
    return fmoe_get_int(fmoe_data(map), fmoe_tensor_dtype(map), i);
}

/* Entries are -1 or rows below R and T*k, each at most once. owner [T*k]: row -> slot, -1: nobody's. */
static fmoe_status check_map(const fmoe_tensor *map, int64_t R, int64_t *owner)
{
    const int64_t slots = map->shape[0], rows = fmoe_min(R, slots);
    for (int64_t r = 0; r < rows; r++) owner[r] = -1;
    for (int64_t i = 0; i < slots; i++) {
        const int64_t r = map_at(map, i);
        if (r == -1) continue;
        if (r < -1 || r >= rows)
            return fmoe_fail(FMOE_ERR_INDEX, "map[%" PRId64 "] is %" PRId64 ", must be -1 or a row below %" PRId64, i,
                             r, rows);
        if (owner[r] >= 0)
            return fmoe_fail(FMOE_ERR_INDEX, "map[%" PRId64 "] and map[%" PRId64 "] are both %" PRId64, owner[r], i, r);
        owner[r] = i;
    }
    return FMOE_OK;
}

/* ---- permute ---- */

typedef struct copy_ctx {
    const fmoe_plan_impl *p;
    const fmoe_permute_args *a;
    const fmoe_groups *g;
} copy_ctx;

static void permute_rows(void *arg, int64_t begin, int64_t end)
{
    const copy_ctx *x = arg;
    const size_t bytes = (size_t)x->p->d.H * fmoe_dtype_size(x->p->d.dtype);
    for (int64_t r = begin; r < end; r++)
        if (r < x->g->R) memcpy(row_of(x->a->xp, r), row_of(x->a->x, x->g->token[r]), bytes);
        else memset(row_of(x->a->xp, r), 0, bytes);
}

fmoe_status fmoe_cpu_permute_forward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    permute_buffers b = permute_buffers_of(p, a->x->shape[0], run);
    FMOE_TRY(fmoe_groups_from_ids(&b.g, p, a->ids));
    const int map_type = fmoe_tensor_dtype(a->map);
    for (int64_t i = 0; i < a->map->shape[0]; i++) fmoe_set_int(fmoe_data(a->map), map_type, i, -1);
    for (int64_t r = 0; r < b.g.R; r++) fmoe_set_int(fmoe_data(a->map), map_type, b.g.slot[r], r);
    for (int64_t e = 0; a->counts && e < p->d.E; e++)
        fmoe_set_int(fmoe_data(a->counts), fmoe_tensor_dtype(a->counts), e, b.g.off[e + 1] - b.g.off[e]);
    copy_ctx ctx = {p, a, &b.g};
    fmoe_for_rows(p, a->xp->shape[0], GRAIN, permute_rows, &ctx);
    return FMOE_OK;
}

/* out[t] = sum_j p[t,j] y[map[t,j]], slot by slot in f32: permute's backward (p NULL) and unpermute's forward. */
typedef struct gather_ctx {
    const fmoe_plan_impl *p;
    const fmoe_tensor *y, *map, *weights, *out;
} gather_ctx;

static void gather_rows(void *arg, int64_t begin, int64_t end)
{
    const gather_ctx *x = arg;
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype, y_type = fmoe_tensor_dtype(x->y);
    const int64_t slots = x->p->d.k, element = (int64_t)fmoe_dtype_size(dtype);
    const int64_t y_element = (int64_t)fmoe_dtype_size(y_type);
    for (int64_t t = begin; t < end; t++)
        for (int64_t n0 = 0; n0 < x->p->d.H; n0 += FMOE_NB) {
            const int64_t n = fmoe_min(FMOE_NB, x->p->d.H - n0);
            float sum[FMOE_NB] = {0}, row[FMOE_NB];
            for (int64_t i = t * slots; i < (t + 1) * slots; i++) {
                const int64_t r = map_at(x->map, i);
                if (r < 0) continue;
                fmoe_load_row(k, y_type, row, row_of(x->y, r) + n0 * y_element, n);
                k->axpy(sum,
                        x->weights ? fmoe_get_float(fmoe_data(x->weights), fmoe_tensor_dtype(x->weights), i) : 1.0f,
                        row, n);
            }
            fmoe_store_row(k, dtype, row_of(x->out, t) + n0 * element, sum, n);
        }
}

fmoe_status fmoe_cpu_permute_backward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    permute_buffers b = permute_buffers_of(p, a->x->shape[0], run);
    FMOE_TRY(check_map(a->map, a->xp->shape[0], b.g.slot));
    gather_ctx ctx = {p, a->xp, a->map, NULL, a->x};
    fmoe_for_rows(p, a->x->shape[0], GRAIN, gather_rows, &ctx);
    return FMOE_OK;
}

/* ---- unpermute ---- */

fmoe_status fmoe_cpu_unpermute_forward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    permute_buffers b = permute_buffers_of(p, a->out->shape[0], run);
    FMOE_TRY(check_map(a->map, a->y->shape[0], b.g.slot));
    gather_ctx ctx = {p, a->y, a->map, a->weights, a->out};
    fmoe_for_rows(p, a->out->shape[0], GRAIN, gather_rows, &ctx);
    return FMOE_OK;
}

typedef struct scatter_ctx {
    const fmoe_plan_impl *p;
    const fmoe_unpermute_args *a;
} scatter_ctx;

static void scatter_rows(void *arg, int64_t begin, int64_t end)
{
    const scatter_ctx *x = arg;
    const fmoe_unpermute_args *a = x->a;
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype;
    const int64_t slots = x->p->d.k, element = (int64_t)fmoe_dtype_size(dtype), H = x->p->d.H;
    for (int64_t t = begin; t < end; t++)
        for (int64_t i = t * slots; i < (t + 1) * slots; i++) {
            const int64_t r = map_at(a->map, i);
            const float weight =
                a->weights ? fmoe_get_float(fmoe_data(a->weights), fmoe_tensor_dtype(a->weights), i) : 1.0f;
            float dp = 0;
            for (int64_t n0 = 0; r >= 0 && n0 < H; n0 += FMOE_NB) {
                const int64_t n = fmoe_min(FMOE_NB, H - n0);
                float dout[FMOE_NB], other[FMOE_NB];
                fmoe_load_row(k, dtype, dout, row_of(a->dout, t) + n0 * element, n);
                if (a->dweights) {
                    fmoe_load_row(k, dtype, other, row_of(a->y, r) + n0 * element, n);
                    dp += k->dot(dout, other, n);
                }
                if (a->dy) {
                    for (int64_t j = 0; j < n; j++) other[j] = weight * dout[j];
                    fmoe_store_row(k, dtype, row_of(a->dy, r) + n0 * element, other, n);
                }
            }
            if (a->dweights) fmoe_set_float(fmoe_data(a->dweights), fmoe_tensor_dtype(a->dweights), i, dp);
        }
}

fmoe_status fmoe_cpu_unpermute_backward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    const int64_t T = a->dout->shape[0];
    const fmoe_tensor *rows = a->dy ? a->dy : a->y;
    if (!rows) return FMOE_OK;
    permute_buffers b = permute_buffers_of(p, T, run);
    FMOE_TRY(check_map(a->map, rows->shape[0], b.g.slot));
    if (a->dy) {
        const size_t bytes = (size_t)p->d.H * fmoe_dtype_size(p->d.dtype);
        for (int64_t r = 0; r < a->dy->shape[0]; r++)
            if (r >= a->map->shape[0] || b.g.slot[r] < 0) memset(row_of(a->dy, r), 0, bytes);
    }
    scatter_ctx ctx = {p, a};
    fmoe_for_rows(p, T, GRAIN, scatter_rows, &ctx);
    return FMOE_OK;
}
