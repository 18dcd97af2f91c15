/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c - fusedmoe bench: time operations through the public API, each beside the ceiling measured in the same run.
 *
 * Flops count the true routed rows: 2*R*3*H*I for a gated forward, twice that for a backward. A time is the median of the
 * repetitions that fit the budget, after one to warm up. */
#define FMOE_EXPERIMENTAL
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fusedmoe.h"

#define MAX_VALUES 16

typedef struct list {
    int64_t v[MAX_VALUES];
    int n;
} list;

typedef struct options {
    const char *op;   /* experts */
    const char *pass; /* fwd, bwd, fwd+bwd; NULL: all three */
    list T, H, I, E, k, dtype, threads;
    double budget; /* seconds a row */
    const char *json;
    bool skew;     /* half of all tokens to one expert */
    bool cpu_time; /* for a busy machine: CPU seconds over threads instead of wall seconds */
} options;

typedef struct row {
    const char *op, *pass, *isa, *dtype;
    int64_t T, H, I, E, k;
    int threads;
    double ms, best_ms, gflops, ceiling; /* median and best time; the rate is the median's */
} row;

static const char *const dtype_names[] = {"?", "f32", "bf16", "f16"};

/* ---- tensors on the heap ---- */

typedef struct buffer {
    fmoe_tensor t;
    int64_t shape[3];
} buffer;

static void die(const char *what)
{
    fprintf(stderr, "fusedmoe bench: %s: %s\n", what, fmoe_last_error());
    exit(1);
}

static void must(fmoe_status status, const char *what)
{
    if (status != FMOE_OK) die(what);
}

static uint64_t random_state = 88172645463325252u;

static float random_unit(void) /* uniform in [-1, 1) */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (float)((double)(random_state >> 11) * 0x1p-52 - 1.0);
}

static void *allocate(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) die("out of memory");
    return p;
}

static buffer *make(int dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
    static const fmoe_datatype types[] = {{0, 32, 1}, {2, 32, 1}, {4, 16, 1}, {2, 16, 1}}; /* 0: int32 */
    buffer *x = allocate(sizeof *x);
    x->shape[0] = a;
    x->shape[1] = b;
    x->shape[2] = c;
    const size_t n = (size_t)(a * (ndim > 1 ? b : 1) * (ndim > 2 ? c : 1));
    x->t = (fmoe_tensor){.data = allocate(n * types[dtype].bits / 8), .device = {FMOE_CPU, 0}, .ndim = ndim, .dtype = types[dtype],
                         .shape = x->shape};
    memset(x->t.data, 0, n * types[dtype].bits / 8);
    return x;
}

/* Fill with small random values: 64 Ki of them, repeated. */
static buffer *make_random(int dtype, int ndim, int64_t a, int64_t b, int64_t c, float scale)
{
    buffer *x = make(dtype, ndim, a, b, c);
    const size_t n = (size_t)(a * (ndim > 1 ? b : 1) * (ndim > 2 ? c : 1));
    for (size_t i = 0; i < n; i++) {
        const float f = i < 65536 ? scale * random_unit() : 0;
        uint32_t u;
        memcpy(&u, &f, 4);
        if (dtype == FMOE_F32) ((float *)x->t.data)[i] = i < 65536 ? f : ((float *)x->t.data)[i % 65536];
        else if (dtype == FMOE_BF16) ((uint16_t *)x->t.data)[i] = i < 65536 ? (uint16_t)(u >> 16) : ((uint16_t *)x->t.data)[i % 65536];
        else { /* f16: sign, exponent and the upper bits of the mantissa; small values become zero */
            const int e = (int)(u >> 23 & 255) - 112;
            const uint32_t h = (u >> 16 & 0x8000) | (e > 0 ? (uint32_t)e << 10 | (u >> 13 & 1023) : 0);
            ((uint16_t *)x->t.data)[i] = i < 65536 ? (uint16_t)h : ((uint16_t *)x->t.data)[i % 65536];
        }
    }
    return x;
}

static void drop(buffer *x)
{
    if (!x) return;
    free(x->t.data);
    free(x);
}

/* ---- timing ---- */

static clockid_t the_clock = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(the_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct timed {
    void (*run)(void *);
    void *ctx;
} timed;

/* Median and best of as many repetitions as fit the budget. */
static double median_ms(timed f, double budget, double *best)
{
    double times[200];
    int n = 0;
    f.run(f.ctx);
    const double begin = now();
    while (n < 200 && (n < 3 || now() - begin < budget)) {
        const double start = now();
        f.run(f.ctx);
        times[n++] = now() - start;
    }
    qsort(times, (size_t)n, sizeof *times, by_value);
    *best = 1e3 * times[0];
    return 1e3 * times[n / 2];
}

/* ---- the experts layer ---- */

typedef struct layer {
    fmoe_plan plan;
    fmoe_experts_args forward, backward;
    fmoe_run run;
} layer;

static void layer_forward(void *ctx)
{
    layer *l = ctx;
    must(fmoe_experts_forward(l->plan, &l->forward, &l->run), "forward");
}

static void layer_backward(void *ctx)
{
    layer *l = ctx;
    must(fmoe_experts_backward(l->plan, &l->backward, &l->run), "backward");
}

static void layer_both(void *ctx)
{
    layer_forward(ctx);
    layer_backward(ctx);
}

static void emit(FILE *json, const row *r, bool *first)
{
    printf("%-8s %-7s %-11s %-4s T=%-6lld H=%lld I=%lld E=%lld k=%lld threads=%d  %9.3f ms %9.1f GF/s  ceiling %8.1f  %5.1f %%  (best %.3f ms, %.1f %%)\n", r->op,
           r->pass, r->isa, r->dtype, (long long)r->T, (long long)r->H, (long long)r->I, (long long)r->E, (long long)r->k, r->threads,
           r->ms, r->gflops, r->ceiling, 100 * r->gflops / r->ceiling, r->best_ms, 100 * r->gflops / r->ceiling * r->ms / r->best_ms);
    fflush(stdout);
    if (!json) return;
    fprintf(json, "%s\n  {\"op\": \"%s\", \"pass\": \"%s\", \"backend\": \"cpu\", \"isa_or_arch\": \"%s\", \"dtype\": \"%s\", \"T\": %lld, "
            "\"H\": %lld, \"I\": %lld, \"E\": %lld, \"k\": %lld, \"threads\": %d, \"ms\": %.6g, \"best_ms\": %.6g, \"gflops\": %.6g, "
            "\"ceiling_gflops\": %.6g, \"share\": %.4f, \"peer\": null}",
            *first ? "" : ",", r->op, r->pass, r->isa, r->dtype, (long long)r->T, (long long)r->H, (long long)r->I, (long long)r->E,
            (long long)r->k, r->threads, r->ms, r->best_ms, r->gflops, r->ceiling, r->gflops / r->ceiling);
    *first = false;
}

static void bench_experts(const options *o, row r, int dtype, FILE *json, bool *first)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = dtype;
    d.H = r.H;
    d.I = r.I;
    d.E = r.E;
    d.k = r.k;
    d.threads = r.threads;
    layer l = {.run = FMOE_RUN_INIT};
    must(fmoe_plan_create(&l.plan, &d), "plan");

    buffer *x = make_random(dtype, 2, r.T, r.H, 0, 1), *out = make(dtype, 2, r.T, r.H, 0), *dx = make(dtype, 2, r.T, r.H, 0);
    buffer *dout = make_random(dtype, 2, r.T, r.H, 0, 1);
    buffer *w1 = make_random(dtype, 3, r.E, 2 * r.I, r.H, 0.04f), *w2 = make_random(dtype, 3, r.E, r.H, r.I, 0.04f);
    buffer *dw1 = make(dtype, 3, r.E, 2 * r.I, r.H), *dw2 = make(dtype, 3, r.E, r.H, r.I);
    buffer *ids = make(0, 2, r.T, r.k, 0), *p = make(FMOE_F32, 2, r.T, r.k, 0), *dp = make(FMOE_F32, 2, r.T, r.k, 0);
    for (int64_t t = 0; t < r.T; t++)
        for (int64_t j = 0; j < r.k; j++) { /* k distinct experts, uniformly */
            int32_t *row_ids = (int32_t *)ids->t.data + t * r.k, e;
            bool taken;
            do {
                e = (int32_t)((double)(random_unit() + 1) * 0.5 * (double)r.E);
                if (o->skew && j == 0 && t % 2 == 0) e = 0;
                taken = e >= r.E;
                for (int64_t i = 0; i < j; i++) taken |= row_ids[i] == e;
            } while (taken);
            row_ids[j] = e;
            ((float *)p->t.data)[t * r.k + j] = 1.0f / (float)r.k;
        }
    size_t fwd, bwd, saved;
    must(fmoe_workspace_bytes(l.plan, FMOE_FORWARD, r.T, &fwd), "workspace");
    must(fmoe_workspace_bytes(l.plan, FMOE_BACKWARD, r.T, &bwd), "workspace");
    must(fmoe_saved_bytes(l.plan, r.T, &saved), "saved");
    l.run.workspace_bytes = fwd > bwd ? fwd : bwd;
    l.run.workspace = allocate(l.run.workspace_bytes);
    l.forward = (fmoe_experts_args){.size = sizeof l.forward, .x = &x->t, .ids = &ids->t, .weights = &p->t,
                                    .w = {.w1 = &w1->t, .w2 = &w2->t}, .saved = allocate(saved), .saved_bytes = saved};
    l.backward = l.forward;
    l.forward.out = &out->t;
    l.backward.dout = &dout->t;
    l.backward.dx = &dx->t;
    l.backward.dweights = &dp->t;
    l.backward.dw = (fmoe_weights){.w1 = &dw1->t, .w2 = &dw2->t};

    const double flops = 6.0 * (double)(r.T * r.k) * (double)r.H * (double)r.I;
    const struct {
        const char *pass;
        void (*run)(void *);
        double flops;
    } passes[] = {{"fwd", layer_forward, flops}, {"bwd", layer_backward, 2 * flops}, {"fwd+bwd", layer_both, 3 * flops}};
    r.op = "experts";
    for (int i = 0; i < 3; i++) {
        r.pass = passes[i].pass;
        if (o->pass && strcmp(o->pass, r.pass) != 0) continue;
        r.ceiling = fmoe_cpu_ceiling_gflops((fmoe_dtype)dtype, r.threads);
        const double share = o->cpu_time ? 1.0 / (double)r.threads : 1;
        r.ms = median_ms((timed){passes[i].run, &l}, o->budget, &r.best_ms) * share;
        r.best_ms *= share;
        r.gflops = passes[i].flops / r.ms * 1e-6;
        emit(json, &r, first);
    }
    must(fmoe_plan_destroy(&l.plan), "destroy");
    free(l.run.workspace);
    free(l.forward.saved);
    buffer *all[] = {x, out, dx, dout, w1, w2, dw1, dw2, ids, p, dp};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) drop(all[i]);
}

/* ---- the command line ---- */

static bool parse_list(const char *text, list *out)
{
    out->n = 0;
    while (*text && out->n < MAX_VALUES) {
        char *end;
        out->v[out->n++] = strtoll(text, &end, 10);
        if (end == text) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return *text == 0;
}

static bool parse_dtypes(const char *text, list *out)
{
    out->n = 0;
    char copy[64];
    snprintf(copy, sizeof copy, "%s", text);
    for (char *save, *name = strtok_r(copy, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        int found = 0;
        for (int i = 1; i <= 3; i++)
            if (strcmp(name, dtype_names[i]) == 0) found = i;
        if (!found || out->n == MAX_VALUES) return false;
        out->v[out->n++] = found;
    }
    return out->n > 0;
}

static int usage(void)
{
    fputs("usage: fusedmoe bench [--op experts] [--pass fwd|bwd|fwd+bwd] [--T 64,512] [--H 2048] [--I 1408] [--E 32] [--k 4] [--dtype bf16,f32,f16]\n"
          "                      [--threads 2] [--seconds 1] [--skew] [--cpu-time] [--json FILE]\n"
          "Times the layer forward, backward and both; every share is of a register-only multiply-add loop on the same\n"
          "threads, measured in the same run. --cpu-time divides CPU seconds by the threads: for a machine that is busy otherwise.\n",
          stderr);
    return 2;
}

int fmoe_bench_main(int argc, char **argv)
{
    options o = {.op = "experts", .T = {{16, 64, 512}, 3}, .H = {{2048}, 1}, .I = {{1408}, 1}, .E = {{32}, 1}, .k = {{4}, 1},
                 .dtype = {{FMOE_F32, FMOE_BF16}, 2}, .threads = {{0}, 1}, .budget = 1};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        const struct {
            const char *name;
            list *to;
        } lists[] = {{"--T", &o.T}, {"--H", &o.H}, {"--I", &o.I}, {"--E", &o.E}, {"--k", &o.k}, {"--threads", &o.threads}};
        bool known = false;
        for (size_t j = 0; j < sizeof lists / sizeof *lists; j++)
            if (strcmp(argv[i], lists[j].name) == 0) known = value && parse_list(value, lists[j].to);
        if (strcmp(argv[i], "--skew") == 0) {
            o.skew = true;
            continue;
        }
        if (strcmp(argv[i], "--cpu-time") == 0) {
            o.cpu_time = true;
            the_clock = CLOCK_PROCESS_CPUTIME_ID;
            continue;
        }
        if (strcmp(argv[i], "--dtype") == 0) known = value && parse_dtypes(value, &o.dtype);
        if (strcmp(argv[i], "--seconds") == 0) known = value && (o.budget = strtod(value, NULL)) > 0;
        if (strcmp(argv[i], "--json") == 0) known = (o.json = value) != NULL;
        if (strcmp(argv[i], "--pass") == 0) known = (o.pass = value) != NULL;
        if (strcmp(argv[i], "--op") == 0) known = value && strcmp(value, "experts") == 0;
        if (!known) return usage();
        i++;
    }
    FILE *json = o.json ? fopen(o.json, "w") : NULL;
    if (o.json && !json) {
        perror(o.json);
        return 1;
    }
    bool first = true;
    if (json) fputs("[", json);
    printf("stream: %.1f GB/s read\n", fmoe_cpu_stream_gbytes((int)o.threads.v[0]));
    for (int a = 0; a < o.dtype.n; a++)
        for (int b = 0; b < o.T.n; b++)
            for (int c = 0; c < o.H.n; c++)
                for (int d = 0; d < o.I.n; d++)
                    for (int e = 0; e < o.E.n; e++)
                        for (int f = 0; f < o.k.n; f++)
                            for (int g = 0; g < o.threads.n; g++) {
                                const row r = {.isa = fmoe_cpu_isa(), .dtype = dtype_names[o.dtype.v[a]], .T = o.T.v[b],
                                               .H = o.H.v[c], .I = o.I.v[d], .E = o.E.v[e], .k = o.k.v[f],
                                               .threads = o.threads.v[g] > 0 ? (int)o.threads.v[g] : (int)sysconf(_SC_NPROCESSORS_ONLN)};
                                bench_experts(&o, r, (int)o.dtype.v[a], json, &first);
                            }
    if (json) {
        fputs("\n]\n", json);
        fclose(json);
    }
    return 0;
}
