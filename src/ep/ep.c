/* SPDX-License-Identifier: Apache-2.0
 * ep.c - a layer over ranks: where its experts are, the plans of what this rank computes, errors with rank and phase.
 */
#include "ep.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST_RANKS = 1 << 16, MOST_CHUNKS = 1024, STRUCT_MOST = 4096 };

fmoe_status fmoe_ep_fail(fmoe_status status, const char *text)
{
    return fmoe_fail(status, "%s", text ? text : "no reason given");
}

fmoe_status fmoe_ep_check_size(const char *name, size_t given, size_t known, const void *bytes)
{
    if (given < known || given > STRUCT_MOST)
        return fmoe_fail(FMOE_ERR_ABI, "%s.size is %zu, this library (%s) knows %zu", name, given,
                         fmoe_version_string(), known);
    for (size_t i = known; i < given; i++)
        if (((const unsigned char *)bytes)[i])
            return fmoe_fail(FMOE_ERR_ARG, "%s.size is %zu, this library knows %zu bytes, and byte %zu is not zero",
                             name, given, known, i);
    return FMOE_OK;
}

static void describe(const fmoe_ep *ep, fmoe_tensor *t, const void *data, int dtype)
{
    union {
        const void *in;
        void *out;
    } memory = {data};
    *t = (fmoe_tensor){.data = memory.out, .device = ep->d.device};
    t->dtype.lanes = 1;
    t->dtype.bits = (uint8_t)(8 * fmoe_dtype_size(dtype));
    t->dtype.code = dtype < 0 ? 0 : dtype == FMOE_BF16 ? 4 : 2;
}

const fmoe_tensor *fmoe_ep_matrix(const fmoe_ep *ep, ep_tensor *t, const void *data, int64_t rows, int64_t columns,
                                  int dtype)
{
    describe(ep, &t->t, data, dtype);
    t->shape[0] = rows;
    t->shape[1] = columns;
    t->t.ndim = 2;
    t->t.shape = t->shape;
    return &t->t;
}

const fmoe_tensor *fmoe_ep_list(const fmoe_ep *ep, ep_tensor *t, const int64_t *data, int64_t n)
{
    describe(ep, &t->t, data, -64);
    t->shape[0] = n;
    t->t.ndim = 1;
    t->t.shape = t->shape;
    return &t->t;
}

/* Workspace and stream of a run on n tokens; the caller gives run->workspace back. */
fmoe_status fmoe_ep_run_plan(fmoe_ep_call *c, fmoe_plan plan, fmoe_pass pass, int64_t n, fmoe_run *run)
{
    *run = FMOE_RUN_INIT;
    run->stream = c->stream;
    FMOE_TRY(fmoe_workspace_bytes(plan, pass, n, &run->workspace_bytes));
    run->workspace = fmoe_ep_alloc(c->ep, (int64_t)run->workspace_bytes, 1);
    return run->workspace ? FMOE_OK : FMOE_ERR_NOMEM;
}

/* ---- errors ---- */

fmoe_status fmoe_ep_named(const fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status)
{
    static const char *const names[] = {"", "count", "dispatch", "compute", "combine"};
    char text[400];
    snprintf(text, sizeof text, "%s", fmoe_last_error());
    return fmoe_fail(status, "expert parallelism, rank %d of %d, %s%s: %s", ep->x.rank, ep->x.ranks,
                     pass == FMOE_BACKWARD ? "backward " : "", names[phase], text);
}

fmoe_status fmoe_ep_broken(fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status)
{
    fmoe_ep_named(ep, pass, phase, status);
    if (!ep->broken && ep->x.abort) {
        char text[512];
        snprintf(text, sizeof text, "%s", fmoe_last_error());
        ep->x.abort(ep->x.ctx, text);
        fmoe_fail(status, "%s", text);
    }
    ep->broken = true;
    return status;
}

/* ---- the description ---- */

static fmoe_status check_exchange(const fmoe_exchange *x)
{
    if (!x) return fmoe_fail(FMOE_ERR_NULL, "exchange is NULL");
    FMOE_TRY(fmoe_ep_check_size("fmoe_exchange", x->size, sizeof *x, x));
    if (x->ranks < 1 || x->ranks > MOST_RANKS)
        return fmoe_fail(FMOE_ERR_ARG, "exchange.ranks is %d, must be 1 to %d", x->ranks, MOST_RANKS);
    if (x->rank < 0 || x->rank >= x->ranks)
        return fmoe_fail(FMOE_ERR_ARG, "exchange.rank is %d, must be 0 to %d", x->rank, x->ranks - 1);
    if (!x->counts || !x->begin || !x->wait || !x->abort)
        return fmoe_fail(FMOE_ERR_NULL, "exchange.%s is NULL",
                         !x->counts  ? "counts"
                         : !x->begin ? "begin"
                         : !x->wait  ? "wait"
                                     : "abort");
    if (!x->alloc != !x->free)
        return fmoe_fail(FMOE_ERR_NULL, "exchange.%s is NULL, exchange.%s is given", x->alloc ? "free" : "alloc",
                         x->alloc ? "alloc" : "free");
    if (!x->device_alloc != !x->device_free)
        return fmoe_fail(FMOE_ERR_NULL, "exchange.device_%s is NULL, exchange.device_%s is given",
                         x->device_alloc ? "free" : "alloc", x->device_alloc ? "alloc" : "free");
    return FMOE_OK;
}

static fmoe_status check_desc(const fmoe_ep_desc *d)
{
    FMOE_TRY(fmoe_ep_check_size("fmoe_ep_desc", d->size, sizeof *d, d));
    FMOE_TRY(check_exchange(d->exchange));
    if (!d->layer) return fmoe_fail(FMOE_ERR_NULL, "layer is NULL");
    FMOE_TRY(fmoe_ep_check_size("fmoe_desc", d->layer->size, sizeof *d->layer, d->layer));
    const fmoe_desc *l = d->layer;
    if (l->op != FMOE_OP_EXPERTS)
        return fmoe_fail(FMOE_ERR_ARG, "layer.op is %d, must be %d (experts)", l->op, FMOE_OP_EXPERTS);
    if (l->dtype != FMOE_F32 && l->dtype != FMOE_BF16 && l->dtype != FMOE_F16)
        return fmoe_fail(FMOE_ERR_DTYPE, "layer.dtype is %d, must be f32 (1), bf16 (2) or f16 (3)", l->dtype);
    if (d->mode != FMOE_EP_EXACT && d->mode != FMOE_EP_LEAN)
        return fmoe_fail(FMOE_ERR_ARG, "mode is %d, must be 0 (exact) or 1 (lean)", d->mode);
    if (d->chunks < 0 || d->chunks > MOST_CHUNKS)
        return fmoe_fail(FMOE_ERR_ARG, "chunks is %d, must be 0 to %d", d->chunks, MOST_CHUNKS);
    if (d->capacity < 0) return fmoe_fail(FMOE_ERR_ARG, "capacity is %" PRId64 ", must not be negative", d->capacity);
    if (d->timeout_ms < 0)
        return fmoe_fail(FMOE_ERR_ARG, "timeout_ms is %" PRId64 ", must not be negative", d->timeout_ms);
    if (!d->expert != !d->rank || (d->expert && d->placements < 1))
        return fmoe_fail(FMOE_ERR_ARG, "expert is %s, rank is %s, placements is %" PRId64 ": all are given, or none",
                         d->expert ? "given" : "NULL", d->rank ? "given" : "NULL", d->placements);
    for (int64_t i = 0; d->expert && i < d->placements; i++) {
        if (d->expert[i] < 0 || d->expert[i] >= l->E)
            return fmoe_fail(FMOE_ERR_INDEX, "expert[%" PRId64 "] is %d, must be 0 to %" PRId64, i, d->expert[i],
                             l->E - 1);
        if (d->rank[i] < 0 || d->rank[i] >= d->exchange->ranks)
            return fmoe_fail(FMOE_ERR_INDEX, "rank[%" PRId64 "] is %d, must be 0 to %d", i, d->rank[i],
                             d->exchange->ranks - 1);
    }
    return FMOE_OK;
}

static int64_t hash(int64_t h, int64_t v)
{
    return (int64_t)(((uint64_t)h ^ (uint64_t)v) * 0x9e3779b97f4a7c15u ^ ((uint64_t)h >> 29));
}

/* ---- where experts are ---- */

static int32_t default_rank(const fmoe_ep *ep, int64_t e)
{
    int64_t r = e * ep->x.ranks / ep->d.E; /* near it: the parts are not all of one size */
    while ((r + 1) * ep->d.E / ep->x.ranks <= e) r++;
    while (r * ep->d.E / ep->x.ranks > e) r--;
    return (int32_t)r;
}

static fmoe_status place_all(fmoe_ep *ep, const fmoe_ep_desc *d, int64_t *held, int64_t *all, int64_t *seen,
                             unsigned char *taken)
{
    const int64_t n = d->expert ? d->placements : ep->d.E, R = ep->x.ranks;
    for (int64_t i = 0; i < n; i++) all[d->expert ? d->expert[i] : i]++;
    for (int64_t e = 0; e < ep->d.E; e++) {
        ep->dest[e] = -1;
        if (!all[e]) return fmoe_fail(FMOE_ERR_ARG, "expert %" PRId64 " is on no rank", e);
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = d->expert ? d->expert[i] : i;
        const int32_t r = d->rank ? d->rank[i] : default_rank(ep, e);
        const bool here = r == ep->x.rank;
        if (taken[e * R + r]++) return fmoe_fail(FMOE_ERR_ARG, "expert %" PRId64 " is on rank %d twice", e, r);
        if (here || (ep->dest[e] != ep->x.rank && seen[e] == (ep->x.rank + e) % all[e])) {
            ep->dest[e] = r;
            ep->index[e] = (int32_t)held[r];
        }
        if (here) ep->local[ep->n_local++] = (int32_t)e;
        held[r]++;
        seen[e]++;
        ep->form = hash(ep->form, e * R + r);
    }
    return FMOE_OK;
}

static fmoe_status place(fmoe_ep *ep, const fmoe_ep_desc *d)
{
    const size_t E = (size_t)ep->d.E, R = (size_t)ep->x.ranks;
    size_t cells = 0;
    const bool fits = !fmoe_mul_overflow(E, R, &cells);
    int64_t *const numbers = calloc(2 * E + R, sizeof *numbers);
    unsigned char *const taken = fits ? calloc(cells, 1) : NULL;
    ep->local = calloc(E, sizeof *ep->local);
    fmoe_status status = FMOE_ERR_NOMEM;
    if (numbers && taken && ep->local) status = place_all(ep, d, numbers, numbers + R, numbers + R + E, taken);
    else fmoe_fail(status, "no memory for %zu experts on %zu ranks", E, R);
    free(numbers);
    free(taken);
    return status;
}

/* ---- plans ---- */

/* One backward for each forward: it may write over what was saved. */
static fmoe_status make_plans(fmoe_ep *ep)
{
    fmoe_desc d = ep->d;
    d.flags = (d.flags & ~(uint32_t)FMOE_BORROW_DW1) | FMOE_REUSE_SAVED;
    if (!ep->direct) {
        d.E = ep->n_local;
        if (ep_exact(ep)) d.k = 1;
        d.flags = (d.flags & ~(uint32_t)FMOE_SKIP_E) | FMOE_SKIP_NEG1;
        if (ep->hosted && ep_exact(ep)) d.flags &= ~(uint32_t)FMOE_SKIP_NEG1; /* the host has seen every pair */
    }
    if (d.E) FMOE_TRY(fmoe_plan_create(&ep->experts, &d));
    if (d.E && !ep->cpu && !(d.flags & FMOE_QUANT)) {
        d.flags |= FMOE_BORROW_DW1;
        FMOE_TRY(fmoe_plan_create(&ep->borrow, &d));
        d.flags &= ~(uint32_t)FMOE_BORROW_DW1;
    }
    if (ep->direct) return FMOE_OK;
    if (ep->cpu) d.flags |= FMOE_RECOMPUTE;
    if (d.E && ep->chunks > 1) FMOE_TRY(fmoe_plan_create(&ep->whole, &d));
    fmoe_desc s = FMOE_DESC_INIT;
    s.op = FMOE_OP_PERMUTE;
    s.dtype = ep->d.dtype;
    s.device = ep->d.device;
    s.H = ep->d.H;
    s.E = 1;
    s.k = ep->sum_slots = ep_exact(ep) ? ep->d.k : fmoe_min(ep->d.k, ep->x.ranks);
    s.threads = ep->d.threads;
    s.parallel = ep->d.parallel;
    s.parallel_ctx = ep->d.parallel_ctx;
    return fmoe_plan_create(&ep->sum, &s);
}

/* What a device needs of the layer: the map of experts, and a place for what it finds wrong. */
static fmoe_status fill_device(fmoe_ep *ep)
{
    const size_t n = (size_t)ep->d.E * sizeof *ep->dest;
    if (ep->direct || ep->cpu) return FMOE_OK; /* the CPU has the map where it was made */
    if (ep->hosted) return ep->ops->event(ep->d.device.id, &ep->passed);
    if (!(ep->report = ep->ops->alloc(ep->d.device.id, sizeof *ep->report, true)) ||
        !(ep->tables = ep->ops->alloc(ep->d.device.id, 2 * n, false)))
        return FMOE_ERR_NOMEM;
    memset(ep->report, 0, sizeof *ep->report);
    return ep->ops->copy(ep->d.device.id, ep->tables, ep->dest, 2 * n, NULL, true);
}

static fmoe_status check_layer(const fmoe_desc *layer) /* what fmoe_plan_create refuses, before E is divided */
{
    fmoe_plan plan;
    FMOE_TRY(fmoe_plan_create(&plan, layer));
    return fmoe_plan_destroy(&plan);
}

static fmoe_status fill(fmoe_ep *ep, const fmoe_ep_desc *desc)
{
    ep->d = *desc->layer;
    if (!ep->d.device.type) ep->d.device.type = FMOE_CPU;
    ep->x = *desc->exchange;
    ep->cpu = ep->d.device.type == FMOE_CPU;
    ep->staged = !ep->cpu && !ep->x.on_device;
    FMOE_TRY(fmoe_device_find(ep->d.device, &ep->ops));
    ep->hosted = !ep->ops->home;
    ep->fixed = !ep->cpu && !ep->hosted && desc->capacity;
    if (ep->fixed && desc->chunks > 1)
        return fmoe_fail(FMOE_ERR_ARG,
                         "capacity is %" PRId64 " and chunks is %d: with a capacity a device has one chunk",
                         desc->capacity, desc->chunks);
    ep->mode = desc->mode;
    ep->chunks = desc->chunks ? desc->chunks : 1;
    ep->capacity = desc->capacity;
    ep->timeout_ms = desc->timeout_ms ? desc->timeout_ms : 600000;
    ep->dest = calloc(2 * (size_t)ep->d.E, sizeof *ep->dest);
    if (!ep->dest) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for %" PRId64 " experts", ep->d.E);
    ep->index = ep->dest + ep->d.E;
    if (ep->cpu || ep->hosted) ep->tables = ep->dest;
    const int64_t agreed[] = {FMOE_VERSION, ep->d.H,     ep->d.I,  ep->d.E,    ep->d.k,     ep->d.dtype,
                              ep->d.act,    ep->d.flags, ep->mode, ep->chunks, ep->x.ranks, ep->capacity};
    for (size_t i = 0; i < sizeof agreed / sizeof *agreed; i++) ep->form = hash(ep->form, agreed[i]);
    FMOE_TRY(place(ep, desc));
    ep->direct = ep->x.ranks == 1 && ep->n_local == ep->d.E && !ep->capacity;
    for (int64_t e = 0; e < ep->d.E; e++) ep->direct = ep->direct && ep->index[e] == e;
    if (ep->direct) ep->chunks = 1; /* nothing to overlap */
    FMOE_TRY(make_plans(ep));
    return fill_device(ep);
}

fmoe_status fmoe_ep_create(fmoe_ep **out, const fmoe_ep_desc *desc)
{
    if (!out) return fmoe_fail(FMOE_ERR_NULL, "ep is NULL");
    *out = NULL;
    if (!desc) return fmoe_fail(FMOE_ERR_NULL, "fmoe_ep_desc is NULL");
    FMOE_TRY(check_desc(desc));
    FMOE_TRY(check_layer(desc->layer));
    fmoe_ep *ep = calloc(1, sizeof *ep);
    if (!ep) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for a layer");
    const fmoe_status status = fill(ep, desc);
    if (status) fmoe_ep_destroy(&ep);
    *out = ep;
    return status;
}

void fmoe_ep_destroy(fmoe_ep **ep)
{
    if (!ep || !*ep) return;
    fmoe_ep *const e = *ep;
    *ep = NULL;
    fmoe_ep_free_all(e);
    fmoe_plan_destroy(&e->experts);
    fmoe_plan_destroy(&e->borrow);
    fmoe_plan_destroy(&e->whole);
    fmoe_plan_destroy(&e->sum);
    if (e->tables && e->tables != e->dest) e->ops->free(e->d.device.id, e->tables, false);
    if (e->passed) e->ops->event_free(e->d.device.id, e->passed);
    if (e->report) e->ops->free(e->d.device.id, e->report, true);
    free(e->dest);
    free(e->local);
    free(e);
}

int64_t fmoe_ep_local(const fmoe_ep *ep, int32_t *experts, int64_t n)
{
    if (!ep) return 0;
    for (int64_t i = 0; experts && i < fmoe_min(n, ep->n_local); i++) experts[i] = ep->local[i];
    return ep->n_local;
}
