/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c - from a description to a plan, and the table of handles.
 *
 * A handle is generation << 16 | slot. Run calls look the slot up, compare the generation and take a reference, all in
 * one atomic word, so a stale, forged or foreign handle is an error and never a pointer that is followed. */
#include "plan.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "abi.h"
#include "util.h"

#define SLOTS 16384u /* plans alive at once; 16 bytes each */
#define MAX_SIZE ((int64_t)1 << 40)

/* state = generation (32 bits) | alive (1 bit) | references (31 bits) */
#define ALIVE (UINT64_C(1) << 31)
#define REFERENCES (ALIVE - 1)

typedef struct slot {
    _Atomic uint64_t state;
    fmoe_plan_impl *plan;
} slot;

static slot slots[SLOTS];
static uint32_t next_slot; /* where to look for a free one first */
static pthread_mutex_t slots_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

/* A child has only the thread that forked: it must not find the table locked by another. */
static void lock_slots(void) { pthread_mutex_lock(&slots_mutex); }
static void unlock_slots(void) { pthread_mutex_unlock(&slots_mutex); }
static void watch_forks(void) { pthread_atfork(lock_slots, unlock_slots, unlock_slots); }

static fmoe_status bad_handle(fmoe_plan handle)
{
    return fmoe_fail(FMOE_ERR_HANDLE, "plan 0x%" PRIx64 " does not exist: it was never made, or has been destroyed",
                     handle);
}

fmoe_status fmoe_plan_acquire(fmoe_plan handle, fmoe_plan_impl **plan)
{
    *plan = NULL;
    const uint64_t index = handle & 0xffff, generation = handle >> 16;
    if (index >= SLOTS || generation == 0 || generation > UINT32_MAX) return bad_handle(handle);
    slot *s = &slots[index];
    uint64_t state = atomic_load_explicit(&s->state, memory_order_acquire);
    do {
        if (state >> 32 != generation || !(state & ALIVE)) return bad_handle(handle);
    } while (!atomic_compare_exchange_weak_explicit(&s->state, &state, state + 1, memory_order_acquire,
                                                    memory_order_acquire));
    *plan = s->plan;
    return FMOE_OK;
}

static void retire(slot *s)
{
    fmoe_plan_free(s->plan);
    lock_slots(); /* the slot is free and its generation over at once, for whoever looks for one */
    const uint64_t generation = atomic_load(&s->state) >> 32;
    atomic_store(&s->state, (generation == UINT32_MAX ? 1 : generation + 1) << 32);
    s->plan = NULL;
    unlock_slots();
}

void fmoe_plan_release(fmoe_plan handle)
{
    slot *s = &slots[handle & 0xffff];
    const uint64_t before = atomic_fetch_sub_explicit(&s->state, 1, memory_order_acq_rel);
    if ((before & REFERENCES) == 1 && !(before & ALIVE)) retire(s);
}

static fmoe_status publish(fmoe_plan_impl *plan, fmoe_plan *handle)
{
    pthread_once(&fork_once, watch_forks);
    lock_slots();
    for (uint32_t n = 0; n < SLOTS; n++) {
        const uint32_t i = (next_slot + n) % SLOTS;
        const uint64_t state = atomic_load(&slots[i].state);
        if (slots[i].plan || (state & (ALIVE | REFERENCES))) continue;
        const uint64_t generation = state >> 32 ? state >> 32 : 1;
        slots[i].plan = plan;
        atomic_store_explicit(&slots[i].state, generation << 32 | ALIVE, memory_order_release);
        next_slot = i + 1;
        unlock_slots();
        *handle = generation << 16 | i;
        return FMOE_OK;
    }
    unlock_slots();
    return fmoe_fail(FMOE_ERR_NOMEM, "%u plans are alive, which is the limit: destroy some", SLOTS);
}

/* ---- from a description to a plan ---- */

static fmoe_status need_size(const char *name, int64_t value)
{
    if (value >= 1 && value <= MAX_SIZE) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_ARG, "%s is %" PRId64 ", must be between 1 and 2^40", name, value);
}

/* Sizes of weight stacks are products of three: they must fit before anything multiplies them. */
static fmoe_status need_product(const char *what, int64_t a, int64_t b, int64_t c)
{
    size_t n;
    if (fmoe_mul_overflow((size_t)a, (size_t)b, &n) || fmoe_mul_overflow(n, (size_t)c, &n) ||
        fmoe_mul_overflow(n, 8, &n) || n > (size_t)INT64_MAX)
        return fmoe_fail(FMOE_ERR_OVERFLOW,
                         "%s = %" PRId64 " * %" PRId64 " * %" PRId64 " elements do not fit 63 bits of bytes", what, a,
                         b, c);
    return FMOE_OK;
}

static fmoe_status check_rule(const fmoe_desc *d)
{
    const fmoe_route_rule *r = &d->route;
    if (r->score < FMOE_SCORE_SOFTMAX || r->score > FMOE_SCORE_SQRT_SOFTPLUS)
        return fmoe_fail(FMOE_ERR_ARG, "route.score is %d, must be a value of fmoe_score (0 to 3)", r->score);
    if (r->group_score < FMOE_GROUP_TOP2_SUM || r->group_score > FMOE_GROUP_MAX)
        return fmoe_fail(FMOE_ERR_ARG, "route.group_score is %d, must be 0 or 1", r->group_score);
    if (d->k > d->E) return fmoe_fail(FMOE_ERR_ARG, "k is %" PRId64 ", more than E = %" PRId64 " experts", d->k, d->E);
    if (r->groups < 0 || r->topk_groups < 0)
        return fmoe_fail(FMOE_ERR_ARG, "route.groups is %d and route.topk_groups %d, must not be negative", r->groups,
                         r->topk_groups);
    if (r->groups > 1) {
        if (d->E % r->groups)
            return fmoe_fail(FMOE_ERR_ARG, "E = %" PRId64 " is not a multiple of route.groups = %d", d->E, r->groups);
        if (r->topk_groups < 1 || r->topk_groups > r->groups)
            return fmoe_fail(FMOE_ERR_ARG, "route.topk_groups is %d, must be between 1 and route.groups = %d",
                             r->topk_groups, r->groups);
        if (!r->excluded_zero && d->k > d->E / r->groups * r->topk_groups)
            return fmoe_fail(FMOE_ERR_ARG, "k is %" PRId64 ", the chosen groups have only %" PRId64 " experts", d->k,
                             d->E / r->groups * r->topk_groups);
    }
    if (!(r->eps >= 0) || !(r->eps < 1e30) || !(r->scale > -1e30 && r->scale < 1e30))
        return fmoe_fail(FMOE_ERR_ARG, "route.eps is %g and route.scale %g, must be finite, eps not negative", r->eps,
                         r->scale);
    return FMOE_OK;
}

static fmoe_status check_rank(const char *name, int64_t rank, int64_t E, int64_t width)
{
    if (rank == 0) return FMOE_OK;
    FMOE_TRY(need_size(name, rank));
    return need_product("an adapter", E, rank, width);
}

static bool act_known(int32_t act)
{
    return (act >= FMOE_ACT_SWIGLU && act <= FMOE_ACT_SWIGLU_CLAMP_OUT) ||
           (act >= FMOE_ACT_SILU && act <= FMOE_ACT_RELU2);
}

static fmoe_status check_desc(const fmoe_desc *d)
{
    const uint32_t known = FMOE_INTERLEAVED | FMOE_BIAS | FMOE_RECOMPUTE | FMOE_SKIP_NEG1 | FMOE_SKIP_E |
                           FMOE_SHARED_GATE | FMOE_ROUND_STEPS | FMOE_REUSE_SAVED | FMOE_BORROW_DW1 | FMOE_KEEP_ALL |
                           FMOE_KEEP_LEAN | FMOE_QUANT | FMOE_SAME_BITS;
    if (d->dtype < FMOE_F32 || d->dtype > FMOE_F64)
        return fmoe_fail(FMOE_ERR_DTYPE, "dtype is %d, must be a value of fmoe_dtype (1 to 4)", d->dtype);
    if (d->flags & ~known)
        return fmoe_fail(FMOE_ERR_ARG, "flags 0x%x has unknown bits, known are 0x%x", d->flags, known);
    if ((d->flags & FMOE_KEEP_ALL) && (d->flags & FMOE_KEEP_LEAN))
        return fmoe_fail(FMOE_ERR_ARG, "flags 0x%x has FMOE_KEEP_ALL and FMOE_KEEP_LEAN: one of them", d->flags);
    if ((d->flags & FMOE_ROUND_STEPS) && d->device.type != 0 && d->device.type != FMOE_CPU)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "FMOE_ROUND_STEPS is for the CPU, device.type is %d", d->device.type);
    if ((d->flags & FMOE_SAME_BITS) && d->device.type != 0 && d->device.type != FMOE_CPU && d->device.type != FMOE_CUDA)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "FMOE_SAME_BITS is for the CPU and CUDA, device.type is %d",
                         d->device.type);
    if (d->threads < 0 || d->threads > 65536)
        return fmoe_fail(FMOE_ERR_ARG, "threads is %d, must be between 0 and 65536", d->threads);
    const bool layer = d->op == FMOE_OP_EXPERTS || d->op == FMOE_OP_BLOCK;
    if ((d->flags & FMOE_QUANT) && !layer && d->op != FMOE_OP_GROUPED_MATMUL)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "FMOE_QUANT is for the grouped matmul (3), experts (5) and block (6), op is %d", d->op);
    if (layer || d->op == FMOE_OP_ACTIVATION) {
        if (!act_known(d->act)) return fmoe_fail(FMOE_ERR_ARG, "act is %d, not a value of fmoe_act", d->act);
        if (!(d->act_limit >= 0) || !(d->act_alpha > -1e30f && d->act_alpha < 1e30f))
            return fmoe_fail(FMOE_ERR_ARG,
                             "act_limit is %g and act_alpha %g: the limit must not be negative, alpha finite",
                             (double)d->act_limit, (double)d->act_alpha);
    }
    switch (d->op) {
    case FMOE_OP_ROUTE:
        FMOE_TRY(need_size("E", d->E));
        FMOE_TRY(need_size("k", d->k));
        return check_rule(d);
    case FMOE_OP_PERMUTE:
        FMOE_TRY(need_size("H", d->H));
        FMOE_TRY(need_size("E", d->E));
        return need_size("k", d->k);
    case FMOE_OP_GROUPED_MATMUL:
        FMOE_TRY(need_size("E", d->E));
        if (d->K == 0 && d->N == 0) return FMOE_OK; /* list form: sizes come with the tensors */
        FMOE_TRY(need_size("K", d->K));
        FMOE_TRY(need_size("N", d->N));
        return need_product("E*K*N", d->E, d->K, d->N);
    case FMOE_OP_ACTIVATION: return need_size("I", d->I);
    case FMOE_OP_EXPERTS:
    case FMOE_OP_BLOCK:
        FMOE_TRY(need_size("H", d->H));
        FMOE_TRY(need_size("I", d->I));
        FMOE_TRY(need_size("E", d->E));
        FMOE_TRY(need_size("k", d->k));
        FMOE_TRY(need_product("E*2I*H", d->E, 2 * d->I, d->H));
        FMOE_TRY(check_rank("rank1", d->rank1, d->E, fmoe_max(2 * d->I, d->H)));
        FMOE_TRY(check_rank("rank2", d->rank2, d->E, fmoe_max(d->I, d->H)));
        if (d->op == FMOE_OP_EXPERTS) return FMOE_OK;
        if (d->shared_I != 0) FMOE_TRY(need_size("shared_I", d->shared_I));
        FMOE_TRY(need_product("2*shared_I*H", 2, d->shared_I, d->H));
        if ((d->flags & FMOE_SHARED_GATE) && d->shared_I == 0)
            return fmoe_fail(FMOE_ERR_ARG,
                             "FMOE_SHARED_GATE is set, but shared_I is 0: there is no shared expert to gate");
        return check_rule(d);
    default: return fmoe_fail(FMOE_ERR_ARG, "op is %d, must be a value of fmoe_op (1 to 6)", d->op);
    }
}

fmoe_status fmoe_plan_build(const fmoe_desc *desc, fmoe_plan_impl **plan)
{
    fmoe_desc d = *desc;
    FMOE_TRY(check_desc(&d));
    if (d.device.type == 0) d.device.type = FMOE_CPU;
    if (d.act_alpha == 0) d.act_alpha = 1.702f;
    if (d.act_limit == 0) d.act_limit = 7;
    if (d.route.scale == 0) d.route.scale = 1;

    const fmoe_backend *backend;
    FMOE_TRY(fmoe_backend_find(d.device, d.dtype, &backend));
    const bool gmm = d.op == FMOE_OP_GROUPED_MATMUL;
    if ((d.flags & FMOE_QUANT) && !(gmm ? backend->quant_gmm : backend->quant))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "FMOE_QUANT: quantised weights of %s are computed on the CPU (device type 1), not by the %s "
                         "backend",
                         gmm ? "the grouped matmul" : "experts", backend->name);
    fmoe_plan_impl *p = calloc(1, sizeof *p);
    if (!p) return fmoe_fail(FMOE_ERR_NOMEM, "a plan of %zu bytes could not be allocated", sizeof *p);
    p->d = d;
    p->gated = d.act < FMOE_ACT_SILU;
    p->h_cols = p->gated ? 2 * d.I : d.I;
    p->backend = backend;
    const fmoe_status status = d.op == FMOE_OP_BLOCK ? fmoe_block_build(p) : backend->plan_init(p);
    if (status != FMOE_OK) {
        free(p);
        return status;
    }
    *plan = p;
    return FMOE_OK;
}

void fmoe_plan_free(fmoe_plan_impl *p)
{
    if (!p) return;
    for (int i = 0; i < PART_COUNT; i++) fmoe_plan_free(p->part[i]);
    if (p->d.op != FMOE_OP_BLOCK) p->backend->plan_fini(p);
    free(p);
}

fmoe_status fmoe_plan_create(fmoe_plan *plan, const fmoe_desc *desc)
{
    if (!plan) return fmoe_fail(FMOE_ERR_NULL, "plan is NULL");
    *plan = 0;
    if (!desc) return fmoe_fail(FMOE_ERR_NULL, "desc is NULL");
    fmoe_desc copy;
    const void *read;
    FMOE_TRY(fmoe_struct_read(&fmoe_desc_form, desc, &copy, &read));
    fmoe_plan_impl *p = NULL;
    FMOE_TRY(fmoe_plan_build(read, &p));
    const fmoe_status status = publish(p, plan);
    if (status != FMOE_OK) fmoe_plan_free(p);
    return status;
}

fmoe_status fmoe_plan_destroy(fmoe_plan *plan)
{
    if (!plan) return fmoe_fail(FMOE_ERR_NULL, "plan is NULL");
    if (*plan == 0) return FMOE_OK;
    fmoe_plan_impl *p = NULL;
    FMOE_TRY(fmoe_plan_acquire(*plan, &p));
    /* Of two threads that destroy one plan, the bit goes from alive to dead once. */
    const uint64_t before = atomic_fetch_and_explicit(&slots[*plan & 0xffff].state, ~ALIVE, memory_order_acq_rel);
    fmoe_plan_release(*plan);
    if (!(before & ALIVE)) return bad_handle(*plan);
    *plan = 0;
    return FMOE_OK;
}

/* ---- asking a plan ---- */

fmoe_status fmoe_plan_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    *saved = 0;
    if (workspace) *workspace = 0;
    if (T < 0 || T > ((int64_t)1 << 48))
        return fmoe_fail(FMOE_ERR_ARG, "T is %" PRId64 ", must be between 0 and 2^48", T);
    if (p->d.op == FMOE_OP_BLOCK) return fmoe_block_bytes(p, pass, T, workspace, saved);
    return p->backend->bytes(p, pass, T, workspace, saved);
}

fmoe_status fmoe_workspace_bytes(fmoe_plan plan, fmoe_pass pass, int64_t T, size_t *bytes)
{
    if (!bytes) return fmoe_fail(FMOE_ERR_NULL, "bytes is NULL");
    *bytes = 0;
    if (pass != FMOE_FORWARD && pass != FMOE_BACKWARD)
        return fmoe_fail(FMOE_ERR_ARG, "pass is %d, must be 0 (forward) or 1 (backward)", (int)pass);
    fmoe_plan_impl *p = NULL;
    FMOE_TRY(fmoe_plan_acquire(plan, &p));
    size_t saved;
    const fmoe_status status = fmoe_plan_bytes(p, pass, T, bytes, &saved);
    fmoe_plan_release(plan);
    return status;
}

fmoe_status fmoe_saved_bytes(fmoe_plan plan, int64_t T, size_t *bytes)
{
    if (!bytes) return fmoe_fail(FMOE_ERR_NULL, "bytes is NULL");
    *bytes = 0;
    fmoe_plan_impl *p = NULL;
    FMOE_TRY(fmoe_plan_acquire(plan, &p));
    const fmoe_status status = fmoe_plan_bytes(p, FMOE_FORWARD, T, NULL, bytes);
    fmoe_plan_release(plan);
    return status;
}

static size_t describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    static const char *const part_name[PART_COUNT] = {"router",      "route",        "experts",
                                                      "shared gate", "shared route", "shared expert"};
    if (p->d.op != FMOE_OP_BLOCK) return p->backend->describe(p, text, n);
    size_t used = 0;
    for (int i = 0; i < PART_COUNT; i++) {
        if (!p->part[i]) continue;
        used += (size_t)snprintf(used < n ? text + used : NULL, used < n ? n - used : 0, "%s: ", part_name[i]);
        used += describe(p->part[i], used < n ? text + used : NULL, used < n ? n - used : 0);
    }
    return used;
}

size_t fmoe_plan_describe(fmoe_plan plan, char *text, size_t n)
{
    fmoe_plan_impl *p = NULL;
    if (!text) n = 0;
    if (n) *text = 0;
    if (fmoe_plan_acquire(plan, &p) != FMOE_OK) return 0;
    const size_t used = describe(p, text, n);
    fmoe_plan_release(plan);
    return used;
}
