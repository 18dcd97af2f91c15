/* SPDX-License-Identifier: Apache-2.0
 * groups.h - rows grouped by expert. */
#ifndef FMOE_CPU_GROUPS_H
#define FMOE_CPU_GROUPS_H

#include "cpu/plan.h"

enum { FMOE_WGRADS = 7 }; /* weight gradients at a time: of W1 in two halves, W2, and the factors of adapters */

typedef struct fmoe_groups {
    int64_t E, R;   /* R: rows in groups */
    int64_t active; /* groups that have any */
    int64_t *off;   /* [E+1] first row of each group */
    int64_t *order; /* [E] groups from large to small: the order tasks are handed out in */
    int64_t *ends;  /* [FMOE_WGRADS][E] scratch: running numbers of tasks of a product, in that order */
    int64_t *slot;  /* [T*k] row -> t*k+j; in each group ascending */
    int64_t *token; /* [T*k] row -> t */
    /* Where the plan gathers rows (else NULL): room for them, of up to gathered_k elements, in rows or in tiles, and
     * the first block of tiles of each group [E+1]. */
    void *gathered;
    int64_t gathered_k, *block;
    float *rows_f32; /* room for the rows of every token in f32, wide_rows of wide_k (widen.c); NULL: not wanted */
    int64_t f32_rows, f32_k;
} fmoe_groups;

void fmoe_groups_carve(fmoe_groups *g, fmoe_carve *c, int64_t E, int64_t slots);
/* Validate ids and sort slots by expert, stable. Skipped slots get no row. Writes only into g. */
fmoe_status fmoe_groups_from_ids(fmoe_groups *g, const fmoe_plan_impl *p, const fmoe_tensor *ids);
/* From group sizes; sizes NULL: one group of all rows. off and order only. */
fmoe_status fmoe_groups_from_sizes(fmoe_groups *g, const fmoe_tensor *sizes, int cumulative, int64_t rows);

#endif
