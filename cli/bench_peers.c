/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_peers.c - yardsticks: the forward of the layer as a loop over experts on somebody else's matrix product.
 *
 * The passes around the products (gather, activation, weighted sum) are ours, whole and on all threads; the products
 * are the peer's, one call an expert on all threads, weights packed beforehand where the peer can. Peers are opened at
 * run time when --peers asks for them: neither the library nor this command is linked to any. */
#include "bench_peers.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A peer's product y[rows,N] = x[rows,K] . w[N,K]^T. */
typedef struct engine {
    const char *name;
    bool (*open)(int threads, int dtype);
    void *(*matrix)(const void *w, int64_t N, int64_t K, int64_t rows, int dtype); /* packed for so many rows */
    void (*multiply)(void *matrix, const void *x, void *y);
    void (*drop)(void *matrix);
} engine;

static void *symbol(void *library, const char *name)
{
    void *s = library ? dlsym(library, name) : NULL;
    if (library && !s) fprintf(stderr, "fusedmoe bench: a peer lacks %s\n", name);
    return s;
}

/* ---- OpenBLAS: f32, no way to pack beforehand ---- */

typedef void sgemm_fn(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                      const float *b, int ldb, float beta, float *c, int ldc);
static sgemm_fn *sgemm;

typedef struct plain_matrix {
    const float *w;
    int N, K, rows;
} plain_matrix;

static bool openblas_open(int threads, int dtype)
{
    void *library = dtype == FMOE_F32 ? dlopen("libopenblas.so.0", RTLD_NOW) : NULL;
    void (*set_threads)(int) = (void (*)(int))(uintptr_t)symbol(library, "openblas_set_num_threads");
    sgemm = (sgemm_fn *)(uintptr_t)symbol(library, "cblas_sgemm");
    if (sgemm && set_threads) set_threads(threads);
    return sgemm && set_threads;
}

static void *openblas_matrix(const void *w, int64_t N, int64_t K, int64_t rows, int dtype)
{
    (void)dtype;
    plain_matrix *m = malloc(sizeof *m);
    if (m) *m = (plain_matrix){w, (int)N, (int)K, (int)rows};
    return m;
}

static void openblas_multiply(void *matrix, const void *x, void *y)
{
    const plain_matrix *m = matrix;
    enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };
    sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, m->rows, m->N, m->K, 1, x, m->K, m->w, m->K, 0, y, m->N);
}

/* ---- oneDNN 2: f32 and bf16, weights in the form it likes best ---- */

#if defined(FMOE_WITH_DNNL)
#include <oneapi/dnnl/dnnl.h>
#if DNNL_VERSION_MAJOR == 2

#define DNNL_CALLS(X)                                                                                                  \
    X(engine_create)                                                                                                   \
    X(stream_create)                                                                                                   \
    X(stream_wait)                                                                                                     \
    X(memory_desc_init_by_tag)                                                                                         \
    X(matmul_desc_init)                                                                                                \
    X(primitive_desc_create)                                                                                           \
    X(primitive_desc_query_md)                                                                                         \
    X(primitive_desc_destroy)                                                                                          \
    X(memory_create)                                                                                                   \
    X(memory_destroy)                                                                                                  \
    X(memory_set_data_handle)                                                                                          \
    X(reorder_primitive_desc_create)                                                                                   \
    X(primitive_create)                                                                                                \
    X(primitive_execute)                                                                                               \
    X(primitive_destroy)
#define POINTER(name) __typeof__(dnnl_##name) *name;
static struct {
    DNNL_CALLS(POINTER)
} dnnl;
static dnnl_engine_t dnnl_device;
static dnnl_stream_t dnnl_queue;

static bool dnnl_open(int threads, int dtype)
{
    (void)dtype;
    char count[16];
    snprintf(count, sizeof count, "%d", threads);
    setenv("OMP_NUM_THREADS", count, 1); /* read when its OpenMP starts: the first count of a run holds */
    void *library = dlopen("libdnnl.so.2", RTLD_NOW);
    bool all = library != NULL;
#define LOAD(name) all = (dnnl.name = (__typeof__(dnnl_##name) *)(uintptr_t)symbol(library, "dnnl_" #name)) && all;
    DNNL_CALLS(LOAD)
    return all &&
           (dnnl_device || (dnnl.engine_create(&dnnl_device, dnnl_cpu, 0) == dnnl_success &&
                            dnnl.stream_create(&dnnl_queue, dnnl_device, dnnl_stream_default_flags) == dnnl_success));
}

typedef struct dnnl_matrix {
    dnnl_primitive_t product;
    dnnl_memory_t w, x, y;
} dnnl_matrix;

static void *dnnl_matrix_of(const void *w, int64_t N, int64_t K, int64_t rows, int dtype)
{
    const dnnl_data_type_t type = dtype == FMOE_F32 ? dnnl_f32 : dnnl_bf16;
    const dnnl_dims_t xs = {rows, K}, ws = {K, N}, ys = {rows, N};
    dnnl_memory_desc_t xd, wd, plain, yd;
    dnnl_matmul_desc_t md;
    dnnl_primitive_desc_t pd = NULL, rd = NULL;
    dnnl_primitive_t reorder = NULL;
    dnnl_memory_t from = NULL;
    dnnl_matrix *m = calloc(1, sizeof *m);
    bool ok = m && dnnl.memory_desc_init_by_tag(&xd, 2, xs, type, dnnl_ab) == dnnl_success &&
              dnnl.memory_desc_init_by_tag(&wd, 2, ws, type, dnnl_format_tag_any) == dnnl_success &&
              dnnl.memory_desc_init_by_tag(&plain, 2, ws, type, dnnl_ba) == dnnl_success &&
              dnnl.memory_desc_init_by_tag(&yd, 2, ys, type, dnnl_ab) == dnnl_success &&
              dnnl.matmul_desc_init(&md, &xd, &wd, NULL, &yd) == dnnl_success &&
              dnnl.primitive_desc_create(&pd, &md, NULL, dnnl_device, NULL) == dnnl_success;
    const dnnl_memory_desc_t *best = ok ? dnnl.primitive_desc_query_md(pd, dnnl_query_weights_md, 0) : NULL;
    ok = ok && best && dnnl.memory_create(&m->w, best, dnnl_device, DNNL_MEMORY_ALLOCATE) == dnnl_success &&
         dnnl.memory_create(&from, &plain, dnnl_device, (void *)(uintptr_t)w) == dnnl_success &&
         dnnl.memory_create(&m->x, &xd, dnnl_device, DNNL_MEMORY_NONE) == dnnl_success &&
         dnnl.memory_create(&m->y, &yd, dnnl_device, DNNL_MEMORY_NONE) == dnnl_success &&
         dnnl.reorder_primitive_desc_create(&rd, &plain, dnnl_device, best, dnnl_device, NULL) == dnnl_success &&
         dnnl.primitive_create(&reorder, rd) == dnnl_success && dnnl.primitive_create(&m->product, pd) == dnnl_success;
    if (ok) {
        const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, m->w}};
        dnnl.primitive_execute(reorder, dnnl_queue, 2, args);
        dnnl.stream_wait(dnnl_queue);
    }
    if (reorder) dnnl.primitive_destroy(reorder);
    if (from) dnnl.memory_destroy(from);
    if (rd) dnnl.primitive_desc_destroy(rd);
    if (pd) dnnl.primitive_desc_destroy(pd);
    if (ok) return m;
    free(m);
    return NULL;
}

static void dnnl_multiply(void *matrix, const void *x, void *y)
{
    dnnl_matrix *m = matrix;
    dnnl.memory_set_data_handle(m->x, (void *)(uintptr_t)x);
    dnnl.memory_set_data_handle(m->y, y);
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, m->x}, {DNNL_ARG_WEIGHTS, m->w}, {DNNL_ARG_DST, m->y}};
    dnnl.primitive_execute(m->product, dnnl_queue, 3, args);
    dnnl.stream_wait(dnnl_queue);
}

static void dnnl_drop(void *matrix)
{
    dnnl_matrix *m = matrix;
    dnnl.primitive_destroy(m->product);
    dnnl.memory_destroy(m->w);
    dnnl.memory_destroy(m->x);
    dnnl.memory_destroy(m->y);
    free(m);
}
#define HAVE_DNNL
#endif
#endif

static const engine engines[] = {
#if defined(HAVE_DNNL)
    {"onednn", dnnl_open, dnnl_matrix_of, dnnl_multiply, dnnl_drop},
#endif
    {"openblas", openblas_open, openblas_matrix, openblas_multiply, free},
};

const char *bench_peer_name(int i) { return i < (int)(sizeof engines / sizeof *engines) ? engines[i].name : NULL; }

/* ---- the layer around them ---- */

typedef struct peer_state {
    const engine *engine;
    const fmoe_experts_args *args; /* whose layer it is */
    fmoe_plan permute, activation;
    fmoe_run run;
    int64_t E, *offset; /* [E+1] */
    void **m1, **m2;    /* [E] */
    fmoe_tensor xp, h, a, y, map, counts;
    int64_t shapes[6][2];
} peer_state;

static void must(fmoe_status status)
{
    if (status == FMOE_OK) return;
    fprintf(stderr, "fusedmoe bench: %s\n", fmoe_last_error());
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) exit(1);
    memset(p, 0, bytes);
    return p;
}

static void set(fmoe_tensor *t, int64_t *shape, fmoe_datatype type, int64_t rows, int64_t columns)
{
    shape[0] = rows;
    shape[1] = columns;
    *t = (fmoe_tensor){.data = allocate((size_t)(rows * (columns ? columns : 1)) * type.bits / 8),
                       .device = {FMOE_CPU, 0},
                       .ndim = columns ? 2 : 1,
                       .dtype = type,
                       .shape = shape};
}

static char *row_of(const fmoe_tensor *t, int64_t row)
{
    return (char *)t->data + row * t->shape[1] * t->dtype.bits / 8;
}

static void each_expert(peer_state *s, void **m, const fmoe_tensor *x, const fmoe_tensor *y)
{
    for (int64_t e = 0; e < s->E; e++)
        if (m[e]) s->engine->multiply(m[e], row_of(x, s->offset[e]), row_of(y, s->offset[e]));
}

static void forward(void *p)
{
    peer_state *s = p;
    const fmoe_experts_args *f = s->args;
    const fmoe_permute_args in = {
        .size = sizeof in, .x = f->x, .ids = f->ids, .xp = &s->xp, .map = &s->map, .counts = &s->counts};
    const fmoe_activation_args act = {.size = sizeof act, .h = &s->h, .a = &s->a};
    const fmoe_unpermute_args out = {
        .size = sizeof out, .y = &s->y, .map = &s->map, .weights = f->weights, .out = f->out};
    must(fmoe_permute_forward(s->permute, &in, &s->run));
    each_expert(s, s->m1, &s->xp, &s->h);
    must(fmoe_activation_forward(s->activation, &act, &s->run));
    each_expert(s, s->m2, &s->a, &s->y);
    must(fmoe_unpermute_forward(s->permute, &out, &s->run));
}

static void drop(void *p)
{
    peer_state *s = p;
    for (int64_t e = 0; e < s->E; e++) {
        if (s->m1[e]) s->engine->drop(s->m1[e]);
        if (s->m2[e]) s->engine->drop(s->m2[e]);
    }
    fmoe_tensor *const tensors[] = {&s->xp, &s->h, &s->a, &s->y, &s->map, &s->counts};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) free(tensors[i]->data);
    fmoe_plan_destroy(&s->permute);
    fmoe_plan_destroy(&s->activation);
    free(s->run.workspace);
    free(s->offset);
    free(s->m1);
    free(s->m2);
    free(s);
}

bool bench_peer(int i, const bench_shape *b, const fmoe_experts_args *f, bench_case *c)
{
    const engine *peer = &engines[i];
    if ((b->dtype != FMOE_F32 && b->dtype != FMOE_BF16) || !peer->open(b->threads, b->dtype)) return false;
    peer_state *s = calloc(1, sizeof *s);
    if (!s) return false;
    const int64_t R = b->T * b->k;
    const fmoe_datatype type = f->x->dtype, integer = {0, 32, 1};
    s->engine = peer;
    s->args = f;
    s->E = b->E;
    s->offset = calloc((size_t)b->E + 1, sizeof *s->offset);
    s->m1 = calloc((size_t)b->E, sizeof *s->m1);
    s->m2 = calloc((size_t)b->E, sizeof *s->m2);
    if (!s->offset || !s->m1 || !s->m2) exit(1);
    set(&s->xp, s->shapes[0], type, R, b->H);
    set(&s->h, s->shapes[1], type, R, 2 * b->I);
    set(&s->a, s->shapes[2], type, R, b->I);
    set(&s->y, s->shapes[3], type, R, b->H);
    set(&s->map, s->shapes[4], integer, R, 0);
    set(&s->counts, s->shapes[5], integer, b->E, 0);
    fmoe_desc d = {.size = sizeof d, .op = FMOE_OP_PERMUTE, .H = b->H, .E = b->E, .k = b->k, .dtype = b->dtype};
    /* Of few rows on one thread: the peer's own wait busily on the others. */
    const int threads = R * b->H < 1 << 20 ? 1 : b->threads;
    d.threads = threads;
    must(fmoe_plan_create(&s->permute, &d));
    d = (fmoe_desc){.size = sizeof d, .op = FMOE_OP_ACTIVATION, .I = b->I, .dtype = b->dtype, .threads = threads};
    must(fmoe_plan_create(&s->activation, &d));
    s->run = FMOE_RUN_INIT;
    must(fmoe_workspace_bytes(s->permute, FMOE_FORWARD, b->T, &s->run.workspace_bytes));
    s->run.workspace = allocate(s->run.workspace_bytes);
    for (int64_t j = 0; j < R; j++) s->offset[((const int32_t *)f->ids->data)[j] + 1]++;
    const size_t element = type.bits / 8;
    for (int64_t e = 0; e < b->E; e++) {
        const int64_t rows = s->offset[e + 1];
        s->offset[e + 1] += s->offset[e];
        if (!rows) continue;
        const size_t at = (size_t)(e * b->I * b->H) * element;
        s->m1[e] = peer->matrix((char *)f->w.w1->data + 2 * at, 2 * b->I, b->H, rows, b->dtype);
        s->m2[e] = peer->matrix((char *)f->w.w2->data + at, b->H, b->I, rows, b->dtype);
        if (!s->m1[e] || !s->m2[e]) {
            fprintf(stderr, "fusedmoe bench: %s has no such product\n", peer->name);
            drop(s);
            return false;
        }
    }
    *c = (bench_case){.forward = forward, .state = s, .forward_flops = 6.0 * (double)(R * b->H * b->I), .drop = drop};
    return true;
}
