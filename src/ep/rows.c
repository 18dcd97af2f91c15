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
    if ((pass == FMOE_FORWARD || c->want_dx) && (!(r->back_send = fmoe_ep_alloc(ep, back_out, ep_back_bytes(ep))) ||
                                                 !(r->back_recv = fmoe_ep_alloc(ep, back_in, ep_back_bytes(ep)))))
        return FMOE_ERR_NOMEM;
    if (pass == FMOE_BACKWARD && (!(r->dp_send = fmoe_ep_alloc(ep, c->recv_pair_at[cells], 4)) ||
                                  !(r->dp_recv = fmoe_ep_alloc(ep, c->send_pair_at[cells], 4))))
        return FMOE_ERR_NOMEM;
    return FMOE_OK;
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

/* ---- exchanges: request 0 .. chunks-1 rows out, chunks .. 2*chunks-1 rows back, 2*chunks pairs or dp ---- */

fmoe_status fmoe_ep_wait(fmoe_ep_call *c, int64_t request)
{
    void *const r = c->requests[request];
    c->requests[request] = NULL;
    return c->ep->x.wait(c->ep->x.ctx, r, c->ep->timeout_ms);
}

/* The ids and routing weights of all rows, in one exchange. */
fmoe_status fmoe_ep_pairs(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks;
    int64_t *const n = fmoe_ep_alloc(ep, 2 * R, 8);
    if (!n) return FMOE_ERR_NOMEM;
    memset(n, 0, (size_t)R * 16);
    for (int64_t i = 0; i < ep_cells(ep); i++) {
        n[i % R] += c->send_pairs[i];
        n[R + i % R] += c->recv_pairs[i];
    }
    fmoe_status status =
        ep->x.begin(ep->x.ctx, c->pairs_send, n, c->pairs_recv, n + R, sizeof(ep_pair), &c->requests[2 * ep->chunks]);
    if (!status) status = fmoe_ep_wait(c, 2 * ep->chunks);
    fmoe_ep_free(ep, n);
    return status ? status : fmoe_ep_read_pairs(c);
}

static int64_t count_bytes(fmoe_ep *ep, const int64_t *rows, int64_t row_bytes)
{
    int64_t n = 0;
    for (int32_t r = 0; r < ep->x.ranks; r++) n += r == ep->x.rank ? 0 : rows[r];
    return n * row_bytes;
}

fmoe_status fmoe_ep_dispatch_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, const fmoe_tensor *rows)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cell = chunk * ep->x.ranks, bytes = ep_row_bytes(ep), first = c->send_row_at[cell];
    const int64_t stride = fmoe_stride(rows, 0) * (int64_t)fmoe_dtype_size(ep->d.dtype);
    char *const send = c->rows[pass].send;
    for (int64_t i = first; i < c->send_row_at[cell + ep->x.ranks]; i++)
        memcpy(send + i * bytes, (const char *)fmoe_data(rows) + c->send_token[i] * stride, (size_t)bytes);
    c->stats.bytes_out += count_bytes(ep, c->send_rows + cell, bytes);
    return ep->x.begin(ep->x.ctx, send + first * bytes, c->send_rows + cell,
                       c->rows[pass].recv + c->recv_row_at[cell] * bytes, c->recv_rows + cell, bytes,
                       &c->requests[chunk]);
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
    return ep->x.begin(ep->x.ctx, c->rows[pass].back_send + out_at[cell] * bytes, out + cell,
                       c->rows[pass].back_recv + in_at[cell] * bytes, in + cell, bytes,
                       &c->requests[ep->chunks + chunk]);
}

/* dp of all chunks, chunk after chunk: numbers, four bytes each. */
fmoe_status fmoe_ep_dp_exchange(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t last = 2 * ep->chunks;
    for (int64_t chunk = 0; chunk < ep->chunks; chunk++) {
        const int64_t cell = chunk * ep->x.ranks;
        c->stats.bytes_back += count_bytes(ep, c->recv_pairs + cell, 4);
        FMOE_TRY(ep->x.begin(ep->x.ctx, c->rows[1].dp_send + c->recv_pair_at[cell], c->recv_pairs + cell,
                             c->rows[1].dp_recv + c->send_pair_at[cell], c->send_pairs + cell, 4, &c->requests[last]));
        FMOE_TRY(fmoe_ep_wait(c, last));
    }
    return FMOE_OK;
}

/* ---- home ---- */

static void set_float(const fmoe_tensor *t, int64_t i, float v)
{
    void *const p = fmoe_data(t);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F32: ((float *)p)[i] = v; break;
    case FMOE_BF16: ((uint16_t *)p)[i] = fmoe_float_to_bf16(v); break;
    default: ((uint16_t *)p)[i] = fmoe_float_to_f16(v);
    }
}

/* out or dx: rows that came back, in the order of one process (exact) or of the ranks (lean). */
fmoe_status fmoe_ep_sum(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep), slots = ep->sum_slots, n = c->T * slots;
    const fmoe_tensor *const to = pass == FMOE_FORWARD ? args->out : args->dx;
    for (int64_t i = 0; pass == FMOE_BACKWARD && args->dweights && i < c->T * ep->d.k; i++)
        set_float(args->dweights, i, c->slot_pair[i] < 0 ? 0 : c->rows[1].dp_recv[c->slot_pair[i]]);
    if (!to || !c->T) return FMOE_OK;
    ep_tensor y, p;
    const int64_t rows = ep_exact(ep) ? c->send_pair_at[cells] : c->send_row_at[cells];
    int64_t map_shape[1] = {n};
    const fmoe_tensor map = {
        .data = c->map, .device = {FMOE_CPU, 0}, .ndim = 1, .dtype = {0, 64, 1}, .shape = map_shape};
    fmoe_unpermute_args a = {.size = sizeof a, .out = to, .map = &map};
    a.y = fmoe_ep_matrix(&y, c->rows[pass].back_recv, rows, ep->d.H, ep_exact(ep) ? FMOE_F32 : ep->d.dtype);
    if (pass == FMOE_FORWARD && ep_exact(ep)) a.weights = fmoe_ep_matrix(&p, c->p, c->T, slots, FMOE_F32);
    fmoe_run run = FMOE_RUN_INIT;
    FMOE_TRY(fmoe_workspace_bytes(ep->sum, FMOE_FORWARD, c->T, &run.workspace_bytes));
    if (!(run.workspace = fmoe_ep_alloc(ep, (int64_t)run.workspace_bytes, 1))) return FMOE_ERR_NOMEM;
    const fmoe_status status = fmoe_unpermute_forward(ep->sum, &a, &run);
    fmoe_ep_free(ep, run.workspace);
    return status;
}
