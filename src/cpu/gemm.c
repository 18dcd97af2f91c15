/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - the three products of the layer as pools of tasks over all experts (see cpu.h for what each computes).
 *
 * No barrier per expert: a product is one list of tasks (expert x column block x row block), claimed by an atomic
 * counter, large experts first. A task takes its 64 columns of weights chunk by chunk, each weight byte read once, and
 * passes all rows of the expert by it while the chunk is in L2. A worker sees its chunks as one line that runs on over
 * tasks and experts: one is multiplied, the next packed, the one after fetched (side.h).
 *
 * Weights whose columns are neighbours in memory (the backward's) are taken up to four panels at a time, with k that
 * much shorter: 64 columns are a few cache lines of a page, whose address is looked up again for each, and rows a power
 * of two apart share too few sets of L2 to wait there. */
#include "cpu/cpu.h"

/* ---- operands ---- */

fmoe_view fmoe_stack_at(const fmoe_stack *s, int64_t e)
{
    if (s->packed.block) {
        fmoe_view packed = s->packed;
        packed.p += e * s->expert;
        return packed;
    }
    const fmoe_tensor *t = s->list ? s->t + e : s->t;
    const int d = s->list ? 0 : 1; /* the N dimension */
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_view v = {.p = fmoe_data(t),
                   .N = t->shape[d],
                   .K = t->shape[d + 1],
                   .sn = fmoe_stride(t, d),
                   .sk = fmoe_stride(t, d + 1)};
    if (!s->list) v.p += e * fmoe_stride(t, 0) * element;
    if (s->rows) {
        v.p += s->row * v.sn * element;
        v.N = s->rows;
    }
    if (s->swap) v = (fmoe_view){.p = v.p, .N = v.K, .K = v.N, .sn = v.sk, .sk = v.sn};
    return v;
}

fmoe_rows fmoe_rows_of(const fmoe_tensor *t, const int64_t *index)
{
    const int dtype = fmoe_tensor_dtype(t);
    return (fmoe_rows){.base = fmoe_data(t),
                       .stride = fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(dtype),
                       .index = index,
                       .dtype = dtype};
}

fmoe_rows fmoe_rows_buffer(const void *base, int64_t columns, int dtype)
{
    return (fmoe_rows){.base = base, .stride = columns * (int64_t)fmoe_dtype_size(dtype), .dtype = dtype};
}

void fmoe_load_row(const fmoe_kernels *k, int dtype, float *dst, const void *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->load_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->load_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *dst);
}

void fmoe_store_row(const fmoe_kernels *k, int dtype, void *dst, const float *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->store_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->store_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *src);
}

void fmoe_round_row(const fmoe_kernels *k, int dtype, float *row, const float *bias, int64_t n)
{
    if (dtype == FMOE_BF16) k->round_bf16(row, bias, n);
    else k->round_f16(row, bias, n);
}

void fmoe_scratch_carve(fmoe_scratch *s, fmoe_carve *c, const fmoe_plan_impl *p, int64_t sums)
{
    for (int w = 0; w < fmoe_cpu(p)->threads; w++) {
        fmoe_scratch one;
        one.panel = fmoe_carve_take(c, 2 * FMOE_PANEL_BYTES, 1);
        one.c = fmoe_carve_take(c, FMOE_PANELS * FMOE_TASK_ROWS * FMOE_NB, sizeof(float)); /* >= FMOE_ROW_BLOCK rows */
        one.pointers = fmoe_carve_take(c, FMOE_KC_PAIRS, sizeof(void *));
        /* A weight gradient needs `left`, the other two products `sums` and `widened`: one memory for both. */
        const int64_t widened = FMOE_WIDEN_ROWS * FMOE_KC;
        const int64_t left = FMOE_LEFT_PANELS * FMOE_PANEL_BYTES / (int64_t)sizeof(float);
        float *shared = fmoe_carve_take(c, fmoe_max(sums + widened, left), sizeof(float));
        one.left = shared;
        one.sums = shared;
        one.room = sums;
        one.widened = shared ? shared + sums : NULL;
        if (s) s[w] = one;
    }
}

/* ---- one chunk of weights ---- */

static bool side_by_side(const fmoe_view *v) { return v->sk != 1 && v->K > 1; }

/* k of a chunk: equal chunks, as few as there can be, whole cache lines. It depends on the weights alone. */
static int64_t chunk_of(const fmoe_cpu_plan *cpu, const fmoe_view *v, bool low)
{
    const bool panels =
        (side_by_side(v) || low) && !cpu->gather; /* a low-rank term comes in the panels of its weights */
    const int64_t most = (cpu->pairs ? FMOE_KC_PAIRS : FMOE_KC) / (panels ? FMOE_PANELS : 1);
    const int64_t chunks = fmoe_max(1, fmoe_ceil_div(v->K, most));
    return fmoe_ceil_div(fmoe_ceil_div(v->K, chunks), 32) * 32;
}

/* Panels to take at a time, so that at least `tasks` remain of `blocks` of 64 columns. Lists may hold matrices that lie
 * either way, with chunks of either length: then one. */
static int64_t panels_of(const fmoe_cpu_plan *cpu, const fmoe_stack *w, int n_w, int64_t E, int64_t blocks,
                         int64_t tasks)
{
    if (cpu->gather || w->packed.block) return 1;
    for (int i = 0; i < n_w; i++)
        for (int64_t e = 0; e < (w[i].list ? E : 1); e++) {
            const fmoe_view v = fmoe_stack_at(&w[i], e);
            if (!side_by_side(&v)) return 1;
        }
    int64_t panels = FMOE_PANELS;
    while (panels > 1 && blocks / panels < tasks) panels /= 2;
    return panels;
}

/* Rows of an expert that pass by a panel at a time: in equal parts, few enough to stay in L2 from panel to panel. */
static int64_t rows_of_task(int64_t rows)
{
    return fmoe_ceil_div(rows, fmoe_max(1, fmoe_ceil_div(rows, FMOE_TASK_ROWS)));
}

/* What is multiplied at a time: kc of k of up to 64 columns, or several panels of them, by up to FMOE_TASK_ROWS rows of
 * an expert. The sums of panel i are c[i*rows ...]. */
typedef struct step {
    fmoe_view v[2]; /* one or two matrices, which share N and K */
    int n_v, dtype;
    int64_t n0, n, k0, kc;         /* columns [n0, n0+n) of each, and k [k0, k0+kc) */
    int64_t e, row, rows;          /* rows of A */
    const fmoe_rows *a;            /* A itself, or the rows of a low-rank term */
    int64_t a_column;              /* where A's k starts in its rows */
    bool first, last;              /* of the sum over k */
    int64_t t0, t1;                /* out: the tokens whose sums these columns are part of */
    int64_t first_column, columns; /* out: the columns of the task, of which these are some */
    bool opens, closes;            /* out: first and last of all steps of those sums */
} step;

static fmoe_pack_fn *packer(const fmoe_cpu_plan *cpu, int dtype, bool cols, bool quads)
{
    const fmoe_kernels *k = &cpu->k;
    if (quads) return cpu->pairs ? k->pack_quads_bf16 : k->pack_quads_f32;
    if (cpu->pairs) return cols ? k->pack_cols_pairs : k->pack_rows_pairs;
    if (dtype == FMOE_BF16) return cols ? k->pack_cols_bf16 : k->pack_rows_bf16;
    if (dtype == FMOE_F16) return cols ? k->pack_cols_f16 : k->pack_rows_f16;
    return cols ? k->pack_cols_f32 : k->pack_rows_f32;
}

static const char *chunk_at(const step *s, int i)
{
    return s->v[i].p + (s->n0 * s->v[i].sn + s->k0 * s->v[i].sk) * (int64_t)fmoe_dtype_size(s->dtype);
}

static bool lies_along_k(const step *s, int i) { return s->v[i].sk == 1 || s->kc == 1; }

static bool along_k(const step *s) { return lies_along_k(s, 0) && (s->n_v == 1 || lies_along_k(s, 1)); }

static int64_t panels_in(const step *s) { return fmoe_ceil_div(s->n * s->n_v, FMOE_NB); }

/* Which form its panel has: by the level and how the weights lie, not by the rows. */
static bool in_quads(const fmoe_cpu_plan *cpu, const step *s)
{
    if (!along_k(s)) return false;
    return cpu->pairs ? cpu->k.gemm_quads_bf16 && !cpu->gather : cpu->k.gemm_quads_f32 && s->dtype == FMOE_F32;
}

static int64_t panel_bytes(const fmoe_cpu_plan *cpu, const step *s)
{
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    return in_quads(cpu, s) ? fmoe_ceil_div(s->kc * element, 16) * 16 * FMOE_NB : (int64_t)fmoe_panel_bytes(cpu, s->kc);
}

/* The whole chunk at once. */
static void pack_chunk(const fmoe_cpu_plan *cpu, const fmoe_scratch *scratch, const step *s, char *panel)
{
    const int64_t width = FMOE_NB / s->n_v, element = (int64_t)fmoe_dtype_size(s->dtype);
    const int64_t bytes = panel_bytes(cpu, s), panels = panels_in(s);
    const bool quads = in_quads(cpu, s);
    if (s->n < panels * width) memset(panel + (panels - 1) * bytes, 0, (size_t)bytes);
    for (int64_t j = 0; j < panels; j++)
        for (int i = 0; i < s->n_v; i++) {
            const char *base = chunk_at(s, i) + j * FMOE_NB * s->v[i].sn * element;
            const int64_t n = fmoe_min(width, s->n - j * width);
            const bool cols = lies_along_k(s, i);
            const int64_t pointers = cols ? n : s->kc, apart = (cols ? s->v[i].sn : s->v[i].sk) * element;
            for (int64_t k = 0; k < pointers; k++) scratch->pointers[k] = base + k * apart;
            packer(cpu, s->dtype, cols, quads)(panel + j * bytes, s->kc, i * width, scratch->pointers, n);
        }
}

/* ---- packed weights: the panels of a block, chunk after chunk ---- */

static bool is_packed(const step *s) { return s->v[0].block != 0; }

/* Bytes of the panels of the first k0 of k, whole chunks. */
static int64_t panels_before(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype, int64_t k0)
{
    const step before = {.v = {*v}, .n_v = 1, .dtype = dtype, .kc = k0};
    return panel_bytes(cpu, &before);
}

static const char *packed_at(const fmoe_cpu_plan *cpu, const step *s)
{
    const fmoe_view *v = &s->v[0];
    return v->p + s->n0 / (FMOE_NB / s->n_v) * v->block + panels_before(cpu, v, s->dtype, s->k0);
}

int64_t fmoe_packed_block(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype)
{
    const int64_t chunk = chunk_of(cpu, v, false), last = (v->K - 1) / chunk * chunk;
    return panels_before(cpu, v, dtype, last) + panels_before(cpu, v, dtype, v->K - last);
}

void fmoe_pack_block(const fmoe_cpu_plan *cpu, const fmoe_view v[2], int n_v, int dtype, int64_t n0, char *panels,
                     const void **pointers)
{
    const fmoe_scratch scratch = {.pointers = pointers};
    const int64_t chunk = chunk_of(cpu, &v[0], false);
    step s = {.v = {v[0], v[n_v - 1]}, .n_v = n_v, .dtype = dtype, .n0 = n0};
    s.n = fmoe_min(FMOE_NB / n_v, v[0].N - n0);
    for (s.k0 = 0; s.k0 < v[0].K; s.k0 += chunk, panels += panel_bytes(cpu, &s)) {
        s.kc = fmoe_min(chunk, v[0].K - s.k0);
        pack_chunk(cpu, &scratch, &s, panels);
    }
}

/* ---- on the side ---- */

enum { FEW_ROWS = 24 }; /* memory is fetched from as fast as it can be */

/* The two halves of a panel's 64 columns, which may be of two matrices; false where columns are missing. */
static bool halves(const step *s, const char *half[2])
{
    if (s->n * s->n_v % FMOE_NB || (along_k(s) && s->n > FMOE_NB) ||
        (s->n_v == 2 && (s->v[0].sk != s->v[1].sk || s->v[0].sn != s->v[1].sn)))
        return false;
    half[0] = chunk_at(s, 0);
    half[1] = s->n_v == 2 ? chunk_at(s, 1) : half[0] + FMOE_NB / 2 * s->v[0].sn * (int64_t)fmoe_dtype_size(s->dtype);
    return true;
}

/* Few rows are multiplied by weights where they lie, without a panel: where no expert has more, for what comes after a
 * chunk of the other kind is not packed beside it. */
static fmoe_gemm_along_fn *along(const fmoe_cpu_plan *cpu, const fmoe_groups *g, const step *s)
{
    const char *half[2];
    const int64_t largest = g->order[0], most = fmoe_max(s->rows, g->off[largest + 1] - g->off[largest]);
    if (most > FMOE_ALONG_ROWS || s->rows == 0 || s->a->dtype != cpu->work_type) return NULL;
    if (is_packed(s) || !in_quads(cpu, s) || !halves(s, half)) return NULL;
    return cpu->pairs ? cpu->k.gemm_along_bf16 : cpu->k.gemm_along_f32;
}

/* Let the product before it pack a chunk piece by piece, where its shape is a regular one. */
static void side_pack(const fmoe_cpu_plan *cpu, const step *s, char *panel, fmoe_side *side)
{
    enum { ROW = FMOE_NB * 4 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype), unit = cpu->pairs ? 2 : 1; /* elements */
    const bool cols = along_k(s), quads = in_quads(cpu, s);
    const int64_t k = (cols ? 16 : 2) * unit, pieces = s->kc / k, columns = quads ? 4 : 8; /* of a piece */
    fmoe_walk *w = &side->pack;
    if (s->kc % k || pieces == 0 || !halves(s, w->half)) return;
    side->panel = side->to = panel;
    side->kind = quads ? FMOE_SIDE_QUADS : cols ? FMOE_SIDE_COLS : FMOE_SIDE_ROWS;
    side->dtype = s->dtype;
    side->to_step = cols ? 16 * ROW : (int64_t)fmoe_panel_bytes(cpu, s->kc);
    side->to_run = cols ? 32 : 2 * ROW;
    w->at = w->half[0];
    w->step = (cols ? s->v[0].sn : s->v[0].sk) * element;
    w->advance = cols ? k * element : FMOE_NB * element;
    w->run_step = cols ? columns * w->step : k * w->step;
    w->per_half = (int32_t)(cols ? FMOE_NB / 2 / columns : pieces);
    w->length = w->in_run = (int32_t)(cols ? pieces : panels_in(s));
    w->left = pieces * (cols ? FMOE_NB / columns : panels_in(s));
}

/* Let it fetch a packed panel: one line after another. */
static void side_fetch_packed(const fmoe_cpu_plan *cpu, const step *s, int64_t rows, fmoe_side *side)
{
    enum { LINE = 64 };
    fmoe_walk *w = &side->fetch;
    w->at = w->half[0] = packed_at(cpu, s);
    w->step = LINE;
    w->advance = 8 * LINE;
    w->left = panel_bytes(cpu, s) / w->advance;
    w->length = w->in_run = (int32_t)w->left;
    w->per_half = 1;
    w->slow = rows >= FEW_ROWS;
}

/* Multiplied where it lies (gemm_lying): columns that are neighbours, whole panels of them. */
static fmoe_gemm_lying_fn *lying(const fmoe_cpu_plan *cpu, const step *s)
{
    const bool regular = !cpu->gather && !is_packed(s) && s->n_v == 1 && !along_k(s) && s->n % FMOE_NB == 0;
    if (!regular || s->dtype != cpu->work_type || s->a->dtype != cpu->work_type) return NULL;
    return cpu->pairs ? cpu->k.gemm_lying_bf16 : cpu->k.gemm_lying_f32;
}

static bool to_pack(const fmoe_cpu_plan *cpu, const fmoe_groups *g, const step *s)
{
    return !is_packed(s) && !lying(cpu, s) && !along(cpu, g, s);
}

/* Let it fetch a chunk of few rows' columns along k: one column after another. */
static void side_fetch_along(const step *s, fmoe_side *side)
{
    enum { LINE = 64 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_walk *w = &side->fetch;
    if (!halves(s, w->half)) return;
    w->at = w->half[0];
    w->step = LINE;
    w->advance = 8 * LINE;
    w->run_step = s->v[0].sn * element;
    w->length = w->in_run = (int32_t)fmoe_ceil_div(s->kc * element, w->advance);
    w->per_half = FMOE_NB / 2;
    w->left = (int64_t)w->length * FMOE_NB;
}

/* Let it fetch the lines of panel j of such a step. */
static void side_fetch_lying(const step *s, int64_t j, fmoe_side *side)
{
    enum { LINE = 64 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_walk *w = &side->fetch;
    w->at = w->half[0] = chunk_at(s, 0) + j * FMOE_NB * element;
    w->step = s->v[0].sk * element;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = w->in_run = (int32_t)(FMOE_NB * element / LINE);
    w->per_half = (int32_t)(s->kc / 8);
    w->left = (int64_t)w->length * w->per_half;
}

/* Let panel j of one of the last two chunks fetch a matrix that the epilogue touches. Each of its rows is a page or
 * half of one, and an epilogue that waits for them takes twice as long; but few rows leave memory no time for more than
 * the weights. */
static void side_fetch_touched(const step *s, const fmoe_touched *touched, int64_t j, fmoe_side *side)
{
    enum { LINE = 64 };
    fmoe_walk *w = &side->rows;
    const int64_t left = s->v[0].K - s->k0 - s->kc, i = left ? j : panels_in(s) + j;
    if (s->rows < FEW_ROWS || left > s->kc || i >= FMOE_TOUCHED || !touched[i].base) return;
    const fmoe_touched *t = &touched[i];
    w->at = w->half[0] = t->base + s->row * t->stride + s->n0 * t->element;
    w->step = t->stride;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = w->in_run = (int32_t)fmoe_ceil_div(s->n * t->element, LINE);
    w->per_half = (int32_t)(s->rows / 8);
    w->left = (int64_t)w->length * w->per_half;
}

/* Let it fetch the lines a chunk lies in: eight columns, or eight k, side by side. Of columns that are neighbours, `s`
 * is fetched up to FETCH_AHEAD k only, after what `before`, the chunk that is packed now, has beyond that. */
static void side_fetch(const step *before, const step *s, int64_t rows, fmoe_side *side)
{
    enum { LINE = 64, FETCH_AHEAD = 32 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    const bool cols = along_k(s);
    fmoe_walk *w = &side->fetch;
    if (!halves(s, w->half)) return;
    w->step = (cols ? s->v[0].sn : s->v[0].sk) * element;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = (int32_t)fmoe_ceil_div((cols ? s->kc : s->n) * element, LINE);
    w->per_half = (int32_t)(cols ? FMOE_NB / 16 : fmoe_ceil_div(s->kc, 8));
    w->left = (int64_t)w->length * w->per_half * (cols ? 2 : s->n_v);
    if (!cols && s->n_v == 1 && before->n == s->n && before->v[0].sk == s->v[0].sk && before->dtype == s->dtype) {
        w->half[1] = w->half[0];
        w->half[0] = chunk_at(before, 0) + FETCH_AHEAD * w->step;
        w->per_half = (int32_t)fmoe_ceil_div(fmoe_max(0, before->kc - FETCH_AHEAD), 8);
        w->left = (int64_t)w->length * (w->per_half + fmoe_min(FETCH_AHEAD, s->kc) / 8);
        if (!w->per_half) w->half[0] = w->half[1];
    }
    w->in_run = w->length;
    w->at = w->half[0];
    w->slow = rows >= FEW_ROWS && cols;
}

/* ---- a worker's line of chunks ---- */

typedef struct line {
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    bool (*next)(void *state, step *s); /* false: no more */
    void *state;
    const fmoe_touched *touched; /* by the epilogue; NULL: nothing */
    step steps[3];               /* multiplied, packed, fetched */
    int n;                       /* how many of them there are; the first time, -1 */
    char *panel[2];
} line;

static line line_of(const fmoe_cpu_plan *cpu, const fmoe_groups *g, fmoe_scratch *scratch, bool (*next)(void *, step *),
                    void *state)
{
    return (line){.cpu = cpu,
                  .g = g,
                  .scratch = scratch,
                  .next = next,
                  .state = state,
                  .n = -1,
                  .panel = {scratch->panel, (char *)scratch->panel + FMOE_PANEL_BYTES}};
}

/* A share of the work on the side, for one of `calls` products that are left, and what remains after it. */
static fmoe_side side_share(fmoe_side *side, int64_t calls)
{
    fmoe_side share = *side;
    share.pack.left = fmoe_ceil_div(side->pack.left, calls);
    share.fetch.left = fmoe_ceil_div(side->fetch.left, calls);
    return share;
}

static void side_rest(fmoe_side *side, const fmoe_side *share, int64_t calls)
{
    const int64_t pack = side->pack.left - fmoe_ceil_div(side->pack.left, calls);
    const int64_t fetch = side->fetch.left - fmoe_ceil_div(side->fetch.left, calls);
    *side = *share;
    side->pack.left += pack;
    side->fetch.left += fetch;
}

/* c[rows][64] (+)= A . W^T over one chunk that lies where it is stored; `then`: the one after it, or NULL. While a
 * panel of it is multiplied, the next one is fetched. */
static void multiply_lying(const line *l, const step *s, const step *then)
{
    fmoe_gemm_lying_fn *gemm = lying(l->cpu, s);
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype), panels = panels_in(s);
    const void *a[FMOE_TASK_ROWS];
    for (int64_t i = 0; i < s->rows; i++)
        a[i] = (const char *)fmoe_row(s->a, l->g, s->e, s->row + i) + (s->a_column + s->k0) * element;
    for (int64_t j = 0; j < panels; j++) {
        fmoe_side side = {0};
        if (j + 1 < panels) side_fetch_lying(s, j + 1, &side);
        else if (then && then->rows && lying(l->cpu, then)) side_fetch_lying(then, 0, &side);
        if (l->touched) side_fetch_touched(s, l->touched, j, &side);
        gemm(s->rows, s->kc, a, chunk_at(s, 0) + j * FMOE_NB * element, s->v[0].sk * element, l->panel[0],
             l->scratch->c + j * s->rows * FMOE_NB, FMOE_NB, s->first, &side);
    }
}

/* c[rows][64] (+)= A . W^T over one chunk, whose panels are ready. */
static void multiply(const line *l, const step *s, const char *panel, fmoe_side *side)
{
    const fmoe_cpu_plan *cpu = l->cpu;
    fmoe_gemm_along_fn *const by_along = along(cpu, l->g, s);
    fmoe_gemm_fn *gemm = in_quads(cpu, s) ? cpu->pairs ? cpu->k.gemm_quads_bf16 : cpu->k.gemm_quads_f32
                         : cpu->pairs     ? cpu->k.gemm_bf16
                                          : cpu->k.gemm_f32;
    const int64_t offset = (s->a_column + s->k0) * (int64_t)fmoe_dtype_size(s->a->dtype);
    const bool widen = s->a->dtype != cpu->work_type;
    const int64_t block = widen ? FMOE_WIDEN_ROWS : FMOE_TASK_ROWS, panels = panels_in(s);
    const void *a[FMOE_TASK_ROWS];
    int64_t calls = fmoe_ceil_div(s->rows, block) * panels;
    for (int64_t r = 0; r < s->rows; r += block) {
        const int64_t rows = fmoe_min(block, s->rows - r);
        for (int64_t i = 0; i < rows; i++) {
            a[i] = (const char *)fmoe_row(s->a, l->g, s->e, s->row + r + i) + offset;
            if (!widen) continue;
            float *wide = l->scratch->widened + i * FMOE_KC;
            fmoe_load_row(&cpu->k, s->a->dtype, wide, a[i], s->kc);
            a[i] = wide;
        }
        if (by_along) {
            const char *half[2];
            halves(s, half);
            by_along(rows, s->kc, a, half, s->v[0].sn * (int64_t)fmoe_dtype_size(s->dtype), l->scratch->c, FMOE_NB,
                     s->first, side);
            return;
        }
        for (int64_t j = 0; j < panels; j++, calls--) {
            fmoe_side share = side_share(side, calls);
            gemm(rows, s->kc, a, 4, panel + j * panel_bytes(cpu, s), l->scratch->c + (j * s->rows + r) * FMOE_NB,
                 FMOE_NB, s->first, &share);
            side_rest(side, &share, calls);
        }
    }
}

/* The next step, multiplied: NULL when there is none. */
static const step *line_next(line *l)
{
    if (l->n < 0) {
        for (l->n = 0; l->n < 3 && l->next(l->state, &l->steps[l->n]);) l->n++;
        if (l->n && to_pack(l->cpu, l->g, &l->steps[0])) pack_chunk(l->cpu, l->scratch, &l->steps[0], l->panel[0]);
    } else {
        char *const used = l->panel[0];
        l->panel[0] = l->panel[1];
        l->panel[1] = used;
        l->steps[0] = l->steps[1];
        l->steps[1] = l->steps[2];
        if (l->n < 3 || !l->next(l->state, &l->steps[2])) l->n--;
    }
    if (l->n <= 0) return NULL;
    const step *now = &l->steps[0], *then = &l->steps[1], *after = &l->steps[2];
    const bool pack = l->n > 1 && to_pack(l->cpu, l->g, then);
    if (lying(l->cpu, now)) {
        multiply_lying(l, now, l->n > 1 ? then : NULL);
        if (pack) pack_chunk(l->cpu, l->scratch, then, l->panel[1]);
        return now;
    }
    fmoe_side side = {.again = is_packed(now) && now->rows < FEW_ROWS};
    if (pack && in_quads(l->cpu, now) == in_quads(l->cpu, then)) side_pack(l->cpu, then, l->panel[1], &side);
    const bool whole = pack && side.pack.left == 0;
    if (l->n > 1 && is_packed(then)) side_fetch_packed(l->cpu, then, now->rows, &side);
    else if (l->n > 1 && along(l->cpu, l->g, then)) side_fetch_along(then, &side);
    else if (l->n > 2 && is_packed(after)) side_fetch_packed(l->cpu, after, now->rows, &side);
    else if (l->n > 2) side_fetch(then, after, now->rows, &side);
    multiply(l, now, is_packed(now) ? packed_at(l->cpu, now) : l->panel[0], &side);
    if (whole || side.pack.left) pack_chunk(l->cpu, l->scratch, then, l->panel[1]);
    return now;
}

/* ---- into the experts ---- */

typedef struct in_run {
    const fmoe_in_job *job;
    fmoe_tasks tasks;
    int64_t *ends; /* running number of tasks, by position in the order of groups */
    int64_t width; /* columns of a task */
} in_run;

static int64_t in_columns(const fmoe_in_job *job, int64_t e) { return fmoe_stack_at(&job->w[0], e).N; }

typedef struct in_walk {
    in_run *run;
    step at; /* the last one handed out */
    int64_t position;
    int64_t task, end; /* claimed, and not yet handed out */
} in_walk;

/* The position moves along the order of groups with the claims, which only grow. */
static bool in_next(void *state, step *s)
{
    in_walk *w = state;
    const fmoe_in_job *job = w->run->job;
    const fmoe_groups *g = job->g;
    const bool has_low = job->low.b[0].t;
    *s = w->at;
    s->k0 += s->kc;
    if (s->rows && s->k0 >= s->v[0].K && has_low && s->a == &job->a) { /* the low-rank term */
        for (int i = 0; i < job->n_w; i++) s->v[i] = fmoe_stack_at(&job->low.b[i], s->e);
        s->dtype = job->low.b[0].dtype;
        s->a = &job->low.l;
        s->k0 = 0;
    } else if (s->k0 >= s->v[0].K) {
        if (w->task == w->end && !fmoe_claim_some(&w->run->tasks, job->cpu->threads, &w->task, &w->end)) return false;
        const int64_t task = w->task++;
        while (task >= w->run->ends[w->position]) w->position++;
        *s = (step){.e = g->order[w->position], .n_v = job->n_w, .dtype = job->w[0].dtype, .a = &job->a};
        const int64_t index = task - (w->position ? w->run->ends[w->position - 1] : 0), width = w->run->width;
        const int64_t blocks = fmoe_ceil_div(in_columns(job, s->e), width);
        const int64_t rows = g->off[s->e + 1] - g->off[s->e], at = index / blocks * rows_of_task(rows);
        s->row = g->off[s->e] + at;
        s->rows = fmoe_min(rows_of_task(rows), rows - at);
        for (int i = 0; i < job->n_w; i++) s->v[i] = fmoe_stack_at(&job->w[i], s->e);
        s->n0 = index % blocks * width;
        s->n = fmoe_min(width, s->v[0].N - s->n0);
    }
    const int64_t K = s->v[0].K;
    s->kc = fmoe_min(chunk_of(job->cpu, &s->v[0], s->a != &job->a), K - s->k0);
    s->first = s->k0 == 0 && s->a == &job->a;
    s->last = s->k0 + s->kc == K && (!has_low || s->a == &job->low.l);
    w->at = *s;
    return true;
}

static void in_worker(void *arg, int worker)
{
    in_walk walk = {.run = arg};
    const fmoe_in_job *job = walk.run->job;
    fmoe_scratch *scratch = &job->scratch[worker];
    line l = line_of(job->cpu, job->g, scratch, in_next, &walk);
    l.touched = job->touched;
    for (const step *s; (s = line_next(&l));)
        for (int64_t j = 0; s->last && j < s->n; j += FMOE_NB)
            job->finish(job->ctx, s->e, s->row, s->rows, s->n0 + j, fmoe_min(FMOE_NB / job->n_w, s->n - j),
                        scratch->c + j * s->rows);
}

void fmoe_multiply_in(const fmoe_in_job *job)
{
    if (fmoe_direct_in(job)) return;
    const fmoe_groups *g = job->g;
    fmoe_in_job gathered = *job;
    gathered.a = fmoe_gather(job->p, g, &job->a, fmoe_stack_at(&job->w[0], 0).K);
    in_run run = {.job = &gathered, .ends = g->ends, .width = FMOE_NB / job->n_w};
    if (job->n_w == 1)
        run.width *= panels_of(job->cpu, job->w, 1, g->E, g->E * fmoe_ceil_div(in_columns(job, 0), FMOE_NB),
                               4 * job->cpu->threads);
    int64_t n = 0;
    for (int64_t i = 0; i < g->E; i++) {
        const int64_t e = g->order[i], rows = g->off[e + 1] - g->off[e];
        if (rows) n += fmoe_ceil_div(in_columns(job, e), run.width) * fmoe_ceil_div(rows, rows_of_task(rows));
        run.ends[i] = n;
    }
    run.tasks.n = n;
    if (n) fmoe_parallel(job->p, in_worker, &run);
}

/* ---- out of the experts ---- */

/* First row of group e whose token is not below t. */
int64_t fmoe_first_row(const fmoe_groups *g, int64_t e, int64_t t)
{
    int64_t lo = g->off[e], hi = g->off[e + 1];
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (g->token[mid] < t) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* The first expert from e on that has rows of tokens [t0, t1). */
int64_t fmoe_next_expert(const fmoe_groups *g, int64_t e, int64_t t0, int64_t t1)
{
    while (e < g->E && fmoe_first_row(g, e, t0) == fmoe_first_row(g, e, t1)) e++;
    return e;
}

typedef struct out_walk {
    fmoe_out_run *run;
    step at;            /* the last one handed out */
    int half;           /* stack it is of */
    int64_t n0, n1;     /* columns of its task */
    int64_t begin, end; /* rows of its expert */
    int64_t e;          /* the expert after it */
    int64_t block;      /* rows of its expert's steps */
} out_walk;

/* Claim the next task that has rows, and stand before its first expert. Tasks without any are zeros. */
static bool out_claim(out_walk *w)
{
    const fmoe_out_job *job = w->run->job;
    const int64_t T = job->out->shape[0], N = job->out->shape[1];
    int64_t task;
    if (!fmoe_claim(&w->run->tasks, &task)) return false;
    w->at = (step){.n_v = 1, .opens = true};
    w->n0 = task % w->run->blocks * w->run->width;
    w->n1 = fmoe_min(N, w->n0 + w->run->width);
    w->at.t0 = task / w->run->blocks * w->run->tokens;
    w->at.t1 = fmoe_min(T, w->at.t0 + w->run->tokens);
    w->e = fmoe_next_expert(job->g, 0, w->at.t0, w->at.t1);
    return true;
}

/* The next expert of the task, or of the next task. */
static bool out_expert(out_walk *w)
{
    const fmoe_groups *g = w->run->job->g;
    step *at = &w->at;
    const bool same = at->rows && w->e < g->E;
    if (!same && !out_claim(w)) return false;
    at->opens = !same;
    at->e = w->e;
    w->begin = w->end = 0;
    if (at->e < g->E) {
        w->begin = fmoe_first_row(g, at->e, at->t0);
        w->end = fmoe_first_row(g, at->e, at->t1);
        w->block = rows_of_task(w->end - w->begin);
        w->e = fmoe_next_expert(g, at->e + 1, at->t0, at->t1);
    }
    at->row = w->begin;
    at->n0 = w->n0;
    return true;
}

static bool out_next(void *state, step *s)
{
    out_walk *w = state;
    const fmoe_out_job *job = w->run->job;
    const fmoe_groups *g = job->g;
    const bool has_low = job->low.b[0].t;
    step *at = &w->at;
    at->k0 += at->kc;
    at->opens = false;
    if (at->rows && at->k0 < at->v[0].K) {           /* the next chunk */
    } else if (at->rows && w->half + 1 < job->n_w) { /* the next matrix along k */
        at->a_column += at->v[0].K;
        at->v[0] = fmoe_stack_at(&job->w[++w->half], at->e);
        at->k0 = 0;
    } else if (at->rows && has_low && at->a == &job->a) { /* the low-rank term */
        at->v[0] = fmoe_stack_at(&job->low.b[0], at->e);
        at->dtype = job->low.b[0].dtype;
        at->a = &job->low.l;
        at->a_column = at->k0 = 0;
    } else {
        if (at->rows && at->row + at->rows < w->end) { /* the next rows of the expert */
            at->row += at->rows;
        } else if (at->rows && at->n0 + at->n < w->n1) { /* the next panels of the task */
            at->n0 += at->n;
            at->row = w->begin;
        } else if (!out_expert(w)) {
            return false;
        }
        at->rows = fmoe_min(w->block, w->end - at->row);
        at->a_column = at->k0 = w->half = 0;
        at->a = &job->a;
        at->dtype = job->w[0].dtype;
        at->v[0] = fmoe_stack_at(&job->w[0], at->e < g->E ? at->e : 0);
        at->n = fmoe_min(FMOE_NB * w->run->panels, w->n1 - at->n0);
    }
    const int64_t K = at->v[0].K;
    at->kc = at->rows ? fmoe_min(chunk_of(job->cpu, &at->v[0], at->a != &job->a), K - at->k0) : 0;
    at->first = at->k0 == 0 && w->half == 0 && at->a == &job->a;
    at->last = at->k0 + at->kc == K && w->half + 1 == job->n_w && (!has_low || at->a == &job->low.l);
    at->closes = !at->rows || (at->last && at->row + at->rows == w->end && at->n0 + at->n == w->n1 && w->e == g->E);
    at->first_column = w->n0;
    at->columns = w->n1 - w->n0;
    *s = *at;
    return true;
}

void fmoe_out_rows(const fmoe_out_job *job, const fmoe_scratch *s, float *c, int64_t e, int64_t row, int64_t rows,
                   int64_t n0, int64_t n, int64_t t0)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    float bias[FMOE_NB];
    enum { AHEAD = 6 };
    if (job->bias) {
        const int dtype = fmoe_tensor_dtype(job->bias);
        const int64_t at = e * fmoe_stride(job->bias, 0) + n0;
        fmoe_load_row(&cpu->k, dtype, bias, (const char *)fmoe_data(job->bias) + at * (int64_t)fmoe_dtype_size(dtype),
                      n);
    }
    for (int64_t i = 0; i < rows; i++, c += FMOE_NB) {
        const int64_t r = row + i;
        if (i + AHEAD < rows) { /* sums of many columns do not stay in L2 */
            const float *next = s->sums + (g->token[r + AHEAD] - t0) * FMOE_NB;
            for (int64_t j = 0; j < n; j += 16) __builtin_prefetch(next + j, 1, 3);
        }
        if (job->steps) fmoe_round_row(&cpu->k, job->steps, c, job->bias ? bias : NULL, n);
        else if (job->bias) cpu->k.axpy(c, 1.0f, bias, n);
        const int p_type = job->weights ? fmoe_tensor_dtype(job->weights) : 0;
        const float p = job->weights ? fmoe_get_float(fmoe_data(job->weights), p_type, g->slot[r]) : 1.0f;
        float *const sum = s->sums + (g->token[r] - t0) * FMOE_NB;
        if (job->steps && job->steps == p_type) {
            float py[FMOE_NB] = {0};
            cpu->k.axpy(py, p, c, n);
            fmoe_round_row(&cpu->k, job->steps, py, NULL, n);
            cpu->k.axpy(sum, 1.0f, py, n);
        } else {
            cpu->k.axpy(sum, p, c, n);
        }
    }
}

void fmoe_out_store(const fmoe_out_job *job, const fmoe_scratch *s, int64_t t0, int64_t t1, int64_t n0, int64_t n)
{
    const fmoe_kernels *k = &job->cpu->k;
    const int dtype = fmoe_tensor_dtype(job->out);
    const int64_t element = (int64_t)fmoe_dtype_size(dtype), stride = fmoe_stride(job->out, 0);
    char *const dst = (char *)fmoe_data(job->out) + (t0 * stride + n0) * element;
    for (int64_t t = 0; t < t1 - t0 && job->add; t++) {
        float old[FMOE_NB];
        fmoe_load_row(k, dtype, old, dst + t * stride * element, n);
        k->axpy(s->sums + t * FMOE_NB, 1.0f, old, n);
    }
    fmoe_store_block(k, dtype)(dst, stride, s->sums, t1 - t0, n, false);
}

static void out_worker(void *arg, int worker)
{
    out_walk walk = {.run = arg};
    const fmoe_out_job *job = walk.run->job;
    fmoe_scratch *scratch = &job->scratch[worker];
    line l = line_of(job->cpu, job->g, scratch, out_next, &walk);
    for (const step *s; (s = line_next(&l));) {
        /* The sums of one panel after another, [tokens][64] each. */
        const int64_t tokens = s->t1 - s->t0;
        fmoe_scratch panel = *scratch;
        if (s->opens)
            memset(panel.sums, 0, (size_t)(fmoe_ceil_div(s->columns, FMOE_NB) * tokens * FMOE_NB) * sizeof *panel.sums);
        for (int64_t j = 0; s->last && j < s->n; j += FMOE_NB) {
            panel.sums = scratch->sums + (s->n0 - s->first_column + j) * tokens;
            fmoe_out_rows(job, &panel, panel.c + j * s->rows, s->e, s->row, s->rows, s->n0 + j,
                          fmoe_min(FMOE_NB, s->n - j), s->t0);
        }
        for (int64_t j = 0; s->closes && j < s->columns; j += FMOE_NB) {
            panel.sums = scratch->sums + j * tokens;
            fmoe_out_store(job, &panel, s->t0, s->t1, s->first_column + j, fmoe_min(FMOE_NB, s->columns - j));
        }
    }
}

/* Columns of a task where they are neighbours in memory: all that are a thread's, so that a page that holds them is
 * looked up once for all of them (7 % of dx at 64 rows); half of that for many threads, of which one may come late. */
int64_t fmoe_out_columns(const fmoe_cpu_plan *cpu, int64_t N)
{
    const int64_t tasks = cpu->threads <= 4 ? cpu->threads : 2 * cpu->threads;
    return cpu->gather ? FMOE_NB : FMOE_NB * fmoe_max(1, N / (FMOE_NB * tasks));
}

void fmoe_out_prepare(fmoe_out_run *run, const fmoe_out_job *job)
{
    const int64_t T = job->out->shape[0], N = job->out->shape[1], blocks = fmoe_ceil_div(N, FMOE_NB);
    *run = (fmoe_out_run){.job = job, .fn = out_worker, .blocks = blocks, .width = FMOE_NB};
    if (T == 0 || fmoe_direct_out(run, job)) return;
    /* Few column blocks for the threads: split the tokens too (each split packs the weights again). */
    const int64_t splits = fmoe_max(1, 2 * job->cpu->threads / fmoe_max(blocks, 1));
    run->tokens = fmoe_min(FMOE_TOKEN_BLOCK, fmoe_max(64, fmoe_ceil_div(T, splits)));
    run->panels = panels_of(job->cpu, job->w, job->n_w, job->g->E, FMOE_PANELS, 1);
    if (run->panels > 1) {
        const int64_t room = job->scratch[0].room / fmoe_min(T, run->tokens);
        run->width = fmoe_max(FMOE_NB, fmoe_min(room, fmoe_out_columns(job->cpu, N)) / FMOE_NB * FMOE_NB);
        run->blocks = fmoe_ceil_div(N, run->width);
    }
    run->tasks.n = run->blocks * fmoe_ceil_div(T, run->tokens);
}

void fmoe_multiply_out(const fmoe_out_job *job)
{
    fmoe_out_run run;
    fmoe_out_prepare(&run, job);
    if (run.tasks.n) fmoe_parallel(job->p, run.fn, &run);
}
