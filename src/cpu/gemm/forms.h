/* SPDX-License-Identifier: Apache-2.0
 *
 * forms.h - which form of a product runs, and how it is divided: every choice, and every number that one depends on.
 * Pure functions of plain numbers: tested without the hardware (tests/unit/test_forms.c), and asked by
 * fmoe_plan_describe as by the products themselves. */
#ifndef FMOE_CPU_FORMS_H
#define FMOE_CPU_FORMS_H

#include "cpu/kernels/kernels.h"

/* ---- thresholds ---- */

enum {
    /* Up to so many rows an expert, on average, k-major weights are multiplied in place. On Intel's cores packing
     * takes longer, and in place pays up to 10 rows: 7 % there, 11 to 25 at 8; at 12 they are equal or 9 % slower. */
    FMOE_FEW_ROWS = 7,
    FMOE_FEW_ROWS_INTEL = 10,
    /* Below, products wait for memory: it is prefetched from as fast as it can be. */
    FMOE_MEMORY_BOUND_ROWS = 24,
    /* From so many rows on, n-major weights in place are prefetched into L1 too: the first tile waits for L2 otherwise
     * (4 % of the backward at 64 rows in small pages). Where rows are fewer, a core's buffers for L1 are full of lines
     * on their way (2 % more time at 24 rows, 30 at 16, 50 at 8). Intel's cores: not measured, never. */
    FMOE_MANY_ROWS = 40,
    /* A saved h of so many bytes is stored nontemporally: it is too large to stay in the cache until the backward, and
     * all weights are read in between (0.3 % of forward and backward). */
    FMOE_NONTEMPORAL_BYTES = 1 << 20
};

/* ---- how much at a time ---- */

enum {
    FMOE_TASK_ROWS = 144,     /* rows of an expert that stay in L2 from panel to panel */
    FMOE_ROW_BLOCK = 512,     /* rows of sums that a worker's scratch holds */
    FMOE_WIDEN_ROWS = 48,     /* rows brought to f32 at a time */
    FMOE_PANELS = 4,          /* of 64 columns, at a time, of n-major weights */
    FMOE_TOKEN_BLOCK = 2048,  /* tokens whose sums a task of combine owns, at most */
    FMOE_TOKENS_LEAST = 64,   /* and at least: each split of the tokens packs the weights again */
    FMOE_TILES_L2 = 1 << 20,  /* bytes of rows in tiles: half of a 2 MiB L2 */
    FMOE_LEFT_PANELS = 8,     /* of the left operand of a weight gradient that are kept: L3 is near enough for them, */
    FMOE_LEFT_PANELS_AMX = 3, /* but AMX wants L2 */
    FMOE_WGRAD_LEAST = 3 * FMOE_NB, /* rows of a weight gradient in one task; a gradient's rows may be a page each, */
    FMOE_WGRAD_MOST = 1024,         /* and the TLB shall hold them from panel to panel */
    FMOE_DECODED_BYTES = 2 * FMOE_PANEL_BYTES + 4096, /* a chunk of quantised weights, decoded */
    FMOE_DECODE_ROWS = 8, /* rows of codes that are decoded at a time; as many more are prefetched before */
    FMOE_STORE_ROWS = 128 /* rows of 64 f32 sums that stay in L1 until they are stored: 32 KiB */
};

/* ---- the form of a product by weights ---- */

typedef enum fmoe_form {
    FMOE_FORM_NONE,             /* no rows: nothing is done */
    FMOE_FORM_TILES,            /* k-major weights in place, by rows in tiles (AMX) */
    FMOE_FORM_FEW_ROWS,         /* k-major weights in place, for few rows */
    FMOE_FORM_NMAJOR_INPLACE,   /* n-major weights in place */
    FMOE_FORM_PREPACKED_KMAJOR, /* panels that were packed before the call: kmajor ones, */
    FMOE_FORM_PREPACKED,        /* or others */
    FMOE_FORM_PACK_KMAJOR,      /* panels that are packed on the way: kmajor ones, */
    FMOE_FORM_PACK,             /* or others */
    FMOE_FORMS
} fmoe_form;

const char *fmoe_form_name(fmoe_form form);

#define FMOE_HAS(has, field) ((has) >> FMOE_SLOT_##field & 1)

/* What the choice depends on. */
typedef struct fmoe_form_input {
    uint64_t has;        /* one bit for every slot of the kernel table that is filled */
    bool pairs, gather;  /* of the plan (cpu/plan.h) */
    bool intel;          /* Intel's cores */
    int a_type, w_type;  /* fmoe_dtype of the rows, of the weights */
    bool prepacked;      /* the weights are panels */
    bool kmajor;         /* k is contiguous in each of the matrices */
    bool room_for_tiles; /* asked for a whole product without a LoRA term, whose rows have room in tiles */
    int matrices;        /* side by side: gate and up, or one */
    bool alike;          /* and their strides are the same */
    int64_t columns;     /* of each, in this step */
    int64_t rows;        /* of the expert, in this step */
    int64_t R, experts;  /* rows of all experts, and experts that have any */
} fmoe_form_input;

/* The panels of weights depend on the weights, the plan and the level alone, never on the rows, and few rows sum in the
 * same order as panels do: the same bits for any split of a batch. All experts alike: a chunk of one kind does not pack
 * the next one of the other kind, so few rows are those of the average. */
fmoe_form fmoe_choose_form(const fmoe_form_input *in);

static inline int fmoe_work_type(bool pairs) { return pairs ? FMOE_BF16 : FMOE_F32; }

static inline int64_t fmoe_few_rows(bool intel) { return intel ? FMOE_FEW_ROWS_INTEL : FMOE_FEW_ROWS; }

/* A panel of a form is a kmajor one: where it has a panel at all, or would have one with more rows. */
static inline bool fmoe_has_kmajor_panel(fmoe_form form)
{
    return form == FMOE_FORM_FEW_ROWS || form == FMOE_FORM_PREPACKED_KMAJOR || form == FMOE_FORM_PACK_KMAJOR;
}

/* Quantised weights of few rows are decoded in registers: 32 k at a time, whole ones, of one group; four columns at a
 * time, which of e4m3 share their scale. rows: the first of 32 rows of codes, k: of a product. */
static inline bool fmoe_fits_coded_few_rows(uint64_t has, const fmoe_coded *m, int64_t row, int64_t k)
{
    if (!FMOE_HAS(has, gemm_coded_few_rows_bf16) || m->zeros || k % 32) return false;
    if (m->group_cols % 32 && m->group_cols < k) return false;
    for (int64_t i = row; m->code == FMOE_CODE_E4M3 && i < row + FMOE_NB / 2; i += 4)
        if (fmoe_coded_group(m, i) != fmoe_coded_group(m, i + 3)) return false;
    return true;
}

static inline bool fmoe_is_packed_now(fmoe_form form)
{
    return form == FMOE_FORM_PACK_KMAJOR || form == FMOE_FORM_PACK;
}

/* Whole halves of 64 columns, of one matrix or of two with the same strides; of k-major ones no more than that. */
static inline bool fmoe_has_whole_panels(int64_t columns, int matrices, bool kmajor, bool alike)
{
    return columns * matrices % FMOE_NB == 0 && !(kmajor && columns > FMOE_NB) && (matrices == 1 || alike);
}

/* The slot that multiplies (-1: none), and the one that packs a matrix into the form's panel, or did so. */
int fmoe_form_gemm(fmoe_form form, bool pairs, int w_type);
int fmoe_form_pack(fmoe_form form, bool pairs, int w_type, bool kmajor);

/* ---- how weights are divided ---- */

/* Weights with columns contiguous in memory (n-major: the backward's) are taken up to four panels at a time, with k
 * that much shorter: 64 columns are a few cache lines of a page, whose address is looked up again for each, and rows a
 * power of two apart share too few sets of L2 to stay there. */
static inline bool fmoe_is_nmajor(int64_t sk, int64_t K) { return sk != 1 && K > 1; }

/* k of a chunk of a matrix N x K: equal chunks, as few as there can be, whole cache lines. It depends on the weights
 * alone. Panels that are never packed, as bf16 pairs in place, have twice the k: sums go to memory and back half as
 * often, 0.5 % of the backward at 64 rows an expert; four times the k is no faster there, and 2 % slower at 8 rows. A
 * LoRA term has the panels of its weights. */
int64_t fmoe_choose_chunk(uint64_t has, bool pairs, bool gather, bool nmajor, bool lora, int64_t N, int64_t K);

/* Panels to take at a time, so that at least `tasks` remain of `blocks` of 64 columns. Only where every matrix is
 * n-major: a list may hold both kinds, with chunks of either length. */
int64_t fmoe_choose_panels(bool gather, bool all_nmajor, int64_t blocks, int64_t tasks);

/* Rows of an expert that are multiplied by a panel at a time: in equal parts. */
int64_t fmoe_rows_of_task(int64_t rows);

/* ---- weight gradients ---- */

typedef enum fmoe_wgrad_form {
    FMOE_WGRAD_STREAM, /* from registers to memory, nontemporally */
    FMOE_WGRAD_STORE,  /* sums in the scratch, then stored */
    FMOE_WGRAD_ADD,    /* sums in the scratch, then added to what is there */
    FMOE_WGRAD_KEEP    /* sums in the scratch, which the next rows go on with */
} fmoe_wgrad_form;

/* last: of the chunks of rows; whole_lines: all of the 64 columns, in cache lines of their own. */
fmoe_wgrad_form fmoe_choose_wgrad_form(uint64_t has, bool pairs, bool accumulate, bool last, bool whole_lines);

static inline bool fmoe_has_wgrad(uint64_t has, bool pairs)
{
    return pairs ? FMOE_HAS(has, wgrad_bf16) : FMOE_HAS(has, wgrad_f32);
}

/* Where a level transposes the left operand (AMX), each of its columns, a row of dW, is contiguous, padded to whole
 * steps of 32. */
static inline bool fmoe_left_transposed(uint64_t has, bool pairs)
{
    return pairs && FMOE_HAS(has, pack_wgrad_left_pairs);
}

/* Rows of an expert whose products are summed in registers: as many as both of a worker's panels hold, or one. */
int64_t fmoe_wgrad_chunk(uint64_t has, bool pairs);
/* The slot that packs an operand of a type; the left one where it is transposed. */
int fmoe_wgrad_pack(uint64_t has, bool pairs, int type, bool left);

#endif
