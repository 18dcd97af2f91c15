/* SPDX-License-Identifier: Apache-2.0
 * rows.c - rows between home and away: packing, exchanging, and the sums at home. */
#include <inttypes.h>

#include "ep.h"

/* ---- memory ---- */

fmoe_status fmoe_ep_rows_alloc(fmoe_ep_call *c, fmoe_pass pass)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep);
    const int64_t out = c->send_row_at[cells], in = c->recv_row_at[cells];
    const int64_t back_out = ep_exact(ep) ? c->recv_pair_at[cells] : in,
                  back_in = ep_exact(ep) ? c->send_pair_at[cells] : out;
    ep_rows *r = &c->rows[pass];
    if (!(r->send = fmoe_ep_alloc(ep, out, ep_row_bytes(ep))) || !(r->recv = fmoe_ep_alloc(ep, in, ep_row_bytes(ep))))
        return FMOE_ERR_NOMEM;
    const int64_t summed = ep->hosted ? c->T * ep->sum_slots : back_in, dp_in = c->send_pair_at[cells];
    const bool back = pass == FMOE_FORWARD || c->want_dx;
    if (back && (!(r->back_send = fmoe_ep_alloc(ep, back_out, ep_back_bytes(ep))) ||
                 !(r->back_recv = fmoe_ep_alloc(ep, summed, ep_back_bytes(ep)))))
        return FMOE_ERR_NOMEM;
    if (pass == FMOE_BACKWARD && (!(r->dp_send = fmoe_ep_alloc(ep, c->recv_pair_at[cells], 4)) ||
                                  !(r->dp_recv = fmoe_ep_alloc(ep, dp_in + ep->hosted, 4))))
        return FMOE_ERR_NOMEM;
    /* Hosted: what the maps name for a slot that is skipped. */
    if (!ep->hosted) return FMOE_OK;
    if (back && summed > back_in)
        FMOE_TRY(ep->ops->zero(ep->d.device.id, r->back_recv + back_in * ep_back_bytes(ep),
                               (size_t)((summed - back_in) * ep_back_bytes(ep)), c->stream));
    return pass == FMOE_BACKWARD ? ep->ops->zero(ep->d.device.id, r->dp_recv + dp_in, 4, c->stream) : FMOE_OK;
}

/* All, or all but the rows of x that came: the backward reads them. */
void fmoe_ep_rows_free(fmoe_ep_call *c, fmoe_pass pass, bool all)
{
    ep_rows *r = &c->rows[pass];
    char *const kept = all ? NULL : r->recv;
    fmoe_ep_free(c->ep, r->send);
    if (all) fmoe_ep_free(c->ep, r->recv);
    fmoe_ep_free(c->ep, r->back_send);
    fmoe_ep_free(c->ep, r->back_recv);
    fmoe_ep_free(c->ep, r->dp_send);
    fmoe_ep_free(c->ep, r->dp_recv);
    *r = (ep_rows){.recv = kept};
}

/* ---- moving ---- */

static fmoe_status move(fmoe_ep_call *c, fmoe_move_args *a)
{
    fmoe_ep *const ep = c->ep;
    if (!a->n) return FMOE_OK;
    a->stream = c->stream;
    FMOE_TRY(ep->ops->move_bytes(ep->d.device.id, a, &a->work_bytes));
    if (!(a->work = fmoe_ep_alloc(ep, (int64_t)a->work_bytes, 1))) return FMOE_ERR_NOMEM;
    const fmoe_status status = ep->ops->move(ep->d.device.id, a);
    fmoe_ep_free(ep, a->work);
    return status;
}

fmoe_status fmoe_ep_gather(fmoe_ep_call *c, void *to, const void *from, int64_t rows, int64_t stride,
                           const int64_t *map, int64_t n)
{
    fmoe_ep *const ep = c->ep;
    const int type = ep->d.dtype;
    const int64_t bytes = ep_row_bytes(ep), apart = stride * (int64_t)fmoe_dtype_size(type);
    if (!ep->hosted) return ep->ops->gather(ep->d.device.id, to, from, apart, bytes, map, n, c->stream);
    fmoe_move_args a = {.from = from, .rows = rows, .columns = ep->d.H, .stride = stride, .map = map, .n = n, .to = to};
    a.from_type = a.type = type;
    return move(c, &a);
}

fmoe_status fmoe_ep_take(fmoe_ep_call *c, void *to, int type, const float *from, int64_t rows, const int64_t *map,
                         int64_t n)
{
    fmoe_ep *const ep = c->ep;
    if (!ep->hosted) return ep->ops->take(ep->d.device.id, to, type, from, map, n, c->stream);
    fmoe_move_args a = {.from = from, .rows = rows, .columns = 1, .stride = 1, .map = map, .n = n, .to = to};
    a.from_type = FMOE_F32;
    a.type = type;
    return move(c, &a);
}

/* ---- exchanges: requests as ep.h has them ---- */

static int64_t sum_of(const int64_t *n, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += n[i];
    return sum;
}

/* Rows of a device, by an engine of the host. */
static fmoe_status begin_staged(fmoe_ep_call *c, ep_request *q, const void *send, const int64_t *send_rows, void *recv,
                                const int64_t *recv_rows, int64_t bytes)
{
    fmoe_ep *const ep = c->ep;
    const int64_t out = sum_of(send_rows, ep->x.ranks) * bytes, in = sum_of(recv_rows, ep->x.ranks) * bytes;
    if (!(q->send = fmoe_ep_alloc_host(ep, out, 1)) || !(q->recv = fmoe_ep_alloc_host(ep, in, 1)))
        return FMOE_ERR_NOMEM;
    q->recv_to = recv;
    q->recv_bytes = (size_t)in;
    FMOE_TRY(fmoe_ep_cross(c, true, q->send, send, out, true));
    return ep->x.begin(ep->x.ctx, q->send, send_rows, q->recv, recv_rows, bytes, &q->real);
}

static fmoe_status begin(fmoe_ep_call *c, int64_t request, const void *send, const int64_t *send_rows, void *recv,
                         const int64_t *recv_rows, int64_t bytes)
{
    fmoe_ep *const ep = c->ep;
    ep_request *const q = &c->requests[request];
    const bool pairs = request > 2 * ep->chunks; /* which lie on the host where it makes them */
    if (ep->staged && !(ep->hosted && pairs)) return begin_staged(c, q, send, send_rows, recv, recv_rows, bytes);
    return ep->x.begin(ep->x.ctx, send, send_rows, recv, recv_rows, bytes, &q->real);
}

fmoe_status fmoe_ep_wait(fmoe_ep_call *c, int64_t request)
{
    ep_request *const q = &c->requests[request];
    void *const real = q->real;
    q->real = NULL;
    fmoe_status status = c->ep->x.wait(c->ep->x.ctx, real, c->ep->timeout_ms);
    if (status || !q->recv) return status; /* what an engine may still write to is given back with the call */
    status = fmoe_ep_cross(c, false, q->recv_to, q->recv, (int64_t)q->recv_bytes, true);
    fmoe_ep_free_host(c->ep, q->send);
    fmoe_ep_free_host(c->ep, q->recv);
    *q = (ep_request){0};
    return status;
}

/* The ids and routing weights of all rows travel beside the first rows, */
fmoe_status fmoe_ep_pairs_begin(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    for (int64_t i = 0; i < ep->chunks; i++) {
        const int64_t cell = i * ep->x.ranks;
        FMOE_TRY(begin(c, 2 * ep->chunks + 1 + i, c->pairs_send + c->send_pair_at[cell], c->send_pairs + cell,
                       c->pairs_recv + c->recv_pair_at[cell], c->recv_pairs + cell, sizeof(fmoe_pair)));
    }
    return FMOE_OK;
}

/* and this is what the experts here see of them. */
fmoe_status fmoe_ep_pairs_end(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep);
    for (int64_t i = 0; i < ep->chunks; i++) FMOE_TRY(fmoe_ep_wait(c, 2 * ep->chunks + 1 + i));
    fmoe_away_args a = {.cells = cells, .ranks = ep->x.ranks, .k = ep->d.k, .experts = ep->n_local};
    a.capacity = ep->capacity;
    a.rows = c->recv_row_at[cells];
    a.pairs = c->recv_pair_at[cells];
    a.row_at = c->recv_row_at;
    a.pair_at = c->recv_pair_at;
    a.exact = ep_exact(ep);
    a.p_type = c->p_type;
    a.recv = c->pairs_recv;
    a.where = c->where;
    a.ids = c->ids;
    a.p = c->p;
    a.ones = c->ones;
    a.report = ep->report;
    a.stream = c->stream;
    if (ep->hosted) return fmoe_ep_away_on_host(c, &a);
    if (!(a.work = fmoe_ep_alloc(ep, (int64_t)ep->ops->away_bytes(&a), 1))) return FMOE_ERR_NOMEM;
    const fmoe_status status = ep->ops->away(ep->d.device.id, &a);
    fmoe_ep_free(ep, a.work);
    return status;
}

static int64_t count_bytes(fmoe_ep *ep, const int64_t *rows, int64_t row_bytes)
{
    return (sum_of(rows, ep->x.ranks) - rows[ep->x.rank]) * row_bytes;
}

fmoe_status fmoe_ep_dispatch_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, const fmoe_tensor *rows)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cell = chunk * ep->x.ranks, bytes = ep_row_bytes(ep), first = c->send_row_at[cell];
    char *const send = c->rows[pass].send + first * bytes;
    const int64_t n = c->send_row_at[cell + ep->x.ranks] - first;
    FMOE_TRY(fmoe_ep_gather(c, send, fmoe_data(rows), c->T, fmoe_stride(rows, 0), c->send_token + first, n));
    c->stats.bytes_out += count_bytes(ep, c->send_rows + cell, bytes);
    return begin(c, chunk, send, c->send_rows + cell, c->rows[pass].recv + c->recv_row_at[cell] * bytes,
                 c->recv_rows + cell, bytes);
}

fmoe_status fmoe_ep_combine_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk)
{
    fmoe_ep *const ep = c->ep;
    const bool exact = ep_exact(ep);
    const int64_t cell = chunk * ep->x.ranks, bytes = ep_back_bytes(ep);
    const int64_t *const out = exact ? c->recv_pairs : c->recv_rows, *const in = exact ? c->send_pairs : c->send_rows;
    const int64_t *const out_at = exact ? c->recv_pair_at : c->recv_row_at, *const in_at = exact ? c->send_pair_at
                                                                                                 : c->send_row_at;
    c->stats.bytes_back += count_bytes(ep, out + cell, bytes);
    return begin(c, ep->chunks + chunk, c->rows[pass].back_send + out_at[cell] * bytes, out + cell,
                 c->rows[pass].back_recv + in_at[cell] * bytes, in + cell, bytes);
}

/* dp of all chunks, chunk after chunk: numbers, four bytes each. */
fmoe_status fmoe_ep_dp_exchange(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t last = 2 * ep->chunks;
    for (int64_t chunk = 0; chunk < ep->chunks; chunk++) {
        const int64_t cell = chunk * ep->x.ranks;
        c->stats.bytes_back += count_bytes(ep, c->recv_pairs + cell, 4);
        FMOE_TRY(begin(c, last, c->rows[1].dp_send + c->recv_pair_at[cell], c->recv_pairs + cell,
                       c->rows[1].dp_recv + c->send_pair_at[cell], c->send_pairs + cell, 4));
        FMOE_TRY(fmoe_ep_wait(c, last));
    }
    return FMOE_OK;
}

/* ---- home ---- */

/* out or dx: rows that came back, in the order of one process (exact) or of the ranks (lean). */
fmoe_status fmoe_ep_sum(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep), slots = ep->sum_slots;
    const fmoe_tensor *const to = pass == FMOE_FORWARD ? args->out : args->dx, *const dp = args->dweights;
    if (pass == FMOE_BACKWARD && dp && c->T)
        FMOE_TRY(fmoe_ep_take(c, fmoe_data(dp), fmoe_tensor_dtype(dp), c->rows[1].dp_recv,
                              c->send_pair_at[cells] + ep->hosted, c->slot_pair, c->T * ep->d.k));
    if (!to || !c->T) return FMOE_OK;
    ep_tensor y, p, map;
    fmoe_run run;
    const int64_t rows = ep->hosted ? c->T * slots : ep_exact(ep) ? c->send_pair_at[cells] : c->send_row_at[cells];
    fmoe_unpermute_args a = {.size = sizeof a, .out = to};
    a.map = fmoe_ep_list(ep, &map, c->map, c->T * slots);
    a.y = fmoe_ep_matrix(ep, &y, c->rows[pass].back_recv, rows, ep->d.H, ep_back_type(ep));
    if (pass == FMOE_FORWARD && ep_exact(ep)) a.weights = fmoe_ep_matrix(ep, &p, c->sum_p, c->T, slots, FMOE_F32);
    fmoe_status status = fmoe_ep_run_plan(c, ep->sum, FMOE_FORWARD, c->T, &run);
    if (!status) status = fmoe_unpermute_forward(ep->sum, &a, &run);
    fmoe_ep_free(ep, run.workspace);
    return status;
}
