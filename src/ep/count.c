/* SPDX-License-Identifier: Apache-2.0
 *
 * count.c - the first phase: where each token goes, what the others announce, and the memory for it. What a peer says
 * is checked before any of it is used. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "ep.h"

enum { HEAD = 3 }; /* numbers before the counts of an announcement: form, status, type of the routing weights */

fmoe_status fmoe_ep_check_tensor(const char *name, const fmoe_tensor *t, int64_t rows, int64_t columns, int dtype,
                                 int other)
{
    if (!t) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", name);
    if (t->device.type != FMOE_CPU)
        return fmoe_fail(FMOE_ERR_ARG, "%s is on device type %d, must be the CPU (1)", name, t->device.type);
    if (t->ndim != 2 || !t->shape) return fmoe_fail(FMOE_ERR_SHAPE, "%s has %d dimensions, must have 2", name, t->ndim);
    if ((rows >= 0 ? t->shape[0] != rows : t->shape[0] < 0) || t->shape[1] != columns)
        return fmoe_fail(FMOE_ERR_SHAPE, "%s is [%" PRId64 ",%" PRId64 "], must be [%" PRId64 ",%" PRId64 "]", name,
                         t->shape[0], t->shape[1], rows >= 0 ? rows : t->shape[0], columns);
    const int type = fmoe_tensor_dtype(t);
    if (type != dtype && type != other)
        return fmoe_fail(FMOE_ERR_DTYPE, "%s has dtype code %d with %d bits", name, t->dtype.code, t->dtype.bits);
    const int64_t stride = fmoe_stride(t, 0);
    if (columns > 1 && fmoe_stride(t, 1) != 1)
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

/* ---- home: where each slot goes ---- */

static float get_p(const fmoe_tensor *t, int64_t i)
{
    const void *p = fmoe_data(t);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F32: return ((const float *)p)[i];
    case FMOE_BF16: return fmoe_bf16_to_float(((const uint16_t *)p)[i]);
    default: return fmoe_f16_to_float(((const uint16_t *)p)[i]);
    }
}

static int64_t chunk_of(const fmoe_ep_call *c, int64_t t) { return t * c->ep->chunks / c->T; }

/* slot_dest[t*k+j]: rank, or -1. Counts rows and pairs; seen [2*ranks]: the last token that was sent, or dropped,
 * there. */
static fmoe_status route_slots(fmoe_ep_call *c, const fmoe_tensor *ids, int32_t *slot_dest, int64_t *seen)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, k = ep->d.k, E = ep->d.E;
    int64_t *const dropped = seen + R, *const sent = seen + 2 * R;
    for (int64_t i = 0; i < 2 * R; i++) seen[i] = -1;
    for (int64_t i = 0; i < R; i++) sent[i] = 0;
    for (int64_t t = 0; t < c->T; t++)
        for (int64_t i = t * k; i < (t + 1) * k; i++) {
            const int64_t e = fmoe_get_int(fmoe_data(ids), fmoe_tensor_dtype(ids), i);
            slot_dest[i] = -1;
            if ((e == -1 && (ep->d.flags & FMOE_SKIP_NEG1)) || (e == E && (ep->d.flags & FMOE_SKIP_E))) continue;
            if (e < 0 || e >= E)
                return fmoe_fail(FMOE_ERR_INDEX,
                                 "ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", must be in [0,%" PRId64 ")", t,
                                 i - t * k, e, E);
            const int32_t d = ep->dest[e];
            if (seen[d] != t && ep->capacity && sent[d] == ep->capacity) dropped[d] = t;
            if (dropped[d] == t) {
                c->stats.dropped++;
                continue;
            }
            const int64_t cell = chunk_of(c, t) * R + d;
            slot_dest[i] = d;
            c->send_pairs[cell]++;
            if (seen[d] == t) continue;
            seen[d] = t;
            sent[d]++;
            c->send_rows[cell]++;
        }
    return FMOE_OK;
}

static void prefix_sums(const int64_t *n, int64_t *at, int64_t cells)
{
    at[0] = 0;
    for (int64_t i = 0; i < cells; i++) at[i + 1] = at[i] + n[i];
}

/* The slots of a token in the order in which one process sums them: by expert, equal ones by slot. */
static void sort_slots(const fmoe_tensor *ids, int64_t t, int64_t k, int64_t *slot)
{
    const int type = fmoe_tensor_dtype(ids);
    for (int64_t j = 0; j < k; j++) {
        const int64_t i = t * k + j, e = fmoe_get_int(fmoe_data(ids), type, i);
        int64_t at = j;
        for (; at > 0 && fmoe_get_int(fmoe_data(ids), type, slot[at - 1]) > e; at--) slot[at] = slot[at - 1];
        slot[at] = i;
    }
}

/* Rows and pairs to send, and what home sums. cursor: [3*cells + ranks + k] */
static void list_slots(fmoe_ep_call *c, const fmoe_tensor *ids, const fmoe_tensor *p, const int32_t *slot_dest,
                       int64_t *cursor)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, k = ep->d.k, cells = ep_cells(ep), slots = ep->sum_slots;
    int64_t *const row_at = cursor, *const pair_at = cursor + cells, *const whole_at = cursor + 2 * cells,
                   *const row_of = cursor + 3 * cells, *const sorted = row_of + R;
    const bool weighted = ep_weighs_at_home(c);
    int64_t at = 0;
    for (int64_t d = 0; d < R; d++)
        for (int64_t chunk = 0; chunk < ep->chunks; chunk++) {
            const int64_t cell = chunk * R + d;
            row_at[cell] = c->send_row_at[cell];
            pair_at[cell] = c->send_pair_at[cell];
            whole_at[cell] = at;
            at += c->send_pairs[cell];
        }
    for (int64_t t = 0; t < c->T; t++) {
        const int64_t first = chunk_of(c, t) * R;
        for (int64_t i = t * k; i < (t + 1) * k; i++)
            if (slot_dest[i] >= 0) row_of[slot_dest[i]] = -1;
        for (int64_t i = t * k; i < (t + 1) * k; i++) {
            const int64_t d = slot_dest[i];
            c->slot_pair[i] = -1;
            if (d < 0) continue;
            const int64_t e = fmoe_get_int(fmoe_data(ids), fmoe_tensor_dtype(ids), i);
            ep_pair pair = {(uint32_t)ep->index[e], get_p(p, i)};
            if (row_of[d] < 0) {
                row_of[d] = row_at[first + d]++;
                c->send_token[row_of[d]] = t;
                pair.expert |= PAIR_FIRST;
            }
            c->pairs_send[whole_at[first + d]++] = pair;
            c->slot_pair[i] = pair_at[first + d]++;
        }
        for (int64_t j = 0; j < slots; j++) c->map[t * slots + j] = -1;
        if (ep_exact(ep)) {
            sort_slots(ids, t, k, sorted);
            for (int64_t j = 0; j < k; j++) {
                c->map[t * k + j] = c->slot_pair[sorted[j]];
                c->p[t * k + j] = weighted ? get_p(p, sorted[j]) : 1.0f;
            }
            continue;
        }
        int64_t n = 0; /* rows of a token rise with its rank: (chunk, destination) is their order */
        for (int64_t i = t * k; i < (t + 1) * k; i++) {
            if (slot_dest[i] < 0 || row_of[slot_dest[i]] < 0) continue;
            int64_t to = n++;
            for (; to > 0 && c->map[t * slots + to - 1] > row_of[slot_dest[i]]; to--)
                c->map[t * slots + to] = c->map[t * slots + to - 1];
            c->map[t * slots + to] = row_of[slot_dest[i]];
            row_of[slot_dest[i]] = -1;
        }
    }
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
        for (int64_t chunk = 0; chunk < ep->chunks; chunk++) {
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
        for (int64_t chunk = 0; chunk < ep->chunks && !mine; chunk++) {
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

static fmoe_status alloc_saved(fmoe_ep_call *c)
{
    const int64_t chunks = c->ep->chunks, n = 3 * chunks + 1;
    if (!(c->requests = fmoe_ep_alloc(c->ep, n, sizeof(void *)))) return FMOE_ERR_NOMEM;
    memset(c->requests, 0, (size_t)n * sizeof(void *));
    c->saved = c->requests + 2 * chunks + 1;
    return FMOE_OK;
}

static fmoe_status alloc_home(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep), n = 4 * cells + 4 * (cells + 1);
    int64_t slots;
    if (__builtin_mul_overflow(c->T, ep->d.k, &slots) || slots > INT64_MAX / 64)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "T * k does not fit 64 bits: T is %" PRId64, c->T);
    int64_t **const parts[] = {&c->send_rows,   &c->send_pairs,   &c->recv_rows,   &c->recv_pairs,
                               &c->send_row_at, &c->send_pair_at, &c->recv_row_at, &c->recv_pair_at};
    int64_t *at = fmoe_ep_alloc(ep, n, 8);
    if (!at) return FMOE_ERR_NOMEM;
    memset(at, 0, (size_t)n * 8);
    for (int i = 0; i < 8; i++) {
        *parts[i] = at;
        at += i < 4 ? cells : cells + 1;
    }
    if (!(c->slot_pair = fmoe_ep_alloc(ep, slots, 8)) || !(c->map = fmoe_ep_alloc(ep, c->T * ep->sum_slots, 8)) ||
        !(c->p = fmoe_ep_alloc(ep, ep_exact(ep) ? slots : 0, 4)))
        return FMOE_ERR_NOMEM;
    return FMOE_OK;
}

static fmoe_status home(fmoe_ep_call *c, const fmoe_ep_args *a)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep);
    FMOE_TRY(alloc_home(c));
    int32_t *const slot_dest = fmoe_ep_alloc(ep, c->T * ep->d.k, sizeof *slot_dest);
    int64_t *const work = fmoe_ep_alloc(ep, 3 * cells + 3 * ep->x.ranks + ep->d.k, 8);
    fmoe_status status = slot_dest && work ? route_slots(c, a->ids, slot_dest, work) : FMOE_ERR_NOMEM;
    if (!status) {
        prefix_sums(c->send_rows, c->send_row_at, cells);
        prefix_sums(c->send_pairs, c->send_pair_at, cells);
        c->send_token = fmoe_ep_alloc(ep, c->send_row_at[cells], 8);
        c->pairs_send = fmoe_ep_alloc(ep, c->send_pair_at[cells], sizeof *c->pairs_send);
        if (c->send_token && c->pairs_send) list_slots(c, a->ids, a->weights, slot_dest, work);
        else status = FMOE_ERR_NOMEM;
    }
    fmoe_ep_free(ep, slot_dest);
    fmoe_ep_free(ep, work);
    return status;
}

static fmoe_status alloc_away(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t pairs = c->recv_pair_at[ep_cells(ep)], rows = c->recv_row_at[ep_cells(ep)];
    if (!(c->pairs_recv = fmoe_ep_alloc(ep, pairs, sizeof *c->pairs_recv)) ||
        !(c->pair_row = fmoe_ep_alloc(ep, pairs, 8)) || !(c->pair_expert = fmoe_ep_alloc(ep, pairs, 4)) ||
        !(c->pair_p = fmoe_ep_alloc(ep, pairs, 4)) || !(c->pair_slot = fmoe_ep_alloc(ep, pairs, 8)) ||
        !(c->order = fmoe_ep_alloc(ep, pairs, 8)) || !(c->row_order = fmoe_ep_alloc(ep, rows, 8)))
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
    c->stats.bytes_pairs = c->stats.pairs_out * (int64_t)sizeof(ep_pair);
}

static fmoe_status check_args(fmoe_ep *ep, const fmoe_ep_args *a)
{
    FMOE_TRY(fmoe_ep_check_size("fmoe_ep_args", a->size, sizeof *a, a));
    FMOE_TRY(fmoe_ep_check_tensor("ids", a->ids, -1, ep->d.k, -32, -64));
    FMOE_TRY(fmoe_ep_check_tensor("weights", a->weights, a->ids->shape[0], ep->d.k, FMOE_F32, ep->d.dtype));
    FMOE_TRY(check_compact("ids", a->ids));
    FMOE_TRY(check_compact("weights", a->weights));
    const int64_t T = a->ids->shape[0], H = ep->d.H; /* of later phases, where they are known: told to the others now */
    if (a->x) FMOE_TRY(fmoe_ep_check_tensor("x", a->x, T, H, ep->d.dtype, ep->d.dtype));
    return a->out ? fmoe_ep_check_tensor("out", a->out, T, H, ep->d.dtype, ep->d.dtype) : FMOE_OK;
}

static fmoe_status count(fmoe_ep_call *c, const fmoe_ep_args *a)
{
    fmoe_ep *const ep = c->ep;
    fmoe_status status = check_args(ep, a);
    if (!status) {
        c->T = a->ids->shape[0];
        c->p_type = fmoe_tensor_dtype(a->weights);
        c->inference = a->inference != 0;
        status = alloc_saved(c);
        if (!status && !ep->direct) status = home(c, a);
    }
    if (ep->direct) return status ? fmoe_ep_named(ep, FMOE_FORWARD, PHASE_COUNT, status) : FMOE_OK;
    FMOE_TRY(announce(c, status));
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
    void *const all[] = {c->send_rows,  c->send_token, c->slot_pair, c->map,         c->p,
                         c->pairs_send, c->pairs_recv, c->pair_row,  c->pair_expert, c->pair_p,
                         c->pair_slot,  c->order,      c->row_order, c->requests};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) fmoe_ep_free(ep, all[i]);
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

/* ---- the pairs that came ---- */

/* By (source, chunk, row, slot) as they came; kept by (chunk, source, row, slot). */
fmoe_status fmoe_ep_read_pairs(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks;
    int64_t at = 0, rows = 0;
    for (int64_t r = 0; r < R; r++)
        for (int64_t chunk = 0; chunk < ep->chunks; chunk++) {
            const int64_t cell = chunk * R + r, first_row = c->recv_row_at[cell], first = c->recv_pair_at[cell];
            int64_t row = first_row - 1, slot = 0;
            for (int64_t i = 0; i < c->recv_pairs[cell]; i++, at++) {
                const ep_pair pair = c->pairs_recv[at];
                const int64_t e = pair.expert & PAIR_EXPERT;
                const bool begins = (pair.expert & PAIR_FIRST) != 0;
                if (begins) {
                    slot = 0;
                    if (++row < first_row + c->recv_rows[cell]) c->row_order[rows++] = row;
                }
                if (e >= ep->n_local || row < first_row || row >= first_row + c->recv_rows[cell] || slot >= ep->d.k)
                    return fmoe_fail(FMOE_ERR_EXCHANGE,
                                     "rank %" PRId64 " sends expert %" PRId64 " in slot %" PRId64 " of row %" PRId64
                                     ": there are %" PRId64 " experts here, %" PRId64
                                     " slots, and it announced %" PRId64 " rows",
                                     r, e, slot, row - first_row, ep->n_local, ep->d.k, c->recv_rows[cell]);
                c->pair_row[first + i] = row;
                c->pair_expert[first + i] = (int32_t)e;
                c->pair_p[first + i] = pair.p;
                c->pair_slot[first + i] = slot++;
                c->order[at] = first + i;
            }
            if (row + 1 != first_row + c->recv_rows[cell])
                return fmoe_fail(FMOE_ERR_EXCHANGE,
                                 "rank %" PRId64 " announced %" PRId64 " rows, its pairs are of %" PRId64, r,
                                 c->recv_rows[cell], row + 1 - first_row);
        }
    return FMOE_OK;
}
