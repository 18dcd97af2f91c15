/* SPDX-License-Identifier: Apache-2.0
 *
 * count.c - the first phase: where each token goes, what the others announce, and the memory for it. What a peer says
 * is checked before any of it is used. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "ep.h"

enum { HEAD = 3 }; /* numbers before the counts of an announcement: form, status, type of the routing weights */

fmoe_status fmoe_ep_check_tensor(const fmoe_ep *ep, const char *name, const fmoe_tensor *t, int64_t rows,
                                 int64_t columns, int dtype, int other)
{
    if (!t) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", name);
    if (t->device.type != ep->d.device.type || (!ep->cpu && t->device.id != ep->d.device.id))
        return fmoe_fail(FMOE_ERR_ARG, "%s is on device type %d, number %d, must be %d, %d: the layer's", name,
                         t->device.type, t->device.id, ep->d.device.type, ep->d.device.id);
    if (t->ndim != 2 || !t->shape) return fmoe_fail(FMOE_ERR_SHAPE, "%s has %d dimensions, must have 2", name, t->ndim);
    if ((rows >= 0 ? t->shape[0] != rows : t->shape[0] < 0) || t->shape[1] != columns)
        return fmoe_fail(FMOE_ERR_SHAPE, "%s is [%" PRId64 ",%" PRId64 "], must be [%" PRId64 ",%" PRId64 "]", name,
                         t->shape[0], t->shape[1], rows >= 0 ? rows : t->shape[0], columns);
    const int type = fmoe_tensor_dtype(t);
    if (type != dtype && type != other)
        return fmoe_fail(FMOE_ERR_DTYPE, "%s has dtype code %d with %d bits", name, t->dtype.code, t->dtype.bits);
    const int64_t stride = fmoe_stride(t, 0);
    if (t->shape[0] && columns > 1 && fmoe_stride(t, 1) != 1) /* of no rows any will do: nothing is read */
        return fmoe_fail(FMOE_ERR_STRIDE, "%s has stride %" PRId64 " in its last dimension, must be 1", name,
                         fmoe_stride(t, 1));
    if (t->shape[0] > 1 && stride < columns)
        return fmoe_fail(FMOE_ERR_STRIDE, "%s has rows %" PRId64 " apart, must be at least %" PRId64, name, stride,
                         columns);
    if (t->shape[0] && columns && !t->data) return fmoe_fail(FMOE_ERR_NULL, "%s.data is NULL", name);
    if ((uintptr_t)fmoe_data(t) % fmoe_dtype_size(type))
        return fmoe_fail(FMOE_ERR_ALIGN, "%s is not aligned to %zu", name, fmoe_dtype_size(type));
    return FMOE_OK;
}

/* ids and p are compact, as in fmoe_experts_args. */
static fmoe_status check_compact(const char *name, const fmoe_tensor *t)
{
    if (t->shape[0] > 1 && fmoe_stride(t, 0) != t->shape[1])
        return fmoe_fail(FMOE_ERR_STRIDE, "%s has rows %" PRId64 " apart, must be compact: %" PRId64, name,
                         fmoe_stride(t, 0), t->shape[1]);
    return FMOE_OK;
}

static void prefix_sums(const int64_t *n, int64_t *at, int64_t cells)
{
    at[0] = 0;
    for (int64_t i = 0; i < cells; i++) at[i + 1] = at[i] + n[i];
}

/* ---- what the others announce ---- */

static fmoe_status check_announced(fmoe_ep_call *c, const int64_t *told, int64_t width)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks;
    for (int64_t r = 0; r < R; r++)
        if (told[r * width + 1] != FMOE_OK)
            return fmoe_fail(FMOE_ERR_EXCHANGE, "rank %" PRId64 " could not begin: %s", r,
                             fmoe_status_string((fmoe_status)told[r * width + 1]));
    int64_t rows = 0, pairs = 0;
    for (int64_t r = 0; r < R; r++) {
        const int64_t *said = told + r * width;
        int64_t of_rank = 0;
        if (said[0] != ep->form)
            return fmoe_fail(FMOE_ERR_EXCHANGE,
                             "rank %" PRId64 " runs another layer, other options or another map of experts", r);
        if (said[2] != c->p_type)
            return fmoe_fail(FMOE_ERR_EXCHANGE,
                             "rank %" PRId64 " has routing weights of dtype %" PRId64 ", this rank of %d", r, said[2],
                             c->p_type);
        for (int64_t chunk = 0; chunk < ep->chunks && !ep->fixed; chunk++) {
            const int64_t n = said[HEAD + 2 * chunk], m = said[HEAD + 2 * chunk + 1];
            int64_t most;
            if (n < 0 || m < n || __builtin_mul_overflow(n, ep->d.k, &most) || m > most ||
                __builtin_add_overflow(rows, n, &rows) || __builtin_add_overflow(pairs, m, &pairs) ||
                (ep->capacity && n > ep->capacity - of_rank) || (n && !ep->n_local))
                return fmoe_fail(FMOE_ERR_EXCHANGE,
                                 "rank %" PRId64 " announces %" PRId64 " rows and %" PRId64
                                 " pairs, which cannot be (k = %" PRId64 ", %" PRId64 " experts here)",
                                 r, n, m, ep->d.k, ep->n_local);
            of_rank += n;
            c->recv_rows[chunk * R + r] = n;
            c->recv_pairs[chunk * R + r] = m;
        }
    }
    if (ep->fixed) return FMOE_OK; /* rows are as many as that */
    prefix_sums(c->recv_rows, c->recv_row_at, ep_cells(ep));
    prefix_sums(c->recv_pairs, c->recv_pair_at, ep_cells(ep));
    return FMOE_OK;
}

static fmoe_status announce(fmoe_ep_call *c, fmoe_status mine)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, width = HEAD + 2 * (int64_t)ep->chunks;
    int64_t *const tell = calloc((size_t)(2 * R * width), sizeof *tell), *const told = tell + R * width;
    if (!tell)
        return fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, fmoe_fail(FMOE_ERR_NOMEM, "no memory to announce rows"));
    for (int64_t r = 0; r < R; r++) {
        int64_t *to = tell + r * width;
        to[0] = ep->form;
        to[1] = mine;
        to[2] = c->p_type;
        for (int64_t chunk = 0; chunk < ep->chunks && !mine && !ep->fixed; chunk++) {
            to[HEAD + 2 * chunk] = c->send_rows[chunk * R + r];
            to[HEAD + 2 * chunk + 1] = c->send_pairs[chunk * R + r];
        }
    }
    char own[512];
    snprintf(own, sizeof own, "%s", fmoe_last_error());
    fmoe_status status = ep->x.counts(ep->x.ctx, tell, told, width, ep->timeout_ms);
    c->stats.bytes_counts += (R - 1) * width * 8;
    if (status) status = fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, status);
    else if (mine) status = fmoe_ep_named(ep, FMOE_FORWARD, PHASE_COUNT, fmoe_fail(mine, "%s", own));
    else if ((status = check_announced(c, told, width))) {
        bool all_know = false; /* every rank has seen a status that is none */
        for (int64_t r = 0; r < R; r++) all_know = all_know || told[r * width + 1] != FMOE_OK;
        status = all_know ? fmoe_ep_named(ep, FMOE_FORWARD, PHASE_COUNT, status)
                          : fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, status);
    }
    free(tell);
    return status;
}

/* ---- the call ---- */

/* Numbers of the host. */
static fmoe_status alloc_numbers(fmoe_ep_call *c)
{
    const int64_t cells = ep_cells(c->ep), chunks = c->ep->chunks, n = 4 * cells + 4 * (cells + 1);
    int64_t **const parts[] = {&c->send_rows,   &c->send_pairs,   &c->recv_rows,   &c->recv_pairs,
                               &c->send_row_at, &c->send_pair_at, &c->recv_row_at, &c->recv_pair_at};
    int64_t *at = calloc((size_t)n, 8);
    c->send_rows = at;
    c->requests = calloc((size_t)(3 * chunks + 1), sizeof *c->requests);
    c->saved = calloc((size_t)chunks, sizeof *c->saved);
    if (!at || !c->requests || !c->saved) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for %" PRId64 " numbers", n);
    for (int i = 0; i < 8; i++) {
        *parts[i] = at;
        at += i < 4 ? cells : cells + 1;
    }
    return FMOE_OK;
}

static fmoe_status alloc_home(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t fixed = ep->fixed ? ep->x.ranks * ep->capacity : 0, slots = c->T * ep->d.k;
    if (!(c->counts = fmoe_ep_alloc(ep, 2 * ep_cells(ep) + 1, 8)) || !(c->slot_pair = fmoe_ep_alloc(ep, slots, 8)) ||
        !(c->map = fmoe_ep_alloc(ep, c->T * ep->sum_slots, 8)) ||
        !(c->sum_p = fmoe_ep_alloc(ep, ep_exact(ep) ? slots : 0, 4)) ||
        !(c->send_token = fmoe_ep_alloc(ep, fixed ? fixed : c->T * fmoe_min(ep->d.k, ep->x.ranks), 8)) ||
        !(c->pairs_send = fmoe_ep_alloc(ep, fixed ? fixed * ep->d.k : slots, sizeof *c->pairs_send)))
        return FMOE_ERR_NOMEM;
    return FMOE_OK;
}

/* What a device found wrong, where it has come so far. */
static fmoe_status reported(fmoe_ep *ep, bool earlier)
{
    if (!ep->report) return FMOE_OK;
    const fmoe_report r = *(volatile fmoe_report *)ep->report;
    memset(ep->report, 0, sizeof *ep->report);
    const char *const when = earlier ? "an earlier call met " : "";
    const int64_t slot = r.slot - 1;
    if (r.slot)
        return fmoe_fail(FMOE_ERR_INDEX, "%sids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", must be in [0,%" PRId64 ")",
                         when, slot / ep->d.k, slot % ep->d.k, r.id, ep->d.E);
    if (!r.pair) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_EXCHANGE,
                     "%spair %" PRId64 " of expert %" PRId64 " that its rank did not announce so: there are %" PRId64
                     " experts here; it was skipped",
                     when, r.pair - 1, r.expert, ep->n_local);
}

/* Numbers of rows and pairs come to the host: the one place where it waits for the device (but host.c). With a capacity
 * they are known, and it does not. */
static fmoe_status read_counts(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep);
    if (!ep->fixed) {
        int64_t *const own = ep->hosted ? NULL : calloc((size_t)(2 * cells + 1), 8), *const n = own ? own : c->counts;
        if (!own && !ep->hosted) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for %" PRId64 " counts", 2 * cells);
        const fmoe_status status = own ? fmoe_ep_copy(c, n, c->counts, (2 * cells + 1) * 8, true) : FMOE_OK;
        memcpy(c->send_rows, n, (size_t)cells * 8);
        memcpy(c->send_pairs, n + cells, (size_t)cells * 8);
        c->stats.dropped = n[2 * cells];
        free(own);
        FMOE_TRY(status);
        FMOE_TRY(reported(ep, false));
    } else c->stats.dropped = -1;
    for (int64_t i = 0; ep->fixed && i < cells; i++) {
        c->send_rows[i] = c->recv_rows[i] = ep->capacity;
        c->send_pairs[i] = c->recv_pairs[i] = ep->capacity * ep->d.k;
    }
    prefix_sums(c->send_rows, c->send_row_at, cells);
    prefix_sums(c->send_pairs, c->send_pair_at, cells);
    prefix_sums(c->recv_rows, c->recv_row_at, cells);
    prefix_sums(c->recv_pairs, c->recv_pair_at, cells);
    return FMOE_OK;
}

static fmoe_status home(fmoe_ep_call *c, const fmoe_ep_args *a)
{
    fmoe_ep *const ep = c->ep;
    int64_t slots;
    if (__builtin_mul_overflow(c->T, ep->d.k, &slots) || slots > INT64_MAX / 64)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "T * k does not fit 64 bits: T is %" PRId64, c->T);
    if (!ep->hosted) FMOE_TRY(alloc_home(c));
    fmoe_home_args h = {.T = c->T, .k = ep->d.k, .E = ep->d.E, .ranks = ep->x.ranks, .chunks = ep->chunks};
    h.capacity = ep->capacity;
    h.flags = ep->d.flags;
    h.columns = ep->sum_slots;
    h.exact = ep_exact(ep);
    h.weighted = ep_weighs_at_home(c);
    h.ids = fmoe_data(a->ids);
    h.ids_type = fmoe_tensor_dtype(a->ids);
    h.p = fmoe_data(a->weights);
    h.p_type = c->p_type;
    h.dest = ep->tables;
    h.index = ep->tables + ep->d.E;
    h.counts = c->counts;
    h.slot_pair = c->slot_pair;
    h.map = c->map;
    h.sum_p = c->sum_p;
    h.send_token = c->send_token;
    h.pairs = c->pairs_send;
    h.report = ep->report;
    h.stream = c->stream;
    fmoe_status status;
    if (!ep->hosted) {
        if (!(h.work = fmoe_ep_alloc(ep, (int64_t)ep->ops->home_bytes(&h), 1))) return FMOE_ERR_NOMEM;
        status = ep->ops->home(ep->d.device.id, &h);
        fmoe_ep_free(ep, h.work);
    } else status = fmoe_ep_home_on_host(c, &h);
    const int64_t *const dropped = c->counts + 2 * ep_cells(ep);
    void *const to = status || !a->dropped ? NULL : fmoe_data(a->dropped);
    if (to)
        status =
            ep->hosted ? fmoe_ep_cross(c, false, to, dropped, 8, ep->staged) : fmoe_ep_copy(c, to, dropped, 8, false);
    return status ? status : read_counts(c);
}

static fmoe_status alloc_away(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t pairs = c->recv_pair_at[ep_cells(ep)], rows = c->recv_row_at[ep_cells(ep)];
    const int64_t slots = ep_exact(ep) ? pairs : rows * ep->d.k;
    if (ep->hosted) {
        FMOE_TRY(fmoe_ep_away_alloc(c));
        return fmoe_ep_rows_alloc(c, FMOE_FORWARD);
    }
    if (!(c->pairs_recv = fmoe_ep_alloc(ep, pairs, sizeof *c->pairs_recv)) ||
        !(c->where = fmoe_ep_alloc(ep, pairs, 8)) || !(c->ids = fmoe_ep_alloc(ep, slots, 4)) ||
        !(c->p = fmoe_ep_alloc(ep, slots, 4)) || (ep_weighs_at_home(c) && !(c->ones = fmoe_ep_alloc(ep, pairs, 4))))
        return FMOE_ERR_NOMEM;
    return fmoe_ep_rows_alloc(c, FMOE_FORWARD);
}

static void count_stats(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    for (int64_t i = 0; i < ep_cells(ep); i++) {
        if (i % ep->x.ranks == ep->x.rank) continue;
        c->stats.rows_out += c->send_rows[i];
        c->stats.pairs_out += c->send_pairs[i];
        c->stats.rows_in += c->recv_rows[i];
        c->stats.pairs_in += c->recv_pairs[i];
    }
    c->stats.bytes_pairs = c->stats.pairs_out * (int64_t)sizeof(fmoe_pair);
}

static fmoe_status check_args(fmoe_ep *ep, const fmoe_ep_args *a)
{
    FMOE_TRY(fmoe_ep_check_size("fmoe_ep_args", a->size, sizeof *a, a));
    FMOE_TRY(fmoe_ep_check_tensor(ep, "ids", a->ids, -1, ep->d.k, -32, -64));
    FMOE_TRY(fmoe_ep_check_tensor(ep, "weights", a->weights, a->ids->shape[0], ep->d.k, FMOE_F32, ep->d.dtype));
    FMOE_TRY(check_compact("ids", a->ids));
    FMOE_TRY(check_compact("weights", a->weights));
    const int64_t T = a->ids->shape[0], H = ep->d.H; /* of later phases, where they are known: told to the others now */
    if (a->x) FMOE_TRY(fmoe_ep_check_tensor(ep, "x", a->x, T, H, ep->d.dtype, ep->d.dtype));
    if (a->out) FMOE_TRY(fmoe_ep_check_tensor(ep, "out", a->out, T, H, ep->d.dtype, ep->d.dtype));
    if (!a->dropped) return FMOE_OK;
    if (!ep->capacity) return fmoe_fail(FMOE_ERR_ARG, "dropped is given, but capacity is 0: nothing is dropped");
    return fmoe_ep_check_tensor(ep, "dropped", a->dropped, 1, 1, -64, -64);
}

static fmoe_status count(fmoe_ep_call *c, const fmoe_ep_args *a)
{
    fmoe_ep *const ep = c->ep;
    fmoe_status status = check_args(ep, a);
    if (!status) {
        c->T = a->ids->shape[0];
        c->p_type = fmoe_tensor_dtype(a->weights);
        c->inference = a->inference != 0;
        c->stream = a->stream;
        status = alloc_numbers(c);
    }
    if (ep->direct) return status ? fmoe_ep_named(ep, FMOE_FORWARD, PHASE_COUNT, status) : FMOE_OK;
    if (!status) status = reported(ep, true);
    if (!status) status = home(c, a);
    if (ep->fixed && ep->agreed) { /* nothing is announced, so that nobody waits, nor can be told */
        if (status) return fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, status);
    } else FMOE_TRY(announce(c, status));
    ep->agreed = true;
    count_stats(c);
    status = alloc_away(c);
    return status ? fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, status) : FMOE_OK;
}

fmoe_status fmoe_ep_count(fmoe_ep *ep, const fmoe_ep_args *args, fmoe_ep_call **out)
{
    if (!out) return fmoe_fail(FMOE_ERR_NULL, "call is NULL");
    *out = NULL;
    if (!ep) return fmoe_fail(FMOE_ERR_NULL, "ep is NULL");
    if (!args) return fmoe_fail(FMOE_ERR_NULL, "fmoe_ep_args is NULL");
    if (ep->broken)
        return fmoe_ep_named(ep, FMOE_FORWARD, PHASE_COUNT,
                             fmoe_fail(FMOE_ERR_EXCHANGE, "the engine was given up after an error: make a new one"));
    fmoe_ep_call *c = calloc(1, sizeof *c);
    if (!c) return fmoe_ep_broken(ep, FMOE_FORWARD, PHASE_COUNT, fmoe_fail(FMOE_ERR_NOMEM, "no memory for a call"));
    c->ep = ep;
    c->stats.size = sizeof c->stats;
    const fmoe_status status = count(c, args);
    if (status) fmoe_ep_call_free(&c);
    else c->done[FMOE_FORWARD] = PHASE_COUNT;
    *out = c;
    return status;
}

void fmoe_ep_call_free(fmoe_ep_call **call)
{
    if (!call || !*call) return;
    fmoe_ep_call *c = *call;
    fmoe_ep *const ep = c->ep;
    for (int64_t i = 0; c->saved && i < ep->chunks; i++) fmoe_ep_free(ep, c->saved[i]);
    fmoe_ep_rows_free(c, FMOE_FORWARD, true);
    fmoe_ep_rows_free(c, FMOE_BACKWARD, true);
    void *const all[] = {c->counts,     c->send_token, c->slot_pair, c->map, c->sum_p, c->pairs_send,
                         c->pairs_recv, c->where,      c->ids,       c->p,   c->ones};
    for (size_t i = 0; i < sizeof all / sizeof *all && !ep->hosted; i++) fmoe_ep_free(ep, all[i]);
    for (int i = 0; i < 4; i++) fmoe_ep_free(ep, c->indices[i]);
    for (int64_t i = 0; c->requests && i < 3 * ep->chunks + 1; i++) {
        fmoe_ep_free_host(ep, c->requests[i].send);
        fmoe_ep_free_host(ep, c->requests[i].recv);
    }
    free(c->send_rows);
    free(c->requests);
    free(c->saved);
    free(c);
    *call = NULL;
}

fmoe_status fmoe_ep_call_stats(const fmoe_ep_call *call, fmoe_ep_stats *stats)
{
    if (!call || !stats) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", call ? "stats" : "call");
    FMOE_TRY(fmoe_ep_check_size("fmoe_ep_stats", stats->size, sizeof *stats, stats));
    *stats = call->stats;
    return FMOE_OK;
}
