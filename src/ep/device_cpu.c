/* SPDX-License-Identifier: Apache-2.0
 *
 * device_cpu.c - where rows go, as the CPU counts it: what device.h asks of a device. Errors are known at once. */
#include <inttypes.h>
#include <stdlib.h>

#include "ep.h"

/* ---- memory and streams: there is one order ---- */

static void *cpu_alloc(int32_t device, size_t bytes, bool host)
{
    (void)device, (void)host;
    return malloc(bytes);
}

static void cpu_free(int32_t device, void *memory, bool host)
{
    (void)device, (void)host;
    free(memory);
}

static fmoe_status cpu_copy(int32_t device, void *to, const void *from, size_t bytes, void *stream, bool wait)
{
    (void)device, (void)stream, (void)wait;
    if (bytes && to != from) memcpy(to, from, bytes);
    return FMOE_OK;
}

static fmoe_status cpu_event(int32_t device, void **event)
{
    (void)device;
    *event = NULL;
    return FMOE_OK;
}

static void cpu_event_free(int32_t device, void *event) { (void)device, (void)event; }

static fmoe_status cpu_order(int32_t device, void *event, void *stream)
{
    (void)device, (void)event, (void)stream;
    return FMOE_OK;
}

static fmoe_status cpu_passed(int32_t device, void *event, bool *yes)
{
    (void)device, (void)event;
    *yes = true;
    return FMOE_OK;
}

static bool cpu_capturing(int32_t device, void *stream)
{
    (void)device, (void)stream;
    return false;
}

/* ---- home ---- */

static float get_p(const void *p, int type, int64_t i)
{
    switch (type) {
    case FMOE_F32: return ((const float *)p)[i];
    case FMOE_BF16: return fmoe_bf16_to_float(((const uint16_t *)p)[i]);
    default: return fmoe_f16_to_float(((const uint16_t *)p)[i]);
    }
}

static void set_p(void *p, int type, int64_t i, float v)
{
    switch (type) {
    case FMOE_F32: ((float *)p)[i] = v; break;
    case FMOE_BF16: ((uint16_t *)p)[i] = fmoe_float_to_bf16(v); break;
    default: ((uint16_t *)p)[i] = fmoe_float_to_f16(v);
    }
}

static int64_t id_of(const fmoe_home_args *a, int64_t slot) { return fmoe_get_int(a->ids, a->ids_type, slot); }
static int64_t first_cell(const fmoe_home_args *a, int64_t t) { return t * a->chunks / a->T * a->ranks; }

/* In `work`. */
typedef struct home_work {
    int64_t *seen, *dropped, *sent;     /* [ranks]: the last token that was sent, or dropped, there; rows */
    int64_t *row_at, *pair_at, *row_of; /* [cells], [cells], [ranks] */
    int64_t *sorted;                    /* [k] */
    int32_t *slot_dest;                 /* [T*k]: rank, or -1 */
} home_work;

static size_t carve_home(const fmoe_home_args *a, home_work *w)
{
    fmoe_carve c = fmoe_carve_begin(a->work, 8);
    const int64_t cells = a->chunks * a->ranks;
    w->seen = fmoe_carve_take(&c, a->ranks, 8);
    w->dropped = fmoe_carve_take(&c, a->ranks, 8);
    w->sent = fmoe_carve_take(&c, a->ranks, 8);
    w->row_at = fmoe_carve_take(&c, cells, 8);
    w->pair_at = fmoe_carve_take(&c, cells, 8);
    w->row_of = fmoe_carve_take(&c, a->ranks, 8);
    w->sorted = fmoe_carve_take(&c, a->k, 8);
    w->slot_dest = fmoe_carve_take(&c, a->T * a->k, 4);
    return fmoe_carve_bytes(&c);
}

static size_t home_bytes(const fmoe_home_args *a)
{
    home_work w;
    fmoe_home_args without = *a;
    without.work = NULL;
    return carve_home(&without, &w);
}

/* Counts rows and pairs. */
static fmoe_status route_slots(const fmoe_home_args *a, const home_work *w)
{
    const int64_t cells = a->chunks * a->ranks;
    memset(a->counts, 0, (size_t)(2 * cells + 1) * 8);
    for (int64_t r = 0; r < a->ranks; r++) w->seen[r] = w->dropped[r] = -1, w->sent[r] = 0;
    for (int64_t t = 0; t < a->T; t++)
        for (int64_t i = t * a->k; i < (t + 1) * a->k; i++) {
            const int64_t e = id_of(a, i);
            w->slot_dest[i] = -1;
            if ((e == -1 && (a->flags & FMOE_SKIP_NEG1)) || (e == a->E && (a->flags & FMOE_SKIP_E))) continue;
            if (e < 0 || e >= a->E)
                return fmoe_fail(FMOE_ERR_INDEX,
                                 "ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", must be in [0,%" PRId64 ")", t,
                                 i - t * a->k, e, a->E);
            const int32_t d = a->dest[e];
            if (w->seen[d] != t && a->capacity && w->sent[d] == a->capacity) w->dropped[d] = t;
            if (w->dropped[d] == t) {
                a->counts[2 * cells]++;
                continue;
            }
            const int64_t cell = first_cell(a, t) + d;
            w->slot_dest[i] = d;
            a->counts[cells + cell]++;
            if (w->seen[d] == t) continue;
            w->seen[d] = t;
            w->sent[d]++;
            a->counts[cell]++;
        }
    return FMOE_OK;
}

/* The slots of a token in the order in which one process sums them: by expert, equal ones by slot. */
static void sort_slots(const fmoe_home_args *a, int64_t t, int64_t *slot)
{
    for (int64_t j = 0; j < a->k; j++) {
        const int64_t i = t * a->k + j, e = id_of(a, i);
        int64_t at = j;
        for (; at > 0 && id_of(a, slot[at - 1]) > e; at--) slot[at] = slot[at - 1];
        slot[at] = i;
    }
}

/* What is summed for token t: pairs (exact), or rows, which rise with their rank. */
static void list_sums(const fmoe_home_args *a, const home_work *w, int64_t t)
{
    int64_t *const map = a->map + t * a->columns, n = 0;
    for (int64_t j = 0; j < a->columns; j++) map[j] = -1;
    if (a->exact) {
        sort_slots(a, t, w->sorted);
        for (int64_t j = 0; j < a->k; j++) {
            map[j] = a->slot_pair[w->sorted[j]];
            a->sum_p[t * a->k + j] = a->weighted ? get_p(a->p, a->p_type, w->sorted[j]) : 1.0f;
        }
        return;
    }
    for (int64_t i = t * a->k; i < (t + 1) * a->k; i++) {
        const int32_t d = w->slot_dest[i];
        if (d < 0 || w->row_of[d] < 0) continue;
        int64_t to = n++;
        for (; to > 0 && map[to - 1] > w->row_of[d]; to--) map[to] = map[to - 1];
        map[to] = w->row_of[d];
        w->row_of[d] = -1;
    }
}

static fmoe_status cpu_home(int32_t device, const fmoe_home_args *a)
{
    (void)device;
    home_work w;
    carve_home(a, &w);
    FMOE_TRY(route_slots(a, &w));
    const int64_t cells = a->chunks * a->ranks;
    for (int64_t cell = 0, row = 0, pair = 0; cell < cells; cell++) {
        w.row_at[cell] = row;
        w.pair_at[cell] = pair;
        row += a->counts[cell];
        pair += a->counts[cells + cell];
    }
    for (int64_t t = 0; t < a->T; t++) {
        const int64_t first = first_cell(a, t);
        for (int64_t i = t * a->k; i < (t + 1) * a->k; i++)
            if (w.slot_dest[i] >= 0) w.row_of[w.slot_dest[i]] = -1;
        for (int64_t i = t * a->k; i < (t + 1) * a->k; i++) {
            const int64_t d = w.slot_dest[i];
            a->slot_pair[i] = -1;
            if (d < 0) continue;
            fmoe_pair pair = {(uint32_t)a->index[id_of(a, i)], get_p(a->p, a->p_type, i)};
            if (w.row_of[d] < 0) {
                w.row_of[d] = w.row_at[first + d]++;
                a->send_token[w.row_of[d]] = t;
                pair.expert |= PAIR_FIRST;
            }
            a->slot_pair[i] = w.pair_at[first + d]++;
            a->pairs[a->slot_pair[i]] = pair;
        }
        list_sums(a, &w, t);
    }
    return FMOE_OK;
}

/* ---- away ---- */

static size_t away_bytes(const fmoe_away_args *a)
{
    (void)a;
    return 0;
}

static fmoe_status bad_pair(const fmoe_away_args *a, int64_t cell, int64_t e, int64_t slot, int64_t row)
{
    const int64_t n = a->row_at[cell + 1] - a->row_at[cell];
    return fmoe_fail(FMOE_ERR_EXCHANGE,
                     "rank %" PRId64 " sends expert %" PRId64 " in slot %" PRId64 " of row %" PRId64
                     ": there are %" PRId64 " experts here, %" PRId64 " slots, and it announced %" PRId64 " rows",
                     cell % a->ranks, e, slot, row - a->row_at[cell], a->experts, a->k, n);
}

/* The pairs of one cell. */
static fmoe_status read_cell(const fmoe_away_args *a, int64_t cell)
{
    int64_t row = a->row_at[cell] - 1, slot = 0;
    for (int64_t q = a->pair_at[cell]; q < a->pair_at[cell + 1]; q++) {
        const int64_t e = a->recv[q].expert & PAIR_EXPERT;
        if (a->recv[q].expert & PAIR_FIRST) {
            slot = 0;
            row++;
        }
        if (e >= a->experts || row < a->row_at[cell] || row >= a->row_at[cell + 1] || slot >= a->k)
            return bad_pair(a, cell, e, slot, row);
        const int64_t at = a->exact ? q : row * a->k + slot;
        a->where[q] = a->exact ? row : at;
        a->ids[at] = (int32_t)e;
        set_p(a->p, a->p_type, at, a->recv[q].p);
        slot++;
    }
    if (row + 1 != a->row_at[cell + 1])
        return fmoe_fail(FMOE_ERR_EXCHANGE, "rank %" PRId64 " announced %" PRId64 " rows, its pairs are of %" PRId64,
                         cell % a->ranks, a->row_at[cell + 1] - a->row_at[cell], row + 1 - a->row_at[cell]);
    return FMOE_OK;
}

static fmoe_status cpu_away(int32_t device, const fmoe_away_args *a)
{
    (void)device;
    const int64_t n = a->rows * a->k;
    for (int64_t i = 0; !a->exact && i < n; i++) {
        a->ids[i] = -1;
        set_p(a->p, a->p_type, i, 0);
    }
    for (int64_t i = 0; a->ones && i < a->pairs; i++) a->ones[i] = 1.0f;
    for (int64_t cell = 0; cell < a->cells; cell++) FMOE_TRY(read_cell(a, cell));
    return FMOE_OK;
}

static fmoe_status cpu_gather(int32_t device, void *to, const void *from, int64_t stride, int64_t bytes,
                              const int64_t *map, int64_t n, void *stream)
{
    (void)device, (void)stream;
    for (int64_t i = 0; i < n; i++)
        if (map[i] < 0) memset((char *)to + i * bytes, 0, (size_t)bytes);
        else memcpy((char *)to + i * bytes, (const char *)from + map[i] * stride, (size_t)bytes);
    return FMOE_OK;
}

static fmoe_status cpu_take(int32_t device, void *to, int type, const float *from, const int64_t *map, int64_t n,
                            void *stream)
{
    (void)device, (void)stream;
    for (int64_t i = 0; i < n; i++) set_p(to, type, i, map[i] < 0 ? 0 : from[map[i]]);
    return FMOE_OK;
}

const fmoe_device_ops fmoe_device_cpu = {
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .event = cpu_event,
    .event_free = cpu_event_free,
    .record = cpu_order,
    .after = cpu_order,
    .passed = cpu_passed,
    .capturing = cpu_capturing,
    .home_bytes = home_bytes,
    .home = cpu_home,
    .away_bytes = away_bytes,
    .away = cpu_away,
    .gather = cpu_gather,
    .take = cpu_take,
};
