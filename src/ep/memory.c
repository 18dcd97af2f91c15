/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - memory of a layer's calls. What is given back is kept for the next call, which has need of about the same:
 * new pages cost more than the copies into them, and memory of a device costs a synchronisation. An engine that
 * allocates on the device itself (torch) keeps what it likes, and nothing is kept here. */
#include <inttypes.h>
#include <stdlib.h>

#include "ep.h"

typedef enum ep_place { ON_DEVICE, ON_HOST } ep_place;

typedef struct ep_block {
    void *memory; /* NULL: no block */
    size_t bytes;
    ep_place place;
    bool used;
} ep_block;

enum { KEPT_FROM = 1 << 16, KEPT = 32 }; /* bytes on the CPU; blocks */
enum { LAST_WAIT_MS = 1000 };            /* for what an engine that was given up has put on the device */

static bool of_engine(const fmoe_ep *ep, ep_place place)
{
    return ep->cpu || place == ON_HOST ? ep->x.alloc != NULL : ep->x.device_alloc != NULL;
}

static void *get(const fmoe_ep *ep, ep_place place, size_t bytes)
{
    const bool host = place == ON_HOST;
    if (!of_engine(ep, place)) return ep->cpu ? malloc(bytes) : ep->ops->alloc(ep->d.device.id, bytes, host);
    return ep->cpu || host ? ep->x.alloc(ep->x.ctx, bytes) : ep->x.device_alloc(ep->x.ctx, bytes);
}

static void release(const fmoe_ep *ep, ep_block *b)
{
    const bool host = b->place == ON_HOST;
    if (!of_engine(ep, b->place)) {
        if (ep->cpu) free(b->memory);
        else ep->ops->free(ep->d.device.id, b->memory, host);
    } else if (ep->cpu || host) ep->x.free(ep->x.ctx, b->memory);
    else ep->x.device_free(ep->x.ctx, b->memory);
    b->memory = NULL;
}

/* A device whose free does not wait for what is under way there. */
static bool must_rest(const fmoe_ep *ep, const ep_block *b) { return !of_engine(ep, b->place) && ep->ops->idle; }
static bool at_rest(const fmoe_ep *ep)
{
    return ep->ops->idle(ep->d.device.id, ep->broken ? LAST_WAIT_MS : ep->timeout_ms);
}

/* The smallest kept block that is large enough, and not more than twice that. */
static ep_block *take_kept(fmoe_ep *ep, ep_place place, size_t bytes)
{
    ep_block *best = NULL;
    for (int64_t i = 0; i < ep->n_blocks; i++) {
        ep_block *const b = &ep->blocks[i];
        if (b->memory && !b->used && b->place == place && b->bytes >= bytes && b->bytes / 2 <= bytes &&
            (!best || b->bytes < best->bytes))
            best = b;
    }
    return best;
}

static ep_block *free_entry(fmoe_ep *ep)
{
    for (int64_t i = 0; i < ep->n_blocks; i++)
        if (!ep->blocks[i].memory) return &ep->blocks[i];
    const int64_t first = ep->n_blocks, n = first ? 2 * first : 64;
    ep_block *const more = realloc(ep->blocks, (size_t)n * sizeof *more);
    if (!more) return NULL;
    memset(more + first, 0, (size_t)(n - first) * sizeof *more);
    ep->blocks = more;
    ep->n_blocks = n;
    return &more[first];
}

static void *alloc(fmoe_ep *ep, ep_place place, int64_t count, int64_t element)
{
    int64_t bytes;
    if (!__builtin_mul_overflow(count, element, &bytes) && bytes >= 0 && bytes < INT64_MAX / 2) {
        const size_t n = bytes ? (size_t)bytes : 1;
        ep_block *b = take_kept(ep, place, n);
        if (!b) {
            b = free_entry(ep);
            void *const memory = b ? get(ep, place, n) : NULL;
            if (memory) *b = (ep_block){memory, n, place, false};
            else b = NULL;
        }
        if (b) {
            b->used = true;
            return b->memory;
        }
    }
    fmoe_fail(FMOE_ERR_NOMEM, "no memory for %" PRId64 " elements of %" PRId64 " bytes", count, element);
    return NULL;
}

static void give_back(fmoe_ep *ep, void *memory)
{
    int64_t kept = 0, at = -1;
    if (!memory) return;
    for (int64_t i = 0; i < ep->n_blocks; i++) {
        if (ep->blocks[i].memory == memory) at = i;
        kept += ep->blocks[i].memory && !ep->blocks[i].used;
    }
    if (at < 0) return;
    ep_block *const b = &ep->blocks[at];
    b->used = false;
    const bool worth = ep->cpu ? b->bytes >= KEPT_FROM : !of_engine(ep, b->place);
    if (worth && !ep->broken && kept < KEPT) return;
    if (!must_rest(ep, b) || (!ep->broken && at_rest(ep))) release(ep, b);
}

void *fmoe_ep_alloc(fmoe_ep *ep, int64_t count, int64_t element) { return alloc(ep, ON_DEVICE, count, element); }
void fmoe_ep_free(fmoe_ep *ep, void *memory) { give_back(ep, memory); }
void *fmoe_ep_alloc_host(fmoe_ep *ep, int64_t count, int64_t element) { return alloc(ep, ON_HOST, count, element); }
void fmoe_ep_free_host(fmoe_ep *ep, void *memory) { give_back(ep, memory); }

/* What an exchange that never ends may still write to stays taken until the process ends. */
void fmoe_ep_free_all(fmoe_ep *ep)
{
    int rest = -1; /* not asked yet */
    for (int64_t i = 0; i < ep->n_blocks; i++) {
        ep_block *const b = &ep->blocks[i];
        if (!b->memory) continue;
        if (must_rest(ep, b) && rest < 0) rest = at_rest(ep);
        if (!must_rest(ep, b) || rest) release(ep, b);
    }
    free(ep->blocks);
}

fmoe_status fmoe_ep_copy(const fmoe_ep_call *c, void *to, const void *from, int64_t bytes, bool wait)
{
    if (!bytes && !wait) return FMOE_OK;
    return c->ep->ops->copy(c->ep->d.device.id, to, from, (size_t)bytes, c->stream, wait);
}

fmoe_status fmoe_ep_cross(const fmoe_ep_call *c, bool to_host, void *to, const void *from, int64_t bytes, bool wait)
{
    if (!bytes && !wait) return FMOE_OK;
    return fmoe_device_cross(c->ep->ops, c->ep->d.device.id, to_host, to, from, (size_t)bytes, c->stream, wait);
}
