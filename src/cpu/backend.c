/* SPDX-License-Identifier: Apache-2.0
 * cpu/backend.c - the CPU backend's table: its plans, the memory they ask for, and what they say of themselves. */
#include <stdio.h>
#include <stdlib.h>

#include "cpu/ops/ops.h"

static fmoe_status cpu_plan_init(fmoe_plan_impl *p)
{
    fmoe_cpu_plan *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return fmoe_fail(FMOE_ERR_NOMEM, "a CPU plan of %zu bytes could not be allocated", sizeof *cpu);
    fmoe_kernels_fill(&cpu->k, fmoe_cpu_level());
    cpu->has = fmoe_kernels_has(&cpu->k);
    /* More threads than cores give nothing; a few more are allowed so that results can be compared over thread counts.
     */
    const int cores = fmoe_cpu_count(), most = cores > 64 ? cores : 64;
    cpu->threads = p->d.threads == 0 ? cores : p->d.threads < most ? p->d.threads : most;
    cpu->pairs = p->d.dtype == FMOE_BF16 && cpu->k.gemm_bf16;
    cpu->gather = cpu->pairs && cpu->k.pack_wgrad_left_pairs;
    cpu->intel = fmoe_cpu_is_intel();
    cpu->work_type = cpu->pairs ? FMOE_BF16 : FMOE_F32;
    p->priv = cpu;
    return FMOE_OK;
}

static void cpu_plan_fini(fmoe_plan_impl *p) { free(p->priv); }

static fmoe_status cpu_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    fmoe_carve c = fmoe_carve_begin(NULL, 64);
    *saved = 0;
    switch (p->d.op) {
    case FMOE_OP_ROUTE: fmoe_cpu_route_carve(p, &c); break;
    case FMOE_OP_PERMUTE: fmoe_cpu_permute_carve(p, T, &c); break;
    case FMOE_OP_GROUPED_MATMUL: fmoe_cpu_gmm_carve(p, &c); break;
    case FMOE_OP_EXPERTS:
        if (pass == FMOE_FORWARD) fmoe_cpu_experts_forward_carve(p, T, &c);
        else fmoe_cpu_experts_backward_carve(p, T, &c);
        if (!(p->d.flags & FMOE_RECOMPUTE) && (fmoe_mul_overflow((size_t)T, (size_t)p->d.k, saved) ||
                                               fmoe_mul_overflow(*saved, (size_t)p->h_cols, saved) ||
                                               fmoe_mul_overflow(*saved, fmoe_dtype_size(p->d.dtype), saved)))
            c.overflow = true;
        break;
    default: break;
    }
    if (c.overflow || *saved > (size_t)INT64_MAX)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "workspace for T = %lld does not fit 63 bits", (long long)T);
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    return FMOE_OK;
}

static size_t cpu_describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    static const char *const dtypes[] = {"?", "f32", "bf16", "f16", "f64"};
    const bool products = p->d.op == FMOE_OP_GROUPED_MATMUL || p->d.op == FMOE_OP_EXPERTS;
    const char *how = !products                ? "elementwise in f32"
                      : cpu->pairs             ? "products on bf16 pairs"
                      : p->d.dtype == FMOE_F32 ? "products in f32"
                                               : "products in f32, 16-bit operands widened (no bf16 unit used)";
    size_t used =
        (size_t)snprintf(text, n, "cpu, %s, level %s, %d thread%s%s: %s\n", dtypes[p->d.dtype], cpu->k.isa,
                         cpu->threads, cpu->threads == 1 ? "" : "s", p->d.parallel ? " of the caller" : "", how);
    if (*fmoe_cpu_isa_warning())
        used +=
            (size_t)snprintf(used < n ? text + used : NULL, used < n ? n - used : 0, "%s\n", fmoe_cpu_isa_warning());
    used += fmoe_cpu_describe(p, used < n ? text + used : NULL, used < n ? n - used : 0);
    return used;
}

const fmoe_backend fmoe_backend_cpu = {
    .version = FMOE_BACKEND_VERSION,
    .name = "cpu",
    .plan_init = cpu_plan_init,
    .plan_fini = cpu_plan_fini,
    .bytes = cpu_bytes,
    .describe = cpu_describe,
    .route = {fmoe_cpu_route_forward, fmoe_cpu_route_backward},
    .permute = {fmoe_cpu_permute_forward, fmoe_cpu_permute_backward},
    .unpermute = {fmoe_cpu_unpermute_forward, fmoe_cpu_unpermute_backward},
    .gmm = {fmoe_cpu_gmm_forward, fmoe_cpu_gmm_backward},
    .activation = {fmoe_cpu_activation_forward, fmoe_cpu_activation_backward},
    .experts = {fmoe_cpu_experts_forward, fmoe_cpu_experts_backward},
    .wide_factors = true,
    .quant = true,
    .quant_gmm = true,
    .packed_bytes = fmoe_cpu_packed_bytes,
    .pack = fmoe_cpu_pack,
    .packed_check = fmoe_cpu_packed_check,
    .quantize = fmoe_cpu_quantize,
    .dequantize = fmoe_cpu_dequantize,
};
