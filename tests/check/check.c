/* SPDX-License-Identifier: Apache-2.0
 * check.c - the runner of the check harness: levels, draws, signals, the command line. What is checked: check_*.c */
#include "check.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "check_memory.h"

fmoe_kernels check_table;
int check_level, check_top;
bool check_quick, check_loose;

static const check_kernel kernels[] = {
#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field) {#type, #field, offsetof(fmoe_kernels, field)},
#include "cpu/kernels/kernels.inc"
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static struct {
    uint64_t seed;
    const char *filter;
    int64_t draw; /* -1: all */
    double seconds;
    bool list, bench;
} options = {.seed = 1, .draw = -1, .seconds = 30};

static uint64_t random_state;
static sigjmp_buf leave;
static volatile sig_atomic_t inside; /* a draw that can be left */
static int failures;                 /* of the check */
static bool draw_failed;
static double largest; /* share of a bound */
static char note[512], info[256];
static int counts[3]; /* passed, failed, skipped */

/* ---- services ---- */

uint64_t check_random(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double check_uniform(void) { return (double)(check_random() >> 11) * 0x1p-53; }
int64_t check_below(int64_t n) { return (int64_t)(check_random() % (uint64_t)n); }
int64_t check_pick(const int64_t *v, int n) { return v[check_below(n)]; }

int64_t check_size(int64_t most)
{
    const int64_t around = CHECK_PICK(6, 16, 32, 64, 128), drawn = CHECK_PICK(1, 2, 3, 5, 7, 13, 17, 31, 61, 97, 127);
    const int64_t n = check_below(2) ? drawn : around * (1 + check_below(2)) + check_below(3) - 1;
    return n <= most ? n : 1 + check_below(most);
}

double check_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void check_fail(const char *format, ...)
{
    draw_failed = true;
    if (failures++ >= 4) return; /* the first few say enough */
    va_list args;
    va_start(args, format);
    printf("  ");
    vprintf(format, args);
    printf("  [%s]\n", note);
    va_end(args);
}

void check_leave(void) { siglongjmp(leave, 1); }
bool check_failed(void) { return draw_failed; }

void check_note(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(note, sizeof note, format, args);
    va_end(args);
}

void check_info(const char *format, ...)
{
    const size_t used = strlen(info);
    va_list args;
    va_start(args, format);
    vsnprintf(info + used, sizeof info - used, format, args);
    va_end(args);
}

void check_near(const char *what, int64_t i, double got, double want, double bound)
{
    if (got == want || (isnan(got) && isnan(want))) return;
    const double share = fabs(got - want) / bound;
    if (share <= 1) largest = share > largest ? share : largest;
    else check_fail("%s[%" PRId64 "] is %.9g, not %.9g: %.3g times the bound %.3g", what, i, got, want, share, bound);
}

double check_c(int64_t n)
{
    const double certain = (double)n + 2, walk = 8 + 2 * sqrt((double)n);
    return certain < walk ? certain : walk;
}

double check_u(int dtype)
{
    return dtype == FMOE_F32 ? 0x1p-24 : dtype == FMOE_BF16 ? 0x1p-8 : dtype == FMOE_F16 ? 0x1p-11 : 0x1p-53;
}

double check_tiny(int dtype) { return dtype == FMOE_F16 ? 0x1p-24 : 0x1p-120; }

/* ---- one check: its draws ---- */

static void on_signal(int number, siginfo_t *s, void *context)
{
    (void)context;
    if (!inside) {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    check_fail("signal %d at address %p", number, s->si_addr);
    siglongjmp(leave, 2);
}

static bool wanted(const char *name) { return !options.filter || strstr(name, options.filter) != NULL; }

typedef void draw_fn(const void *subject, int64_t index);

/* Draws until the time is used up, at least at_least of them. A signal or a failure ends the check. */
static void run_check(const char *name, draw_fn *draw, const void *subject, int64_t at_least, double seconds)
{
    if (!wanted(name)) return;
    if (options.list) {
        puts(name);
        return;
    }
    const double begin = check_seconds();
    volatile int64_t i = options.draw < 0 ? 0 : options.draw;
    failures = 0;
    largest = 0;
    info[0] = 0;
    for (;; i++) {
        random_state = options.seed * 0x9e3779b97f4a7c15u + (uint64_t)i;
        for (const char *c = name; *c; c++) random_state = random_state * 0x100000001b3u ^ (uint64_t)*c;
        draw_failed = false;
        note[0] = 0;
        inside = 1;
        if (!sigsetjmp(leave, 1)) draw(subject, i);
        inside = 0;
        check_memory_free();
        if (draw_failed) {
            printf("  again: fusedmoe check --seed %" PRIu64 " -f %s --draw %" PRId64 "\n", options.seed, name, i);
            break;
        }
        if (options.draw >= 0 || (i + 1 >= at_least && check_seconds() - begin >= seconds)) break;
    }
    counts[draw_failed]++;
    printf("%-7s %-34s %5" PRId64 " draws %6.2f s  bound used %.3f  %s\n", draw_failed ? "FAILED" : "ok", name, i + 1,
           check_seconds() - begin, largest, info);
    fflush(stdout);
}

/* ---- kernels ---- */

typedef void any_fn(void);

static any_fn *pointer(const fmoe_kernels *k, const check_kernel *c)
{
    any_fn *p;
    memcpy(&p, (const char *)k + c->offset, sizeof p);
    return p;
}

static const check_kernel_case *kernel_case(const char *type)
{
    for (const check_kernel_case *c = check_kernel_cases; c->type; c++)
        if (strcmp(c->type, type) == 0) return c;
    return NULL;
}

typedef struct kernel_subject {
    const check_kernel *kernel;
    const check_kernel_case *how;
} kernel_subject;

static void draw_kernel(const void *subject, int64_t index)
{
    const kernel_subject *s = subject;
    s->how->draw(s->kernel, index);
}

static void no_check(const void *subject, int64_t index)
{
    (void)index;
    const kernel_subject *s = subject;
    check_fail("kernels.inc has %s of type %s, and no check knows that type", s->kernel->field, s->kernel->type);
}

/* Kernels that are new at this level: the pointer is not the one below. */
static int new_kernels(int level, kernel_subject *list)
{
    fmoe_kernels below = {0};
    if (level > 0) fmoe_kernels_fill(&below, level - 1);
    int n = 0;
    for (int i = 0; i < KERNELS; i++)
        if (pointer(&check_table, &kernels[i]) && pointer(&check_table, &kernels[i]) != pointer(&below, &kernels[i]))
            list[n++] = (kernel_subject){&kernels[i], kernel_case(kernels[i].type)};
    return n;
}

static void draw_case(const void *subject, int64_t index) { ((const check_case *)subject)->draw(index); }

static const check_case *const tables[] = {check_op_cases,   check_gmm_cases,    check_layer_cases, check_block_cases,
                                           check_same_cases, check_packed_cases, check_steps_cases};
enum { TABLES = sizeof tables / sizeof *tables };

static void check_one_level(int level, double seconds)
{
    const char *isa = fmoe_cpu_level_name(level);
    kernel_subject fresh[KERNELS];
    char name[96];
    const int n = new_kernels(level, fresh);
    /* --quick: a quarter of the draws that are otherwise made whatever the time, and none of the checks that take
     * seconds: for emulators and sanitizers. */
    const int64_t share = check_quick ? 4 : 1;
    for (int i = 0; i < n; i++) { /* a fifth of the time for kernels */
        snprintf(name, sizeof name, "%s_%s", fresh[i].kernel->field, isa);
        if (fresh[i].how)
            run_check(name, draw_kernel, &fresh[i], fmoe_ceil_div(fresh[i].how->at_least, share), 0.2 * seconds / n);
        else run_check(name, no_check, &fresh[i], 1, 0);
    }
    double weights = 0;
    for (int t = 0; t < TABLES; t++)
        for (const check_case *c = tables[t]; c->name; c++) weights += c->weight;
    for (int t = 0; t < TABLES; t++)
        for (const check_case *c = tables[t]; c->name; c++) {
            if ((c->slow && check_quick) || (c->slow > 1 && level != check_top)) continue;
            snprintf(name, sizeof name, "%s/%s", c->name, isa);
            run_check(name, draw_case, c, fmoe_ceil_div(c->at_least, share), 0.8 * seconds * c->weight / weights);
        }
}

/* ---- timing ---- */

static double best_rate(const check_kernel *k, const check_kernel_case *how, const fmoe_kernels *table,
                        double *flops_per_item)
{
    double best = 0;
    for (double end = check_seconds() + 0.05; check_seconds() < end;) {
        int64_t items = 0;
        const double begin = check_seconds();
        how->bench(k, table, &items, flops_per_item);
        const double rate = (double)items / (check_seconds() - begin);
        best = rate > best ? rate : best;
    }
    check_memory_free();
    return best;
}

static double ceiling(fmoe_peak_fn *peak) /* the best of ten slices, after one to warm up */
{
    double best = 0;
    peak(400000);
    for (int i = 0; i < 10; i++) {
        const double begin = check_seconds(), flops = peak(200000), rate = flops / (check_seconds() - begin);
        best = rate > best ? rate : best;
    }
    return best;
}

static void bench_level(int level, const fmoe_kernels *c_table)
{
    kernel_subject fresh[KERNELS];
    const int n = new_kernels(level, fresh);
    const fmoe_kernels *t = &check_table;
    const double rate = ceiling(t->peak_f32), pairs = t->peak_bf16 ? ceiling(t->peak_bf16) : rate;
    printf("%s: register-only ceiling %.1f GFLOP/s in f32, %.1f in bf16 (1 thread)\n", fmoe_cpu_level_name(level),
           1e-9 * rate, 1e-9 * pairs);
    for (int i = 0; i < n; i++) {
        const check_kernel *k = fresh[i].kernel;
        const check_kernel_case *how = fresh[i].how;
        char name[96];
        snprintf(name, sizeof name, "%s_%s", k->field, fmoe_cpu_level_name(level));
        if (!how || !how->bench || !wanted(name)) continue;
        double per_item = 0;
        const double r = best_rate(k, how, t, &per_item);
        const double c = pointer(c_table, k) ? best_rate(k, how, c_table, &per_item) : 0;
        const bool gemm = strcmp(k->type, "gemm") == 0;
        printf("  %-28s %10.2f G%s/s", name, 1e-9 * r * (per_item > 0 ? per_item : 1),
               per_item > 0 ? "FLOP" : "elements");
        if (gemm) printf("  %5.1f %% of the ceiling", 100 * r * per_item / (strstr(k->field, "bf16") ? pairs : rate));
        if (c > 0) printf("  %6.2f x c", r / c);
        putchar('\n');
    }
}

/* ---- the command line ---- */

static int usage(FILE *to, int code)
{
    fputs("usage: fusedmoe check [options]\n"
          "Holds every CPU kernel and every operation, at each level up to the one that the CPU has and\n"
          "FMOE_MAX_ISA allows, to a computation in double, on shapes and values that are drawn.\n"
          "\n"
          "  --seconds S  time for all of it, in seconds (default 30); every check makes a few draws at least\n"
          "  --quick      fewer and smaller draws\n"
          "  -f TEXT      only checks with TEXT in their name\n"
          "  --seed N     where the drawing begins (default 1)\n"
          "  --draw I     only draw number I: to repeat one that failed\n"
          "  --loose      memory ends 64 bytes before the forbidden page: for emulators (qemu)\n"
          "  --list       the names of the checks, and nothing else\n"
          "  --bench      instead time the kernels: GFLOP/s (1e9 multiplications and additions a second) or\n"
          "               elements a second, the share of the ceiling (a loop of multiply-adds on registers),\n"
          "               and the ratio to the portable kernel\n"
          "\n"
          "A line for each check: ok or FAILED, its name, the draws, seconds, and the largest part of the error\n"
          "bound that was used; the last line counts them. A failure says how to repeat it.\n"
          "Exit status: 0; 1 when a check fails; 2 for a command line that cannot be read, or a TEXT that no\n"
          "check has in its name.\n",
          to);
    return code;
}

int fmoe_check_main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--list")) options.list = true;
        else if (!strcmp(argv[i], "--bench")) options.bench = true;
        else if (!strcmp(argv[i], "--quick")) check_quick = true;
        else if (!strcmp(argv[i], "--loose")) check_loose = true;
        else if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return usage(stdout, 0);
        else if (!value) return usage(stderr, 2);
        else if (!strcmp(argv[i], "--seed")) options.seed = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "-f")) options.filter = argv[++i];
        else if (!strcmp(argv[i], "--draw")) options.draw = strtoll(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--seconds")) options.seconds = strtod(argv[++i], NULL);
        else return usage(stderr, 2);
    }
    const struct sigaction act = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    const int caught[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) sigaction(caught[i], &act, NULL);

    const int levels = fmoe_cpu_level() + 1; /* before our own caps: what the CPU has and FMOE_MAX_ISA allows */
    check_top = levels - 1;
    const double begin = check_seconds();
    fmoe_kernels c_table;
    fmoe_kernels_fill(&c_table, 0);
    if (!options.list) printf("seed %" PRIu64 ", levels c to %s\n", options.seed, fmoe_cpu_level_name(levels - 1));
    for (check_level = 0; check_level < levels; check_level++) {
        fmoe_cpu_set_max_isa(fmoe_cpu_level_name(check_level));
        fmoe_kernels_fill(&check_table, check_level);
        if (options.bench) bench_level(check_level, &c_table);
        else check_one_level(check_level, options.seconds / levels);
    }
    fmoe_cpu_set_max_isa(NULL);
    if (options.list || options.bench) return 0;
    if (counts[0] + counts[1] == 0) {
        fprintf(stderr, "no check has '%s' in its name\n", options.filter);
        return 2;
    }
    for (int level = 0; level < fmoe_cpu_level_count(); level++) /* what is not there has not passed */
        if (!fmoe_cpu_level_available(level)) {
            printf("SKIP    kernels of %s: this CPU does not have it\n", fmoe_cpu_level_name(level));
            counts[2]++;
        }
    printf("%.1f s\n%d passed, %d failed, %d skipped\n", check_seconds() - begin, counts[0], counts[1], counts[2]);
    return counts[1] > 0;
}
