/* SPDX-License-Identifier: Apache-2.0
 *
 * api.c - the exported run calls: check everything a host can check, then call the backend. Here route, permute,
 * grouped matmul and activation; experts and block, which have weights, are in api_layer.c. */
#include "api.h"

#include <inttypes.h>

#include "quant.h"

fmoe_status fmoe_call_begin(fmoe_call *c, const fmoe_plan_impl *p, fmoe_op op, fmoe_pass pass, const fmoe_run *given,
                            uint32_t known_flags)
{
    static const char *const op_name[] = {"?", "route", "permute", "grouped matmul", "activation", "experts", "block"};
    *c = (fmoe_call){.p = p, .pass = pass, .check = fmoe_checker_begin(p)};
    const void *read;
    FMOE_TRY(fmoe_struct_read(&fmoe_run_form, given, &c->run_copy, &read));
    const fmoe_run *run = c->run = read;
    if (p->d.op != (int32_t)op)
        return fmoe_fail(FMOE_ERR_PLAN, "the plan is for %s, the call is for %s", op_name[p->d.op], op_name[op]);
    if (run->flags & ~known_flags)
        return fmoe_fail(FMOE_ERR_ARG, "fmoe_run.flags 0x%x has bits that do not apply to %s %s, which knows 0x%x",
                         run->flags, op_name[op], pass ? "backward" : "forward", known_flags);
    return FMOE_OK;
}

fmoe_status fmoe_call_finish(fmoe_call *c, const fmoe_arg *args, int n, fmoe_axis_id rows, void *saved,
                             size_t saved_bytes)
{
    const fmoe_run *run = c->run;
    const fmoe_span spans[4] = {
        {"workspace", run->workspace, run->workspace_bytes}, {"saved", saved, saved_bytes}, c->packed[0], c->packed[1]};
    /* Packed weights and, in backward, the saved state are read: they may not overlap an output, which listing them as
     * outputs checks too. */
    FMOE_TRY(fmoe_check_args(&c->check, args, n, spans, 4));
    size_t need, keep;
    const int64_t T = c->check.size[rows];
    FMOE_TRY(fmoe_plan_bytes(c->p, c->pass, T, &need, &keep));
    if (need && !run->workspace)
        return fmoe_fail(FMOE_ERR_WORKSPACE, "workspace is NULL, %zu bytes are needed for %" PRId64 " rows", need, T);
    if (run->workspace_bytes < need)
        return fmoe_fail(FMOE_ERR_WORKSPACE, "workspace has %zu bytes, %zu are needed for %" PRId64 " rows",
                         run->workspace_bytes, need, T);
    const size_t align = c->p->d.device.type == FMOE_CPU ? 16 : 256;
    if (saved && (uintptr_t)saved % align)
        return fmoe_fail(FMOE_ERR_ALIGN, "saved at %p is not aligned to %zu", saved, align);
    if (saved && saved_bytes < keep)
        return fmoe_fail(FMOE_ERR_WORKSPACE, "saved has %zu bytes, %zu are needed for %" PRId64 " rows", saved_bytes,
                         keep, T);
    if (!saved && keep && c->pass == FMOE_BACKWARD)
        return fmoe_fail(FMOE_ERR_WORKSPACE,
                         "saved is NULL, the forward of this plan keeps %zu bytes for %" PRId64 " rows", keep, T);
    return FMOE_OK;
}

/* ---- route ---- */

static fmoe_status route_check(fmoe_call *c, const fmoe_route_args *a)
{
    const int float_types = TYPE_PLAN | TYPE_WIDE;
    const bool replay = (c->run->flags & FMOE_REPLAY) != 0;
    const fmoe_arg logits = {"logits", a->logits, ARG_IN, float_types, LAYOUT_ROWS, {AXIS_T, AXIS_E}, 0};
    const fmoe_arg bias = {"select_bias", a->select_bias, ARG_OPTIONAL, TYPE_WIDE, LAYOUT_COMPACT, {AXIS_E}, 0};
    if (c->pass == FMOE_FORWARD) {
        const fmoe_arg args[] = {
            logits,
            bias,
            {"ids", a->ids, replay ? ARG_IN : ARG_OUT, TYPE_INT, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
            {"weights", a->weights, ARG_OUT, float_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
            {"bad_rows", a->bad_rows, ARG_OPTIONAL_OUT, TYPE_INT64, LAYOUT_COMPACT, {AXIS_ONE}, 0},
        };
        return fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0);
    }
    const fmoe_arg args[] = {
        logits,
        bias,
        {"ids", a->ids, ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
        {"dweights", a->dweights, ARG_IN, float_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
        {"dlogits", a->dlogits, ARG_OUT, float_types, LAYOUT_ROWS, {AXIS_T, AXIS_E}, 0},
    };
    return fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0);
}

static fmoe_status route_run(fmoe_call *c, const fmoe_route_args *a)
{
    return c->p->backend->route[c->pass](c->p, a, c->run);
}

FMOE_RUN_CALL(route, FMOE_OP_ROUTE, fmoe_route_args, FMOE_REPLAY, 0)

/* ---- permute and unpermute ---- */

/* xp must have room for every slot, map and counts for their numbers. */
static fmoe_status need_rows(const fmoe_call *c, const fmoe_permute_args *a)
{
    const int64_t T = c->check.size[AXIS_T], R = c->check.size[AXIS_R], slots = c->check.size[AXIS_TK];
    if (R < slots)
        return fmoe_fail(FMOE_ERR_SHAPE, "xp has %" PRId64 " rows, T*k = %" PRId64 " * %" PRId64 " are needed", R, T,
                         c->p->d.k);
    const bool narrow_map = fmoe_tensor_dtype(a->map) == -32;
    if (slots > INT32_MAX && (narrow_map || (a->counts && fmoe_tensor_dtype(a->counts) == -32)))
        return fmoe_fail(FMOE_ERR_DTYPE, "%s is int32, which does not hold T*k = %" PRId64 ": int64 is needed",
                         narrow_map ? "map" : "counts", slots);
    return FMOE_OK;
}

static fmoe_status permute_check(fmoe_call *c, const fmoe_permute_args *a)
{
    if (c->pass == FMOE_FORWARD) {
        const fmoe_arg args[] = {
            {"x", a->x, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0},
            {"ids", a->ids, ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
            {"xp", a->xp, ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_H}, 0},
            {"map", a->map, ARG_OUT, TYPE_INT, LAYOUT_COMPACT, {AXIS_TK}, 0},
            {"counts", a->counts, ARG_OPTIONAL_OUT, TYPE_INT, LAYOUT_COMPACT, {AXIS_E}, 0},
        };
        FMOE_TRY(fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0));
        return need_rows(c, a);
    }
    const fmoe_arg args[] = {
        {"x", a->x, ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0},
        {"xp", a->xp, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_H}, 0},
        {"map", a->map, ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_TK}, 0},
    };
    return fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0);
}

static fmoe_status permute_run(fmoe_call *c, const fmoe_permute_args *a)
{
    return c->p->backend->permute[c->pass](c->p, a, c->run);
}

FMOE_RUN_CALL(permute, FMOE_OP_PERMUTE, fmoe_permute_args, 0, 0)

static fmoe_status unpermute_check(fmoe_call *c, const fmoe_unpermute_args *a)
{
    const int p_types = TYPE_PLAN | TYPE_WIDE;
    const int sums =
        c->p->d.device.type == FMOE_CPU ? TYPE_PLAN | TYPE_WIDE : TYPE_PLAN; /* expert parallelism's rows */
    const fmoe_arg map = {"map", a->map, ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_TK}, 0};
    const fmoe_arg weights = {"weights", a->weights, ARG_OPTIONAL, p_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0};
    if (c->pass == FMOE_FORWARD) {
        const fmoe_arg args[] = {
            {"out", a->out, ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0},
            {"y", a->y, ARG_IN, sums, LAYOUT_ROWS, {AXIS_R, AXIS_H}, 0},
            map,
            weights,
        };
        return fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0);
    }
    const fmoe_arg args[] = {
        {"dout", a->dout, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_T, AXIS_H}, 0},
        {"y", a->y, a->dweights ? ARG_IN : ARG_OPTIONAL, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_H}, 0},
        map,
        weights,
        {"dy", a->dy, ARG_OPTIONAL_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_H}, 0},
        {"dweights", a->dweights, ARG_OPTIONAL_OUT, p_types, LAYOUT_COMPACT, {AXIS_T, AXIS_K_SLOTS}, 0},
    };
    return fmoe_call_finish(c, args, FMOE_N_ARGS(args), AXIS_T, NULL, 0);
}

static fmoe_status unpermute_run(fmoe_call *c, const fmoe_unpermute_args *a)
{
    return c->p->backend->unpermute[c->pass](c->p, a, c->run);
}

FMOE_RUN_CALL(unpermute, FMOE_OP_PERMUTE, fmoe_unpermute_args, 0, 0)

/* ---- grouped matmul ---- */

static int gmm_list(const fmoe_gmm_args *a, fmoe_pass pass, int64_t E, int64_t list, fmoe_arg *args)
{
    const int y_types = TYPE_PLAN | TYPE_WIDE, grad = TYPE_PLAN | TYPE_WIDE;
    const bool back = pass == FMOE_BACKWARD;
    const fmoe_axis_id stack = list ? AXIS_NONE : AXIS_E;
    int n = 0;
    args[n++] =
        (fmoe_arg){"x", a->x, back && !a->dw ? ARG_OPTIONAL : ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_K}, list};
    if (!a->quant) /* else gmm_codes lists it */
        args[n++] = (fmoe_arg){
            "w",       a->w,          back && !a->dx ? ARG_OPTIONAL : ARG_IN,
            TYPE_PLAN, LAYOUT_MATRIX, {stack ? stack : AXIS_K, stack ? AXIS_K : AXIS_N, stack ? AXIS_N : AXIS_NONE},
            list};
    if (!list)
        args[n++] =
            (fmoe_arg){"sizes", a->sizes, E == 1 ? ARG_OPTIONAL : ARG_IN, TYPE_INT, LAYOUT_COMPACT, {AXIS_E}, 0};
    if (!back) {
        args[n++] = (fmoe_arg){"y", a->y, ARG_OUT, y_types, LAYOUT_ROWS, {AXIS_R, AXIS_N}, list};
        args[n++] = (fmoe_arg){"bias",       a->bias,
                               ARG_OPTIONAL, TYPE_PLAN | TYPE_WIDE,
                               LAYOUT_ROWS,  {stack ? stack : AXIS_N, stack ? AXIS_N : AXIS_NONE},
                               list};
        return n;
    }
    args[n++] = (fmoe_arg){"dy", a->dy, ARG_IN, y_types, LAYOUT_ROWS, {AXIS_R, AXIS_N}, list};
    args[n++] = (fmoe_arg){"dx", a->dx, ARG_OPTIONAL_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_K}, list};
    args[n++] =
        (fmoe_arg){"dw", a->dw,         ARG_OPTIONAL_OUT,
                   grad, LAYOUT_MATRIX, {stack ? stack : AXIS_K, stack ? AXIS_K : AXIS_N, stack ? AXIS_N : AXIS_NONE},
                   list};
    args[n++] = (fmoe_arg){"dbias", a->dbias,    ARG_OPTIONAL_OUT,
                           grad,    LAYOUT_ROWS, {stack ? stack : AXIS_N, stack ? AXIS_N : AXIS_NONE},
                           list};
    return n;
}

/* Quantised weights: codes and the tensors of their descriptor, after all others, which fix K and N. Without dx nobody
 * reads them. */
static fmoe_status gmm_codes(fmoe_call *c, const fmoe_gmm_args *a, fmoe_quant_matrix *m, fmoe_arg *args, int *n)
{
    static const fmoe_quant_names names = FMOE_QUANT_NAMES("quant");
    const bool back = c->pass == FMOE_BACKWARD;
    if (!(c->p->d.flags & FMOE_QUANT))
        return fmoe_fail(FMOE_ERR_PLAN, "quant is given, but the plan was made without FMOE_QUANT");
    if (back && a->dw)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "dw is given, but quant says that w is quantised: it has no gradient");
    if (back && !a->dx) return FMOE_OK;
    *m = (fmoe_quant_matrix){.quant = a->quant,
                             .names = &names,
                             .axes = AXIS_GRID,
                             .E = AXIS_E,
                             .in = AXIS_K,
                             .list = a->list ? c->p->d.E : 0,
                             .N = c->p->d.N,
                             .K = c->p->d.K,
                             .halves = !a->list && c->p->d.N % 2 == 0};
    fmoe_arg *const codes = &args[(*n)++];
    *codes = (fmoe_arg){"w", a->w, ARG_IN, TYPE_BYTE, LAYOUT_ROWS, {AXIS_E, AXIS_N}, m->list};
    if (a->list) codes->axes[0] = AXIS_N;
    return fmoe_quant_args_of(&c->check, m, codes, args, n);
}

static fmoe_status grouped_matmul_check(fmoe_call *c, const fmoe_gmm_args *a)
{
    fmoe_arg args[12];
    fmoe_quant_matrix codes = {.quant = NULL};
    const int64_t E = c->p->d.E;
    if (a->list != 0 && a->list != 1) return fmoe_fail(FMOE_ERR_ARG, "list is %d, must be 0 or 1", a->list);
    if (a->cumulative != 0 && a->cumulative != 1)
        return fmoe_fail(FMOE_ERR_ARG, "cumulative is %d, must be 0 or 1", a->cumulative);
    if (a->list != (c->p->d.K == 0))
        return fmoe_fail(FMOE_ERR_PLAN,
                         "list is %d, the plan was made with K = %" PRId64 ", N = %" PRId64 " (0, 0 is the list form)",
                         a->list, c->p->d.K, c->p->d.N);
    if (c->pass == FMOE_BACKWARD && !a->dx && !a->dw && !a->dbias)
        return fmoe_fail(FMOE_ERR_NULL, "dx, dw and dbias are all NULL: nothing to compute");
    int n = gmm_list(a, c->pass, E, a->list ? E : 0, args);
    const int plain = n;
    if (a->quant) FMOE_TRY(gmm_codes(c, a, &codes, args, &n));
    if (!a->list) return fmoe_call_finish(c, args, n, AXIS_R, NULL, 0);
    /* Sizes differ from group to group: bind R, K and N anew for each, and sum the rows. */
    int64_t rows = 0;
    for (int64_t g = 0; g < E; g++) {
        c->check.size[AXIS_R] = c->check.size[AXIS_K] = c->check.size[AXIS_N] = -1;
        for (int i = 0; i < n; i++) {
            if (i == plain) {
                codes.N = c->check.size[AXIS_N];
                codes.K = c->check.size[AXIS_K];
                fmoe_quant_bind(&c->check, &codes);
            }
            if (args[i].t) FMOE_TRY(fmoe_check_tensor(&c->check, &args[i], g));
            else if (!(args[i].role & ARG_OPTIONAL)) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", args[i].name);
        }
        if (__builtin_add_overflow(rows, c->check.size[AXIS_R], &rows))
            return fmoe_fail(FMOE_ERR_OVERFLOW, "the rows of all groups do not fit 64 bits");
    }
    c->check.size[AXIS_R] = rows;
    const fmoe_span workspace = {"workspace", c->run->workspace, c->run->workspace_bytes};
    FMOE_TRY(fmoe_check_overlap(args, n, &workspace, 1));
    return fmoe_call_finish(c, NULL, 0, AXIS_R, NULL, 0);
}

static fmoe_status grouped_matmul_run(fmoe_call *c, const fmoe_gmm_args *a)
{
    return c->p->backend->gmm[c->pass](c->p, a, c->run);
}

FMOE_RUN_CALL(grouped_matmul, FMOE_OP_GROUPED_MATMUL, fmoe_gmm_args, 0, FMOE_ACCUMULATE | FMOE_ADD_DX)

/* ---- activation ---- */

static fmoe_status activation_check(fmoe_call *c, const fmoe_activation_args *a)
{
    const bool back = c->pass == FMOE_BACKWARD;
    const fmoe_arg args[] = {
        {"h", a->h, ARG_IN, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_HC}, 0},
        {back ? "da" : "a", back ? a->da : a->a, back ? ARG_IN : ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_I}, 0},
        {"dh", a->dh, ARG_OUT, TYPE_PLAN, LAYOUT_ROWS, {AXIS_R, AXIS_HC}, 0},
    };
    return fmoe_call_finish(c, args, back ? 3 : 2, AXIS_R, NULL, 0);
}

static fmoe_status activation_run(fmoe_call *c, const fmoe_activation_args *a)
{
    return c->p->backend->activation[c->pass](c->p, a, c->run);
}

FMOE_RUN_CALL(activation, FMOE_OP_ACTIVATION, fmoe_activation_args, 0, 0)
