/* SPDX-License-Identifier: Apache-2.0
 *
 * chunking.c - a chunk of weights: how long it is, which form its panels have, and how it is packed. All of it depends
 * on the weights, the plan and the level alone, never on the rows: the same bits for any split of a batch.
 *
 * Weights with columns contiguous in memory (n-major: the backward's) are taken up to four panels at a time, with k
 * that much shorter: 64 columns are a few cache lines of a page, whose address is looked up again for each, and rows a
 * power of two apart share too few sets of L2 to stay there. */
#include "cpu/gemm/pipeline.h"

static bool is_nmajor(const fmoe_view *v) { return v->sk != 1 && v->K > 1; }

/* bf16 pairs that are always multiplied in place (pipeline.c): no panel of them is kept while another is made. */
static bool never_packed(const fmoe_cpu_plan *cpu, const fmoe_view *v)
{
    return cpu->pairs && cpu->k.gemm_nmajor_inplace_bf16 && v->N % FMOE_NB == 0;
}

/* k of a chunk: equal chunks, as few as there can be, whole cache lines. It depends on the weights alone. Panels that
 * are never packed have twice the k: sums go to memory and back half as often, 0.5 % of the backward at 64 rows an
 * expert; four times the k is no faster there, and 2 % slower at 8 rows. */
int64_t fmoe_chunk_of(const fmoe_cpu_plan *cpu, const fmoe_view *v, bool lora)
{
    const bool panels = (is_nmajor(v) || lora) && !cpu->gather; /* a LoRA term has the panels of its weights */
    const int64_t parts = !panels ? 1 : lora || !never_packed(cpu, v) ? FMOE_PANELS : FMOE_PANELS / 2;
    const int64_t chunks = fmoe_max(1, fmoe_ceil_div(v->K * parts, cpu->pairs ? FMOE_KC_PAIRS : FMOE_KC));
    return fmoe_ceil_div(fmoe_ceil_div(v->K, chunks), 32) * 32;
}

/* Panels to take at a time, so that at least `tasks` remain of `blocks` of 64 columns. A list may hold k-major and
 * n-major matrices, with chunks of either length: then one. */
int64_t fmoe_panels_of(const fmoe_cpu_plan *cpu, const fmoe_stack *w, int n_w, int64_t E, int64_t blocks, int64_t tasks)
{
    if (cpu->gather || w->prepacked.block) return 1;
    for (int i = 0; i < n_w; i++)
        for (int64_t e = 0; e < (w[i].list ? E : 1); e++) {
            const fmoe_view v = fmoe_stack_at(&w[i], e);
            if (!is_nmajor(&v)) return 1;
        }
    int64_t panels = FMOE_PANELS;
    while (panels > 1 && blocks / panels < tasks) panels /= 2;
    return panels;
}

/* Rows of an expert that are multiplied by a panel at a time: in equal parts, few enough to stay in L2 from panel to
 * panel. */
int64_t fmoe_rows_of_task(int64_t rows)
{
    return fmoe_ceil_div(rows, fmoe_max(1, fmoe_ceil_div(rows, FMOE_TASK_ROWS)));
}

static fmoe_pack_fn *packer(const fmoe_cpu_plan *cpu, int dtype, bool kmajor, bool kmajor_panel)
{
    const fmoe_kernels *k = &cpu->k;
    if (kmajor_panel && !cpu->pairs && dtype != FMOE_F32)
        return dtype == FMOE_BF16 ? k->pack_kmajor_widen_bf16 : k->pack_kmajor_widen_f16;
    if (kmajor_panel) return cpu->pairs ? k->pack_kmajor_bf16 : k->pack_kmajor_f32;
    if (cpu->pairs) return kmajor ? k->pack_transposed_pairs : k->pack_nmajor_pairs;
    if (dtype == FMOE_BF16) return kmajor ? k->pack_transposed_bf16 : k->pack_nmajor_bf16;
    if (dtype == FMOE_F16) return kmajor ? k->pack_transposed_f16 : k->pack_nmajor_f16;
    return kmajor ? k->pack_transposed_f32 : k->pack_nmajor_f32;
}

const char *fmoe_chunk_at(const fmoe_step *s, int i)
{
    return s->v[i].p + (s->n0 * s->v[i].sn + s->k0 * s->v[i].sk) * (int64_t)fmoe_dtype_size(s->dtype);
}

static bool matrix_is_kmajor(const fmoe_step *s, int i) { return s->v[i].sk == 1 || s->kc == 1; }

bool fmoe_is_kmajor(const fmoe_step *s) { return matrix_is_kmajor(s, 0) && (s->n_v == 1 || matrix_is_kmajor(s, 1)); }

int64_t fmoe_panels_in(const fmoe_step *s) { return fmoe_ceil_div(s->n * s->n_v, FMOE_NB); }

/* Which form its panel has: by the level and the layout of the weights, not by the rows. */
bool fmoe_has_kmajor_panel(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    if (!fmoe_is_kmajor(s)) return false;
    if (cpu->pairs) return cpu->k.gemm_kmajor_bf16 && !cpu->gather;
    return cpu->k.gemm_kmajor_f32 && (s->dtype == FMOE_F32 || cpu->k.pack_kmajor_widen_bf16);
}

int64_t fmoe_chunk_bytes(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    const int64_t element = (int64_t)fmoe_dtype_size(cpu->work_type);
    return fmoe_has_kmajor_panel(cpu, s) ? fmoe_ceil_div(s->kc * element, 16) * 16 * FMOE_NB
                                         : (int64_t)fmoe_panel_bytes(cpu, s->kc);
}

/* The whole chunk at once. */
void fmoe_pack_chunk(const fmoe_cpu_plan *cpu, const fmoe_scratch *scratch, const fmoe_step *s, char *panel)
{
    const int64_t width = FMOE_NB / s->n_v, element = (int64_t)fmoe_dtype_size(s->dtype);
    const int64_t bytes = fmoe_chunk_bytes(cpu, s), panels = fmoe_panels_in(s);
    const bool kmajor_panel = fmoe_has_kmajor_panel(cpu, s);
    if (s->n < panels * width) memset(panel + (panels - 1) * bytes, 0, (size_t)bytes);
    for (int64_t j = 0; j < panels; j++)
        for (int i = 0; i < s->n_v; i++) {
            const char *base = fmoe_chunk_at(s, i) + j * FMOE_NB * s->v[i].sn * element;
            const int64_t n = fmoe_min(width, s->n - j * width);
            const bool kmajor = matrix_is_kmajor(s, i);
            const int64_t pointers = kmajor ? n : s->kc, apart = (kmajor ? s->v[i].sn : s->v[i].sk) * element;
            for (int64_t k = 0; k < pointers; k++) scratch->pointers[k] = base + k * apart;
            packer(cpu, s->dtype, kmajor, kmajor_panel)(panel + j * bytes, s->kc, i * width, scratch->pointers, n);
        }
}

/* ---- packed weights: the panels of a block, chunk after chunk ---- */

bool fmoe_is_prepacked(const fmoe_step *s) { return s->v[0].block != 0; }

/* Bytes of the panels of the first k0 of k, whole chunks. */
static int64_t panels_before(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype, int64_t k0)
{
    const fmoe_step before = {.v = {*v}, .n_v = 1, .dtype = dtype, .kc = k0};
    return fmoe_chunk_bytes(cpu, &before);
}

const char *fmoe_prepacked_at(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    const fmoe_view *v = &s->v[0];
    return v->p + s->n0 / (FMOE_NB / s->n_v) * v->block + panels_before(cpu, v, s->dtype, s->k0);
}

int64_t fmoe_prepacked_block_bytes(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype)
{
    const int64_t chunk = fmoe_chunk_of(cpu, v, false), last = (v->K - 1) / chunk * chunk;
    return panels_before(cpu, v, dtype, last) + panels_before(cpu, v, dtype, v->K - last);
}

void fmoe_prepack_block(const fmoe_cpu_plan *cpu, const fmoe_view v[2], int n_v, int dtype, int64_t n0, char *panels,
                        const void **pointers)
{
    const fmoe_scratch scratch = {.pointers = pointers};
    const int64_t chunk = fmoe_chunk_of(cpu, &v[0], false);
    fmoe_step s = {.v = {v[0], v[n_v - 1]}, .n_v = n_v, .dtype = dtype, .n0 = n0};
    s.n = fmoe_min(FMOE_NB / n_v, v[0].N - n0);
    for (s.k0 = 0; s.k0 < v[0].K; s.k0 += chunk, panels += fmoe_chunk_bytes(cpu, &s)) {
        s.kc = fmoe_min(chunk, v[0].K - s.k0);
        fmoe_pack_chunk(cpu, &scratch, &s, panels);
    }
}
