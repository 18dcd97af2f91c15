/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_quant.c - a layer on quantised weights beside the one in bf16, on the CPU: 1 and 8 tokens beside a plain sweep
 * over the same bytes, and 512 tokens, forward and backward to x. All formats have their turn in every round; medians.
 *
 *   cc -O2 -Iinclude bench/cpu_quant.c build/libfusedmoe.a -lm -lpthread -ldl -o build/cpu_quant
 *   build/cpu_quant [threads [seconds a line [cpu]]]     lines of bench/results/cpu_quant.csv, without their first
 * three columns; cpu: processor time instead of wall time, one thread, lower quartiles, for a machine that is busy */
#define _GNU_SOURCE
#define FMOE_EXPERIMENTAL
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "fusedmoe.h"

enum { H = 2048, I = 1408, E = 32, K = 4, MOST = 512, ROUNDS = 2000 };

typedef struct format {
    const char *name;
    int32_t code;
    uint32_t flags;
    int32_t rows, cols, scale_type;
    float zero;
    int has_scale2;
    double bytes; /* a weight */
} format;

static const format formats[] = {{"bf16", 0, 0, 0, 0, 0, 0, 0, 2},
                                 {"nf4", FMOE_CODE_NF4, FMOE_QUANT_HIGH_FIRST, 1, 64, 0, 0, 0, 0.5625},
                                 {"mxfp4", FMOE_CODE_E2M1, 0, 1, 32, FMOE_SCALE_E8M0, 0, 0, 0.53125},
                                 {"int4", FMOE_CODE_U4, 0, 1, 128, 0, 8, 0, 0.53125},
                                 {"fp8", FMOE_CODE_E4M3, 0, 128, 128, 0, 0, 0, 1},
                                 {"int8", FMOE_CODE_S8, 0, 1, 0, 0, 0, 1, 1}};
enum { FORMATS = sizeof formats / sizeof *formats };

typedef struct tensor {
    fmoe_tensor t;
    int64_t shape[3];
} tensor;

typedef struct layer {
    fmoe_plan plan;
    fmoe_weights w;
    fmoe_quant quant[2];
    tensor codes[2], scale[2], scale2;
    size_t expert[2]; /* bytes of an expert's codes */
} layer;

static int cpu_time;

static double now(void)
{
    struct timespec t;
    clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Memory in huge pages, as the Python package puts weights. */
static void *memory(size_t bytes)
{
    const size_t page = (size_t)2 << 20;
    char *p = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) exit(1);
    p += page - (size_t)((uintptr_t)p % page);
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static void make(tensor *t, void *data, fmoe_datatype dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
    *t = (tensor){.shape = {a, b, c}};
    t->t = (fmoe_tensor){.data = data, .device = {FMOE_CPU, 0}, .ndim = ndim, .dtype = dtype, .shape = t->shape};
}

static const fmoe_datatype f32 = {2, 32, 1}, bf16 = {4, 16, 1}, bytes = {1, 8, 1}, int32 = {0, 32, 1};

static void make_layer(layer *l, const format *f, int threads)
{
    static float scale2 = 1.f / 127;
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS, d.dtype = FMOE_BF16, d.H = H, d.I = I, d.E = E, d.k = K, d.threads = threads;
    d.flags = f->code ? FMOE_QUANT : 0;
    if (fmoe_plan_create(&l->plan, &d) != FMOE_OK) puts(fmoe_last_error()), exit(1);
    for (int w = 0; w < 2; w++) {
        const int64_t rows = w ? H : 2 * I, cols = w ? I : H;
        const int64_t row = !f->code ? 2 * cols : f->code >= FMOE_CODE_E2M1 ? cols / 2 : cols;
        l->expert[w] = (size_t)(rows * row);
        uint32_t *data = memory(E * l->expert[w]), state = (uint32_t)(f->code + w);
        for (size_t i = 0; i < E * l->expert[w] / 4; i++) {
            state = state * 1664525u + 1013904223u;
            data[i] = !f->code                    ? 0x3c003c00u | (state >> 8 & 0x807f807fu)
                      : f->code == FMOE_CODE_E4M3 ? state >> 4 & 0xbfbfbfbfu
                                                  : state;
        }
        make(&l->codes[w], data, f->code ? bytes : bf16, 3, E, rows, f->code ? row : cols);
        if (!f->code) continue;
        const int64_t groups = f->rows > 1 ? (rows + f->rows - 1) / f->rows : rows,
                      columns = f->cols ? (cols + f->cols - 1) / f->cols : 1;
        float *scales = memory((size_t)(E * groups * columns) * sizeof *scales);
        for (int64_t i = 0; i < E * groups * columns; i++)
            if (f->scale_type) ((uint8_t *)scales)[i] = (uint8_t)(118 + i % 3);
            else scales[i] = 0.01f;
        make(&l->scale[w], scales, f->scale_type ? bytes : f32, 3, E, groups, columns);
        l->quant[w] = FMOE_QUANT_INIT;
        l->quant[w].code = f->code, l->quant[w].flags = f->flags, l->quant[w].zero = f->zero;
        l->quant[w].group_rows = f->rows, l->quant[w].group_cols = f->cols, l->quant[w].scale_type = f->scale_type;
        l->quant[w].scale = &l->scale[w].t;
        make(&l->scale2, &scale2, f32, 1, 1, 1, 1);
        if (f->has_scale2) l->quant[w].scale2 = &l->scale2.t;
    }
    l->w = (fmoe_weights){.w1 = &l->codes[0].t, .w2 = &l->codes[1].t};
    if (f->code) l->w.quant1 = &l->quant[0], l->w.quant2 = &l->quant[1];
}

/* k different experts for each token; returns how many are hit in all. Those of one token take turns, so that its
 * weights come from memory. */
static int draw_ids(int32_t *ids, int64_t T, int round, char hit[E])
{
    int n = 0;
    memset(hit, 0, E);
    for (int64_t i = 0; i < T * K; i++) {
        int again = 1;
        while (again) {
            ids[i] = T == 1 ? (int32_t)((round * K + i) % E) : rand() % E;
            again = 0;
            for (int64_t j = i / K * K; j < i; j++) again |= ids[j] == ids[i];
        }
        n += !hit[ids[i]];
        hit[ids[i]] = 1;
    }
    return n;
}

/* Seconds of a plain sweep over as many codes of other experts. */
static double sweep_seconds(const layer *l, const char hit[E], int threads)
{
    double total = 0;
    for (int e = 0; e < E; e++)
        for (int w = 0; w < 2 && hit[e]; w++) {
            const char *at = (const char *)l->codes[w].t.data + (size_t)((e + E / 2) % E) * l->expert[w];
            const double begin = now();
            const double gbytes = fmoe_cpu_read_gbytes(at, l->expert[w], threads);
            total += cpu_time ? now() - begin : (double)l->expert[w] / 1e9 / gbytes;
        }
    return total;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double middle(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_size);
    return v[cpu_time ? n / 4 : n / 2];
}

int main(int argc, char **argv)
{
    static layer layers[FORMATS];
    static double times[FORMATS][ROUNDS], sweeps[FORMATS][ROUNDS];
    const int threads = argc > 1 ? atoi(argv[1]) : 2;
    const double seconds = argc > 2 ? atof(argv[2]) : 5;
    cpu_time = argc > 3;
    for (int f = 0; f < FORMATS; f++) make_layer(&layers[f], &formats[f], threads);
    uint16_t *xs = memory(MOST * H * 2), *outs = memory(MOST * H * 2);
    float *ps = memory(MOST * K * sizeof *ps);
    int32_t *ids = memory(MOST * K * sizeof *ids);
    for (int i = 0; i < MOST * H; i++) xs[i] = (uint16_t)(0x3c00 + (rand() & 0x807f));
    for (int i = 0; i < MOST * K; i++) ps[i] = 0.25f;
    const size_t room = (size_t)512 << 20;
    void *workspace = memory(room), *saved = memory((size_t)MOST * K * 2 * I * 2);
    printf("level,threads,pass,T,format,ms,gb_s,sweep_gb_s,rounds\n");
    for (int line = 0; line < 4; line++) {
        const int64_t T = (const int64_t[]){1, 8, MOST, MOST}[line];
        const int back = line == 3;
        tensor x, out, p, id;
        char hit[E];
        double hits = 0;
        int n = 0;
        struct timespec begin, t;
        make(&x, xs, bf16, 2, T, H, 1), make(&out, outs, bf16, 2, T, H, 1);
        make(&p, ps, f32, 2, T, K, 1), make(&id, ids, int32, 2, T, K, 1);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        do {
            hits += draw_ids(ids, T, n, hit);
            for (int f = 0; f < FORMATS; f++) {
                layer *l = &layers[f];
                fmoe_run run = FMOE_RUN_INIT;
                run.workspace = workspace, run.workspace_bytes = room;
                fmoe_experts_args a = {.size = sizeof a, .x = &x.t, .ids = &id.t, .weights = &p.t, .w = l->w};
                a.out = &out.t;
                if (back) fmoe_saved_bytes(l->plan, T, &a.saved_bytes), a.saved = saved;
                double from = now();
                fmoe_status status = fmoe_experts_forward(l->plan, &a, &run);
                if (back) {
                    a.out = NULL, a.dout = &x.t, a.dx = &out.t;
                    from = now();
                    status = fmoe_experts_backward(l->plan, &a, &run);
                }
                times[f][n] = now() - from;
                if (status != FMOE_OK) puts(fmoe_last_error()), exit(1);
                if (T <= 8) sweeps[f][n] = sweep_seconds(l, hit, threads);
            }
            clock_gettime(CLOCK_MONOTONIC, &t);
        } while (++n < ROUNDS && (double)(t.tv_sec - begin.tv_sec) < seconds);
        for (int f = 0; f < FORMATS; f++) {
            const double ms = 1e3 * middle(times[f], n), all = hits / n * 3 * H * I * formats[f].bytes / 1e6;
            const double codes = hits / n * (double)(layers[f].expert[0] + layers[f].expert[1]) / 1e6;
            printf("%s,%d,%s,%d,%s,%.3f", fmoe_cpu_isa(), threads, back ? "bwd" : "fwd", (int)T, formats[f].name, ms);
            if (T <= 8) printf(",%.1f,%.1f,%d\n", all / ms, codes / (1e3 * middle(sweeps[f], n)), n);
            else printf(",,,%d\n", n);
        }
        fflush(stdout);
    }
    return 0;
}
