/* SPDX-License-Identifier: Apache-2.0
 * op_warp.c - the lanes of a warp among themselves, and the way through the code. */
#include "ptx.h"

static void nothing(warp *w, const instruction *i, uint32_t lanes) { (void)w, (void)i, (void)lanes; }

static void trap(warp *w, const instruction *i, uint32_t lanes)
{
    (void)lanes;
    sim_fault(w, i, "a trap");
}

/* shfl.sync.kind result|there, value, b, c, mask: c has the segments and the last lane. */
enum { IDX, UP, DOWN, BFLY };
static void shuffle(warp *w, const instruction *i, uint32_t lanes)
{
    const uint32_t *const a = REG(uint32_t, 2), *const b = REG(uint32_t, 3), *const c = REG(uint32_t, 4),
                          *const mask = REG(uint32_t, 5);
    uint32_t value[LANES];
    uint8_t there[LANES];
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        const int segment = (int)(c[l] >> 8 & 31), last = (int)(c[l] & 31), by = (int)(b[l] & 31);
        const int low = l & segment, high = low | (last & ~segment);
        int from = 0;
        bool in = true;
        switch (i->combine) {
        case UP: from = l - by, in = from >= high; break; /* here `last` is the least */
        case DOWN: from = l + by, in = from <= high; break;
        case BFLY: from = l ^ by, in = from <= high; break;
        default: from = low | (by & ~segment), in = from <= high;
        }
        there[l] = in;
        if (!in) from = l;
        if (in && !(mask[l] >> from & 1))
            sim_fault(w, i, "lane %d reads lane %d, which is not in %08x", l, from, mask[l]);
        value[l] = a[from];
    }
    EACH(REG(uint32_t, 0)[l] = value[l]; REG(uint8_t, 1)[l] = there[l]);
}
#define SHUFFLE(name, how)                                                                                             \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        instruction j = *i;                                                                                            \
        j.combine = how;                                                                                               \
        shuffle(w, &j, lanes);                                                                                         \
    }
SHUFFLE(shuffle_idx, IDX)
SHUFFLE(shuffle_up, UP)
SHUFFLE(shuffle_down, DOWN)
SHUFFLE(shuffle_bfly, BFLY)

static void ballot(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t all = 0;
    EACH(if (REG(uint8_t, 1)[l]) all |= 1u << l);
    EACH(REG(uint32_t, 0)[l] = all & REG(uint32_t, 2)[l]);
}
static void vote_any(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t all = 0;
    EACH(if (REG(uint8_t, 1)[l]) all |= 1u << l);
    EACH(REG(uint8_t, 0)[l] = (all & REG(uint32_t, 2)[l]) != 0);
}
static void vote_all(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t not = 0;
    EACH(if (!REG(uint8_t, 1)[l]) not|= 1u << l);
    EACH(REG(uint8_t, 0)[l] = (not&REG(uint32_t, 2)[l]) == 0);
}
static void match(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t same[LANES];
    EACH(same[l] = 0; const uint64_t mine = lane_value(w, i, 1, l);
         for (int n = 0; n < LANES; n++) same[l] |=
         (uint32_t)(lanes >> n & REG(uint32_t, 2)[l] >> n & 1 && lane_value(w, i, 1, n) == mine) << n);
    EACH(REG(uint32_t, 0)[l] = same[l]);
}
static void reduce(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t out[LANES];
    const uint32_t *const a = REG(uint32_t, 1), *const mask = REG(uint32_t, 2);
    EACH(uint32_t v = a[l]; for (int n = 0; n < LANES; n++) {
        if (n == l || !(mask[l] >> n & 1)) continue;
        const uint32_t x = a[n];
        switch (i->compare) {
        case MIN: v = i->type[0] == S32 ? ((int32_t)x < (int32_t)v ? x : v) : x < v ? x : v; break;
        case MAX: v = i->type[0] == S32 ? ((int32_t)x > (int32_t)v ? x : v) : x > v ? x : v; break;
        case ADD: v += x; break;
        case AND: v &= x; break;
        case OR: v |= x; break;
        default: v ^= x;
        }
    } out[l] = v);
    EACH(REG(uint32_t, 0)[l] = out[l]);
}
static void elect(warp *w, const instruction *i, uint32_t lanes)
{
    const int first = __builtin_ctz(lanes);
    EACH(set_lane(w, i, 0, l, (uint64_t)first); REG(uint8_t, 1)[l] = l == first);
}

const op warp_ops[] = {{"bra", "l", nothing, BRANCH, 0},
                       {"bra.uni", "l", nothing, BRANCH, 0},
                       {"ret", "", nothing, RETURN, 0},
                       {"exit", "", nothing, EXIT, 0},
                       {"trap", "", trap, PLAIN, 0},
                       {"brkpt", "", trap, PLAIN, 0},
                       {"bar.sync", "w?w", nothing, BARRIER, 0},
                       {"barrier.sync", "w?w", nothing, BARRIER, 0},
                       {"bar.arrive", "ww", nothing, BARRIER, 2},
                       {"bar.red.popc.u32", "wwp", nothing, BARRIER, 1},
                       {"bar.warp.sync", "w", nothing, TOGETHER, 0},
                       {"shfl.sync.idx.b32", "bwwww", shuffle_idx, TOGETHER, 5},
                       {"shfl.sync.up.b32", "bwwww", shuffle_up, TOGETHER, 5},
                       {"shfl.sync.down.b32", "bwwww", shuffle_down, TOGETHER, 5},
                       {"shfl.sync.bfly.b32", "bwwww", shuffle_bfly, TOGETHER, 5},
                       {"vote.sync.ballot.b32", "wpw", ballot, TOGETHER, 2},
                       {"vote.sync.any.pred", "ppw", vote_any, TOGETHER, 2},
                       {"vote.sync.all.pred", "ppw", vote_all, TOGETHER, 2},
                       {"match.any.sync.b32", "www", match, TOGETHER, 2},
                       {"match.any.sync.b64", "wdw", match, TOGETHER, 2},
                       {"redux.sync.*", "www", reduce, TOGETHER, 2},
                       {"elect.sync", "bw", elect, TOGETHER, 2},
                       {"griddepcontrol.*", "", nothing, PLAIN, 0}, /* launches follow one another */
                       {"setmaxnreg.*", "w", nothing, PLAIN, 0},
                       {"fence.*", "", nothing, PLAIN, 0}, /* memory is seen in the order of execution */
                       {"membar.*", "", nothing, PLAIN, 0},
                       {"nanosleep.u32", "w", nothing, PLAIN, 0},
                       {0}};
