/* SPDX-License-Identifier: Apache-2.0
 *
 * pipeline.c - the chunks of a worker as a pipeline: one is multiplied, the next is packed, the one after is prefetched
 * (overlap.h). */
#include "cpu/gemm/pipeline.h"

/* ---- what overlaps with a product: packing and prefetching ---- */

/* The two halves of a panel's 64 columns, which may be of two matrices; false where columns are missing. */
static bool panel_halves(const fmoe_step *s, const char *half[2])
{
    const bool alike = s->n_v == 1 || (s->v[0].sk == s->v[1].sk && s->v[0].sn == s->v[1].sn);
    if (!fmoe_has_whole_panels(s->n, s->n_v, fmoe_is_kmajor(s), alike)) return false;
    half[0] = fmoe_chunk_at(s, 0);
    half[1] =
        s->n_v == 2 ? fmoe_chunk_at(s, 1) : half[0] + FMOE_NB / 2 * s->v[0].sn * (int64_t)fmoe_dtype_size(s->dtype);
    return true;
}

/* The kernel that multiplies a step. */
static fmoe_any_fn *gemm_kernel(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    return fmoe_kernel_at(&cpu->k, fmoe_form_gemm(s->form, cpu->pairs, s->dtype));
}

/* The two halves of the columns of a step of few rows, as rows of codes; false: they are to be decoded before. */
static bool coded_halves(const fmoe_cpu_plan *cpu, const fmoe_step *s, fmoe_coded m[2], int64_t row[2])
{
    for (int i = 0; i < 2; i++) {
        const fmoe_view *v = &s->v[i < s->n_v ? i : 0];
        m[i] = fmoe_coded_of(v->coded->t, v->coded->quant, v->coded->list, v->e);
        row[i] = v->coded->row + s->n0 + (i < s->n_v ? 0 : FMOE_NB / 2);
        if (!fmoe_fits_coded_few_rows(cpu->has, &m[i], row[i], s->v[0].K)) return false;
    }
    return cpu->pairs;
}

static bool fits_coded(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    fmoe_coded m[2];
    int64_t row[2];
    return s->v[0].coded && coded_halves(cpu, s, m, row);
}

void fmoe_take_k(const fmoe_cpu_plan *cpu, const fmoe_groups *g, fmoe_step *s, bool lora)
{
    s->chunk = fmoe_chunk_of(cpu, &s->v[0], lora);
    s->kc = s->rows ? fmoe_min(s->chunk, s->v[0].K - s->k0) : 0;
    s->form = fmoe_form_of(cpu, g, s);
    if (s->form == FMOE_FORM_FEW_ROWS && (!s->v[0].coded || fits_coded(cpu, s))) s->kc = s->v[0].K - s->k0;
}

/* Let the product before it pack a chunk piece by piece, where its shape is a regular one. */
static void overlap_pack(const fmoe_cpu_plan *cpu, const fmoe_step *s, char *panel, fmoe_overlap *overlap)
{
    enum { ROW = FMOE_NB * 4 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype), unit = cpu->pairs ? 2 : 1; /* elements */
    const bool kmajor = fmoe_is_kmajor(s), kmajor_panel = fmoe_has_kmajor_panel(s->form);
    const int64_t k = (kmajor ? 16 : 2) * unit, pieces = s->kc / k, columns = kmajor_panel ? 4 : 8; /* of a piece */
    fmoe_walk *w = &overlap->pack;
    if (s->kc % k || pieces == 0 || !panel_halves(s, w->half)) return;
    overlap->panel = overlap->to = panel;
    overlap->kind = kmajor_panel ? FMOE_OVERLAP_KMAJOR : kmajor ? FMOE_OVERLAP_TRANSPOSE : FMOE_OVERLAP_NMAJOR;
    overlap->dtype = s->dtype;
    overlap->to_step = kmajor ? 16 * ROW : (int64_t)fmoe_panel_bytes(cpu, s->kc);
    overlap->to_run = kmajor ? 32 : 2 * ROW;
    w->at = w->half[0];
    w->step = (kmajor ? s->v[0].sn : s->v[0].sk) * element;
    w->advance = kmajor ? k * element : FMOE_NB * element;
    w->run_step = kmajor ? columns * w->step : k * w->step;
    w->per_half = (int32_t)(kmajor ? FMOE_NB / 2 / columns : pieces);
    w->length = w->in_run = (int32_t)(kmajor ? pieces : fmoe_panels_in(s));
    w->left = pieces * (kmajor ? FMOE_NB / columns : fmoe_panels_in(s));
}

/* Let the product prefetch a prepacked panel: one line after another; on Intel's cores eighths of it side by side where
 * memory and products take about as long (10 % at 16 and 24 rows, 1 at 48; at 8 it costs 4 %, at 64 up to 3). */
static void overlap_prefetch_prepacked(const fmoe_cpu_plan *cpu, const fmoe_step *s, int64_t rows,
                                       fmoe_overlap *overlap)
{
    enum { LINE = 64 };
    fmoe_walk *w = &overlap->prefetch;
    w->at = w->half[0] = fmoe_prepacked_at(cpu, s);
    w->step = LINE;
    w->advance = 8 * LINE;
    w->left = fmoe_chunk_bytes(cpu, s) / w->advance;
    w->length = w->in_run = (int32_t)w->left;
    w->per_half = 1;
    if (cpu->intel && rows >= FMOE_MEMORY_BOUND_ROWS / 2 && rows <= 2 * FMOE_MEMORY_BOUND_ROWS) {
        w->step = fmoe_chunk_bytes(cpu, s) / 8;
        w->advance = LINE;
    }
    w->into_l1 = rows >= FMOE_MEMORY_BOUND_ROWS;
}

/* Let the product prefetch the lines of panel j of a step of n-major weights in place. */
static void overlap_prefetch_nmajor(const fmoe_step *s, int64_t j, fmoe_overlap *overlap)
{
    enum { LINE = 64 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_walk *w = &overlap->prefetch;
    w->at = w->half[0] = fmoe_chunk_at(s, 0) + j * FMOE_NB * element;
    w->step = s->v[0].sk * element;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = w->in_run = (int32_t)(FMOE_NB * element / LINE);
    w->per_half = (int32_t)(s->kc / 8);
    w->left = (int64_t)w->length * w->per_half;
}

/* Let panel j of one of the last two chunks, or of the only one, prefetch a matrix that the epilogue reads or writes.
 * Each of its rows is a page or half of one, and an epilogue that waits for them takes twice as long; but few rows
 * leave memory no time for more than the weights. */
static void overlap_prefetch_epilogue(const fmoe_step *s, const fmoe_epilogue_operand *operands, int64_t j,
                                      fmoe_overlap *overlap)
{
    enum { LINE = 64 };
    fmoe_walk *w = &overlap->epilogue;
    const int64_t left = s->v[0].K - s->k0 - s->kc, i = left || s->k0 == 0 ? j : fmoe_panels_in(s) + j;
    if (s->rows < FMOE_MEMORY_BOUND_ROWS || left > s->kc || i >= FMOE_EPILOGUE_OPERANDS || !operands[i].base) return;
    const fmoe_epilogue_operand *t = &operands[i];
    w->at = w->half[0] = t->base + s->row * t->stride + s->n0 * t->element;
    w->step = t->stride;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = w->in_run = (int32_t)fmoe_ceil_div(s->n * t->element, LINE);
    w->per_half = (int32_t)(s->rows / 8);
    w->left = (int64_t)w->length * w->per_half;
}

/* Let the product prefetch the lines of a chunk: eight columns, or eight k, side by side. Of n-major weights, `s` is
 * prefetched up to PREFETCH_AHEAD k only, after what `before`, the chunk that is packed now, has beyond that. */
static void overlap_prefetch(const fmoe_step *before, const fmoe_step *s, int64_t rows, fmoe_overlap *overlap)
{
    enum { LINE = 64, PREFETCH_AHEAD = 32 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    const bool kmajor = fmoe_is_kmajor(s);
    fmoe_walk *w = &overlap->prefetch;
    if (!panel_halves(s, w->half)) return;
    w->step = (kmajor ? s->v[0].sn : s->v[0].sk) * element;
    w->advance = LINE;
    w->run_step = 8 * w->step;
    w->length = (int32_t)fmoe_ceil_div((kmajor ? s->kc : s->n) * element, LINE);
    w->per_half = (int32_t)(kmajor ? FMOE_NB / 16 : fmoe_ceil_div(s->kc, 8));
    w->left = (int64_t)w->length * w->per_half * (kmajor ? 2 : s->n_v);
    if (!kmajor && s->n_v == 1 && before->n == s->n && before->v[0].sk == s->v[0].sk && before->dtype == s->dtype) {
        w->half[1] = w->half[0];
        w->half[0] = fmoe_chunk_at(before, 0) + PREFETCH_AHEAD * w->step;
        w->per_half = (int32_t)fmoe_ceil_div(fmoe_max(0, before->kc - PREFETCH_AHEAD), 8);
        w->left = (int64_t)w->length * (w->per_half + fmoe_min(PREFETCH_AHEAD, s->kc) / 8);
        if (!w->per_half) w->half[0] = w->half[1];
    }
    w->in_run = w->length;
    w->at = w->half[0];
    w->into_l1 = rows >= FMOE_MEMORY_BOUND_ROWS && kmajor;
}

/* ---- quantised weights ---- */

/* Decode a step's chunk, which then is one of plain weights: into the worker's scratch, from where it is packed or
 * multiplied before the next one is decoded. */
static void decode_step(const fmoe_pipeline *pipe, fmoe_step *s)
{
    if (!s->v[0].coded || !s->rows) return;
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    const bool swap = s->v[0].coded->swap;
    const int64_t apart = swap ? s->n : (s->kc + 31) / 32 * 32 + 32; /* columns never a whole page apart */
    for (int i = 0; i < s->n_v; i++) {
        fmoe_view *v = &s->v[i];
        char *to = pipe->scratch->decoded + i * (FMOE_NB / 2) * apart * element;
        const fmoe_code_block block = {v, s->n0, s->n, s->k0, s->kc};
        fmoe_decode(pipe->cpu, &block, to, apart);
        v->coded = NULL;
        v->sn = swap ? 1 : apart;
        v->sk = swap ? apart : 1;
        v->p = (char *)((uintptr_t)to - (uintptr_t)((s->n0 * v->sn + s->k0 * v->sk) * element)); /* see fmoe_chunk_at */
    }
}

/* Let a product prefetch part j of n of the codes of a step, spread over it: in a burst, before they are decoded, a
 * core drops most of them, and waits longer for codes than it decodes them. */
static void overlap_prefetch_codes(const fmoe_step *s, int64_t j, int64_t n, bool into_l1, fmoe_walk *w)
{
    enum { LINE = 64 };
    fmoe_code_lines part[2];
    if (!s->v[0].coded || !s->rows) return;
    for (int i = 0; i < s->n_v; i++) part[i] = fmoe_codes_at(&(fmoe_code_block){&s->v[i], s->n0, s->n, s->k0, s->kc});
    const int64_t eights = part[0].rows / 8, first = eights * j / n, count = eights * (j + 1) / n - first;
    *w = (fmoe_walk){.step = part[0].step, .advance = LINE, .run_step = 8 * part[0].step, .into_l1 = into_l1};
    w->half[0] = w->at = part[0].at + first * w->run_step;
    w->half[1] = s->n_v == 2 ? part[1].at + first * w->run_step : w->at;
    w->length = w->in_run = (int32_t)fmoe_ceil_div(part[0].bytes, LINE);
    w->per_half = (int32_t)count;
    w->left = (int64_t)w->length * count * s->n_v;
}

/* ---- the pipeline of a worker ---- */

fmoe_pipeline fmoe_pipeline_start(const fmoe_cpu_plan *cpu, const fmoe_groups *g, fmoe_scratch *scratch,
                                  bool (*next)(void *, fmoe_step *), void *state)
{
    return (fmoe_pipeline){.cpu = cpu,
                           .g = g,
                           .scratch = scratch,
                           .next = next,
                           .state = state,
                           .n = -1,
                           .panel = {scratch->panel, (char *)scratch->panel + FMOE_PANEL_BYTES}};
}

/* Pointers to the rows of A that a step multiplies, so many of them after the first `from`. */
static void point_at_rows(const fmoe_pipeline *pipe, const fmoe_step *s, int64_t from, int64_t rows, const void **a)
{
    fmoe_point(s->a, pipe->g, s->e, s->row + from, rows, (s->a_column + s->k0) * (int64_t)fmoe_dtype_size(s->a->dtype),
               a);
}

/* c[rows][64] (+)= A . W^T over one chunk of n-major weights in place; `then`: the one after it, or NULL. While a panel
 * of it is multiplied, the next one is prefetched, into L1 too where rows are many; or, where they are quantised, the
 * codes of the next chunk, for this one was decoded into L2 (dx at 64 rows: 15 % less than with both). */
static void multiply_nmajor(const fmoe_pipeline *pipe, const fmoe_step *s, const fmoe_step *then)
{
    fmoe_gemm_nmajor_inplace_fn *gemm = (fmoe_gemm_nmajor_inplace_fn *)gemm_kernel(pipe->cpu, s);
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype), panels = fmoe_panels_in(s);
    const bool many = s->rows >= FMOE_MANY_ROWS && !pipe->cpu->intel;
    const void *a[FMOE_TASK_ROWS];
    point_at_rows(pipe, s, 0, s->rows, a);
    for (int64_t j = 0; j < panels; j++) {
        fmoe_overlap overlap = {.batched = pipe->cpu->intel};
        if (j + 1 < panels) overlap_prefetch_nmajor(s, j + 1, &overlap);
        else if (then && then->form == FMOE_FORM_NMAJOR_INPLACE && !then->v[0].coded)
            overlap_prefetch_nmajor(then, 0, &overlap);
        if (pipe->operands) overlap_prefetch_epilogue(s, pipe->operands, j, &overlap);
        if (then && then->v[0].coded) overlap_prefetch_codes(then, j, panels, many, &overlap.prefetch);
        overlap.prefetch.into_l1 = overlap.epilogue.into_l1 = many;
        gemm(s->rows, s->kc, a, fmoe_chunk_at(s, 0) + j * FMOE_NB * element, s->v[0].sk * element, pipe->panel[0],
             pipe->scratch->c + j * s->rows * FMOE_NB, FMOE_NB, s->first, &overlap);
    }
}

/* c[rows][64] (+)= A . W^T for few rows, by k-major weights in place; `then`: as above. What comes 16 columns later is
 * prefetched: 16 to 64 KiB are far enough, and more cost (128 KiB 3 %, 256 KiB 8 % of a stream from memory). Intel's
 * cores are faster by 3 to 10 % with lines of the same columns, 768 bytes ahead and into L1; Zen 4 is slower by 8
 * to 17. */
static void multiply_few_rows(const fmoe_pipeline *pipe, const fmoe_step *s, const fmoe_step *then)
{
    enum { LINE = 64, COLUMNS = FMOE_NB / 2, AHEAD = COLUMNS / 2 };
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype), step = s->v[0].sn * element, bytes = s->kc * element;
    fmoe_gemm_kmajor_few_rows_fn *gemm = (fmoe_gemm_kmajor_few_rows_fn *)gemm_kernel(pipe->cpu, s);
    const char *w[2], *next[2] = {NULL, NULL};
    const void *a[FMOE_TASK_ROWS];
    panel_halves(s, w);
    if (then && then->form == FMOE_FORM_FEW_ROWS && then->v[0].sn == s->v[0].sn && !then->v[0].coded)
        panel_halves(then, next);
    point_at_rows(pipe, s, 0, s->rows, a);
    for (int i = 0; i < 2; i++) {
        const char *const from = w[i] + AHEAD * step, *const after = i ? next[0] : w[1];
        fmoe_walk prefetch = {.at = from, .half = {from, after ? after : from}, .advance = 4 * LINE};
        prefetch.run_step = step;
        prefetch.per_half = step == bytes ? 1 : AHEAD; /* one run where each column begins at the end of the last */
        prefetch.length = prefetch.in_run = (int32_t)fmoe_ceil_div(AHEAD / prefetch.per_half * bytes, prefetch.advance);
        prefetch.left = (int64_t)prefetch.length * prefetch.per_half * (after ? 2 : 1);
        if (pipe->cpu->intel) prefetch.same_columns = true, prefetch.left = bytes;
        gemm(s->rows, s->kc, s->chunk, a, w[i], step, pipe->scratch->c + i * COLUMNS, FMOE_NB, s->first, &prefetch);
    }
}

/* The same by quantised weights, decoded in registers; `then`: as above. false: they are to be decoded before. */
static bool multiply_coded(const fmoe_pipeline *pipe, const fmoe_step *s, const fmoe_step *then)
{
    const void *a[FMOE_TASK_ROWS];
    fmoe_coded m[3];
    int64_t row[3];
    if (!s->v[0].coded || !coded_halves(pipe->cpu, s, m, row)) return false;
    m[2] = m[1], row[2] = row[1] + FMOE_NB / 2;
    if (then && then->rows && then->v[0].coded) {
        const fmoe_view *v = &then->v[0];
        m[2] = fmoe_coded_of(v->coded->t, v->coded->quant, v->coded->list, v->e);
        row[2] = v->coded->row + then->n0;
    }
    point_at_rows(pipe, s, 0, s->rows, a);
    for (int i = 0; i < 2; i++)
        pipe->cpu->k.gemm_coded_few_rows_bf16(s->rows, s->k0, s->kc, s->chunk, a, &m[i], row[i],
                                              pipe->scratch->c + i * (FMOE_NB / 2), FMOE_NB, s->first, &m[i + 1],
                                              row[i + 1]);
    return true;
}

/* c[rows][64] (+)= A . W^T over one chunk, whose panels are ready. */
static void multiply_panels(const fmoe_pipeline *pipe, const fmoe_step *s, const char *panel, fmoe_overlap *overlap)
{
    const fmoe_cpu_plan *cpu = pipe->cpu;
    fmoe_gemm_fn *gemm = (fmoe_gemm_fn *)gemm_kernel(cpu, s);
    const bool widen = s->a->dtype != cpu->work_type;
    const int64_t block = widen ? FMOE_WIDEN_ROWS : FMOE_TASK_ROWS, panels = fmoe_panels_in(s);
    const void *a[FMOE_TASK_ROWS];
    int64_t calls = fmoe_ceil_div(s->rows, block) * panels;
    for (int64_t r = 0; r < s->rows; r += block) {
        const int64_t rows = fmoe_min(block, s->rows - r);
        point_at_rows(pipe, s, r, rows, a);
        for (int64_t i = 0; i < rows && widen; i++) {
            float *row_f32 = pipe->scratch->widened + i * FMOE_KC;
            fmoe_load_row(&cpu->k, s->a->dtype, row_f32, a[i], s->kc);
            a[i] = row_f32;
        }
        for (int64_t j = 0; j < panels; j++, calls--) { /* each with its share of what overlaps */
            const int64_t pack = overlap->pack.left / calls, prefetch = overlap->prefetch.left / calls;
            const int64_t later[2] = {overlap->pack.left - pack, overlap->prefetch.left - prefetch};
            overlap->pack.left = pack;
            overlap->prefetch.left = prefetch;
            gemm(rows, s->kc, a, 4, panel + j * fmoe_chunk_bytes(cpu, s),
                 pipe->scratch->c + (j * s->rows + r) * FMOE_NB, FMOE_NB, s->first, overlap);
            overlap->pack.left += later[0];
            overlap->prefetch.left += later[1];
        }
    }
}

/* The next step, multiplied: NULL when there is none. */
const fmoe_step *fmoe_pipeline_next(fmoe_pipeline *pipe)
{
    if (pipe->n < 0) {
        for (pipe->n = 0; pipe->n < 3 && pipe->next(pipe->state, &pipe->steps[pipe->n]);) pipe->n++;
        if (pipe->n && fmoe_is_packed_now(pipe->steps[0].form)) decode_step(pipe, &pipe->steps[0]);
        if (pipe->n && fmoe_is_packed_now(pipe->steps[0].form))
            fmoe_pack_chunk(pipe->cpu, pipe->scratch, &pipe->steps[0], pipe->panel[0]);
    } else {
        char *const used = pipe->panel[0];
        pipe->panel[0] = pipe->panel[1];
        pipe->panel[1] = used;
        if (pipe->n < 3 || !pipe->next(pipe->state, &pipe->steps[pipe->first]))
            pipe->n--; /* in the place of the one that is done */
        pipe->first = (pipe->first + 1) % 3;
    }
    if (pipe->n <= 0) return NULL;
    fmoe_step *now = &pipe->steps[pipe->first], *then = &pipe->steps[(pipe->first + 1) % 3];
    const fmoe_step *after = &pipe->steps[(pipe->first + 2) % 3];
    const bool pack = pipe->n > 1 && fmoe_is_packed_now(then->form);
    if (now->form == FMOE_FORM_NONE || now->form == FMOE_FORM_FEW_ROWS || now->form == FMOE_FORM_NMAJOR_INPLACE) {
        const fmoe_step *next = pipe->n > 1 ? then : NULL;
        const bool done = now->form == FMOE_FORM_FEW_ROWS && multiply_coded(pipe, now, next);
        if (!done) decode_step(pipe, now);
        if (!done && now->form == FMOE_FORM_FEW_ROWS) multiply_few_rows(pipe, now, next);
        else if (now->form == FMOE_FORM_NMAJOR_INPLACE) multiply_nmajor(pipe, now, next);
        if (pack) decode_step(pipe, then);
        if (pack) fmoe_pack_chunk(pipe->cpu, pipe->scratch, then, pipe->panel[1]);
        return now;
    }
    fmoe_overlap overlap = {.batched = pipe->cpu->intel,
                            .prefetch_again = fmoe_is_prepacked(now) && now->rows < FMOE_MEMORY_BOUND_ROWS};
    if (pack) decode_step(pipe, then);
    if (pack && fmoe_has_kmajor_panel(now->form) == fmoe_has_kmajor_panel(then->form))
        overlap_pack(pipe->cpu, then, pipe->panel[1], &overlap);
    const bool whole = pack && overlap.pack.left == 0;
    if (pipe->n > 1 && fmoe_is_prepacked(then)) overlap_prefetch_prepacked(pipe->cpu, then, now->rows, &overlap);
    else if (pipe->n > 2 && fmoe_is_prepacked(after)) overlap_prefetch_prepacked(pipe->cpu, after, now->rows, &overlap);
    else if (pipe->n > 2 && after->v[0].coded)
        overlap_prefetch_codes(after, 0, 1, now->rows >= FMOE_MEMORY_BOUND_ROWS, &overlap.prefetch);
    else if (pipe->n > 2) overlap_prefetch(then, after, now->rows, &overlap);
    multiply_panels(pipe, now, fmoe_is_prepacked(now) ? fmoe_prepacked_at(pipe->cpu, now) : pipe->panel[0], &overlap);
    if (whole || overlap.pack.left) fmoe_pack_chunk(pipe->cpu, pipe->scratch, then, pipe->panel[1]);
    return now;
}
