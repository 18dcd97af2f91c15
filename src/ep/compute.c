/* SPDX-License-Identifier: Apache-2.0
 *
 * compute.c - the experts of this rank on the rows that came, by fusedmoe.h alone.
 *
 * Exact: each pair is a token of its own with one slot, whose "sum" 0 + 1 * y is y in f32. One row of x may be several
 * pairs', so rows are gathered first. Lean: each row is a token with its pairs as slots, whose sum is the partial sum.
 */
#include "ep.h"

/* The tokens of one run: pairs (exact) or rows (lean), some of those that came, in some order. */
typedef struct ep_batch {
    int64_t n, k;
    const int64_t *pairs; /* exact: which; NULL: from `first` on */
    int64_t first;
    char *memory[4]; /* x, dout, ids, p: what had to be gathered */
    ep_tensor x, dout, ids, p;
} ep_batch;

static void store_p(void *p, int type, int64_t i, float v)
{
    if (type == FMOE_F32) ((float *)p)[i] = v;
    else ((uint16_t *)p)[i] = type == FMOE_BF16 ? fmoe_float_to_bf16(v) : fmoe_float_to_f16(v);
}

static void batch_free(fmoe_ep *ep, ep_batch *b)
{
    for (int i = 0; i < 4; i++) fmoe_ep_free(ep, b->memory[i]);
}

/* Rows of one pass for the batch: gathered, or where they lie. */
static const char *batch_rows(const fmoe_ep_call *c, ep_batch *b, int of, const char *recv)
{
    fmoe_ep *const ep = c->ep;
    const int64_t bytes = ep_row_bytes(ep);
    if (!ep_exact(ep) && !b->pairs) return recv + b->first * bytes;
    char *const to = b->memory[of] = fmoe_ep_alloc(ep, b->n, bytes);
    for (int64_t i = 0; to && i < b->n; i++) {
        const int64_t at = b->pairs ? b->pairs[i] : b->first + i, row = ep_exact(ep) ? c->pair_row[at] : at;
        memcpy(to + i * bytes, recv + row * bytes, (size_t)bytes);
    }
    return to;
}

/* ids [n,k] and p [n,k]; ones: the weights are applied at home. position: of a row in the batch (lean), or NULL. */
static fmoe_status batch_slots(const fmoe_ep_call *c, ep_batch *b, bool ones, int64_t pair0, int64_t pairs,
                               const int64_t *position)
{
    fmoe_ep *const ep = c->ep;
    const int p_type = ones ? FMOE_F32 : c->p_type;
    int32_t *const ids = fmoe_ep_alloc(ep, b->n, b->k * 4);
    void *const p = fmoe_ep_alloc(ep, b->n, b->k * (int64_t)fmoe_dtype_size(p_type));
    b->memory[2] = (char *)ids;
    b->memory[3] = p;
    if (!ids || !p) return FMOE_ERR_NOMEM;
    if (ep_exact(ep))
        for (int64_t i = 0; i < b->n; i++) {
            const int64_t at = b->pairs ? b->pairs[i] : b->first + i;
            ids[i] = c->pair_expert[at];
            store_p(p, p_type, i, ones ? 1.0f : c->pair_p[at]);
        }
    else {
        for (int64_t i = 0; i < b->n * b->k; i++) {
            ids[i] = -1;
            store_p(p, p_type, i, 0);
        }
        for (int64_t q = pair0; q < pair0 + pairs; q++) {
            const int64_t row = position ? position[c->pair_row[q]] : c->pair_row[q] - b->first;
            const int64_t i = row * b->k + c->pair_slot[q];
            ids[i] = c->pair_expert[q];
            store_p(p, p_type, i, c->pair_p[q]);
        }
    }
    fmoe_ep_matrix(&b->ids, ids, b->n, b->k, -32);
    fmoe_ep_matrix(&b->p, p, b->n, b->k, p_type);
    return FMOE_OK;
}

static fmoe_status batch_of_chunk(const fmoe_ep_call *c, int64_t chunk, bool ones, bool backward, ep_batch *b)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, pair0 = c->recv_pair_at[chunk * R], pairs = c->recv_pair_at[(chunk + 1) * R] - pair0;
    const int64_t row0 = c->recv_row_at[chunk * R], rows = c->recv_row_at[(chunk + 1) * R] - row0;
    *b = (ep_batch){
        .n = ep_exact(ep) ? pairs : rows, .k = ep_exact(ep) ? 1 : ep->d.k, .first = ep_exact(ep) ? pair0 : row0};
    const char *const x = batch_rows(c, b, 0, c->rows[0].recv);
    const char *const dout = backward ? batch_rows(c, b, 1, c->rows[1].recv) : x;
    if (!x || !dout) return FMOE_ERR_NOMEM;
    fmoe_ep_matrix(&b->x, x, b->n, ep->d.H, ep->d.dtype);
    fmoe_ep_matrix(&b->dout, dout, b->n, ep->d.H, ep->d.dtype);
    return batch_slots(c, b, ones, pair0, pairs, NULL);
}

static fmoe_status run_experts(fmoe_ep *ep, fmoe_plan plan, fmoe_pass pass, int64_t n, const fmoe_experts_args *a,
                               bool accumulate)
{
    fmoe_run run = FMOE_RUN_INIT;
    FMOE_TRY(fmoe_workspace_bytes(plan, pass, n, &run.workspace_bytes));
    if (!(run.workspace = fmoe_ep_alloc(ep, (int64_t)run.workspace_bytes, 1))) return FMOE_ERR_NOMEM;
    run.flags = accumulate ? FMOE_ACCUMULATE : 0;
    const fmoe_status status =
        pass == FMOE_FORWARD ? fmoe_experts_forward(plan, a, &run) : fmoe_experts_backward(plan, a, &run);
    fmoe_ep_free(ep, run.workspace);
    return status;
}

/* The state that the backward of n tokens reads: made by the forward. */
static fmoe_status take_saved(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, int64_t n, fmoe_experts_args *a)
{
    if (c->inference) return FMOE_OK;
    FMOE_TRY(fmoe_saved_bytes(c->ep->experts, n, &a->saved_bytes));
    if (pass == FMOE_FORWARD && a->saved_bytes && !(c->saved[chunk] = fmoe_ep_alloc(c->ep, (int64_t)a->saved_bytes, 1)))
        return FMOE_ERR_NOMEM;
    a->saved = c->saved[chunk];
    return FMOE_OK;
}

fmoe_status fmoe_ep_compute_forward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    ep_batch b = {0};
    ep_tensor out;
    if (!ep->n_local) return FMOE_OK; /* and nothing came: the announcements were checked */
    fmoe_status status = batch_of_chunk(c, chunk, ep_weighs_at_home(c), false, &b);
    fmoe_experts_args a = {.size = sizeof a, .x = &b.x.t, .ids = &b.ids.t, .weights = &b.p.t, .w = args->w};
    if (!status) status = take_saved(c, FMOE_FORWARD, chunk, b.n, &a);
    if (!status) {
        a.out = fmoe_ep_matrix(&out, c->rows[0].back_send + b.first * ep_back_bytes(ep), b.n, ep->d.H,
                               ep_exact(ep) ? FMOE_F32 : ep->d.dtype);
        status = run_experts(ep, ep->experts, FMOE_FORWARD, b.n, &a, false);
    }
    batch_free(ep, &b);
    return status;
}

/* dp of the pairs of a chunk, out of [rows,k]. */
static void spread_dp(fmoe_ep_call *c, int64_t chunk, const float *dp, int64_t row0)
{
    const int64_t R = c->ep->x.ranks;
    for (int64_t q = c->recv_pair_at[chunk * R]; q < c->recv_pair_at[(chunk + 1) * R]; q++)
        c->rows[1].dp_send[q] = dp[(c->pair_row[q] - row0) * c->ep->d.k + c->pair_slot[q]];
}

/* dx and dp of a chunk; where it is the only one, the weight gradients too. */
fmoe_status fmoe_ep_compute_backward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    ep_batch b = {0};
    ep_tensor dx, dp;
    float *wide = NULL;
    if (!ep->n_local) return FMOE_OK;
    fmoe_status status = batch_of_chunk(c, chunk, false, true, &b);
    if (!status && !ep_exact(ep) && !(wide = fmoe_ep_alloc(ep, b.n, b.k * 4))) status = FMOE_ERR_NOMEM;
    fmoe_experts_args a = {.size = sizeof a, .x = &b.x.t, .ids = &b.ids.t, .weights = &b.p.t, .w = args->w};
    if (!status) status = take_saved(c, FMOE_BACKWARD, chunk, b.n, &a);
    if (!status) {
        a.dout = &b.dout.t;
        if (c->want_dx)
            a.dx = fmoe_ep_matrix(&dx, c->rows[1].back_send + b.first * ep_back_bytes(ep), b.n, ep->d.H,
                                  ep_exact(ep) ? FMOE_F32 : ep->d.dtype);
        a.dweights = fmoe_ep_matrix(&dp, wide ? wide : c->rows[1].dp_send + b.first, b.n, b.k, FMOE_F32);
        if (ep->chunks == 1) a.dw = args->dw;
        status = run_experts(ep, ep->experts, FMOE_BACKWARD, b.n, &a, args->accumulate && ep->chunks == 1);
    }
    if (!status && wide) spread_dp(c, chunk, wide, b.first);
    fmoe_ep_free(ep, wide);
    batch_free(ep, &b);
    return status;
}

static bool wants_gradients(const fmoe_weights *dw)
{
    return dw->w1 || dw->b1 || dw->w2 || dw->b2 || dw->gate || dw->up || dw->down || dw->lora_a1 || dw->lora_b1 ||
           dw->lora_a2 || dw->lora_b2;
}

/* Over all chunks at once, in the order of one process: cutting tokens into chunks does not change the sums. h is
 * computed again, for it lies there chunk by chunk. */
fmoe_status fmoe_ep_weight_gradients(fmoe_ep_call *c, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    const int64_t cells = ep_cells(ep), pairs = c->recv_pair_at[cells], rows = c->recv_row_at[cells];
    if (ep->chunks == 1 || !ep->n_local || !wants_gradients(&args->dw)) return FMOE_OK;
    ep_batch b = {.n = ep_exact(ep) ? pairs : rows, .k = ep_exact(ep) ? 1 : ep->d.k};
    b.pairs = ep_exact(ep) ? c->order : c->row_order;
    int64_t *const position = ep_exact(ep) ? NULL : fmoe_ep_alloc(ep, rows, 8);
    for (int64_t i = 0; position && i < rows; i++) position[c->row_order[i]] = i;
    fmoe_status status = ep_exact(ep) || position ? FMOE_OK : FMOE_ERR_NOMEM;
    const char *const x = status ? NULL : batch_rows(c, &b, 0, c->rows[0].recv);
    const char *const dout = x ? batch_rows(c, &b, 1, c->rows[1].recv) : NULL;
    status = dout ? batch_slots(c, &b, false, 0, pairs, position) : FMOE_ERR_NOMEM;
    if (!status) {
        fmoe_experts_args a = {.size = sizeof a, .ids = &b.ids.t, .weights = &b.p.t, .w = args->w, .dw = args->dw};
        a.x = fmoe_ep_matrix(&b.x, x, b.n, ep->d.H, ep->d.dtype);
        a.dout = fmoe_ep_matrix(&b.dout, dout, b.n, ep->d.H, ep->d.dtype);
        status = run_experts(ep, ep->whole, FMOE_BACKWARD, b.n, &a, args->accumulate);
    }
    fmoe_ep_free(ep, position);
    batch_free(ep, &b);
    return status;
}

/* One rank with all experts: the plain layer. */
fmoe_status fmoe_ep_direct(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    fmoe_experts_args a = {.size = sizeof a,
                           .x = args->x,
                           .ids = args->ids,
                           .weights = args->weights,
                           .w = args->w,
                           .out = args->out,
                           .dout = args->dout,
                           .dx = args->dx,
                           .dweights = args->dweights,
                           .dw = args->dw};
    FMOE_TRY(take_saved(c, pass, 0, c->T, &a));
    return run_experts(ep, ep->experts, pass, c->T, &a, pass == FMOE_BACKWARD && args->accumulate);
}
