/* SPDX-License-Identifier: Apache-2.0
 * chunking.c - a chunk of weights: how long it is, which form its product has (forms.h), and how it is packed. */
#include "cpu/gemm/pipeline.h"

int64_t fmoe_chunk_of(const fmoe_cpu_plan *cpu, const fmoe_view *v, bool lora)
{
    return fmoe_choose_chunk(cpu->has, cpu->pairs, cpu->gather, fmoe_is_nmajor(v->sk, v->K), lora, v->N, v->K);
}

int64_t fmoe_panels_of(const fmoe_cpu_plan *cpu, const fmoe_stack *w, int n_w, int64_t E, int64_t blocks, int64_t tasks)
{
    bool all_nmajor = !w->prepacked.block;
    for (int i = 0; i < n_w && all_nmajor; i++)
        for (int64_t e = 0; e < (w[i].list ? E : 1) && all_nmajor; e++) {
            const fmoe_view v = fmoe_stack_at(&w[i], e);
            all_nmajor = fmoe_is_nmajor(v.sk, v.K);
        }
    return fmoe_choose_panels(cpu->gather, all_nmajor, blocks, tasks);
}

const char *fmoe_chunk_at(const fmoe_step *s, int i)
{
    return s->v[i].p + (s->n0 * s->v[i].sn + s->k0 * s->v[i].sk) * (int64_t)fmoe_dtype_size(s->dtype);
}

static bool matrix_is_kmajor(const fmoe_step *s, int i) { return s->v[i].sk == 1 || s->kc == 1; }

bool fmoe_is_kmajor(const fmoe_step *s) { return matrix_is_kmajor(s, 0) && (s->n_v == 1 || matrix_is_kmajor(s, 1)); }

int64_t fmoe_panels_in(const fmoe_step *s) { return fmoe_ceil_div(s->n * s->n_v, FMOE_NB); }

fmoe_form fmoe_form_of(const fmoe_cpu_plan *cpu, const fmoe_groups *g, const fmoe_step *s)
{
    const fmoe_view *v = s->v;
    const fmoe_form_input in = {.has = cpu->has,
                                .pairs = cpu->pairs,
                                .gather = cpu->gather,
                                .intel = cpu->intel,
                                .a_type = g ? s->a->dtype : cpu->work_type,
                                .w_type = s->dtype,
                                .prepacked = !g || fmoe_is_prepacked(s),
                                .kmajor = fmoe_is_kmajor(s),
                                .matrices = s->n_v,
                                .alike = s->n_v == 1 || (v[0].sk == v[1].sk && v[0].sn == v[1].sn),
                                .columns = s->n,
                                .rows = g ? s->rows : 1,
                                .R = g ? g->R : 0,
                                .experts = g ? g->active : 0};
    return fmoe_choose_form(&in);
}

int64_t fmoe_chunk_bytes(const fmoe_cpu_plan *cpu, const fmoe_step *s)
{
    const int64_t element = (int64_t)fmoe_dtype_size(cpu->work_type);
    return fmoe_has_kmajor_panel(s->form) ? fmoe_ceil_div(s->kc * element, 16) * 16 * FMOE_NB
                                          : (int64_t)fmoe_panel_bytes(cpu, s->kc);
}

/* The whole chunk at once. */
void fmoe_pack_chunk(const fmoe_cpu_plan *cpu, const fmoe_scratch *scratch, const fmoe_step *s, char *panel)
{
    const int64_t width = FMOE_NB / s->n_v, element = (int64_t)fmoe_dtype_size(s->dtype);
    const int64_t bytes = fmoe_chunk_bytes(cpu, s), panels = fmoe_panels_in(s);
    if (s->n < panels * width) memset(panel + (panels - 1) * bytes, 0, (size_t)bytes);
    for (int64_t j = 0; j < panels; j++)
        for (int i = 0; i < s->n_v; i++) {
            const char *base = fmoe_chunk_at(s, i) + j * FMOE_NB * s->v[i].sn * element;
            const int64_t n = fmoe_min(width, s->n - j * width);
            const bool kmajor = matrix_is_kmajor(s, i);
            const int64_t pointers = kmajor ? n : s->kc, apart = (kmajor ? s->v[i].sn : s->v[i].sk) * element;
            for (int64_t k = 0; k < pointers; k++) scratch->pointers[k] = base + k * apart;
            const int slot = fmoe_form_pack(s->form, cpu->pairs, s->dtype, kmajor);
            ((fmoe_pack_fn *)fmoe_kernel_at(&cpu->k, slot))(panel + j * bytes, s->kc, i * width, scratch->pointers, n);
        }
}

/* ---- packed weights: the panels of a block, chunk after chunk ---- */

bool fmoe_is_prepacked(const fmoe_step *s) { return s->v[0].block != 0; }

/* Bytes of the panels of the first k0 of k, whole chunks. */
static int64_t panels_before(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype, int64_t k0)
{
    fmoe_step before = {.v = {*v}, .n_v = 1, .dtype = dtype, .kc = k0};
    before.form = fmoe_form_of(cpu, NULL, &before);
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
        s.form = fmoe_form_of(cpu, NULL, &s);
        fmoe_pack_chunk(cpu, &scratch, &s, panels);
    }
}
