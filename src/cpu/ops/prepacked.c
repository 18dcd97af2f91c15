/* SPDX-License-Identifier: Apache-2.0
 *
 * prepacked.c - the weights of a layer as a packed buffer: the panels that pipeline.c would make of them inside every
 * call, made once. A header says what they were made of and for which plans; it holds no pointers, so that a buffer may
 * be moved, written to a file and mapped again.
 *
 *   header | W1: [expert][block of columns][chunk of k] panels | W2: [block of columns][expert][chunk of k] panels
 *
 * This is the order in which a worker visits them: up goes through the columns of one expert after another, down
 * through the experts of one block of columns after another. Reading is one stream, without a copy. */
#include <inttypes.h>

#include "cpu/ops/ops.h"

enum { LAYOUT_VERSION = 2, ALIGN = 64 }; /* of the panels, and of what the caller gives */

static const char magic[8] = {'f', 'm', 'o', 'e', 'p', 'a', 'c', 'k'};

typedef struct header {
    char magic[8];
    char level[16];
    int64_t version, dtype, E, H, I, h_cols;
    int64_t whole;            /* W1 is one matrix in stored order, not gate and up */
    int64_t kmajor1, kmajor2; /* W1, W2 were k-major: [out,in] */
    char reserved[256 - 96];  /* zero */
} header;

_Static_assert(sizeof(header) == 256, "panels begin at whole cache lines");

/* ---- sizes ---- */

/* One of the two matrices of every expert. */
typedef struct matrix {
    fmoe_view v;             /* of expert 0, packed; p is not set */
    int64_t n_v;             /* matrices side by side in a block of columns: gate and up, or one */
    int64_t blocks;          /* of columns, of one expert */
    int64_t expert, columns; /* bytes to the panels of the next expert, of the next block */
} matrix;

static matrix matrix_of(const fmoe_plan_impl *p, int64_t N, int64_t K, int n_v, bool kmajor)
{
    matrix m = {.v = {.N = N, .K = K, .sn = kmajor ? K : 1, .sk = kmajor ? 1 : 2}, .n_v = n_v};
    m.blocks = fmoe_ceil_div(N, FMOE_NB / n_v);
    m.v.block = fmoe_prepacked_block_bytes(fmoe_cpu(p), &m.v, p->d.dtype);
    return m;
}

static matrix matrix1(const fmoe_plan_impl *p, bool whole, bool kmajor)
{
    matrix m = matrix_of(p, whole ? p->h_cols : p->d.I, p->d.H, whole ? 1 : 2, kmajor);
    m.columns = m.v.block;
    m.expert = m.blocks * m.v.block;
    return m;
}

static matrix matrix2(const fmoe_plan_impl *p, bool kmajor)
{
    matrix m = matrix_of(p, p->d.H, p->d.I, 1, kmajor);
    m.expert = m.v.block;
    m.v.block = m.columns = p->d.E * m.expert;
    return m;
}

static bool has_packed_form(const fmoe_plan_impl *p)
{
    return p->d.op == FMOE_OP_EXPERTS && !fmoe_cpu(p)->gather && !(p->d.flags & FMOE_QUANT);
}

/* A panel is at most 16 bytes for each element of a matrix whose sizes are rounded up to 64 and 8: checked here, once.
 */
static bool too_large(const fmoe_plan_impl *p)
{
    int64_t n, m;
    return __builtin_mul_overflow(p->d.H + 64, 2 * p->d.I + 64, &n) || __builtin_mul_overflow(n, p->d.E, &m) ||
           m > INT64_MAX / 64;
}

fmoe_status fmoe_cpu_packed_bytes(const fmoe_plan_impl *p, size_t *bytes)
{
    *bytes = 0;
    if (!has_packed_form(p)) return FMOE_OK;
    if (too_large(p))
        return fmoe_fail(FMOE_ERR_OVERFLOW,
                         "packed weights of E = %" PRId64 ", H = %" PRId64 ", I = %" PRId64
                         " do not fit 63 bits of bytes",
                         p->d.E, p->d.H, p->d.I);
    int64_t most1 = 0, most2 = 0; /* either orientation fits */
    for (int kmajor = 0; kmajor < 2; kmajor++) {
        const matrix w1 = matrix1(p, !p->gated, kmajor), w2 = matrix2(p, kmajor);
        most1 = fmoe_max(most1, p->d.E * w1.expert);
        most2 = fmoe_max(most2, w2.blocks * w2.columns);
    }
    *bytes = sizeof(header) + (size_t)(most1 + most2);
    return FMOE_OK;
}

/* ---- packing ---- */

typedef struct prepack_run {
    const fmoe_plan_impl *p;
    fmoe_stack w1[2], w2;
    matrix m1, m2;
    char *panels1, *panels2;
    fmoe_tasks tasks;
} prepack_run;

static void prepack_worker(void *arg, int worker)
{
    (void)worker;
    prepack_run *run = arg;
    const fmoe_plan_impl *p = run->p;
    const int64_t first = run->m1.blocks * p->d.E;
    const void *pointers[FMOE_KC_PAIRS];
    for (int64_t task; fmoe_claim(&run->tasks, &task);) {
        const bool up = task < first;
        const matrix *m = up ? &run->m1 : &run->m2;
        const int64_t index = up ? task : task - first, e = index / m->blocks, block = index % m->blocks;
        const fmoe_view v[2] = {fmoe_stack_at(up ? &run->w1[0] : &run->w2, e),
                                fmoe_stack_at(up ? &run->w1[1] : &run->w2, e)};
        fmoe_prepack_block(fmoe_cpu(p), v, (int)m->n_v, p->d.dtype, block * (FMOE_NB / m->n_v),
                           (up ? run->panels1 : run->panels2) + e * m->expert + block * m->columns, pointers);
    }
}

/* Whether the matrices of a stack are k-major, all of them or none. */
static fmoe_status stored_kmajor(const fmoe_plan_impl *p, const fmoe_stack *w, const char *name, bool *kmajor)
{
    for (int64_t e = 0; e < (w->list ? p->d.E : 1); e++) {
        const fmoe_view v = fmoe_stack_at(w, e);
        const bool this_one = v.sk == 1 || v.K == 1;
        if (e && this_one != *kmajor)
            return fmoe_fail(FMOE_ERR_UNSUPPORTED, "%s[%" PRId64 "] is stored %s, %s[0] %s: all are packed one way",
                             name, e, this_one ? "[out,in]" : "[in,out]", name, *kmajor ? "[out,in]" : "[in,out]");
        *kmajor = this_one;
    }
    return FMOE_OK;
}

fmoe_status fmoe_cpu_pack(const fmoe_plan_impl *p, const fmoe_pack_args *args, const fmoe_run *run)
{
    (void)run;
    const bool whole = fmoe_w1_whole(p, &args->w);
    bool kmajor1 = false, kmajor2 = false, up_kmajor = false; /* gcc 16 does not know that E is 1 at the least */
    prepack_run r = {.p = p, .w1 = {fmoe_w1_stack(p, &args->w, 0), fmoe_w1_stack(p, &args->w, 1)}};
    r.w2 = fmoe_w2_stack(p, &args->w);
    FMOE_TRY(stored_kmajor(p, &r.w1[0], args->w.gate ? "gate" : "up", &kmajor1));
    FMOE_TRY(stored_kmajor(p, &r.w1[1], "up", &up_kmajor));
    FMOE_TRY(stored_kmajor(p, &r.w2, "down", &kmajor2));
    if (kmajor1 != up_kmajor)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "gate is stored %s, up %s: both are packed one way",
                         kmajor1 ? "[out,in]" : "[in,out]", up_kmajor ? "[out,in]" : "[in,out]");
    r.m1 = matrix1(p, whole, kmajor1);
    r.m2 = matrix2(p, kmajor2);
    r.panels1 = (char *)args->packed + sizeof(header);
    r.panels2 = r.panels1 + p->d.E * r.m1.expert;
    r.tasks.n = p->d.E * (r.m1.blocks + r.m2.blocks);
    fmoe_parallel(p, prepack_worker, &r);
    header h = {.version = LAYOUT_VERSION,
                .dtype = p->d.dtype,
                .E = p->d.E,
                .H = p->d.H,
                .I = p->d.I,
                .h_cols = p->h_cols,
                .whole = whole,
                .kmajor1 = kmajor1,
                .kmajor2 = kmajor2};
    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.level, fmoe_cpu(p)->k.isa, strlen(fmoe_cpu(p)->k.isa));
    memcpy(args->packed, &h, sizeof h);
    return FMOE_OK;
}

/* ---- reading ---- */

fmoe_status fmoe_cpu_packed_check(const fmoe_plan_impl *p, const char *name, const void *packed, size_t bytes)
{
    header h;
    size_t need;
    FMOE_TRY(fmoe_cpu_packed_bytes(p, &need));
    if (!need)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "%s is given, but level %s reads weights of this dtype in place", name,
                         fmoe_cpu(p)->k.isa);
    if ((uintptr_t)packed % ALIGN)
        return fmoe_fail(FMOE_ERR_ALIGN, "%s at %p is not aligned to %d", name, packed, ALIGN);
    if (bytes < need)
        return fmoe_fail(FMOE_ERR_WORKSPACE, "%s has %zu bytes, those of this plan are %zu", name, bytes, need);
    memcpy(&h, packed, sizeof h);
    if (memcmp(h.magic, magic, sizeof magic))
        return fmoe_fail(FMOE_ERR_ARG, "%s holds no packed weights: it does not begin as fmoe_pack_weights writes it",
                         name);
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    h.level[sizeof h.level - 1] = 0;
    if (strcmp(h.level, cpu->k.isa))
        return fmoe_fail(FMOE_ERR_PLAN, "%s was made for level %s, the plan has %s", name, h.level, cpu->k.isa);
    const struct {
        const char *what;
        int64_t made, plan;
    } all[] = {{"layout", h.version, LAYOUT_VERSION},
               {"dtype", h.dtype, p->d.dtype},
               {"E", h.E, p->d.E},
               {"H", h.H, p->d.H},
               {"I", h.I, p->d.I},
               {"columns of h", h.h_cols, p->h_cols}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].made != all[i].plan)
            return fmoe_fail(FMOE_ERR_PLAN, "%s was made for %s = %" PRId64 ", the plan has %" PRId64, name,
                             all[i].what, all[i].made, all[i].plan);
    if (!p->gated && !h.whole) /* no buffer of ours, and reading would go beyond its end */
        return fmoe_fail(FMOE_ERR_PLAN, "%s was made of gates and ups, activation %d has no gate", name, p->d.act);
    /* Lists are never interleaved, whatever the plan's flag; stacks are as it says. */
    const bool interleaved = p->gated && (p->d.flags & FMOE_INTERLEAVED);
    if (p->gated && h.whole && !interleaved)
        return fmoe_fail(FMOE_ERR_PLAN, "%s was made of interleaved gates and ups, the plan has no FMOE_INTERLEAVED",
                         name);
    if (interleaved && !h.whole && (p->d.flags & FMOE_BIAS))
        return fmoe_fail(FMOE_ERR_PLAN, "%s was made of gates and ups apart, the plan has FMOE_INTERLEAVED", name);
    return FMOE_OK;
}

static fmoe_stack prepacked_stack(const fmoe_plan_impl *p, const matrix *m, const char *panels)
{
    fmoe_stack s = {.dtype = p->d.dtype, .prepacked = m->v, .expert = m->expert};
    s.prepacked.p = (char *)(uintptr_t)panels; /* read only */
    return s;
}

fmoe_stack fmoe_prepacked_w1(const fmoe_plan_impl *p, const void *packed, bool *whole)
{
    const header *h = packed;
    *whole = h->whole;
    const matrix m = matrix1(p, h->whole, h->kmajor1);
    return prepacked_stack(p, &m, (const char *)(h + 1));
}

fmoe_stack fmoe_prepacked_w2(const fmoe_plan_impl *p, const void *packed)
{
    const header *h = packed;
    const matrix m1 = matrix1(p, h->whole, h->kmajor1), m2 = matrix2(p, h->kmajor2);
    return prepacked_stack(p, &m2, (const char *)(h + 1) + p->d.E * m1.expert);
}
