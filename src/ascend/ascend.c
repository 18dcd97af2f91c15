/* SPDX-License-Identifier: Apache-2.0
 * ascend.c - the Ascend backend's table: plans, sizes, and the entry of every operation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ascend.h"
#include "ops.h"

/* Limits of CANN's operators on 910B. */
enum { MAX_GROUPS = 1024, MAX_INNER = 65535, MAX_ROWS = 16777214, MAX_TOPK = 512 };

static fmoe_status check_inner(const char *name, int64_t value)
{
    if (value <= MAX_INNER) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: %s is %lld, CANN's grouped matmul takes at most %d", name,
                     (long long)value, MAX_INNER);
}

static fmoe_status check_desc(const fmoe_plan_impl *p)
{
    const fmoe_desc *d = &p->d;
    const bool experts = d->op == FMOE_OP_EXPERTS, gmm = d->op == FMOE_OP_GROUPED_MATMUL;
    if (d->dtype != FMOE_F32 && d->dtype != FMOE_BF16 && d->dtype != FMOE_F16)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: dtype %d; f32, bf16 and f16 are there", d->dtype);
    if (d->E > MAX_GROUPS && (experts || (gmm && d->K > 0)))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: E is %lld, CANN's grouped matmul takes at most %d groups",
                         (long long)d->E, MAX_GROUPS);
    if (d->k > MAX_TOPK && (experts || d->op == FMOE_OP_PERMUTE))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: k is %lld, CANN's permutation takes at most %d",
                         (long long)d->k, MAX_TOPK);
    if (experts) {
        FMOE_TRY(check_inner("H", d->H));
        FMOE_TRY(check_inner(p->gated ? "2I" : "I", p->h_cols));
    }
    if (gmm) {
        FMOE_TRY(check_inner("K", d->K));
        FMOE_TRY(check_inner("N", d->N));
    }
    return FMOE_OK;
}

/* What to keep: as the plan's flags say; where they leave it open FMOE_ASCEND_KEEP=lean or all. Default all: it moves
 * the fewest bytes. */
static asc_keep choose_keep(const fmoe_desc *d)
{
    if (d->flags & FMOE_RECOMPUTE) return KEEP_NOTHING;
    if (d->flags & (FMOE_KEEP_ALL | FMOE_KEEP_LEAN)) return d->flags & FMOE_KEEP_LEAN ? KEEP_LEAN : KEEP_ALL;
    const char *say = getenv("FMOE_ASCEND_KEEP");
    return say && strcmp(say, "lean") == 0 ? KEEP_LEAN : KEEP_ALL;
}

/* MoeInitRoutingV3 saves a launch, but torch_npu sends these sizes to V2 before CANN 8.5 for speed.
 * FMOE_ASCEND_ROUTING=v2 or v3 overrules the table, as far as the symbols are there. */
static bool choose_routing(const fmoe_acl *acl, const fmoe_desc *d)
{
    static const struct {
        int64_t E, H;
        int before;
    } slower[] = {{128, 2048, 805}}; /* Qwen3-30B-A3B */
    const char *say = getenv("FMOE_ASCEND_ROUTING");
    if (!acl->aclnnMoeInitRoutingV3 || !acl->aclnnMoeInitRoutingV2) return acl->aclnnMoeInitRoutingV3 != NULL;
    if (say && (strcmp(say, "v2") == 0 || strcmp(say, "v3") == 0)) return say[1] == '3';
    for (size_t i = 0; i < sizeof slower / sizeof *slower; i++)
        if (d->E == slower[i].E && d->H == slower[i].H && acl->number && acl->number < slower[i].before) return false;
    return true;
}

static fmoe_status plan_init(fmoe_plan_impl *p)
{
    const fmoe_acl *acl = NULL;
    FMOE_TRY(check_desc(p));
    FMOE_TRY(fmoe_acl_get(&acl));
    if (p->d.device.id < 0 || (uint32_t)p->d.device.id >= acl->devices)
        return fmoe_fail(FMOE_ERR_BACKEND, "Ascend: device %d was asked for, there are %u", p->d.device.id,
                         acl->devices);
    asc_plan *plan = calloc(1, sizeof *plan);
    if (!plan) return fmoe_fail(FMOE_ERR_NOMEM, "Ascend: no memory for a plan");
    plan->acl = acl;
    plan->keep = choose_keep(&p->d);
    plan->routing_v3 = choose_routing(acl, &p->d);
    plan->skip = (p->d.flags & (FMOE_SKIP_NEG1 | FMOE_SKIP_E)) != 0;
    const char *check = getenv("FMOE_ASCEND_CHECK");
    plan->check = check && *check && strcmp(check, "0") != 0;
    for (int i = 0; i < ASC_CACHE; i++) plan->cache[i].rows = -1;
    if (pthread_mutex_init(&plan->lock, NULL) != 0) {
        free(plan);
        return fmoe_fail(FMOE_ERR_NOMEM, "Ascend: no mutex for a plan");
    }
    p->priv = plan;
    return FMOE_OK;
}

static void plan_fini(fmoe_plan_impl *p)
{
    asc_plan *plan = p->priv;
    pthread_mutex_destroy(&plan->lock);
    free(plan);
    p->priv = NULL;
}

static fmoe_status bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    asc_plan *plan = p->priv;
    const fmoe_desc *d = &p->d;
    const bool slots = d->op == FMOE_OP_EXPERTS || d->op == FMOE_OP_PERMUTE;
    int64_t R = T;
    if (workspace) *workspace = 0;
    *saved = 0;
    if ((slots && __builtin_mul_overflow(T, d->k, &R)) || R > INT64_MAX / 16 / MAX_INNER)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "Ascend: the rows of T = %lld do not fit 64 bits", (long long)T);
    if (d->op == FMOE_OP_EXPERTS) {
        asc_saved layout;
        *saved = asc_saved_layout(p, R, NULL, &layout);
    }
    if (!workspace) return FMOE_OK;
    if (T == 0) {
        if (d->op != FMOE_OP_GROUPED_MATMUL) return FMOE_OK;
        T = 1; /* zeros are written to its gradients all the same */
    }
    if (T == 1) T = 2; /* a single row is packed whatever its stride: no copy of rows with gaps would be measured */
    if (slots && R > MAX_ROWS) return FMOE_OK; /* the run will be refused; sizes may be asked for all the same */
    if (d->op == FMOE_OP_GROUPED_MATMUL && d->K == 0) { /* lists: sizes are known only when it runs */
        *workspace = (size_t)64 << 20;
        return FMOE_OK;
    }
    pthread_mutex_lock(&plan->lock);
    for (int i = 0; i < ASC_CACHE; i++)
        if (plan->cache[i].rows == T && plan->cache[i].pass == (int)pass) {
            *workspace = plan->cache[i].workspace;
            pthread_mutex_unlock(&plan->lock);
            return FMOE_OK;
        }
    pthread_mutex_unlock(&plan->lock);
    FMOE_TRY(asc_measure(p, pass, T, workspace));
    pthread_mutex_lock(&plan->lock);
    plan->cache[plan->next].rows = T;
    plan->cache[plan->next].pass = (int)pass;
    plan->cache[plan->next].workspace = *workspace;
    plan->next = (plan->next + 1) % ASC_CACHE;
    pthread_mutex_unlock(&plan->lock);
    return FMOE_OK;
}

static size_t describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    static const char *const kept[] = {"xp, h, a, y (7 launches backward)", "h (xp, a and y made again)",
                                       "nothing (all made again)"};
    const asc_plan *plan = p->priv;
    const fmoe_acl *acl = plan->acl;
    const bool fused = p->d.act == FMOE_ACT_SWIGLU && !(p->d.flags & FMOE_INTERLEAVED);
    int len;
    if (p->d.op == FMOE_OP_EXPERTS)
        len =
            snprintf(text, n,
                     "ascend: CANN %s on %s\n  rows: %s\n  products: aclnnGroupedMatmul%s\n  activation: %s\n  kept "
                     "for backward: %s\n  skip marks: %s\n  dp of f32 routing weights: %s\n%s",
                     acl->version[0] ? acl->version : "(version unknown)", acl->soc,
                     plan->routing_v3             ? "aclnnMoeInitRoutingV3"
                     : acl->aclnnMoeInitRoutingV3 ? "aclnnMoeInitRoutingV2 + Cast (chosen for these sizes)"
                                                  : "aclnnMoeInitRoutingV2 + Cast (V3 is not there)",
                     p->d.E == 1                 ? ": one expert, aclnnMm"
                     : acl->aclnnGroupedMatmulV5 ? "V5"
                                                 : "V4 (V5 is not there)",
                     fused                         ? "aclnnSwiGlu"
                     : asc_act_clipped(acl, &p->d) ? "aclnnClippedSwiglu"
                                                   : "element-wise operators in f32",
                     kept[plan->keep], plan->skip ? "ids are masked first (E+1 buckets)" : "none",
                     p->d.dtype == FMOE_F32 || acl->mixed_probs
                         ? "f32"
                         : "rounded to the plan's dtype (this CANN is not known to take both)",
                     p->d.flags & FMOE_QUANT ? "  quantised weights: decoded into scratch before each product\n" : "");
    else
        len = snprintf(text, n, "ascend: CANN %s on %s\n", acl->version[0] ? acl->version : "(version unknown)",
                       acl->soc);
    return len < 0 ? 0 : (size_t)len;
}

size_t fmoe_ascend_info(char *text, size_t n)
{
    const fmoe_acl *acl = NULL;
    int len;
    if (fmoe_acl_get(&acl) != FMOE_OK) len = snprintf(text, n, "ascend: not available: %s\n", fmoe_last_error());
    else
        len = snprintf(text, n, "ascend: %u %s, CANN %s, GroupedMatmul%s, MoeInitRouting%s%s\n", acl->devices, acl->soc,
                       acl->version[0] ? acl->version : "(version unknown)", acl->aclnnGroupedMatmulV5 ? "V5" : "V4",
                       acl->aclnnMoeInitRoutingV3 ? "V3" : "V2",
                       acl->mixed_probs ? "" : ", gradients of f32 routing weights rounded to 16 bits");
    return len < 0 ? 0 : (size_t)len;
}

/* ---- Entries: begin, walk, end ---- */

void asc_activation(asc_call *c, fmoe_pass pass, const fmoe_activation_args *a)
{
    if (a->h->shape[0] == 0) return;
    const asc_view h = asc_packed(c, a->h);
    if (pass == FMOE_FORWARD) {
        const asc_view out = asc_target(c, a->a, h.dtype, false);
        asc_act(c, h, out);
        asc_deliver(c, a->a, out, false);
    } else {
        const asc_view dh = asc_target(c, a->dh, h.dtype, false);
        asc_act_gradient(c, asc_packed(c, a->da), h, dh);
        asc_deliver(c, a->dh, dh, false);
    }
}

static fmoe_status check_rows(const fmoe_plan_impl *p, int64_t rows)
{
    if (rows <= MAX_ROWS) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: T*k is %lld (k is %lld), CANN's permutation takes at most %d rows",
                     (long long)rows, (long long)p->d.k, MAX_ROWS);
}

#define ENTRY(name, args, rows, walk)                                                                                  \
    static fmoe_status name(const fmoe_plan_impl *p, const args *a, const fmoe_run *run)                               \
    {                                                                                                                  \
        asc_call c;                                                                                                    \
        FMOE_TRY(check_rows(p, rows));                                                                                 \
        FMOE_TRY(asc_begin(&c, p, run));                                                                               \
        walk;                                                                                                          \
        return asc_end(&c);                                                                                            \
    }

ENTRY(route_forward, fmoe_route_args, 0, asc_route(&c, FMOE_FORWARD, a, run->flags))
ENTRY(route_backward, fmoe_route_args, 0, asc_route(&c, FMOE_BACKWARD, a, run->flags))
ENTRY(permute_forward, fmoe_permute_args, a->map->shape[0], asc_permute(&c, FMOE_FORWARD, a))
ENTRY(permute_backward, fmoe_permute_args, a->map->shape[0], asc_permute(&c, FMOE_BACKWARD, a))
ENTRY(unpermute_forward, fmoe_unpermute_args, a->map->shape[0], asc_unpermute(&c, FMOE_FORWARD, a))
ENTRY(unpermute_backward, fmoe_unpermute_args, a->map->shape[0], asc_unpermute(&c, FMOE_BACKWARD, a))
ENTRY(gmm_forward, fmoe_gmm_args, 0, asc_gmm(&c, FMOE_FORWARD, a, run->flags))
ENTRY(gmm_backward, fmoe_gmm_args, 0, asc_gmm(&c, FMOE_BACKWARD, a, run->flags))
ENTRY(activation_forward, fmoe_activation_args, 0, asc_activation(&c, FMOE_FORWARD, a))
ENTRY(activation_backward, fmoe_activation_args, 0, asc_activation(&c, FMOE_BACKWARD, a))
ENTRY(experts_forward, fmoe_experts_args, a->x->shape[0] * p->d.k, asc_experts_forward(&c, a, run->flags))
ENTRY(experts_backward, fmoe_experts_args, a->x->shape[0] * p->d.k, asc_experts_backward(&c, a, run->flags))

const fmoe_backend fmoe_backend_ascend = {
    .version = FMOE_BACKEND_VERSION,
    .name = "ascend",
    .plan_init = plan_init,
    .plan_fini = plan_fini,
    .bytes = bytes,
    .describe = describe,
    .route = {route_forward, route_backward},
    .permute = {permute_forward, permute_backward},
    .unpermute = {unpermute_forward, unpermute_backward},
    .gmm = {gmm_forward, gmm_backward},
    .activation = {activation_forward, activation_backward},
    .experts = {experts_forward, experts_backward},
    .wide_factors = true,
    .quant = true,
    .quant_gmm = true,
    .device = &asc_device,
};
