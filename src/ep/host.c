/* SPDX-License-Identifier: Apache-2.0
 *
 * host.c - where rows go, on a device that does not compute that itself (device.h). Its host copies ids, routing
 * weights and the pairs that came, runs the CPU's functions on them, and sends the indices back in one piece. So it
 * waits twice in a forward, for these copies, by the deadline (beside an engine of the host it waits all the time); and
 * what a peer sent is checked before any of it is used. The sums at home want maps without holes: slots that are
 * skipped name rows of zeros behind those that come back. */
#include "ep.h"

enum { ALIGN = 64, ROOM = 32 }; /* of each piece, as Ascend's operators want them */
enum { HOME_DEVICE, HOME_HOST, AWAY_DEVICE, AWAY_HOST };

static void *take(fmoe_carve *v, int64_t count, int64_t element)
{
    int64_t bytes;
    if (__builtin_mul_overflow(count, element, &bytes) || bytes > INT64_MAX - ROOM) bytes = -1;
    else bytes += ROOM;
    return fmoe_carve_take(v, bytes, 1);
}

static void *aligned(void *base) { return (char *)base + (ALIGN - (uintptr_t)base % ALIGN) % ALIGN; }

/* The host goes on when the device has come here. Not by the stream's own wait: it would last as long as an exchange
 * whose peer never comes. */
static fmoe_status settle(fmoe_ep_call *c)
{
    fmoe_ep *const ep = c->ep;
    const int64_t deadline = ep_now_ms() + fmoe_min(ep->timeout_ms, 1 << 30);
    bool passed = false;
    FMOE_TRY(ep->ops->record(ep->d.device.id, ep->passed, c->stream));
    for (int64_t turn = 0;; turn++) {
        FMOE_TRY(ep->ops->passed(ep->d.device.id, ep->passed, &passed));
        if (passed) return FMOE_OK;
        if (ep_now_ms() > deadline)
            return fmoe_fail(FMOE_ERR_EXCHANGE, "the device is not done by the deadline with what was launched before");
        if (turn > 100) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

/* A block on the device, and one on the host that begins with the same layout. */
static fmoe_status alloc_both(fmoe_ep_call *c, int which, const fmoe_carve *device, const fmoe_carve *host)
{
    if (device->overflow || host->overflow)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "the indices of these tokens do not fit 64 bits");
    c->indices[which] = fmoe_ep_alloc(c->ep, (int64_t)device->used + ALIGN, 1);
    c->indices[which + 1] = fmoe_ep_alloc_host(c->ep, (int64_t)host->used + ALIGN, 1);
    return c->indices[which] && c->indices[which + 1] ? FMOE_OK : FMOE_ERR_NOMEM;
}

static fmoe_status send(fmoe_ep_call *c, int which, const fmoe_carve *v)
{
    const bool wait = c->ep->staged; /* the host does all the time then, and its memory may be an engine's */
    return fmoe_ep_cross(c, false, aligned(c->indices[which]), aligned(c->indices[which + 1]), (int64_t)v->used, wait);
}

/* ---- home ---- */

/* What the device gets. */
static fmoe_carve carve_home(void *base, fmoe_home_args *h)
{
    fmoe_carve v = fmoe_carve_begin(base, ALIGN);
    const int64_t slots = h->T * h->k;
    h->slot_pair = take(&v, slots, 8);
    h->map = take(&v, h->T * h->columns, 8);
    h->send_token = take(&v, h->T * fmoe_min(h->k, h->ranks), 8);
    h->sum_p = take(&v, h->exact ? slots : 0, 4);
    h->pairs = take(&v, slots, sizeof *h->pairs);
    return v;
}

typedef struct copied {
    void *ids, *p;
} copied;

static size_t number_bytes(int type) { return type < 0 ? (size_t)-type / 8 : fmoe_dtype_size(type); }

/* And what the host needs beside. */
static void carve_own(fmoe_carve *v, fmoe_home_args *h, copied *in)
{
    const int64_t slots = h->T * h->k;
    in->ids = take(v, slots, (int64_t)number_bytes(h->ids_type));
    in->p = take(v, slots, (int64_t)number_bytes(h->p_type));
    h->counts = take(v, 2 * h->chunks * h->ranks + 1, 8);
    h->work = take(v, (int64_t)fmoe_device_cpu.home_bytes(h), 1);
}

/* Slots in the order in which one process on this device sums them, which is their own; and no holes. */
static void fill_holes(const fmoe_home_args *h)
{
    const int64_t slots = h->T * h->k, cells = h->chunks * h->ranks;
    int64_t rows = 0, pairs = 0;
    for (int64_t i = 0; i < cells; i++) rows += h->counts[i], pairs += h->counts[cells + i];
    int64_t zeros = h->exact ? pairs : rows;
    for (int64_t i = 0; i < slots && h->exact; i++) {
        const int64_t pair = h->slot_pair[i];
        h->map[i] = pair < 0 ? zeros++ : pair;
        h->sum_p[i] = pair < 0 ? 0.0f : h->weighted ? h->pairs[pair].p : 1.0f;
    }
    for (int64_t i = 0; i < h->T * h->columns && !h->exact; i++)
        if (h->map[i] < 0) h->map[i] = zeros++;
    for (int64_t i = 0; i < slots; i++)
        if (h->slot_pair[i] < 0) h->slot_pair[i] = pairs;
}

fmoe_status fmoe_ep_home_on_host(fmoe_ep_call *c, const fmoe_home_args *device)
{
    fmoe_ep *const ep = c->ep;
    fmoe_home_args h = *device, there = *device;
    copied in;
    const fmoe_carve sent = carve_home(NULL, &h);
    fmoe_carve all = sent;
    carve_own(&all, &h, &in);
    FMOE_TRY(alloc_both(c, HOME_DEVICE, &sent, &all));
    carve_home(c->indices[HOME_DEVICE], &there);
    all = carve_home(c->indices[HOME_HOST], &h);
    carve_own(&all, &h, &in);
    const int64_t slots = h.T * h.k;
    FMOE_TRY(fmoe_ep_cross(c, true, in.ids, h.ids, slots * (int64_t)number_bytes(h.ids_type), ep->staged));
    FMOE_TRY(fmoe_ep_cross(c, true, in.p, h.p, slots * (int64_t)number_bytes(h.p_type), ep->staged));
    if (!ep->staged) FMOE_TRY(settle(c));
    h.ids = in.ids;
    h.p = in.p;
    FMOE_TRY(fmoe_device_cpu.home(0, &h));
    fill_holes(&h);
    FMOE_TRY(send(c, HOME_DEVICE, &sent));
    c->counts = h.counts;
    c->slot_pair = there.slot_pair;
    c->map = there.map;
    c->sum_p = there.sum_p;
    c->send_token = there.send_token;
    c->pairs_send = ep->staged ? h.pairs : there.pairs;
    return FMOE_OK;
}

/* ---- away ---- */

static fmoe_carve carve_away(const fmoe_ep_call *c, void *base, fmoe_away_args *a)
{
    fmoe_carve v = fmoe_carve_begin(base, ALIGN);
    const int64_t slots = a->exact ? a->pairs : a->rows * a->k;
    a->where = take(&v, a->pairs, 8);
    a->ids = take(&v, slots, 4);
    a->p = take(&v, slots, 4);
    a->ones = ep_weighs_at_home(c) ? take(&v, a->pairs, 4) : NULL;
    return v;
}

static fmoe_pair *carve_pairs(fmoe_carve *v, const fmoe_away_args *a)
{
    return take(v, a->pairs, (int64_t)sizeof(fmoe_pair));
}

static fmoe_away_args sizes_away(const fmoe_ep_call *c)
{
    const int64_t cells = ep_cells(c->ep);
    return (fmoe_away_args){
        .k = c->ep->d.k, .rows = c->recv_row_at[cells], .pairs = c->recv_pair_at[cells], .exact = ep_exact(c->ep)};
}

fmoe_status fmoe_ep_away_alloc(fmoe_ep_call *c)
{
    fmoe_away_args a = sizes_away(c);
    fmoe_carve v = carve_away(c, NULL, &a);
    carve_pairs(&v, &a);
    FMOE_TRY(alloc_both(c, AWAY_DEVICE, &v, &v));
    v = carve_away(c, c->indices[c->ep->staged ? AWAY_HOST : AWAY_DEVICE], &a);
    c->pairs_recv = carve_pairs(&v, &a);
    carve_away(c, c->indices[AWAY_DEVICE], &a);
    c->where = a.where;
    c->ids = a.ids;
    c->p = a.p;
    c->ones = a.ones;
    return FMOE_OK;
}

fmoe_status fmoe_ep_away_on_host(fmoe_ep_call *c, const fmoe_away_args *device)
{
    fmoe_away_args a = *device;
    fmoe_carve v = carve_away(c, c->indices[AWAY_HOST], &a);
    const fmoe_carve sent = v;
    fmoe_pair *const pairs = carve_pairs(&v, &a);
    if (!c->ep->staged) {
        FMOE_TRY(fmoe_ep_cross(c, true, pairs, c->pairs_recv, a.pairs * (int64_t)sizeof *pairs, false));
        FMOE_TRY(settle(c));
    }
    a.recv = pairs;
    FMOE_TRY(fmoe_device_cpu.away(0, &a));
    return send(c, AWAY_DEVICE, &sent);
}
