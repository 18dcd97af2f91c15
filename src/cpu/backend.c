/* SPDX-License-Identifier: Apache-2.0
 * cpu.c - the CPU backend's table, and which ISA level its plans use. */
#include "cpu/cpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- levels ---- */

/* From low to high; each contains the ones before it. From LEVEL_WIDE on, f32 panels are 64 columns wide, below 16. */
#if defined(__x86_64__)
enum { LEVEL_c, LEVEL_avx2, LEVEL_avx512, LEVEL_avx512_bf16, LEVEL_amx_bf16, LEVELS, LEVEL_WIDE = LEVEL_avx512 };
static const char *const level_names[LEVELS] = {"c", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
#elif defined(__aarch64__)
enum { LEVEL_c, LEVEL_neon, LEVEL_neon_bf16, LEVELS, LEVEL_WIDE = LEVELS };
static const char *const level_names[LEVELS] = {"c", "neon", "neon_bf16"};
#else
enum { LEVEL_c, LEVELS, LEVEL_WIDE = LEVELS };
static const char *const level_names[LEVELS] = {"c"};
#endif

/* Of this build: the last levels are left out where the compiler does not know their instructions. */
#if defined(FMOE_NO_AVX512_BF16)
enum { BUILT = LEVEL_avx512 };
#elif defined(FMOE_NO_AMX_BF16)
enum { BUILT = LEVEL_avx512_bf16 };
#elif defined(FMOE_NO_NEON_BF16)
enum { BUILT = LEVEL_neon };
#else
enum { BUILT = LEVELS - 1 };
#endif

static pthread_once_t detect_once = PTHREAD_ONCE_INIT;
static int detected; /* highest level of CPU, operating system and build */
static bool intel;
static int env_cap = LEVELS - 1; /* FMOE_MAX_ISA */
static char env_warning[96];
static _Atomic int api_cap = LEVELS - 1; /* fmoe_cpu_set_max_isa */

static int level_by_name(const char *name)
{
    for (int i = 0; i < LEVELS; i++)
        if (strcmp(name, level_names[i]) == 0) return i;
    return -1;
}

#if defined(__x86_64__)
#include <cpuid.h>

/* Which register files the operating system saves (XCR0): the CPUID bits alone are not enough. */
static uint64_t os_state(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

#ifdef FMOE_AMX_EMULATE
static bool has_tiles(bool cpu, uint64_t state) { return (void)cpu, (void)state, true; }
#else
#include <sys/syscall.h>
#include <unistd.h>

/* Tiles, 8 KiB of state, have to be asked for, once in a process: Linux keeps them from programs that do not, whose
 * signal stacks may be too small. Palette 1 must have 8 tiles of 16 rows of 64 bytes. */
static bool has_tiles(bool cpu, uint64_t state)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM of asm/prctl.h, new in Linux 5.16 */
    const uint64_t tiles = 3u << 17;
    unsigned a, b, c, d;
    if (!cpu || (state & tiles) != tiles || !__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return false;
    if (b >> 16 < 8 || (b & 0xffff) != 64 || (c & 0xffff) != 16) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

static bool detect_intel(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx;
}

static int detect_level(void)
{
    unsigned a, b, c, d;
    const uint64_t ymm = 0x6, zmm = 0xe6;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return LEVEL_c;
    const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, avx = c >> 28 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !avx || !fma || !f16c) return LEVEL_c;
    const uint64_t state = os_state();
    if ((state & ymm) != ymm || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return LEVEL_c;
    if (!(b >> 5 & 1)) return LEVEL_c;
    const bool f = b >> 16 & 1, dq = b >> 17 & 1, bw = b >> 30 & 1, vl = b >> 31 & 1;
    if (!f || !dq || !bw || !vl || (state & zmm) != zmm) return LEVEL_avx2;
    const bool amx = d >> 22 & 1 && d >> 24 & 1; /* bf16 products, tiles */
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return LEVEL_avx512;
    return env_cap >= LEVEL_amx_bf16 && has_tiles(amx, state) ? LEVEL_amx_bf16 : LEVEL_avx512_bf16;
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1ul << 14) /* C libraries older than the extension */
#endif

static bool detect_intel(void) { return false; }

/* The operating system says what may be used; NEON itself is part of the architecture. */
static int detect_level(void) { return getauxval(AT_HWCAP2) & HWCAP2_BF16 ? LEVEL_neon_bf16 : LEVEL_neon; }
#else
static bool detect_intel(void) { return false; }
static int detect_level(void) { return LEVEL_c; }
#endif

/* The names of the first n levels; text has room for all. */
static const char *list_levels(char text[64], int n, const char *between)
{
    text[0] = 0;
    for (int i = 0; i < n; i++) strcat(strcat(text, i ? between : ""), level_names[i]);
    return text;
}

static void detect(void)
{
    const char *env = getenv("FMOE_MAX_ISA");
    const int cap = env && *env ? level_by_name(env) : LEVELS - 1;
    if (cap >= 0) env_cap = cap; /* before levels are tried: tiles that are not wanted are not asked for */
    else snprintf(env_warning, sizeof env_warning, "FMOE_MAX_ISA=%.40s is not a level and is ignored", env);
    detected = detect_level();
    if (detected > BUILT) detected = BUILT;
    intel = detect_intel();
}

int fmoe_cpu_level_count(void) { return LEVELS; }
const char *fmoe_cpu_level_name(int level) { return level_names[level]; }

int fmoe_cpu_level_available(int level)
{
    pthread_once(&detect_once, detect);
    return level <= detected;
}

int fmoe_cpu_level(void)
{
    pthread_once(&detect_once, detect);
    const int cap = atomic_load(&api_cap) < env_cap ? atomic_load(&api_cap) : env_cap;
    return detected < cap ? detected : cap;
}

const char *fmoe_cpu_isa(void) { return level_names[fmoe_cpu_level()]; }

fmoe_status fmoe_cpu_set_max_isa(const char *name)
{
    const int cap = name ? level_by_name(name) : LEVELS - 1;
    if (cap < 0) {
        char known[64];
        return fmoe_fail(FMOE_ERR_ARG, "ISA level '%.40s' is unknown: %s", name, list_levels(known, LEVELS, ", "));
    }
    atomic_store(&api_cap, cap);
    return FMOE_OK;
}

void fmoe_kernels_fill(fmoe_kernels *k, int level)
{
    memset(k, 0, sizeof *k);
    k->isa = level_names[level];
    k->nr = level >= LEVEL_WIDE ? 64 : 16;
#define FMOE_KERNEL_FIELD(type, field)
#define FMOE_KERNEL(lvl, type, field)                                                                                  \
    if (level >= LEVEL_##lvl) k->field = fmoe_##field##_##lvl;
#include "cpu/kernels/kernels.inc"
    if (level >= LEVEL_WIDE) k->gemm_lying_wide_bf16 = k->gemm_lying_wide_f16 = NULL; /* packing is faster there */
}

/* ---- threads ---- */

typedef struct callback {
    void (*fn)(void *, int);
    void *arg;
} callback;

static void call_worker(void *arg, int worker)
{
    const callback *c = arg;
    fmoe_run_worker(c->fn, c->arg, worker);
}

void fmoe_parallel(const fmoe_plan_impl *p, void (*fn)(void *arg, int worker), void *arg)
{
    callback c = {fn, arg};
    if (p->d.parallel) p->d.parallel(p->d.parallel_ctx, fmoe_cpu(p)->threads, call_worker, &c);
    else fmoe_pool_run(fmoe_cpu(p)->threads, fn, arg);
}

typedef struct parts_run {
    const fmoe_part *parts;
    int n;
} parts_run;

static void parts_worker(void *arg, int worker)
{
    const parts_run *run = arg;
    const int first = run->n > 1 && !run->parts[1].brief ? worker % 2 : 0;
    for (int i = 0; i < run->n; i++) {
        const fmoe_part *part = &run->parts[(i + first) % run->n];
        part->fn(part->arg, worker);
    }
}

void fmoe_parallel_parts(const fmoe_plan_impl *p, const fmoe_part *parts, int n)
{
    parts_run run = {parts, n};
    if (n) fmoe_parallel(p, parts_worker, &run);
}

typedef struct rows_run {
    int64_t n, grain;
    void (*fn)(void *, int64_t, int64_t);
    void *ctx;
    fmoe_tasks tasks;
} rows_run;

static void rows_worker(void *arg, int worker)
{
    (void)worker;
    rows_run *run = arg;
    int64_t task;
    while (fmoe_claim(&run->tasks, &task))
        run->fn(run->ctx, task * run->grain, fmoe_min(run->n, (task + 1) * run->grain));
}

void fmoe_for_rows(const fmoe_plan_impl *p, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                   void *ctx)
{
    rows_run run = {.n = n, .grain = grain, .fn = fn, .ctx = ctx};
    run.tasks.n = fmoe_ceil_div(n, grain);
    if (n) fmoe_parallel(p, rows_worker, &run);
}

/* ---- plans ---- */

static fmoe_status plan_init(fmoe_plan_impl *p)
{
    fmoe_cpu_plan *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return fmoe_fail(FMOE_ERR_NOMEM, "a CPU plan of %zu bytes could not be allocated", sizeof *cpu);
    fmoe_kernels_fill(&cpu->k, fmoe_cpu_level());
    /* More threads than cores give nothing; a few more are allowed so that results can be compared over thread counts.
     */
    const int cores = fmoe_cpu_count(), most = cores > 64 ? cores : 64;
    cpu->threads = p->d.threads == 0 ? cores : p->d.threads < most ? p->d.threads : most;
    cpu->pairs = p->d.dtype == FMOE_BF16 && cpu->k.gemm_bf16;
    cpu->gather = cpu->pairs && cpu->k.pack_left_pairs;
    cpu->intel = intel;
    cpu->work_type = cpu->pairs ? FMOE_BF16 : FMOE_F32;
    p->priv = cpu;
    return FMOE_OK;
}

static void plan_fini(fmoe_plan_impl *p) { free(p->priv); }

static fmoe_status bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
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

static size_t describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    static const char *const dtypes[] = {"?", "f32", "bf16", "f16", "f64"};
    const bool products = p->d.op == FMOE_OP_GROUPED_MATMUL || p->d.op == FMOE_OP_EXPERTS;
    const char *how = !products                ? "elementwise in f32"
                      : cpu->pairs             ? "products on bf16 pairs, gemm_bf16_"
                      : p->d.dtype == FMOE_F32 ? "products in f32"
                                               : "products in f32, operands widened while packed (no bf16 unit used)";
    size_t used = (size_t)snprintf(text, n, "cpu, %s, level %s, %d thread%s%s: %s%s\n", dtypes[p->d.dtype], cpu->k.isa,
                                   cpu->threads, cpu->threads == 1 ? "" : "s", p->d.parallel ? " of the caller" : "",
                                   how, products && cpu->pairs ? cpu->k.isa : "");
    if (env_warning[0])
        used += (size_t)snprintf(used < n ? text + used : NULL, used < n ? n - used : 0, "%s\n", env_warning);
    return used;
}

/* The processor's own name for itself; "" where there is none to ask. */
static void cpu_name(char name[49])
{
    name[0] = 0;
#if defined(__x86_64__)
    unsigned r[12];
    if ((unsigned)__get_cpuid_max(0x80000000u, NULL) < 0x80000004u) return;
    for (unsigned i = 0; i < 3; i++)
        __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
    memcpy(name, r, 48);
    name[48] = 0;
    for (size_t end = strlen(name); end > 0 && name[end - 1] == ' ';) name[--end] = 0;
#endif
}

/* Every kernel that a plan made now would use, by name. */
static size_t kernel_names(char *text, size_t n)
{
    static const struct {
        const char *field, *name;
        int level;
    } all[] = {
#define FMOE_KERNEL_FIELD(type, field)
#define FMOE_KERNEL(lvl, type, field) {#field, #field "_" #lvl, LEVEL_##lvl},
#include "cpu/kernels/kernels.inc"
    };
    const int count = (int)(sizeof all / sizeof *all), level = fmoe_cpu_level();
    size_t used = (size_t)snprintf(text, n, "     kernels:");
    for (int i = 0; i < count; i++) {
        bool best = all[i].level <= level;
        for (int j = i + 1; j < count; j++) best &= all[j].level > level || strcmp(all[j].field, all[i].field) != 0;
        if (best) used += (size_t)snprintf(used < n ? text + used : NULL, used < n ? n - used : 0, " %s", all[i].name);
    }
    return used + (size_t)snprintf(used < n ? text + used : NULL, used < n ? n - used : 0, "\n");
}

size_t fmoe_cpu_info(char *text, size_t n)
{
    pthread_once(&detect_once, detect);
    char levels[64], name[49];
    cpu_name(name);
    const size_t used = (size_t)snprintf(text, n, "cpu: %s%s%d cores, levels %s, in use %s%s%s\n", name,
                                         *name ? ", " : "", fmoe_cpu_count(), list_levels(levels, detected + 1, " "),
                                         fmoe_cpu_isa(), env_warning[0] ? "; " : "", env_warning);
    return used + kernel_names(used < n ? text + used : NULL, used < n ? n - used : 0);
}

const fmoe_backend fmoe_backend_cpu = {
    .version = FMOE_BACKEND_VERSION,
    .name = "cpu",
    .plan_init = plan_init,
    .plan_fini = plan_fini,
    .bytes = bytes,
    .describe = describe,
    .route = {fmoe_cpu_route_forward, fmoe_cpu_route_backward},
    .permute = {fmoe_cpu_permute_forward, fmoe_cpu_permute_backward},
    .unpermute = {fmoe_cpu_unpermute_forward, fmoe_cpu_unpermute_backward},
    .gmm = {fmoe_cpu_gmm_forward, fmoe_cpu_gmm_backward},
    .activation = {fmoe_cpu_activation_forward, fmoe_cpu_activation_backward},
    .experts = {fmoe_cpu_experts_forward, fmoe_cpu_experts_backward},
    .lora = true,
    .wide_factors = true,
    .packed_bytes = fmoe_cpu_packed_bytes,
    .pack = fmoe_cpu_pack,
    .packed_check = fmoe_cpu_packed_check,
};
