/* SPDX-License-Identifier: Apache-2.0
 * forms.c - which form of a product runs (forms.h: the choices, and the numbers that they depend on). */
#include "cpu/gemm/forms.h"

#include "util.h"

const char *fmoe_form_name(fmoe_form form)
{
    static const char *const names[FMOE_FORMS] = {
        [FMOE_FORM_NONE] = "none",
        [FMOE_FORM_TILES] = "tiles in place",
        [FMOE_FORM_FEW_ROWS] = "few rows in place",
        [FMOE_FORM_NMAJOR_INPLACE] = "n-major in place",
        [FMOE_FORM_PREPACKED_KMAJOR] = "k-major panels",
        [FMOE_FORM_PREPACKED] = "panels",
        [FMOE_FORM_PACK_KMAJOR] = "packed k-major",
        [FMOE_FORM_PACK] = "packed",
    };
    return names[form];
}

/* ---- products by weights ---- */

static bool panel_is_kmajor(const fmoe_form_input *in)
{
    if (!in->kmajor) return false;
    if (in->pairs) return FMOE_HAS(in->has, gemm_kmajor_bf16) && !in->gather;
    return FMOE_HAS(in->has, gemm_kmajor_f32) && (in->w_type == FMOE_F32 || FMOE_HAS(in->has, pack_kmajor_widen_bf16));
}

static bool fits_few_rows(const fmoe_form_input *in)
{
    if (in->R > fmoe_few_rows(in->intel) * in->experts) return false;
    if (!fmoe_has_whole_panels(in->columns, in->matrices, in->kmajor, in->alike)) return false;
    const int work = fmoe_work_type(in->pairs);
    if (in->a_type != work || in->w_type != work) return false;
    return in->pairs ? FMOE_HAS(in->has, gemm_kmajor_few_rows_bf16) : FMOE_HAS(in->has, gemm_kmajor_few_rows_f32);
}

static bool fits_nmajor_inplace(const fmoe_form_input *in)
{
    if (in->gather || in->kmajor || in->matrices != 1 || in->columns % FMOE_NB) return false;
    if (in->a_type != fmoe_work_type(in->pairs) || (in->pairs && in->w_type != FMOE_BF16)) return false;
    return in->has >> fmoe_form_gemm(FMOE_FORM_NMAJOR_INPLACE, in->pairs, in->w_type) & 1;
}

fmoe_form fmoe_choose_form(const fmoe_form_input *in)
{
    if (in->rows == 0) return FMOE_FORM_NONE;
    if (in->room_for_tiles && in->pairs && in->kmajor && FMOE_HAS(in->has, gemm_inplace)) return FMOE_FORM_TILES;
    const bool kmajor_panel = panel_is_kmajor(in);
    if (in->prepacked) return kmajor_panel ? FMOE_FORM_PREPACKED_KMAJOR : FMOE_FORM_PREPACKED;
    if (kmajor_panel && fits_few_rows(in)) return FMOE_FORM_FEW_ROWS;
    if (fits_nmajor_inplace(in)) return FMOE_FORM_NMAJOR_INPLACE;
    return kmajor_panel ? FMOE_FORM_PACK_KMAJOR : FMOE_FORM_PACK;
}

int fmoe_form_gemm(fmoe_form form, bool pairs, int w_type)
{
    switch (form) {
    case FMOE_FORM_NONE: return -1;
    case FMOE_FORM_TILES: return FMOE_SLOT_gemm_inplace;
    case FMOE_FORM_FEW_ROWS: return pairs ? FMOE_SLOT_gemm_kmajor_few_rows_bf16 : FMOE_SLOT_gemm_kmajor_few_rows_f32;
    case FMOE_FORM_NMAJOR_INPLACE:
        return pairs                 ? FMOE_SLOT_gemm_nmajor_inplace_bf16
               : w_type == FMOE_BF16 ? FMOE_SLOT_gemm_nmajor_inplace_widen_bf16
               : w_type == FMOE_F16  ? FMOE_SLOT_gemm_nmajor_inplace_widen_f16
                                     : FMOE_SLOT_gemm_nmajor_inplace_f32;
    case FMOE_FORM_PREPACKED_KMAJOR:
    case FMOE_FORM_PACK_KMAJOR: return pairs ? FMOE_SLOT_gemm_kmajor_bf16 : FMOE_SLOT_gemm_kmajor_f32;
    default: return pairs ? FMOE_SLOT_gemm_bf16 : FMOE_SLOT_gemm_f32;
    }
}

int fmoe_form_pack(fmoe_form form, bool pairs, int w_type, bool kmajor)
{
    if (fmoe_has_kmajor_panel(form))
        return pairs                 ? FMOE_SLOT_pack_kmajor_bf16
               : w_type == FMOE_BF16 ? FMOE_SLOT_pack_kmajor_widen_bf16
               : w_type == FMOE_F16  ? FMOE_SLOT_pack_kmajor_widen_f16
                                     : FMOE_SLOT_pack_kmajor_f32;
    if (pairs) return kmajor ? FMOE_SLOT_pack_transposed_pairs : FMOE_SLOT_pack_nmajor_pairs;
    if (w_type == FMOE_BF16) return kmajor ? FMOE_SLOT_pack_transposed_bf16 : FMOE_SLOT_pack_nmajor_bf16;
    if (w_type == FMOE_F16) return kmajor ? FMOE_SLOT_pack_transposed_f16 : FMOE_SLOT_pack_nmajor_f16;
    return kmajor ? FMOE_SLOT_pack_transposed_f32 : FMOE_SLOT_pack_nmajor_f32;
}

/* ---- how weights are divided ---- */

int64_t fmoe_choose_chunk(uint64_t has, bool pairs, bool gather, bool nmajor, bool lora, int64_t N, int64_t K)
{
    const bool never_packed = pairs && FMOE_HAS(has, gemm_nmajor_inplace_bf16) && N % FMOE_NB == 0 && !lora;
    const int64_t parts = gather || !(nmajor || lora) ? 1 : never_packed ? FMOE_PANELS / 2 : FMOE_PANELS;
    const int64_t chunks = fmoe_max(1, fmoe_ceil_div(K * parts, pairs ? FMOE_KC_PAIRS : FMOE_KC));
    return fmoe_ceil_div(fmoe_ceil_div(K, chunks), 32) * 32;
}

int64_t fmoe_choose_panels(bool gather, bool all_nmajor, int64_t blocks, int64_t tasks)
{
    int64_t panels = gather || !all_nmajor ? 1 : FMOE_PANELS;
    while (panels > 1 && blocks / panels < tasks) panels /= 2;
    return panels;
}

int64_t fmoe_rows_of_task(int64_t rows)
{
    return fmoe_ceil_div(rows, fmoe_max(1, fmoe_ceil_div(rows, FMOE_TASK_ROWS)));
}

/* ---- weight gradients ---- */

fmoe_wgrad_form fmoe_choose_wgrad_form(uint64_t has, bool pairs, bool accumulate, bool last, bool whole_lines)
{
    if (!last) return FMOE_WGRAD_KEEP;
    if (accumulate) return FMOE_WGRAD_ADD;
    return whole_lines && fmoe_has_wgrad(has, pairs) ? FMOE_WGRAD_STREAM : FMOE_WGRAD_STORE;
}

int64_t fmoe_wgrad_chunk(uint64_t has, bool pairs)
{
    return pairs ? FMOE_KC_PAIRS : FMOE_HAS(has, wgrad_f32) ? 2 * FMOE_KC : FMOE_KC;
}

int fmoe_wgrad_pack(uint64_t has, bool pairs, int type, bool left)
{
    if (left && fmoe_left_transposed(has, pairs)) return FMOE_SLOT_pack_wgrad_left_pairs;
    if (pairs) return FMOE_SLOT_pack_nmajor_pairs;
    return type == FMOE_BF16  ? FMOE_SLOT_pack_nmajor_bf16
           : type == FMOE_F16 ? FMOE_SLOT_pack_nmajor_f16
                              : FMOE_SLOT_pack_nmajor_f32;
}
