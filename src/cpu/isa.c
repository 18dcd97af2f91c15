/* SPDX-License-Identifier: Apache-2.0
 * isa.c - which ISA level this CPU, this operating system and this build have, and the kernels of a level. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend.h"
#include "cpu/kernels/kernels.h"
#include "cpu/parallel.h"
#include "util.h"

/* ---- levels ---- */

/* From low to high; each contains the ones before it. From LEVEL_NR64 on, f32 panels have a register width of 64
 * columns, below 16. */
#if defined(__x86_64__)
enum { LEVEL_c, LEVEL_avx2, LEVEL_avx512, LEVEL_avx512_bf16, LEVEL_amx_bf16, LEVELS, LEVEL_NR64 = LEVEL_avx512 };
static const char *const level_names[LEVELS] = {"c", "avx2", "avx512", "avx512_bf16", "amx_bf16"};
#elif defined(__aarch64__)
enum { LEVEL_c, LEVEL_neon, LEVEL_neon_bf16, LEVELS, LEVEL_NR64 = LEVELS };
static const char *const level_names[LEVELS] = {"c", "neon", "neon_bf16"};
#else
enum { LEVEL_c, LEVELS, LEVEL_NR64 = LEVELS };
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

bool fmoe_cpu_is_intel(void)
{
    pthread_once(&detect_once, detect);
    return intel;
}

const char *fmoe_cpu_isa_warning(void) { return env_warning; }

void fmoe_kernels_fill(fmoe_kernels *k, int level)
{
    memset(k, 0, sizeof *k);
    k->isa = level_names[level];
    k->nr = level >= LEVEL_NR64 ? 64 : 16;
#define FMOE_KERNEL_FIELD(type, field)
#define FMOE_KERNEL(lvl, type, field)                                                                                  \
    if (level >= LEVEL_##lvl) k->field = fmoe_##field##_##lvl;
#include "cpu/kernels/kernels.inc"
    if (level >= LEVEL_NR64)
        k->gemm_nmajor_inplace_widen_bf16 = k->gemm_nmajor_inplace_widen_f16 = NULL; /* packing is faster there */
    if (k->gemm_inplace) { /* rows in tiles, or gathered for panels of pairs: no other product in bf16 */
        k->gemm_kmajor_bf16 = NULL;
        k->gemm_kmajor_few_rows_bf16 = NULL;
        k->gemm_coded_few_rows_bf16 = NULL;
        k->gemm_nmajor_inplace_bf16 = NULL;
        k->pack_kmajor_bf16 = NULL;
    }
    if (k->gemm_bf16 && k->pack_kmajor_widen_bf16) k->pack_transposed_bf16 = NULL; /* widened beside f32 only: kmajor */
}

_Static_assert(FMOE_SLOTS <= 64, "a bit for every slot");
_Static_assert(sizeof(fmoe_kernels) == offsetof(fmoe_kernels, gemm_f32) + FMOE_SLOTS * sizeof(fmoe_any_fn *),
               "the table is an array of pointers after its first two members");

fmoe_any_fn *fmoe_kernel_at(const fmoe_kernels *k, int slot)
{
    fmoe_any_fn *fn;
    memcpy(&fn, (const char *)k + offsetof(fmoe_kernels, gemm_f32) + (size_t)slot * sizeof fn, sizeof fn);
    return fn;
}

uint64_t fmoe_kernels_has(const fmoe_kernels *k)
{
    uint64_t has = 0;
    for (int i = 0; i < FMOE_SLOTS; i++) has |= (uint64_t)(fmoe_kernel_at(k, i) != NULL) << i;
    return has;
}

/* Of the kernels in the list, the one that is in the table: by its address, so that no other is ever named. */
const char *fmoe_kernel_name(const fmoe_kernels *k, int slot)
{
    static const struct {
        fmoe_any_fn *kernel;
        int slot;
        const char *name;
    } all[] = {
#define FMOE_KERNEL_FIELD(type, field)
#define FMOE_KERNEL(lvl, type, field) {(fmoe_any_fn *)fmoe_##field##_##lvl, FMOE_SLOT_##field, #field "_" #lvl},
#include "cpu/kernels/kernels.inc"
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].slot == slot && all[i].kernel == fmoe_kernel_at(k, slot)) return all[i].name;
    return NULL;
}

/* ---- what fmoe_info() says of them ---- */

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

/* Text that is added to piece by piece; used counts what did not fit too. */
typedef struct info_text {
    char *at;
    size_t n, used;
} info_text;

static void add(info_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(info_text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const bool fits = t->used < t->n;
    t->used += (size_t)vsnprintf(fits ? t->at + t->used : NULL, fits ? t->n - t->used : 0, format, args);
    va_end(args);
}

static const struct {
    const char *title, *begins[4]; /* the types of kernels.inc whose names begin so; none: all that is left */
} groups[] = {{"products:", {"gemm"}},
              {"weight gradients:", {"wgrad"}},
              {"packing:", {"pack"}},
              {"activations:", {"act"}},
              {"routing:", {"softmax"}},
              {"conversions:", {"load", "store", "round", "dequant"}},
              {"sums:", {"add_rows", "axpy", "dot"}},
              {"ceilings:", {"peak"}},
              {"other:", {NULL}}};
enum { GROUPS = sizeof groups / sizeof *groups };

static int group_of(const char *type)
{
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < 4 && groups[g].begins[i]; i++)
            if (strncmp(type, groups[g].begins[i], strlen(groups[g].begins[i])) == 0) return g;
    return GROUPS - 1;
}

/* Every kernel in the table of a plan made now, by name, one paragraph for each operation. */
static void add_kernels(info_text *t)
{
    enum { INDENT = 5, NAMES = 23, COLUMNS = 100 };
    typedef void any_fn(void);
    fmoe_kernels k;
    fmoe_kernels_fill(&k, fmoe_cpu_level());
    const struct {
        const char *type, *name;
        any_fn *in_table, *kernel;
    } all[] = {
#define FMOE_KERNEL_FIELD(type, field)
#define FMOE_KERNEL(lvl, type, field) {#type, #field "_" #lvl, (any_fn *)k.field, (any_fn *)fmoe_##field##_##lvl},
#include "cpu/kernels/kernels.inc"
    };
    for (int group = 0; group < GROUPS; group++) {
        int column = 0;
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            if (all[i].in_table != all[i].kernel || group_of(all[i].type) != group) continue;
            const int width = (int)strlen(all[i].name) + 1;
            const bool first = column == 0;
            if (first || column + width > COLUMNS) {
                add(t, "%s%*s%-*s", first ? "" : "\n", INDENT, "", NAMES - INDENT, first ? groups[group].title : "");
                column = NAMES;
            }
            add(t, " %s", all[i].name);
            column += width;
        }
        if (column) add(t, "\n");
    }
}

size_t fmoe_cpu_info(char *text, size_t n)
{
    pthread_once(&detect_once, detect);
    char levels[64], name[49];
    info_text t = {.at = text, .n = n};
    cpu_name(name);
    add(&t, "cpu: %s%s%d cores, levels %s, in use %s", name, *name ? ", " : "", fmoe_cpu_count(),
        list_levels(levels, detected + 1, " "), fmoe_cpu_isa());
    if (env_warning[0]) add(&t, "; %s", env_warning);
    else if (env_cap < LEVELS - 1) add(&t, " (FMOE_MAX_ISA=%s)", level_names[env_cap]);
    add(&t, "\n");
    add_kernels(&t);
    return t.used;
}
