/* SPDX-License-Identifier: Apache-2.0
 * groups.c - rows grouped by expert: validation and a stable counting sort. */
#include <inttypes.h>

#include "cpu/groups.h"

void fmoe_groups_carve(fmoe_groups *g, fmoe_carve *c, int64_t E, int64_t slots)
{
    g->E = E;
    g->off = fmoe_carve_take(c, E + 1, sizeof *g->off);
    g->order = fmoe_carve_take(c, E, sizeof *g->order);
    g->ends = fmoe_carve_take(c, E, FMOE_WGRADS * sizeof *g->ends);
    g->slot = slots ? fmoe_carve_take(c, slots, sizeof *g->slot) : NULL;
    g->token = slots ? fmoe_carve_take(c, slots, sizeof *g->token) : NULL;
    g->gathered = NULL;
    g->rows_f32 = NULL;
}

static int64_t group_rows(const fmoe_groups *g, int64_t e) { return g->off[e + 1] - g->off[e]; }

static bool is_larger(const void *groups, int64_t i, int64_t j)
{
    const fmoe_groups *g = groups;
    return group_rows(g, g->order[i]) > group_rows(g, g->order[j]);
}

static void swap_order(void *groups, int64_t i, int64_t j)
{
    int64_t *const order = ((fmoe_groups *)groups)->order, swap = order[i];
    order[i] = order[j];
    order[j] = swap;
}

/* Large groups first, so that the last tasks handed out are short. */
static void order_groups(fmoe_groups *g)
{
    g->active = 0;
    for (int64_t e = 0; e < g->E; e++) {
        g->order[e] = e;
        g->active += group_rows(g, e) > 0;
    }
    fmoe_sort(g, g->E, is_larger, swap_order);
}

fmoe_status fmoe_groups_from_ids(fmoe_groups *g, const fmoe_plan_impl *p, const fmoe_tensor *ids)
{
    const int64_t E = p->d.E, k = p->d.k, n = ids->shape[0] * k;
    const int type = fmoe_tensor_dtype(ids);
    const void *data = fmoe_data(ids);
    const bool skip_neg1 = p->d.flags & FMOE_SKIP_NEG1, skip_E = p->d.flags & FMOE_SKIP_E;
    memset(g->off, 0, (size_t)(E + 1) * sizeof *g->off);
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = fmoe_get_int(data, type, i);
        if ((uint64_t)e < (uint64_t)E) g->off[e + 1]++;
        else if (!(e == -1 && skip_neg1) && !(e == E && skip_E))
            return fmoe_fail(FMOE_ERR_INDEX, "ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", E is %" PRId64 "%s", i / k,
                             i % k, e, E, e == -1 || e == E ? " (the plan declares no such skip mark)" : "");
    }
    for (int64_t e = 0; e < E; e++) g->off[e + 1] += g->off[e];
    g->R = g->off[E];
    int64_t *next = g->order; /* the order is made last: borrow its memory */
    memcpy(next, g->off, (size_t)E * sizeof *next);
    for (int64_t i = 0; i < n; i++) {
        const int64_t e = fmoe_get_int(data, type, i);
        if ((uint64_t)e >= (uint64_t)E) continue;
        g->slot[next[e]] = i;
        g->token[next[e]++] = i / k;
    }
    order_groups(g);
    return FMOE_OK;
}

fmoe_status fmoe_groups_from_sizes(fmoe_groups *g, const fmoe_tensor *sizes, int cumulative, int64_t rows)
{
    g->off[0] = 0;
    if (!sizes) g->off[1] = rows;
    for (int64_t e = 0; sizes && e < g->E; e++) {
        const int64_t v = fmoe_get_int(fmoe_data(sizes), fmoe_tensor_dtype(sizes), e);
        const int64_t before = g->off[e];
        if (cumulative ? v < before : v < 0)
            return fmoe_fail(FMOE_ERR_INDEX, "sizes[%" PRId64 "] is %" PRId64 ", must not be below %" PRId64 "%s", e, v,
                             cumulative ? before : 0, cumulative ? " (the sum before it)" : "");
        if (cumulative ? v > rows : v > rows - before)
            return fmoe_fail(FMOE_ERR_INDEX,
                             "sizes[%" PRId64 "] is %" PRId64 ": with %" PRId64
                             " rows before it that is more than x has, %" PRId64,
                             e, v, before, rows);
        g->off[e + 1] = cumulative ? v : before + v;
    }
    g->R = g->off[g->E];
    order_groups(g);
    return FMOE_OK;
}
