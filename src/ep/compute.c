/* SPDX-License-Identifier: Apache-2.0
 *
 * compute.c - the experts of this rank on the rows that came, by fusedmoe.h alone.
 *
 * Exact: each pair is a token of its own with one slot, whose "sum" 0 + 1 * y is y as it is before the sum. One row of
 * x may be several pairs', so rows are gathered first. Lean: each row is a token with its pairs as slots, whose sum is
 * the partial sum. */
#include "ep.h"

/* The tokens of one run: pairs (exact) or rows (lean). */
typedef struct ep_batch {
    int64_t n, k, first; /* first: which of those that came */
    void *memory[4];     /* x, dout, ids, p: what is not where it came */
    ep_tensor x, dout, ids, p;
} ep_batch;

static void batch_free(fmoe_ep *ep, ep_batch *b)
{
    for (int i = 0; i < 4; i++) fmoe_ep_free(ep, b->memory[i]);
}

static void batch_tensors(const fmoe_ep *ep, ep_batch *b, const void *x, const void *dout, const void *ids,
                          const void *p, int p_type)
{
    fmoe_ep_matrix(ep, &b->x, x, b->n, ep->d.H, ep->d.dtype);
    fmoe_ep_matrix(ep, &b->dout, dout, b->n, ep->d.H, ep->d.dtype);
    fmoe_ep_matrix(ep, &b->ids, ids, b->n, b->k, -32);
    fmoe_ep_matrix(ep, &b->p, p, b->n, b->k, p_type);
}

/* The rows of pairs from `first` on, at `to`. */
static fmoe_status gather_pairs(fmoe_ep_call *c, fmoe_pass pass, int64_t first, int64_t n, void *to)
{
    return fmoe_ep_gather(c, to, c->rows[pass].recv, c->recv_row_at[ep_cells(c->ep)], c->ep->d.H, c->where + first, n);
}

/* Rows of one pass for the batch: gathered, or where they lie. */
static fmoe_status batch_rows(fmoe_ep_call *c, ep_batch *b, fmoe_pass pass, const void **rows)
{
    *rows = c->rows[pass].recv + b->first * ep_row_bytes(c->ep);
    if (!ep_exact(c->ep)) return FMOE_OK;
    *rows = b->memory[pass] = fmoe_ep_alloc(c->ep, b->n, ep_row_bytes(c->ep));
    return *rows ? gather_pairs(c, pass, b->first, b->n, b->memory[pass]) : FMOE_ERR_NOMEM;
}

/* ones: the weights are applied at home. */
static fmoe_status batch_of_chunk(fmoe_ep_call *c, int64_t chunk, bool ones, bool backward, ep_batch *b)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, *const at = ep_exact(ep) ? c->recv_pair_at : c->recv_row_at;
    *b = (ep_batch){.k = ep_exact(ep) ? 1 : ep->d.k, .first = at[chunk * R]};
    b->n = at[(chunk + 1) * R] - b->first;
    const void *x = NULL, *dout = NULL;
    FMOE_TRY(batch_rows(c, b, FMOE_FORWARD, &x));
    if (backward) FMOE_TRY(batch_rows(c, b, FMOE_BACKWARD, &dout));
    const char *const p = ones ? (const char *)c->ones : c->p;
    const int p_type = ones ? FMOE_F32 : c->p_type;
    batch_tensors(ep, b, x, backward ? dout : x, c->ids + b->first * b->k,
                  p + b->first * b->k * (int64_t)fmoe_dtype_size(p_type), p_type);
    return FMOE_OK;
}

static bool has_holes(const fmoe_tensor *t)
{
    int64_t last = 1, count = 1;
    for (int i = 0; i < t->ndim; i++) {
        last += (t->shape[i] - 1) * fmoe_stride(t, i);
        count *= t->shape[i];
    }
    return last != count;
}

static fmoe_status run_experts(fmoe_ep_call *c, fmoe_plan plan, fmoe_pass pass, int64_t n, const fmoe_experts_args *a,
                               uint32_t flags)
{
    fmoe_run run;
    const fmoe_tensor *const dw1 = a->dw.w1;
    if (plan == c->ep->experts && c->ep->borrow && pass == FMOE_BACKWARD && dw1 && !(flags & FMOE_ACCUMULATE) &&
        dw1->ndim == 3 && dw1->shape && !has_holes(dw1))
        plan = c->ep->borrow;
    fmoe_status status = fmoe_ep_run_plan(c, plan, pass, n, &run);
    run.flags = flags;
    if (!status)
        status = pass == FMOE_FORWARD ? fmoe_experts_forward(plan, a, &run) : fmoe_experts_backward(plan, a, &run);
    fmoe_ep_free(c->ep, run.workspace);
    return status;
}

enum { SAVED_ALIGN = 256 }; /* as devices want it; memory of a device may begin at 64 bytes */
static void *aligned(void *memory)
{
    return memory ? (char *)memory + (SAVED_ALIGN - (uintptr_t)memory % SAVED_ALIGN) % SAVED_ALIGN : NULL;
}

/* The state that the backward of n tokens reads: made by the forward. */
static fmoe_status take_saved(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, int64_t n, fmoe_experts_args *a)
{
    if (c->inference) return FMOE_OK;
    FMOE_TRY(fmoe_saved_bytes(c->ep->experts, n, &a->saved_bytes));
    const int64_t room = (int64_t)a->saved_bytes + SAVED_ALIGN;
    if (pass == FMOE_FORWARD && a->saved_bytes && !(c->saved[chunk] = fmoe_ep_alloc(c->ep, room, 1)))
        return FMOE_ERR_NOMEM;
    a->saved = aligned(c->saved[chunk]);
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
        a.out = fmoe_ep_matrix(ep, &out, c->rows[0].back_send + b.first * ep_back_bytes(ep), b.n, ep->d.H,
                               ep_back_type(ep));
        status = run_experts(c, ep->experts, FMOE_FORWARD, b.n, &a, 0);
    }
    batch_free(ep, &b);
    return status;
}

/* dx and dp of a chunk; where it is the only one, the weight gradients too. */
fmoe_status fmoe_ep_compute_backward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, pair = c->recv_pair_at[chunk * R], pairs = c->recv_pair_at[(chunk + 1) * R] - pair;
    ep_batch b = {0};
    ep_tensor dx, dp;
    float *wide = NULL;
    if (!ep->n_local) return FMOE_OK;
    fmoe_status status = batch_of_chunk(c, chunk, false, true, &b);
    /* Lean: dp of [rows,k], from the first chunk's on, as `where` counts them. */
    if (!status && !ep_exact(ep) && !(wide = fmoe_ep_alloc(ep, b.first + b.n, b.k * 4))) status = FMOE_ERR_NOMEM;
    fmoe_experts_args a = {.size = sizeof a, .x = &b.x.t, .ids = &b.ids.t, .weights = &b.p.t, .w = args->w};
    if (!status) status = take_saved(c, FMOE_BACKWARD, chunk, b.n, &a);
    if (!status) {
        a.dout = &b.dout.t;
        if (c->want_dx)
            a.dx = fmoe_ep_matrix(ep, &dx, c->rows[1].back_send + b.first * ep_back_bytes(ep), b.n, ep->d.H,
                                  ep_back_type(ep));
        a.dweights = fmoe_ep_matrix(ep, &dp, (wide ? wide : c->rows[1].dp_send) + b.first * b.k, b.n, b.k, FMOE_F32);
        if (ep->chunks == 1) a.dw = args->dw;
        const uint32_t add = args->accumulate && ep->chunks == 1 ? FMOE_ACCUMULATE : 0;
        status = run_experts(c, ep->experts, FMOE_BACKWARD, b.n, &a, add | (c->ones ? FMOE_NEW_WEIGHTS : 0));
    }
    if (!status && wide && pairs)
        status =
            fmoe_ep_take(c, c->rows[1].dp_send + pair, FMOE_F32, wide, (b.first + b.n) * b.k, c->where + pair, pairs);
    fmoe_ep_free(ep, wide);
    batch_free(ep, &b);
    return status;
}

static bool wants_gradients(const fmoe_weights *dw)
{
    return dw->w1 || dw->b1 || dw->w2 || dw->b2 || dw->gate || dw->up || dw->down || dw->lora_a1 || dw->lora_b1 ||
           dw->lora_a2 || dw->lora_b2;
}

/* All tokens that came, in the order of one process: piece by piece, since each is where its cell is. */
static fmoe_status whole_batch(fmoe_ep_call *c, ep_batch *b)
{
    fmoe_ep *const ep = c->ep;
    const int64_t R = ep->x.ranks, bytes = ep_row_bytes(ep), p_bytes = b->k * (int64_t)fmoe_dtype_size(c->p_type);
    const int64_t *const at = ep_exact(ep) ? c->recv_pair_at : c->recv_row_at,
                         each[] = {bytes, bytes, b->k * 4, p_bytes};
    const char *const from[] = {c->rows[0].recv, c->rows[1].recv, (char *)c->ids, c->p};
    for (int i = 0; i < 4; i++)
        if (!(b->memory[i] = fmoe_ep_alloc(ep, b->n, each[i]))) return FMOE_ERR_NOMEM;
    int64_t to = 0;
    for (int64_t r = 0; r < R; r++)
        for (int64_t cell = r; cell < ep_cells(ep); cell += R) {
            const int64_t n = at[cell + 1] - at[cell];
            for (int i = 0; i < 4; i++) {
                char *const here = (char *)b->memory[i] + to * each[i];
                if (i < 2 && ep_exact(ep)) FMOE_TRY(gather_pairs(c, (fmoe_pass)i, at[cell], n, here));
                else FMOE_TRY(fmoe_ep_copy(c, here, from[i] + at[cell] * each[i], n * each[i], false));
            }
            to += n;
        }
    batch_tensors(ep, b, b->memory[0], b->memory[1], b->memory[2], b->memory[3], c->p_type);
    return FMOE_OK;
}

/* A device keeps more than h: a forward makes it. */
static fmoe_status forward_of_whole(fmoe_ep_call *c, const ep_batch *b, fmoe_experts_args *a, ep_tensor *out,
                                    void **saved)
{
    fmoe_ep *const ep = c->ep;
    FMOE_TRY(fmoe_saved_bytes(ep->whole, b->n, &a->saved_bytes));
    void *const rows = fmoe_ep_alloc(ep, b->n, ep_row_bytes(ep));
    *saved = fmoe_ep_alloc(ep, (int64_t)a->saved_bytes + SAVED_ALIGN, 1);
    a->saved = aligned(*saved);
    fmoe_status status = rows && a->saved ? FMOE_OK : FMOE_ERR_NOMEM;
    a->out = fmoe_ep_matrix(ep, out, rows, b->n, ep->d.H, ep->d.dtype);
    if (!status) status = run_experts(c, ep->whole, FMOE_FORWARD, b->n, a, 0);
    a->out = NULL;
    fmoe_ep_free(ep, rows);
    return status;
}

/* Over all chunks at once: cutting tokens into chunks does not change the sums. h is computed again, for it lies there
 * chunk by chunk. */
fmoe_status fmoe_ep_weight_gradients(fmoe_ep_call *c, const fmoe_ep_args *args)
{
    fmoe_ep *const ep = c->ep;
    if (ep->chunks == 1 || !ep->n_local || !wants_gradients(&args->dw)) return FMOE_OK;
    ep_batch b = {.k = ep_exact(ep) ? 1 : ep->d.k};
    ep_tensor out;
    b.n = (ep_exact(ep) ? c->recv_pair_at : c->recv_row_at)[ep_cells(ep)];
    fmoe_status status = whole_batch(c, &b);
    if (!status) {
        fmoe_experts_args a = {.size = sizeof a, .x = &b.x.t, .ids = &b.ids.t, .weights = &b.p.t, .dout = &b.dout.t};
        a.w = args->w;
        a.dw = args->dw;
        void *saved = NULL;
        if (!ep->cpu) status = forward_of_whole(c, &b, &a, &out, &saved);
        if (!status) status = run_experts(c, ep->whole, FMOE_BACKWARD, b.n, &a, args->accumulate ? FMOE_ACCUMULATE : 0);
        fmoe_ep_free(ep, saved);
    }
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
    return run_experts(c, ep->experts, pass, c->T, &a, pass == FMOE_BACKWARD && args->accumulate ? FMOE_ACCUMULATE : 0);
}
