/* SPDX-License-Identifier: Apache-2.0
 *
 * api_layer.c - the exported run calls of the operations that have weights: experts, block, and packing. */
#include <inttypes.h>
#include <math.h>

#include "api.h"
#include "quant.h"

/* ---- weights and their gradients ---- */

/* The arguments of a set of weights or of their gradients, by name. */
typedef struct weight_names {
    bool shared, grad;
    const char *w1, *b1, *w2, *b2, *gate, *up, *down, *lora_a1, *lora_b1, *lora_a2, *lora_b2, *packed, *reserved;
    fmoe_quant_names quant1, quant2, quant_gate;
} weight_names;

static bool is_list(const fmoe_weights *w) { return w->gate || w->up || w->down; }

#define WEIGHT_NAMES(shared, grad, d)                                                                                  \
    {shared,                                                                                                           \
     grad,                                                                                                             \
     d "w1",                                                                                                           \
     d "b1",                                                                                                           \
     d "w2",                                                                                                           \
     d "b2",                                                                                                           \
     d "gate",                                                                                                         \
     d "up",                                                                                                           \
     d "down",                                                                                                         \
     d "lora_a1",                                                                                                      \
     d "lora_b1",                                                                                                      \
     d "lora_a2",                                                                                                      \
     d "lora_b2",                                                                                                      \
     d "packed",                                                                                                       \
     d "reserved",                                                                                                     \
     FMOE_QUANT_NAMES(d "quant1"),                                                                                     \
     FMOE_QUANT_NAMES(d "quant2"),                                                                                     \
     FMOE_QUANT_NAMES(d "quant_gate")}

static const weight_names experts_names = WEIGHT_NAMES(false, false, "");
static const weight_names experts_grad_names = WEIGHT_NAMES(false, true, "d");
static const weight_names shared_names = WEIGHT_NAMES(true, false, "shared ");
static const weight_names shared_grad_names = WEIGHT_NAMES(true, true, "dshared ");

static int matrix_args(fmoe_arg *args, const fmoe_plan_impl *p, const fmoe_weights *w, const weight_names *names,
                       int need)
{
    const bool shared = names->shared;
    const fmoe_axis_id E = shared ? AXIS_ONE : AXIS_E, HC = shared ? AXIS_SHARED_HC : AXIS_HC,
                       I = shared ? AXIS_SHARED_I : AXIS_I;
    const int types = names->grad ? TYPE_PLAN | TYPE_WIDE : TYPE_PLAN;
    const int64_t n_list = shared ? 1 : p->d.E;
    int n = 0;
    if (is_list(w)) {
        if (p->gated || w->gate)
            args[n++] = (fmoe_arg){names->gate, w->gate, need, types, LAYOUT_MATRIX, {I, AXIS_H}, n_list};
        args[n++] = (fmoe_arg){names->up, w->up, need, types, LAYOUT_MATRIX, {I, AXIS_H}, n_list};
        args[n++] = (fmoe_arg){names->down, w->down, need, types, LAYOUT_MATRIX, {AXIS_H, I}, n_list};
    } else {
        args[n++] = (fmoe_arg){names->w1, w->w1, need, types, LAYOUT_MATRIX, {E, HC, AXIS_H}, 0};
        args[n++] = (fmoe_arg){names->w2, w->w2, need, types, LAYOUT_MATRIX, {E, AXIS_H, I}, 0};
    }
    return n;
}

/* Those of them that are quantised, as matrix_args listed them: bytes, and the tensors of their descriptors. */
static fmoe_status quant_args(fmoe_call *c, const fmoe_weights *w, const weight_names *names, fmoe_arg *args,
                              int matrices, int *n)
{
    const fmoe_plan_impl *p = c->p;
    const int64_t H = p->d.H, I = names->shared ? p->d.shared_I : p->d.I, columns = p->gated ? 2 * I : I;
    const int first_axes = names->shared ? 3 : 0;
    for (int i = 0; i < matrices; i++) {
        const bool w2 = i + 1 == matrices, gate = matrices == 3 && i == 0, list = is_list(w);
        const fmoe_quant *q = w2 ? w->quant2 : gate ? w->quant_gate : w->quant1;
        fmoe_quant_matrix m = {.quant = q,
                               .names = w2     ? &names->quant2
                                        : gate ? &names->quant_gate
                                               : &names->quant1,
                               .axes = (fmoe_axis_id)(AXIS_GRID + 3 * (first_axes + (w2     ? 1
                                                                                     : gate ? 2
                                                                                            : 0))),
                               .E = names->shared ? AXIS_ONE : AXIS_E,
                               .list = list ? args[i].list : 0,
                               .N = w2     ? H
                                    : list ? I
                                           : columns,
                               .K = w2 ? I : H,
                               .halves = !w2 && !list && p->gated && !(p->d.flags & FMOE_INTERLEAVED)};
        if (q) FMOE_TRY(fmoe_quant_args_of(&c->check, &m, &args[i], args, n));
    }
    return FMOE_OK;
}

static fmoe_status weight_args(fmoe_arg *all, int *count, fmoe_call *c, const fmoe_weights *w,
                               const weight_names *names)
{
    fmoe_arg *const args = all + *count;
    const fmoe_plan_impl *p = c->p;
    const bool shared = names->shared, bias = (p->d.flags & FMOE_BIAS) != 0;
    const fmoe_axis_id E = shared ? AXIS_ONE : AXIS_E, HC = shared ? AXIS_SHARED_HC : AXIS_HC,
                       I = shared ? AXIS_SHARED_I : AXIS_I;
    const int types = names->grad || p->backend->wide_factors ? TYPE_PLAN | TYPE_WIDE : TYPE_PLAN; /* of factors */
    const int bias_types = TYPE_PLAN | TYPE_WIDE;
    const int need = names->grad ? ARG_OPTIONAL_OUT : ARG_IN;
    int n = matrix_args(args, p, w, names, need | (w->packed && c->pass == FMOE_FORWARD ? ARG_OPTIONAL : 0));
    FMOE_TRY(quant_args(c, w, names, args, n, &n));
    if (!is_list(w)) {
        if (bias) args[n++] = (fmoe_arg){names->b1, w->b1, need, bias_types, LAYOUT_ROWS, {E, HC}, 0};
        if (bias) args[n++] = (fmoe_arg){names->b2, w->b2, need, bias_types, LAYOUT_ROWS, {E, AXIS_H}, 0};
    }
    if (p->d.rank1 && !shared) {
        args[n++] = (fmoe_arg){names->lora_a1, w->lora_a1, need, types, LAYOUT_MATRIX, {E, AXIS_RANK1, AXIS_H}, 0};
        args[n++] = (fmoe_arg){names->lora_b1, w->lora_b1, need, types, LAYOUT_MATRIX, {E, HC, AXIS_RANK1}, 0};
    }
    if (p->d.rank2 && !shared) {
        args[n++] = (fmoe_arg){names->lora_a2, w->lora_a2, need, types, LAYOUT_MATRIX, {E, AXIS_RANK2, I}, 0};
        args[n++] = (fmoe_arg){names->lora_b2, w->lora_b2, need, types, LAYOUT_MATRIX, {E, AXIS_H, AXIS_RANK2}, 0};
    }
    *count += n;
    return FMOE_OK;
}

/* Where descriptors may be; what they say is checked with their tensors (quant.c). */
static fmoe_status check_quant(const fmoe_plan_impl *p, const fmoe_weights *w, const weight_names *names)
{
    const fmoe_quant_names *first = w->quant1 ? &names->quant1 : w->quant2 ? &names->quant2 : &names->quant_gate;
    if (!w->quant1 && !w->quant2 && !w->quant_gate) return FMOE_OK;
    if (names->grad) return fmoe_fail(FMOE_ERR_ARG, "%s is given: gradients are not quantised", first->quant);
    if (!(p->d.flags & FMOE_QUANT))
        return fmoe_fail(FMOE_ERR_PLAN, "%s is given, but the plan was made without FMOE_QUANT", first->quant);
    if (w->quant_gate && (!is_list(w) || !p->gated))
        return fmoe_fail(FMOE_ERR_ARG, "%s is given, but %s", names->quant_gate.quant,
                         p->gated ? "the weights are stacks: W1's is quant1" : "the activation is ungated");
    if (is_list(w) && p->gated && !w->quant_gate != !w->quant1)
        return fmoe_fail(FMOE_ERR_ARG, "%s is %s, %s %s: gate and up are both quantised or neither is",
                         names->quant_gate.quant, w->quant_gate ? "given" : "NULL", names->quant1.quant,
                         w->quant1 ? "given" : "NULL");
    return FMOE_OK;
}

/* What the table of arguments cannot say. */
static fmoe_status check_weights(const fmoe_plan_impl *p, const fmoe_weights *w, const weight_names *names)
{
    const bool list = is_list(w);
    for (size_t i = 0; i < sizeof w->reserved / sizeof *w->reserved; i++)
        if (w->reserved[i])
            return fmoe_fail(FMOE_ERR_ARG, "%s[%zu] is %p, must be NULL: this library (%s) knows no such field",
                             names->reserved, i, w->reserved[i], fmoe_version_string());
    FMOE_TRY(check_quant(p, w, names));
    if (list && (w->w1 || w->b1 || w->w2 || w->b2))
        return fmoe_fail(FMOE_ERR_ARG, "%s and %s are both given: weights are stacked or lists, not both",
                         w->w1 || w->b1 ? names->w1 : names->w2, names->up);
    if (list && (p->d.flags & FMOE_BIAS))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "%s is given, but the plan has FMOE_BIAS: the list form has no biases",
                         names->up);
    if (w->gate && !p->gated)
        return fmoe_fail(FMOE_ERR_ARG, "%s is given, but the activation %d is ungated", names->gate, p->d.act);
    if (!(p->d.flags & FMOE_BIAS) && (w->b1 || w->b2))
        return fmoe_fail(FMOE_ERR_PLAN, "%s is given, but the plan was made without FMOE_BIAS",
                         w->b1 ? names->b1 : names->b2);
    if ((w->lora_a1 || w->lora_b1) && (!p->d.rank1 || names->shared))
        return fmoe_fail(FMOE_ERR_PLAN, "%s is given, but the plan has no adapter there: rank1 is %" PRId64,
                         w->lora_a1 ? names->lora_a1 : names->lora_b1, names->shared ? 0 : p->d.rank1);
    if ((w->lora_a2 || w->lora_b2) && (!p->d.rank2 || names->shared))
        return fmoe_fail(FMOE_ERR_PLAN, "%s is given, but the plan has no adapter there: rank2 is %" PRId64,
                         w->lora_a2 ? names->lora_a2 : names->lora_b2, names->shared ? 0 : p->d.rank2);
    if (!names->grad && !names->shared && !(isfinite(w->lora_scale1) && isfinite(w->lora_scale2)))
        return fmoe_fail(FMOE_ERR_ARG, "lora_scale1 is %g and lora_scale2 %g: both are finite", (double)w->lora_scale1,
                         (double)w->lora_scale2);
    return FMOE_OK;
}

/* Packed weights, of the plan of an experts layer. In backward they are left alone: it needs the weights themselves. */
static fmoe_status check_packed(fmoe_call *c, const fmoe_plan_impl *experts, const fmoe_weights *w,
                                const weight_names *names)
{
    if (!w->packed) return FMOE_OK;
    if (names->grad) return fmoe_fail(FMOE_ERR_ARG, "%s is given: gradients have no packed form", names->packed);
    if (c->pass == FMOE_BACKWARD) {
        if (w->w1 || is_list(w)) return FMOE_OK;
        return fmoe_fail(FMOE_ERR_NULL, "%s is NULL, and %s serves the forward only: the backward reads %s and %s",
                         names->w1, names->packed, names->w1, names->w2);
    }
    if (!experts || !experts->backend->packed_check)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "%s is given, but %s", names->packed,
                         experts ? "this plan reads weights as they are stored" : "the plan has no such expert");
    c->packed[names->shared] = (fmoe_span){names->packed, w->packed, w->packed_bytes};
    return experts->backend->packed_check(experts, names->packed, w->packed, w->packed_bytes);
}

/* Interleaving is a property of stacks: gradients then come the way the weights came. */
static fmoe_status check_gradients(const fmoe_plan_impl *p, const fmoe_weights *w, const fmoe_weights *dw,
                                   const weight_names *names, const weight_names *grad_names)
{
    FMOE_TRY(check_weights(p, dw, grad_names));
    const bool first = dw->w1 || dw->gate || dw->up;
    if ((w->quant1 && first) || (w->quant2 && (dw->w2 || dw->down)))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "%s is given, but %s says that these weights are quantised: they have no "
                         "gradient",
                         w->quant1 && first ? dw->w1     ? grad_names->w1
                                              : dw->gate ? grad_names->gate
                                                         : grad_names->up
                         : dw->w2           ? grad_names->w2
                                            : grad_names->down,
                         w->quant1 && first ? names->quant1.quant : names->quant2.quant);
    if (first && p->gated && (p->d.flags & FMOE_INTERLEAVED) && is_list(w) != is_list(dw))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "%s are given as %s, %s as %s: with FMOE_INTERLEAVED both must be the same", names->w1,
                         is_list(w) ? "lists" : "a stack", grad_names->w1, is_list(dw) ? "lists" : "a stack");
    return FMOE_OK;
}

/* FMOE_BORROW_DW1: memory that holds nothing yet, and nobody else's between its elements. dw itself is checked. */
static fmoe_status check_borrowed(const fmoe_call *c, const fmoe_tensor *dw1)
{
    int64_t last = 0, elements = 1;
    if (!(c->p->d.flags & FMOE_BORROW_DW1)) return FMOE_OK;
    if (!dw1) return fmoe_fail(FMOE_ERR_NULL, "dw.w1 is NULL: a plan with FMOE_BORROW_DW1 computes in its memory");
    if (c->run->flags & FMOE_ACCUMULATE)
        return fmoe_fail(FMOE_ERR_ARG, "FMOE_ACCUMULATE adds to dw.w1, whose memory the plan's FMOE_BORROW_DW1 lends");
    for (int i = 0; i < dw1->ndim; i++) {
        last += (dw1->shape[i] - 1) * fmoe_stride(dw1, i);
        elements *= dw1->shape[i];
    }
    if (last + 1 == elements) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_STRIDE,
                     "dw.w1 has %" PRId64 " elements in the space of %" PRId64
                     ": FMOE_BORROW_DW1 needs it without holes",
                     elements, last + 1);
}

/* ---- experts ---- */

static fmoe_status experts_check(fmoe_call *c, const fmoe_experts_args *a)
{
    const bool back = c->pass == FMOE_BACKWARD;
    const int p_types = TYPE_PLAN | TYPE_WIDE;
    const int sums =
        c->p->d.device.type == FMOE_CPU ? TYPE_PLAN | TYPE_WIDE : TYPE_PLAN; /* expert parallelism adds on */
    fmoe_arg args[36];
    int n = 0;
    FMOE_TRY(check_weights(c->p, &a->w, &experts_names));
    FMOE_TRY(check_packed(c, c->p, &a->w, &experts_names));
    FMOE_TRY(check_packed(c, c->p, &a->dw, &experts_grad_names));
    args[n++] = (fmoe_arg){"x", a->x, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"ids", a->ids, ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    args[n++] = (fmoe_arg){"weights", a->weights, ARG_IN, p_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    FMOE_TRY(weight_args(args, &n, c, &a->w, &experts_names));
    if (!back) {
        args[n++] = (fmoe_arg){"out", a->out, ARG_OUT, sums, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
        return fmoe_call_finish(c, args, n, AXIS_T, a->saved, a->saved_bytes);
    }
    FMOE_TRY(check_gradients(c->p, &a->w, &a->dw, &experts_names, &experts_grad_names));
    args[n++] = (fmoe_arg){"dout", a->dout, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"dx", a->dx, ARG_OPTIONAL_OUT, sums, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] =
        (fmoe_arg){"dweights", a->dweights, ARG_OPTIONAL_OUT, p_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    FMOE_TRY(weight_args(args, &n, c, &a->dw, &experts_grad_names));
    FMOE_TRY(fmoe_call_finish(c, args, n, AXIS_T, a->saved, a->saved_bytes));
    return check_borrowed(c, a->dw.w1);
}

static fmoe_status experts_run(fmoe_call *c, const fmoe_experts_args *a)
{
    fmoe_experts_args plain = *a;
    plain.w.packed = NULL;
    return c->p->backend->experts[c->pass](c->p, c->pass == FMOE_BACKWARD ? &plain : a, c->run);
}

FMOE_RUN_CALL(experts, FMOE_OP_EXPERTS, fmoe_experts_args, FMOE_ADD_OUT,
              FMOE_ACCUMULATE | FMOE_ADD_DX | FMOE_NEW_WEIGHTS)

/* ---- packed weights, of experts or of a block's experts ---- */

static const fmoe_plan_impl *experts_of(const fmoe_plan_impl *p)
{
    return p->d.op == FMOE_OP_BLOCK ? p->part[PART_EXPERTS] : p;
}

static fmoe_status packed_bytes(const fmoe_plan_impl *p, size_t *bytes)
{
    *bytes = 0;
    if (p->d.op != FMOE_OP_EXPERTS && p->d.op != FMOE_OP_BLOCK)
        return fmoe_fail(FMOE_ERR_PLAN,
                         "the plan is for operation %d: weights are packed for experts (5) and block (6)", p->d.op);
    return p->backend->packed_bytes ? p->backend->packed_bytes(experts_of(p), bytes) : FMOE_OK;
}

fmoe_status fmoe_packed_bytes(fmoe_plan plan, size_t *bytes)
{
    fmoe_plan_impl *p;
    if (!bytes) return fmoe_fail(FMOE_ERR_NULL, "bytes is NULL");
    *bytes = 0;
    FMOE_TRY(fmoe_plan_acquire(plan, &p));
    const fmoe_status status = packed_bytes(p, bytes);
    fmoe_plan_release(plan);
    return status;
}

static fmoe_status pack(const fmoe_plan_impl *p, const fmoe_pack_args *given, const fmoe_run *run)
{
    fmoe_call c;
    fmoe_pack_args copy;
    const void *read;
    size_t need;
    fmoe_arg args[4];
    FMOE_TRY(packed_bytes(p, &need));
    FMOE_TRY(fmoe_struct_read(&fmoe_pack_args_form, given, &copy, &read));
    const fmoe_pack_args *a = read;
    FMOE_TRY(fmoe_call_begin(&c, p, (fmoe_op)p->d.op, FMOE_FORWARD, run, 0));
    if (!need)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "there is nothing to pack: this plan (%s) reads weights as they are stored", p->backend->name);
    FMOE_TRY(check_weights(p, &a->w, &experts_names));
    if (!a->packed) return fmoe_fail(FMOE_ERR_NULL, "packed is NULL");
    if ((uintptr_t)a->packed % 64) return fmoe_fail(FMOE_ERR_ALIGN, "packed at %p is not aligned to 64", a->packed);
    if (a->packed_bytes < need)
        return fmoe_fail(FMOE_ERR_WORKSPACE, "packed has %zu bytes, %zu are needed", a->packed_bytes, need);
    const fmoe_span out = {"packed", a->packed, a->packed_bytes};
    FMOE_TRY(fmoe_check_args(&c.check, args, matrix_args(args, p, &a->w, &experts_names, ARG_IN), &out, 1));
    return p->backend->pack(experts_of(p), a, c.run);
}

fmoe_status fmoe_pack_weights(fmoe_plan plan, const fmoe_pack_args *a, const fmoe_run *run)
{
    fmoe_plan_impl *p;
    if (!a) return fmoe_fail(FMOE_ERR_NULL, "fmoe_pack_args is NULL");
    if (!run) return fmoe_fail(FMOE_ERR_NULL, "fmoe_run is NULL");
    FMOE_TRY(fmoe_plan_acquire(plan, &p));
    const fmoe_status status = pack(p, a, run);
    fmoe_plan_release(plan);
    return status;
}

/* ---- block ---- */

static fmoe_status block_check(fmoe_call *c, const fmoe_block_args *a)
{
    const bool back = c->pass == FMOE_BACKWARD, shared = c->p->d.shared_I > 0,
               gate = (c->p->d.flags & FMOE_SHARED_GATE) != 0;
    const int wide = TYPE_PLAN | TYPE_WIDE;
    const int routed = back ? ARG_IN : ARG_OUT;
    fmoe_arg args[64];
    int n = 0;
    FMOE_TRY(check_weights(c->p, &a->w, &experts_names));
    FMOE_TRY(check_weights(c->p, &a->shared, &shared_names));
    FMOE_TRY(check_packed(c, c->p->part[PART_EXPERTS], &a->w, &experts_names));
    FMOE_TRY(check_packed(c, c->p->part[PART_SHARED], &a->shared, &shared_names));
    FMOE_TRY(check_packed(c, NULL, &a->dw, &experts_grad_names));
    FMOE_TRY(check_packed(c, NULL, &a->dshared, &shared_grad_names));
    args[n++] = (fmoe_arg){"x", a->x, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"w_router", a->w_router, ARG_IN, TYPE_PLAN, LAYOUT_MATRIX, {AXIS_E, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"b_router", a->b_router, ARG_OPTIONAL, wide, LAYOUT_COMPACT, {AXIS_E}, 0};
    args[n++] = (fmoe_arg){"select_bias", a->select_bias, ARG_OPTIONAL, TYPE_WIDE, LAYOUT_COMPACT, {AXIS_E}, 0};
    FMOE_TRY(weight_args(args, &n, c, &a->w, &experts_names));
    if (shared) FMOE_TRY(weight_args(args, &n, c, &a->shared, &shared_names));
    if (gate)
        args[n++] = (fmoe_arg){"shared_gate", a->shared_gate, ARG_IN, TYPE_PLAN, LAYOUT_MATRIX, {AXIS_ONE, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"logits", a->logits, routed, wide, LAYOUT_ROWS, {AXIS_T, AXIS_E}, 0};
    args[n++] = (fmoe_arg){"ids", a->ids, routed, TYPE_INT, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    args[n++] = (fmoe_arg){"weights", a->weights, routed, wide, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    if (!back) {
        args[n++] = (fmoe_arg){"out", a->out, ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
        return fmoe_call_finish(c, args, n, AXIS_T, a->saved, a->saved_bytes);
    }
    FMOE_TRY(check_gradients(c->p, &a->w, &a->dw, &experts_names, &experts_grad_names));
    FMOE_TRY(check_gradients(c->p, &a->shared, &a->dshared, &shared_names, &shared_grad_names));
    args[n++] = (fmoe_arg){"dout", a->dout, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"dlogits", a->dlogits, ARG_OPTIONAL, wide, LAYOUT_ROWS, {AXIS_T, AXIS_E}, 0};
    args[n++] = (fmoe_arg){"dx", a->dx, ARG_OPTIONAL_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"dw_router", a->dw_router, ARG_OPTIONAL_OUT, wide, LAYOUT_MATRIX, {AXIS_E, AXIS_H}, 0};
    args[n++] = (fmoe_arg){"db_router", a->db_router, ARG_OPTIONAL_OUT, wide, LAYOUT_COMPACT, {AXIS_E}, 0};
    FMOE_TRY(weight_args(args, &n, c, &a->dw, &experts_grad_names));
    if (shared) FMOE_TRY(weight_args(args, &n, c, &a->dshared, &shared_grad_names));
    if (gate)
        args[n++] =
            (fmoe_arg){"dshared_gate", a->dshared_gate, ARG_OPTIONAL_OUT, wide, LAYOUT_MATRIX, {AXIS_ONE, AXIS_H}, 0};
    FMOE_TRY(fmoe_call_finish(c, args, n, AXIS_T, a->saved, a->saved_bytes));
    return check_borrowed(c, a->dw.w1);
}

static fmoe_status block_run(fmoe_call *c, const fmoe_block_args *a)
{
    fmoe_block_args plain = *a;
    plain.w.packed = plain.shared.packed = NULL;
    return fmoe_block_run(c->p, c->pass, c->pass == FMOE_BACKWARD ? &plain : a, c->run);
}

FMOE_RUN_CALL(block, FMOE_OP_BLOCK, fmoe_block_args, 0, FMOE_ACCUMULATE | FMOE_ADD_DX)
