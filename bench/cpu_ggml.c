/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu_ggml.c - the layer of Qwen3-30B-A3B on quantised weights beside llama.cpp's on the CPU (the graph that it builds
 * for such a layer, of ggml's public operators; its 4-bit types in the repacked form that it chooses by default where
 * it has one). Everything has its turn in every round; medians. ggml is built by its users, as a shared library:
 *
 *   cc -O2 -Iinclude -I GGML/include bench/cpu_ggml.c build/libfusedmoe.a -L GGML/lib -lggml -lggml-cpu -lggml-base \
 *      -lm -lpthread -ldl -o build/cpu_ggml
 *   build/cpu_ggml [threads [rounds]]      lines of bench/results/cpu_ggml.csv, without their first four columns
 *
 * error: of the last of the layers, relative to our layer in bf16, on the weights before they were quantised. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "fusedmoe.h"

enum { H = 2048, I = 768, E = 128, K = 8, MOST = 512, ROUNDS = 200, LAYERS = 16 };
static const int64_t sizes[2][2] = {{2 * I, H}, {H, I}}; /* rows and columns of an expert's W1, W2 */

typedef struct item {
    const char *library, *name;
    int type; /* ggml_type */
    int repacked;
    int32_t code;
    uint32_t flags;
    int32_t rows, cols, scale_type;
    float zero, scale2;
    double bits;
} item;

static const item items[] = {
    {"fusedmoe", "bf16", .bits = 16},
    {"fusedmoe", "nf4", .code = FMOE_CODE_NF4, .flags = FMOE_QUANT_HIGH_FIRST, .rows = 1, .cols = 64, .bits = 4.5},
    {"fusedmoe", "mxfp4", .code = FMOE_CODE_E2M1, .rows = 1, .cols = 32, .scale_type = FMOE_SCALE_E8M0, .bits = 4.25},
    {"fusedmoe", "int4", .code = FMOE_CODE_U4, .rows = 1, .cols = 128, .zero = 8, .bits = 4.25},
    {"fusedmoe", "fp8", .code = FMOE_CODE_E4M3, .rows = 128, .cols = 128, .bits = 8},
    {"fusedmoe", "int8", .code = FMOE_CODE_S8, .rows = 1, .scale2 = 1.f / 127, .bits = 8},
    {"ggml", "bf16", .type = GGML_TYPE_BF16, .bits = 16},
    {"ggml", "q4_0", .type = GGML_TYPE_Q4_0, .repacked = 1, .bits = 4.5},
    {"ggml", "q4_k", .type = GGML_TYPE_Q4_K, .repacked = 1, .bits = 4.5},
    {"ggml", "mxfp4", .type = GGML_TYPE_MXFP4, .repacked = 1, .bits = 4.25},
    {"ggml", "q8_0", .type = GGML_TYPE_Q8_0, .bits = 8.5}};
enum { ITEMS = sizeof items / sizeof *items };

typedef struct tensor {
    fmoe_tensor t;
    int64_t shape[3];
} tensor;

typedef struct layer { /* of either library */
    fmoe_plan plan;
    fmoe_weights w;
    fmoe_quant quant[2];
    tensor codes[2], scale[2], scale2;
    struct ggml_tensor *ggml[2];
} layer;

static int threads = 2;
static ggml_backend_t backend;

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *memory(size_t bytes) /* in huge pages */
{
    const size_t page = (size_t)2 << 20;
    char *p = mmap(NULL, bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) fail("out of memory");
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

static uint16_t to_bf16(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t v)
{
    const uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static float normal(void)
{
    static uint64_t state = 88172645463325252u;
    float sum = 0; /* of twelve even draws */
    for (int i = 0; i < 12; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += (float)(state >> 40) * 0x1p-24f;
    }
    return sum - 6;
}

static void make_ours(layer *l, const item *f, uint16_t *const weights[2])
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS, d.dtype = FMOE_BF16, d.H = H, d.I = I, d.E = E, d.k = K, d.threads = threads;
    d.flags = f->code ? FMOE_QUANT : 0;
    if (fmoe_plan_create(&l->plan, &d) != FMOE_OK) fail(fmoe_last_error());
    for (int w = 0; w < 2; w++) {
        const int64_t rows = sizes[w][0], cols = sizes[w][1];
        tensor plain;
        make(&plain, weights[w], bf16, 3, E, rows, cols);
        if (!f->code) make(&l->codes[w], weights[w], bf16, 3, E, rows, cols);
        if (!f->code) continue;
        const int64_t row = f->code >= FMOE_CODE_E2M1 ? cols / 2 : cols;
        make(&l->codes[w], memory((size_t)(E * rows * row)), bytes, 3, E, rows, row);
        const int64_t groups = f->rows > 1 ? (rows + f->rows - 1) / f->rows : rows,
                      columns = f->cols ? (cols + f->cols - 1) / f->cols : 1;
        make(&l->scale[w], memory((size_t)(E * groups * columns) * 4), f->scale_type ? bytes : f32, 3, E, groups,
             columns);
        fmoe_quant *q = &l->quant[w];
        *q = FMOE_QUANT_INIT;
        q->code = f->code, q->flags = f->flags, q->zero = f->zero, q->scale_type = f->scale_type;
        q->group_rows = f->rows, q->group_cols = f->cols, q->scale = &l->scale[w].t;
        make(&l->scale2, (void *)&f->scale2, f32, 1, 1, 1, 1);
        if (f->scale2 != 0) q->scale2 = &l->scale2.t;
        const fmoe_quant_args a = {.size = sizeof a, .w = &plain.t, .codes = &l->codes[w].t, .quant = q};
        if (fmoe_quantize(&a) != FMOE_OK) fail(fmoe_last_error());
    }
    l->w = (fmoe_weights){.w1 = &l->codes[0].t, .w2 = &l->codes[1].t};
    if (f->code) l->w.quant1 = &l->quant[0], l->w.quant2 = &l->quant[1];
}

/* Where llama.cpp puts weights on a CPU: a repacked form if there is one for the type. */
static ggml_backend_buffer_type_t repacked_buffers(void)
{
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const ggml_backend_dev_get_extra_bufts_t extra =
        (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev),
                                                                              "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *b = extra ? extra(dev) : NULL; b && *b; b++)
        if (strstr(ggml_backend_buft_name(*b), "REPACK")) return *b;
    fail("this ggml has no repacked buffers (GGML_CPU_REPACK)");
    return NULL;
}

static void make_ggml(layer *l, const item *f, uint16_t *const weights[2])
{
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){2 * ggml_tensor_overhead(), NULL, true});
    for (int w = 0; w < 2; w++) l->ggml[w] = ggml_new_tensor_3d(ctx, f->type, sizes[w][1], sizes[w][0], E);
    if (!ggml_backend_alloc_ctx_tensors_from_buft(ctx,
                                                  f->repacked ? repacked_buffers() : ggml_backend_cpu_buffer_type()))
        fail("ggml: no memory for weights");
    for (int w = 0; w < 2; w++) {
        const int64_t rows = sizes[w][0], cols = sizes[w][1];
        const size_t all = ggml_nbytes(l->ggml[w]);
        char *data = memory(all);
        float *row = malloc((size_t)cols * 4);
        for (int64_t r = 0; r < E * rows && row; r++) {
            for (int64_t c = 0; c < cols; c++) row[c] = from_bf16(weights[w][r * cols + c]);
            ggml_quantize_chunk(f->type, row, data + (size_t)r * ggml_row_size(f->type, cols), 0, 1, cols, NULL);
        }
        free(row);
        ggml_backend_tensor_set(l->ggml[w], data, 0, all);
        munmap(data, all);
        if (f->repacked && !l->ggml[w]->extra) fprintf(stderr, "ggml %s: W%d is not repacked\n", f->name, w + 1);
    }
}

typedef struct graph {
    struct ggml_context *ctx;
    struct ggml_cgraph *g;
    struct ggml_tensor *out[LAYERS];
} graph;

/* Some layers in one graph, so that the cost of a graph's start is shared as in a model; each with ids of its own. */
static graph build(const layer *l, int64_t T, int layers, float *x, int32_t *ids, float *p)
{
    graph r;
    const size_t results = (size_t)layers * (size_t)T * (4 * K * (2 * I + I + H + H) + (size_t)4 * H * (K + 2));
    r.ctx = ggml_init((struct ggml_init_params){results + ((size_t)64 << 20), NULL, false});
    r.g = ggml_new_graph_custom(r.ctx, 4096, false);
    struct ggml_tensor *in = ggml_new_tensor_3d(r.ctx, GGML_TYPE_F32, H, 1, T);
    memcpy(in->data, x, (size_t)T * H * 4);
    for (int i = 0; i < layers; i++) {
        struct ggml_tensor *id = ggml_new_tensor_2d(r.ctx, GGML_TYPE_I32, K, T),
                           *weight = ggml_new_tensor_3d(r.ctx, GGML_TYPE_F32, 1, K, T);
        memcpy(id->data, ids + (size_t)i * (size_t)T * K, (size_t)T * K * 4);
        memcpy(weight->data, p, (size_t)T * K * 4);
        struct ggml_tensor *h = ggml_mul_mat_id(r.ctx, l->ggml[0], in, id);
        struct ggml_tensor *gate = ggml_view_3d(r.ctx, h, I, K, T, h->nb[1], h->nb[2], 0),
                           *up = ggml_view_3d(r.ctx, h, I, K, T, h->nb[1], h->nb[2], I * 4);
        struct ggml_tensor *y = ggml_mul_mat_id(r.ctx, l->ggml[1], ggml_swiglu_split(r.ctx, gate, up), id);
        y = ggml_mul(r.ctx, y, weight);
        struct ggml_tensor *sum = NULL;
        for (int j = 0; j < K; j++) {
            struct ggml_tensor *one = ggml_view_2d(r.ctx, y, H, T, y->nb[2], (size_t)j * y->nb[1]);
            sum = sum ? ggml_add(r.ctx, sum, one) : one;
        }
        r.out[i] = sum;
        ggml_build_forward_expand(r.g, sum);
    }
    return r;
}

/* K different experts for each token; those of single tokens take turns, so that weights come from memory. */
static void draw_ids(int32_t *ids, int64_t T, int round)
{
    for (int64_t i = 0; i < T * K; i++) {
        int again = 1;
        while (again) {
            ids[i] = T == 1 ? (int32_t)((round * K + i) % E) : rand() % E;
            again = 0;
            for (int64_t j = i / K * K; j < i; j++) again |= ids[j] == ids[i];
        }
    }
}

static void run_ours(const layer *l, int64_t T, int layers, uint16_t *x, int32_t *ids, float *p, uint16_t *out)
{
    static const size_t room = (size_t)512 << 20;
    static void *workspace;
    if (!workspace) workspace = memory(room);
    tensor tx, tout, tp, id;
    make(&tx, x, bf16, 2, T, H, 1), make(&tout, out, bf16, 2, T, H, 1), make(&tp, p, f32, 2, T, K, 1);
    for (int i = 0; i < layers; i++) {
        make(&id, ids + (size_t)i * (size_t)T * K, int32, 2, T, K, 1);
        fmoe_run run = FMOE_RUN_INIT;
        run.workspace = workspace, run.workspace_bytes = room;
        fmoe_experts_args a = {.size = sizeof a, .x = &tx.t, .ids = &id.t, .weights = &tp.t, .w = l->w, .out = &tout.t};
        if (fmoe_experts_forward(l->plan, &a, &run) != FMOE_OK) fail(fmoe_last_error());
    }
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
    static layer layers[ITEMS];
    static double times[ITEMS][ROUNDS], error[ITEMS];
    static float expected[MOST * H];
    if (argc > 1) threads = atoi(argv[1]);
    const int most = argc > 2 ? atoi(argv[2]) : 15, rounds = most < 1 ? 1 : most > ROUNDS ? ROUNDS : most;
    backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, threads);
    uint16_t *weights[2];
    for (int w = 0; w < 2; w++) { /* a million draws, repeated with an expert's own factor */
        const int64_t n = sizes[w][0] * sizes[w][1];
        weights[w] = memory((size_t)(E * n) * 2);
        for (int64_t i = 0; i < n; i++) weights[w][i] = to_bf16(0.02f * normal());
        for (int64_t e = 1; e < E; e++)
            for (int64_t i = 0; i < n; i++)
                weights[w][e * n + i] = to_bf16(from_bf16(weights[w][(i + 977 * e) % n]) * (1 + 0.01f * (float)e));
    }
    for (int f = 0; f < ITEMS; f++) (items[f].type ? make_ggml : make_ours)(&layers[f], &items[f], weights);
    float *x = memory((size_t)MOST * H * 4), *p = memory((size_t)MOST * K * 4);
    uint16_t *x16 = memory((size_t)MOST * H * 2), *out16 = memory((size_t)MOST * H * 2);
    int32_t *ids = memory((size_t)LAYERS * MOST * K * sizeof *ids);
    for (int i = 0; i < MOST * H; i++) x16[i] = to_bf16(normal()), x[i] = from_bf16(x16[i]);
    for (int i = 0; i < MOST * K; i++) p[i] = 0.125f;
    printf("level,threads,T,library,format,bits,ms,best_ms,error,rounds\n");
    static const struct {
        int T, layers, rounds;
    } lines[] = {{1, 16, 1}, {8, 8, 1}, {512, 1, 3}}; /* rounds: a third of them */
    for (int line = 0; line < 3; line++) {
        const int64_t T = lines[line].T;
        const int count = lines[line].layers, turns = (rounds + lines[line].rounds - 1) / lines[line].rounds;
        graph graphs[ITEMS] = {0};
        for (int i = 0; i < count; i++) draw_ids(ids + (size_t)i * (size_t)T * K, T, i);
        for (int f = 0; f < ITEMS; f++)
            if (items[f].type) graphs[f] = build(&layers[f], T, count, x, ids, p);
        for (int n = 0; n < turns; n++)
            for (int f = 0; f < ITEMS; f++) {
                usleep(60000); /* threads of the other library that wait in a loop are asleep by then */
                for (int again = 0; again < 2; again++) { /* the second is counted */
                    const double begin = now();
                    if (!items[f].type) run_ours(&layers[f], T, count, x16, ids, p, out16);
                    else if (ggml_backend_graph_compute(backend, graphs[f].g) != GGML_STATUS_SUCCESS)
                        fail("ggml: the graph failed");
                    times[f][n] = 1e3 * (now() - begin) / count;
                }
                if (n) continue;
                double difference = 0, all = 0; /* of the last layer */
                for (int i = 0; i < T * H; i++) {
                    const float v = items[f].type ? ((float *)graphs[f].out[count - 1]->data)[i] : from_bf16(out16[i]);
                    if (f == 0) expected[i] = v;
                    difference += (double)(v - expected[i]) * (double)(v - expected[i]);
                    all += (double)expected[i] * (double)expected[i];
                }
                error[f] = sqrt(difference / all);
            }
        for (int f = 0; f < ITEMS; f++) {
            qsort(times[f], (size_t)turns, sizeof **times, by_size);
            printf("%s,%d,%d,%s,%s,%g,%.3f,%.3f,%.4f,%d\n", fmoe_cpu_isa(), threads, (int)T, items[f].library,
                   items[f].name, items[f].bits, times[f][turns / 2], times[f][0], error[f], turns);
            if (graphs[f].ctx) ggml_free(graphs[f].ctx);
        }
        fflush(stdout);
    }
    return 0;
}
