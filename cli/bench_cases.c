/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_cases.c - the operations that fusedmoe bench times, with random data on the heap.
 *
 * Flops count the true routed rows: 2*R*3*H*I for a gated forward, twice that for a backward. Bytes count each row read
 * or written once. */
#define FMOE_EXPERIMENTAL
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "fusedmoe.h"

const char *const bench_op_names[] = {"experts", "block", "gmm", "activation", "permute", "unpermute", "route", NULL};

enum { INT32 = 0, MAX_BUFFERS = 32 };

typedef struct buffer {
    fmoe_tensor t;
    int64_t shape[3];
} buffer;

typedef struct state {
    fmoe_plan plan;
    fmoe_run run;
    void *saved;
    buffer *buffers[MAX_BUFFERS];
    int n_buffers;
    void *packed;
    size_t packed_bytes;
    bench_shape shape;
    union {
        fmoe_experts_args experts;
        fmoe_block_args block;
        fmoe_gmm_args gmm;
        fmoe_activation_args activation;
        fmoe_permute_args permute;
        fmoe_unpermute_args unpermute;
        fmoe_route_args route;
    } fwd, bwd;
} state;

static void die(const char *what)
{
    fprintf(stderr, "fusedmoe bench: %s: %s\n", what, fmoe_last_error());
    exit(1);
}

static void must(fmoe_status status, const char *what)
{
    if (status != FMOE_OK) die(what);
}

/* ---- data ---- */

static uint64_t random_state = 88172645463325252u;

static double random_unit(void) /* uniform in [-1, 1) */
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) * 0x1p-52 - 1.0;
}

static void *allocate(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 1)) die("out of memory");
    return p;
}

/* What is large, in the pages that were asked for. Written once: a page is there when it has been written. */
static void *allocate_in(int pages, size_t bytes)
{
    enum { HUGE = 2 << 20 };
    void *p = NULL;
    if (pages == PAGES_AS_IS || bytes < HUGE) return memset(allocate(bytes), 0, bytes);
    if (posix_memalign(&p, HUGE, bytes)) die("out of memory");
#if defined(MADV_HUGEPAGE) && defined(MADV_NOHUGEPAGE)
    if (madvise(p, bytes, pages == PAGES_HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE)) perror("fusedmoe bench: madvise");
#endif
    return memset(p, 0, bytes);
}

/* A tensor of up to three dimensions (0: none), owned by the state. */
static const fmoe_tensor *tensor(state *s, int dtype, int64_t a, int64_t b, int64_t c)
{
    static const fmoe_datatype types[] = {
        [INT32] = {0, 32, 1}, [FMOE_F32] = {2, 32, 1}, [FMOE_BF16] = {4, 16, 1}, [FMOE_F16] = {2, 16, 1}};
    buffer *x = allocate(sizeof *x);
    const size_t bytes = (size_t)(a * (b ? b : 1) * (c ? c : 1)) * types[dtype].bits / 8;
    *x = (buffer){.shape = {a, b, c}};
    x->t = (fmoe_tensor){.data = allocate_in(s->shape.pages, bytes),
                         .device = {FMOE_CPU, 0},
                         .ndim = b ? c ? 3 : 2 : 1,
                         .dtype = types[dtype],
                         .shape = x->shape};
    s->buffers[s->n_buffers++] = x;
    return &x->t;
}

static size_t elements(const fmoe_tensor *t)
{
    size_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= (size_t)t->shape[i];
    return n;
}

/* Uniform in [-scale, scale): 64 Ki values, repeated. Rounding toward zero is good enough here. */
static const fmoe_tensor *random_tensor(state *s, int dtype, int64_t a, int64_t b, int64_t c, double scale)
{
    enum { PERIOD = 65536 };
    const fmoe_tensor *t = tensor(s, dtype, a, b, c);
    const size_t n = elements(t), drawn = n < PERIOD ? n : PERIOD;
    for (size_t i = 0; i < drawn; i++) {
        const float f = (float)(scale * random_unit());
        uint32_t u;
        memcpy(&u, &f, 4);
        if (dtype == FMOE_F32) ((float *)t->data)[i] = f;
        else if (dtype == FMOE_BF16) ((uint16_t *)t->data)[i] = (uint16_t)(u >> 16);
        else { /* f16: small values become zero */ const int e = (int)(u >> 23 & 255) - 112;
            ((uint16_t *)t->data)[i] =
                (uint16_t)((u >> 16 & 0x8000) | (e > 0 ? (uint32_t)e << 10 | (u >> 13 & 1023) : 0));
        }
    }
    const size_t size = t->dtype.bits / 8;
    for (size_t i = drawn; i < n; i += PERIOD)
        memcpy((char *)t->data + i * size, t->data, (n - i < PERIOD ? n - i : PERIOD) * size);
    return t;
}

/* k distinct experts a token, uniformly. */
static const fmoe_tensor *random_ids(state *s, const bench_shape *b)
{
    const fmoe_tensor *t = tensor(s, INT32, b->T, b->k, 0);
    for (int64_t i = 0; i < b->T; i++)
        for (int64_t j = 0; j < b->k; j++) {
            int32_t *row = (int32_t *)t->data + i * b->k, e;
            bool taken;
            do {
                e = (int32_t)((random_unit() + 1) * 0.5 * (double)b->E);
                if (b->skew && j == 0 && i % 2 == 0) e = 0;
                taken = e >= b->E;
                for (int64_t o = 0; o < j; o++) taken |= row[o] == e;
            } while (taken);
            row[j] = e;
        }
    return t;
}

static const fmoe_tensor *even_weights(state *s, const bench_shape *b)
{
    const fmoe_tensor *p = tensor(s, FMOE_F32, b->T, b->k, 0);
    for (int64_t i = 0; i < b->T * b->k; i++) ((float *)p->data)[i] = 1.0f / (float)b->k;
    return p;
}

/* ---- plans ---- */

static void prepare(state *s, fmoe_desc d, const bench_shape *b, int64_t rows)
{
    size_t forward, backward, saved;
    d.dtype = b->dtype;
    d.threads = b->threads;
    must(fmoe_plan_create(&s->plan, &d), "plan");
    must(fmoe_workspace_bytes(s->plan, FMOE_FORWARD, rows, &forward), "workspace");
    must(fmoe_workspace_bytes(s->plan, FMOE_BACKWARD, rows, &backward), "workspace");
    must(fmoe_saved_bytes(s->plan, rows, &saved), "saved");
    s->run = FMOE_RUN_INIT;
    s->run.workspace_bytes = forward > backward ? forward : backward;
    s->run.workspace = allocate(s->run.workspace_bytes);
    s->saved = allocate(saved);
    if (d.op == FMOE_OP_EXPERTS) s->fwd.experts.saved_bytes = saved;
    if (d.op == FMOE_OP_BLOCK) s->fwd.block.saved_bytes = saved;
}

static void drop(void *p)
{
    state *s = p;
    must(fmoe_plan_destroy(&s->plan), "destroy");
    for (int i = 0; i < s->n_buffers; i++) {
        free(s->buffers[i]->t.data);
        free(s->buffers[i]);
    }
    free(s->run.workspace);
    free(s->saved);
    free(s->packed);
    free(s);
}

#define PASSES(name, call)                                                                                             \
    static void name##_forward(void *p)                                                                                \
    {                                                                                                                  \
        state *s = p;                                                                                                  \
        must(fmoe_##call##_forward(s->plan, &s->fwd.name, &s->run), #name " forward");                                 \
    }                                                                                                                  \
    static void name##_backward(void *p)                                                                               \
    {                                                                                                                  \
        state *s = p;                                                                                                  \
        must(fmoe_##call##_backward(s->plan, &s->bwd.name, &s->run), #name " backward");                               \
    }
PASSES(experts, experts)
PASSES(block, block)
PASSES(gmm, grouped_matmul)
PASSES(activation, activation)
PASSES(permute, permute)
PASSES(unpermute, unpermute)
PASSES(route, route)

/* ---- cases ---- */

/* Whether expert e has rows. */
static bool touched(const bench_shape *b, const fmoe_tensor *ids, int64_t e)
{
    for (int64_t i = 0; i < b->T * b->k; i++)
        if (((const int32_t *)ids->data)[i] == e) return true;
    return false;
}

/* Bytes of the weights that these ids touch. */
static double touched_bytes(const bench_shape *b, const fmoe_tensor *ids)
{
    double n = 0;
    for (int64_t e = 0; e < b->E; e++) n += touched(b, ids, e);
    return n * 3 * (double)(b->H * b->I) * (b->dtype == FMOE_F32 ? 4 : 2);
}

static double sweep_of(const void *data, size_t bytes, int threads)
{
    return 1e-9 * (double)bytes / fmoe_cpu_read_gbytes(data, bytes, threads);
}

/* The same bytes as the forward reads, as plain streams. In a packed buffer W1 comes first, expert after expert; the
 * experts of W2 take turns there, so as many bytes are read in one piece. */
static double experts_sweep(void *p, bool packed)
{
    state *s = p;
    const bench_shape *b = &s->shape;
    const fmoe_experts_args *f = &s->fwd.experts;
    const size_t w2 = (size_t)(b->H * b->I) * f->w.w2->dtype.bits / 8, third = s->packed_bytes / 3 / (size_t)b->E;
    const char *const from1 = packed ? s->packed : f->w.w1->data;
    const char *const from2 = packed ? from1 + 2 * third * (size_t)b->E : f->w.w2->data;
    const size_t bytes = packed ? third : w2;
    double seconds = 0;
    for (int64_t e = 0; e < b->E; e++) {
        if (!touched(b, f->ids, e)) continue;
        seconds += sweep_of(from1 + 2 * bytes * (size_t)e, 2 * bytes, b->threads);
        seconds += sweep_of(from2 + bytes * (size_t)e, bytes, b->threads);
    }
    return seconds;
}

static void experts_packed(void *p)
{
    state *s = p;
    fmoe_experts_args a = s->fwd.experts;
    a.w = (fmoe_weights){.packed = s->packed, .packed_bytes = s->packed_bytes};
    must(fmoe_experts_forward(s->plan, &a, &s->run), "experts with packed weights");
}

/* False where the plan reads weights as they are stored. */
static bool pack(state *s)
{
    fmoe_pack_args a = {.size = sizeof a, .w = s->fwd.experts.w};
    must(fmoe_packed_bytes(s->plan, &a.packed_bytes), "packed weights");
    if (!a.packed_bytes) return false;
    s->packed = a.packed = allocate_in(s->shape.pages, a.packed_bytes);
    s->packed_bytes = a.packed_bytes;
    must(fmoe_pack_weights(s->plan, &a, &s->run), "packed weights");
    return true;
}

static bench_case make_experts(state *s, const bench_shape *b)
{
    const fmoe_desc d = {.size = sizeof d, .op = FMOE_OP_EXPERTS, .H = b->H, .I = b->I, .E = b->E, .k = b->k};
    fmoe_experts_args *f = &s->fwd.experts, *g = &s->bwd.experts;
    *f = (fmoe_experts_args){.size = sizeof *f};
    prepare(s, d, b, b->T);
    f->x = random_tensor(s, b->dtype, b->T, b->H, 0, 1);
    f->ids = random_ids(s, b);
    f->weights = even_weights(s, b);
    f->w.w1 = random_tensor(s, b->dtype, b->E, 2 * b->I, b->H, 0.04);
    f->w.w2 = random_tensor(s, b->dtype, b->E, b->H, b->I, 0.04);
    f->saved = s->saved;
    *g = *f;
    f->out = tensor(s, b->dtype, b->T, b->H, 0);
    g->dout = random_tensor(s, b->dtype, b->T, b->H, 0, 1);
    g->dx = tensor(s, b->dtype, b->T, b->H, 0);
    g->dweights = tensor(s, FMOE_F32, b->T, b->k, 0);
    if (!b->forward_only) {
        g->dw.w1 = tensor(s, b->dtype, b->E, 2 * b->I, b->H);
        g->dw.w2 = tensor(s, b->dtype, b->E, b->H, b->I);
    }
    const double flops = 6.0 * (double)(b->T * b->k) * (double)b->H * (double)b->I;
    return (bench_case){.experts = f,
                        .forward_bytes = touched_bytes(b, f->ids),
                        .sweep = experts_sweep,
                        .packed = b->packed && pack(s) ? experts_packed : NULL,
                        .forward = experts_forward,
                        .backward = experts_backward,
                        .forward_flops = flops,
                        .backward_flops = 2 * flops};
}

/* Router, softmax over all, top-k renormalised, experts: Qwen3's block. */
static bench_case make_block(state *s, const bench_shape *b)
{
    const fmoe_desc d = {
        .size = sizeof d, .op = FMOE_OP_BLOCK, .H = b->H, .I = b->I, .E = b->E, .k = b->k, .route = {.renormalize = 1}};
    fmoe_block_args *f = &s->fwd.block, *g = &s->bwd.block;
    *f = (fmoe_block_args){.size = sizeof *f};
    prepare(s, d, b, b->T);
    f->x = random_tensor(s, b->dtype, b->T, b->H, 0, 1);
    f->w_router = random_tensor(s, b->dtype, b->E, b->H, 0, 0.04);
    f->w.w1 = random_tensor(s, b->dtype, b->E, 2 * b->I, b->H, 0.04);
    f->w.w2 = random_tensor(s, b->dtype, b->E, b->H, b->I, 0.04);
    f->logits = tensor(s, FMOE_F32, b->T, b->E, 0);
    f->ids = tensor(s, INT32, b->T, b->k, 0);
    f->weights = tensor(s, FMOE_F32, b->T, b->k, 0);
    f->saved = s->saved;
    *g = *f;
    f->out = tensor(s, b->dtype, b->T, b->H, 0);
    g->dout = random_tensor(s, b->dtype, b->T, b->H, 0, 1);
    g->dx = tensor(s, b->dtype, b->T, b->H, 0);
    g->dw_router = tensor(s, b->dtype, b->E, b->H, 0);
    g->dw.w1 = tensor(s, b->dtype, b->E, 2 * b->I, b->H);
    g->dw.w2 = tensor(s, b->dtype, b->E, b->H, b->I);
    const double flops =
        6.0 * (double)(b->T * b->k) * (double)b->H * (double)b->I + 2.0 * (double)(b->T * b->E) * (double)b->H;
    return (bench_case){
        .forward = block_forward, .backward = block_backward, .forward_flops = flops, .backward_flops = 2 * flops};
}

/* K = H, N = I; the rows of T*k slots, evenly over the groups. */
static bench_case make_gmm(state *s, const bench_shape *b)
{
    const int64_t R = b->T * b->k;
    const fmoe_desc d = {.size = sizeof d, .op = FMOE_OP_GROUPED_MATMUL, .E = b->E, .K = b->H, .N = b->I};
    fmoe_gmm_args *f = &s->fwd.gmm, *g = &s->bwd.gmm;
    *f = (fmoe_gmm_args){.size = sizeof *f};
    prepare(s, d, b, R);
    f->x = random_tensor(s, b->dtype, R, b->H, 0, 1);
    f->w = random_tensor(s, b->dtype, b->E, b->H, b->I, 0.04);
    const fmoe_tensor *sizes = tensor(s, INT32, b->E, 0, 0);
    for (int64_t e = 0; e < b->E; e++) ((int32_t *)sizes->data)[e] = (int32_t)((e + 1) * R / b->E);
    f->sizes = sizes;
    f->cumulative = 1;
    *g = *f;
    f->y = tensor(s, b->dtype, R, b->I, 0);
    g->dy = random_tensor(s, b->dtype, R, b->I, 0, 1);
    g->dx = tensor(s, b->dtype, R, b->H, 0);
    g->dw = tensor(s, b->dtype, b->E, b->H, b->I);
    const double flops = 2.0 * (double)R * (double)b->H * (double)b->I;
    return (bench_case){
        .forward = gmm_forward, .backward = gmm_backward, .forward_flops = flops, .backward_flops = 2 * flops};
}

static double bytes_of(const fmoe_tensor *t) { return (double)elements(t) * t->dtype.bits / 8; }

static bench_case make_activation(state *s, const bench_shape *b)
{
    const int64_t R = b->T * b->k;
    const fmoe_desc d = {.size = sizeof d, .op = FMOE_OP_ACTIVATION, .I = b->I};
    fmoe_activation_args *f = &s->fwd.activation, *g = &s->bwd.activation;
    prepare(s, d, b, R);
    *f = *g = (fmoe_activation_args){.size = sizeof *f, .h = random_tensor(s, b->dtype, R, 2 * b->I, 0, 4)};
    f->a = tensor(s, b->dtype, R, b->I, 0);
    g->da = random_tensor(s, b->dtype, R, b->I, 0, 1);
    g->dh = tensor(s, b->dtype, R, 2 * b->I, 0);
    return (bench_case){.forward = activation_forward,
                        .backward = activation_backward,
                        .forward_bytes = bytes_of(f->h) + bytes_of(f->a),
                        .backward_bytes = 2 * bytes_of(f->h) + bytes_of(f->a)};
}

static fmoe_desc permute_desc(const bench_shape *b)
{
    return (fmoe_desc){.size = sizeof(fmoe_desc), .op = FMOE_OP_PERMUTE, .H = b->H, .E = b->E, .k = b->k};
}

static bench_case make_permute(state *s, const bench_shape *b)
{
    fmoe_permute_args *f = &s->fwd.permute, *g = &s->bwd.permute;
    prepare(s, permute_desc(b), b, b->T);
    *f = (fmoe_permute_args){.size = sizeof *f,
                             .x = random_tensor(s, b->dtype, b->T, b->H, 0, 1),
                             .ids = random_ids(s, b),
                             .xp = tensor(s, b->dtype, b->T * b->k, b->H, 0),
                             .map = tensor(s, INT32, b->T * b->k, 0, 0)};
    *g = (fmoe_permute_args){.size = sizeof *g, .x = tensor(s, b->dtype, b->T, b->H, 0), .xp = f->xp, .map = f->map};
    must(fmoe_permute_forward(s->plan, f, &s->run), "permute"); /* the backward needs its map */
    const double bytes = bytes_of(f->x) + bytes_of(f->xp);
    return (bench_case){
        .forward = permute_forward, .backward = permute_backward, .forward_bytes = bytes, .backward_bytes = bytes};
}

static bench_case make_unpermute(state *s, const bench_shape *b)
{
    fmoe_unpermute_args *f = &s->fwd.unpermute, *g = &s->bwd.unpermute;
    prepare(s, permute_desc(b), b, b->T);
    const fmoe_permute_args map = {.size = sizeof map,
                                   .x = tensor(s, b->dtype, b->T, b->H, 0),
                                   .ids = random_ids(s, b),
                                   .xp = random_tensor(s, b->dtype, b->T * b->k, b->H, 0, 1),
                                   .map = tensor(s, INT32, b->T * b->k, 0, 0)};
    must(fmoe_permute_forward(s->plan, &map, &s->run), "permute");
    *f = *g = (fmoe_unpermute_args){.size = sizeof *f, .y = map.xp, .map = map.map, .weights = even_weights(s, b)};
    f->out = map.x;
    g->dout = random_tensor(s, b->dtype, b->T, b->H, 0, 1);
    g->dy = tensor(s, b->dtype, b->T * b->k, b->H, 0);
    g->dweights = tensor(s, FMOE_F32, b->T, b->k, 0);
    return (bench_case){.forward = unpermute_forward,
                        .backward = unpermute_backward,
                        .forward_bytes = bytes_of(f->y) + bytes_of(f->out),
                        .backward_bytes = 2 * bytes_of(f->y) + bytes_of(f->out)};
}

static bench_case make_route(state *s, const bench_shape *b)
{
    const fmoe_desc d = {.size = sizeof d, .op = FMOE_OP_ROUTE, .E = b->E, .k = b->k, .route = {.renormalize = 1}};
    fmoe_route_args *f = &s->fwd.route, *g = &s->bwd.route;
    prepare(s, d, b, b->T);
    *f = *g = (fmoe_route_args){.size = sizeof *f,
                                .logits = random_tensor(s, b->dtype, b->T, b->E, 0, 4),
                                .ids = tensor(s, INT32, b->T, b->k, 0)};
    f->weights = tensor(s, FMOE_F32, b->T, b->k, 0);
    g->dweights = random_tensor(s, FMOE_F32, b->T, b->k, 0, 1);
    g->dlogits = tensor(s, b->dtype, b->T, b->E, 0);
    must(fmoe_route_forward(s->plan, f, &s->run), "route");
    return (bench_case){.forward = route_forward,
                        .backward = route_backward,
                        .forward_bytes = bytes_of(f->logits) + 2 * bytes_of(f->weights),
                        .backward_bytes = 2 * bytes_of(f->logits) + 2 * bytes_of(f->weights)};
}

bench_case bench_make(const char *op, const bench_shape *shape)
{
    bench_case (*const make[])(state *, const bench_shape *) = {
        make_experts, make_block, make_gmm, make_activation, make_permute, make_unpermute, make_route};
    int i = 0;
    while (strcmp(op, bench_op_names[i]) != 0) i++;
    state *s = calloc(1, sizeof *s);
    if (!s) die("out of memory");
    s->shape = *shape;
    bench_case c = make[i](s, shape);
    c.state = s;
    c.drop = drop;
    return c;
}
