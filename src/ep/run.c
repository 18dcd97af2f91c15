/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c - the phases, alone and all in one. Overlapped: while chunk c is computed, the rows of chunk c + 1 come and
 * those of chunk c - 1 go home; in the backward, weight gradients are computed while the last dx go home. */
#include <inttypes.h>

#include "ep.h"

/* ---- checks ---- */

static fmoe_status check_phase(const fmoe_ep_call *c, fmoe_pass pass, int phase, const fmoe_ep_args *a)
{
    static const char *const names[] = {"nothing", "count", "dispatch", "compute", "combine"};
    if (!c) return fmoe_fail(FMOE_ERR_NULL, "call is NULL");
    if (!a) return fmoe_fail(FMOE_ERR_NULL, "fmoe_ep_args is NULL");
    if (pass != FMOE_FORWARD && pass != FMOE_BACKWARD)
        return fmoe_fail(FMOE_ERR_ARG, "pass is %d, must be 0 or 1", (int)pass);
    FMOE_TRY(fmoe_ep_check_size("fmoe_ep_args", a->size, sizeof *a, a));
    if (c->ep->broken) return fmoe_fail(FMOE_ERR_EXCHANGE, "the engine was given up after an error: make a new one");
    const int before = pass == FMOE_BACKWARD && phase == PHASE_DISPATCH ? 0 : phase - 1;
    if (pass == FMOE_BACKWARD && (c->inference || c->done[FMOE_FORWARD] != PHASE_COMBINE))
        return fmoe_fail(FMOE_ERR_ARG,
                         c->inference ? "the call is for inference: it has no backward" : "the forward is not done");
    if (c->done[pass] != before)
        return fmoe_fail(FMOE_ERR_ARG, "the last phase of this pass was %s, must be %s", names[c->done[pass]],
                         names[before]);
    return FMOE_OK;
}

/* What a phase reads and writes, before anything is sent. */
static fmoe_status check_tensors(const fmoe_ep_call *c, fmoe_pass pass, int phase, const fmoe_ep_args *a)
{
    fmoe_ep *const ep = c->ep;
    const int64_t T = c->T, H = ep->d.H, k = ep->d.k;
    const int dtype = ep->d.dtype;
    if (phase == PHASE_DISPATCH)
        return pass == FMOE_FORWARD ? fmoe_ep_check_tensor(ep, "x", a->x, T, H, dtype, dtype)
                                    : fmoe_ep_check_tensor(ep, "dout", a->dout, T, H, dtype, dtype);
    if (phase != PHASE_COMBINE) return FMOE_OK;
    if (pass == FMOE_FORWARD) return fmoe_ep_check_tensor(ep, "out", a->out, T, H, dtype, dtype);
    if (a->dx && !c->want_dx) return fmoe_fail(FMOE_ERR_ARG, "dx is given, but it was not when the backward began");
    if (a->dx) FMOE_TRY(fmoe_ep_check_tensor(ep, "dx", a->dx, T, H, dtype, dtype));
    if (!a->dweights) return FMOE_OK;
    FMOE_TRY(fmoe_ep_check_tensor(ep, "dweights", a->dweights, T, k, FMOE_F32, dtype));
    if (T > 1 && fmoe_stride(a->dweights, 0) != k)
        return fmoe_fail(FMOE_ERR_STRIDE, "dweights has rows %" PRId64 " apart, must be compact: %" PRId64,
                         fmoe_stride(a->dweights, 0), k);
    return FMOE_OK;
}

/* ---- the steps of a phase ---- */

static fmoe_status dispatch_first(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    if (pass == FMOE_FORWARD) return fmoe_ep_pairs_begin(c);
    c->want_dx = a->dx != NULL;
    return fmoe_ep_rows_alloc(c, FMOE_BACKWARD);
}

static fmoe_status compute_chunk(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, const fmoe_ep_args *a)
{
    return pass == FMOE_FORWARD ? fmoe_ep_compute_forward(c, chunk, a) : fmoe_ep_compute_backward(c, chunk, a);
}

static bool goes_back(const fmoe_ep_call *c, fmoe_pass pass) { return pass == FMOE_FORWARD || c->want_dx; }

static fmoe_status combine_last(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    for (int64_t i = 0; goes_back(c, pass) && i < c->ep->chunks; i++) FMOE_TRY(fmoe_ep_wait(c, c->ep->chunks + i));
    if (pass == FMOE_BACKWARD) FMOE_TRY(fmoe_ep_dp_exchange(c));
    return fmoe_ep_sum(c, pass, a);
}

static const fmoe_tensor *rows_of(fmoe_pass pass, const fmoe_ep_args *a)
{
    return pass == FMOE_FORWARD ? a->x : a->dout;
}

/* What nothing reads any more is given back at once: a call may outlive its backward. */
static fmoe_status done(fmoe_ep_call *c, fmoe_pass pass, int phase)
{
    c->done[pass] = phase;
    if (phase != PHASE_COMBINE) return FMOE_OK;
    const bool last = pass == FMOE_BACKWARD || c->inference;
    fmoe_ep_rows_free(c, pass, last);
    if (!last) return FMOE_OK;
    fmoe_ep_rows_free(c, FMOE_FORWARD, true);
    for (int64_t i = 0; i < c->ep->chunks; i++) {
        fmoe_ep_free(c->ep, c->saved[i]);
        c->saved[i] = NULL;
    }
    return FMOE_OK;
}

/* An error after the count: tensors that are wrong here are not known to the others either. */
static fmoe_status failed(fmoe_ep_call *c, fmoe_pass pass, int phase, fmoe_status status)
{
    return c->ep->direct ? fmoe_ep_named(c->ep, pass, phase, status) : fmoe_ep_broken(c->ep, pass, phase, status);
}

/* ---- phase by phase ---- */

static fmoe_status dispatch(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    FMOE_TRY(dispatch_first(c, pass, a));
    for (int64_t i = 0; i < c->ep->chunks; i++) FMOE_TRY(fmoe_ep_dispatch_begin(c, pass, i, rows_of(pass, a)));
    if (pass == FMOE_FORWARD) FMOE_TRY(fmoe_ep_pairs_end(c));
    for (int64_t i = 0; i < c->ep->chunks; i++) FMOE_TRY(fmoe_ep_wait(c, i));
    return FMOE_OK;
}

static fmoe_status compute(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    for (int64_t i = 0; i < c->ep->chunks; i++) FMOE_TRY(compute_chunk(c, pass, i, a));
    return pass == FMOE_BACKWARD ? fmoe_ep_weight_gradients(c, a) : FMOE_OK;
}

static fmoe_status combine(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    for (int64_t i = 0; goes_back(c, pass) && i < c->ep->chunks; i++) FMOE_TRY(fmoe_ep_combine_begin(c, pass, i));
    return combine_last(c, pass, a);
}

static fmoe_status phase(fmoe_ep_call *c, fmoe_pass pass, int which, const fmoe_ep_args *a)
{
    static fmoe_status (*const steps[])(fmoe_ep_call *, fmoe_pass, const fmoe_ep_args *) = {dispatch, compute, combine};
    FMOE_TRY(check_phase(c, pass, which, a));
    c->stream = a->stream;
    fmoe_status status = c->ep->direct ? FMOE_OK : check_tensors(c, pass, which, a);
    if (!status && !c->ep->direct) status = steps[which - PHASE_DISPATCH](c, pass, a);
    if (!status && c->ep->direct && which == PHASE_COMBINE)
        status = fmoe_ep_direct(c, pass, a); /* it is one step there */
    return status ? failed(c, pass, which, status) : done(c, pass, which);
}

fmoe_status fmoe_ep_dispatch(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args)
{
    return phase(call, pass, PHASE_DISPATCH, args);
}

fmoe_status fmoe_ep_compute(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args)
{
    return phase(call, pass, PHASE_COMPUTE, args);
}

fmoe_status fmoe_ep_combine(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args)
{
    return phase(call, pass, PHASE_COMBINE, args);
}

/* ---- all in one ---- */

static fmoe_status overlapped(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a, int *at)
{
    const int64_t chunks = c->ep->chunks;
    *at = PHASE_DISPATCH;
    FMOE_TRY(dispatch_first(c, pass, a));
    FMOE_TRY(fmoe_ep_dispatch_begin(c, pass, 0, rows_of(pass, a)));
    if (pass == FMOE_FORWARD) FMOE_TRY(fmoe_ep_pairs_end(c));
    for (int64_t i = 0; i < chunks; i++) {
        *at = PHASE_DISPATCH;
        if (i + 1 < chunks) FMOE_TRY(fmoe_ep_dispatch_begin(c, pass, i + 1, rows_of(pass, a)));
        FMOE_TRY(fmoe_ep_wait(c, i));
        *at = PHASE_COMPUTE;
        FMOE_TRY(compute_chunk(c, pass, i, a));
        *at = PHASE_COMBINE;
        if (goes_back(c, pass)) FMOE_TRY(fmoe_ep_combine_begin(c, pass, i));
    }
    *at = PHASE_COMPUTE;
    if (pass == FMOE_BACKWARD) FMOE_TRY(fmoe_ep_weight_gradients(c, a));
    *at = PHASE_COMBINE;
    return combine_last(c, pass, a);
}

static fmoe_status whole_pass(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *a)
{
    int at = PHASE_DISPATCH;
    FMOE_TRY(check_phase(c, pass, PHASE_DISPATCH, a));
    c->stream = a->stream;
    fmoe_status status = FMOE_OK;
    c->want_dx = pass == FMOE_BACKWARD && a->dx;
    for (int i = PHASE_DISPATCH; i <= PHASE_COMBINE && !c->ep->direct && !status; i++)
        status = check_tensors(c, pass, i, a);
    if (!status) status = c->ep->direct ? fmoe_ep_direct(c, pass, a) : overlapped(c, pass, a, &at);
    return status ? failed(c, pass, at, status) : done(c, pass, PHASE_COMBINE);
}

fmoe_status fmoe_ep_forward(fmoe_ep *ep, const fmoe_ep_args *args, fmoe_ep_call **call)
{
    fmoe_ep_call *c = NULL;
    if (call) *call = NULL;
    if (args && args->size >= sizeof *args && !call && !args->inference)
        return fmoe_fail(FMOE_ERR_NULL, "call is NULL, and inference is 0: the backward needs it");
    FMOE_TRY(fmoe_ep_count(ep, args, &c));
    const fmoe_status status = whole_pass(c, FMOE_FORWARD, args);
    if (status || !call) fmoe_ep_call_free(&c);
    if (call) *call = c;
    return status;
}

fmoe_status fmoe_ep_backward(fmoe_ep_call *call, const fmoe_ep_args *args)
{
    return whole_pass(call, FMOE_BACKWARD, args);
}
