/* SPDX-License-Identifier: Apache-2.0
 *
 * saved.c - what the forward of the experts keeps for its backward.
 *   KEEP_ALL      map, counts, xp, h, a, y: seven launches backward
 *   KEEP_LEAN     map, counts, h: xp, a and (for the gradient of the routing weights) y are made again
 *   KEEP_NOTHING  FMOE_RECOMPUTE: everything is made again from x */
#include "ascend.h"

enum { ALIGN = 512, ROOM = 32 };

static void *take(size_t *used, char *base, size_t bytes)
{
    void *p = base ? base + *used : NULL;
    *used += fmoe_align_up(bytes + ROOM, ALIGN);
    return p;
}

size_t asc_saved_layout(const fmoe_plan_impl *p, int64_t rows, void *base, asc_saved *s)
{
    const fmoe_desc *d = &p->d;
    const asc_keep keep = ((const asc_plan *)p->priv)->keep;
    const aclDataType dtype = asc_plan_dtype(p);
    const size_t size = asc_size(dtype), R = (size_t)rows, H = (size_t)d->H, I = (size_t)d->I, hc = (size_t)p->h_cols;
    *s = (asc_saved){.map = {.data = NULL}};
    if (keep == KEEP_NOTHING || rows == 0) return 0;
    size_t used = 0;
    char *b = base;
    const size_t lost = b ? (ALIGN - (uintptr_t)b % ALIGN) % ALIGN : 0;
    if (b) b += lost;
    s->map = asc_1d(take(&used, b, R * 4), ACL_INT32, rows);
    s->counts = asc_1d(take(&used, b, (size_t)(d->E + 1) * 8), ACL_INT64, d->E);
    s->h = asc_2d(take(&used, b, R * hc * size), dtype, rows, p->h_cols);
    if (keep == KEEP_ALL) {
        s->xp = asc_2d(take(&used, b, R * H * size), dtype, rows, d->H);
        s->a = asc_2d(take(&used, b, R * I * size), dtype, rows, d->I);
        s->y = asc_2d(take(&used, b, R * H * size), dtype, rows, d->H);
    }
    /* An upper bound that is linear in the rows: a caller may size its buffers without asking for every T. */
    const size_t pieces = keep == KEEP_ALL ? 6 : 3, wide = keep == KEEP_ALL ? hc + 2 * H + I : hc;
    return R * (4 + wide * size) + (size_t)(d->E + 1) * 8 + pieces * (ALIGN + ROOM) + ALIGN;
}
