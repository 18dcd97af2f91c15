/* SPDX-License-Identifier: Apache-2.0
 *
 * rows.c - from ids to rows. MoeInitRoutingV3 sorts, gathers and counts in one launch; before CANN 8.2, and where a
 * plan chooses so, it is V2 and a cast of the counts.
 *
 * Plans with skip marks use one expert more than there are: skipped slots (and ids out of range) become id E, are
 * sorted last, and get rows that no group covers. So the map stays a permutation, which is what the gradients'
 * operators are documented for; the rows past the last group are never written by GroupedMatmul and are zeroed where
 * they are read. */
#include "ops.h"
#include "ascend.h"

static void mark(asc_call *c, asc_view ids, bool below, int64_t limit, asc_view mask)
{
    const aclTensor *tv = asc_t(c, ids), *tm = asc_t(c, mask);
    const aclScalar *s = asc_si(c, limit);
    if (below) ASC_LAUNCH(c, LtScalar, tv, s, tm);
    else ASC_LAUNCH(c, GeScalar, tv, s, tm);
}

/* ids with every skip mark turned into E, and which they are. E itself is the only mark of many plans: nothing to turn.
 */
static asc_view skip_ids(asc_call *c, const fmoe_tensor *ids, asc_view *mask)
{
    const asc_view from = asc_of(ids); /* int32 all the way: in int64 a masked fill would run on the AI CPU */
    const int64_t E = c->p->d.E;
    *mask = asc_new2(c, ACL_BOOL, from.dims[0], from.dims[1]);
    if (!(c->p->d.flags & FMOE_SKIP_NEG1)) {
        const asc_view v = asc_packed_as(c, from, ACL_INT32);
        mark(c, v, false, E, *mask);
        return v;
    }
    const asc_view v = asc_new2(c, ACL_INT32, from.dims[0], from.dims[1]); /* a copy: it is written to */
    asc_copy(c, v, from);
    mark(c, v, true, 0, *mask);
    asc_fill_where(c, v, *mask, (double)E);
    mark(c, v, false, E, *mask); /* both kinds */
    asc_fill_where(c, v, *mask, (double)E);
    return v;
}

asc_view asc_skip_mask(asc_call *c, const fmoe_tensor *ids)
{
    asc_view mask = {.data = NULL};
    if (c->plan->skip) skip_ids(c, ids, &mask);
    return mask;
}

/* FMOE_ASCEND_CHECK: how many ids belong to no expert and are no skip mark, read back before anything uses them. To
 * find a fault: what CANN does with such an id is an exception of the device at best. */
static void check_ids(asc_call *c, const fmoe_tensor *ids)
{
    const uint32_t flags = c->p->d.flags;
    const int64_t E = c->p->d.E, low = flags & FMOE_SKIP_NEG1 ? -1 : 0, high = flags & FMOE_SKIP_E ? E + 1 : E;
    const size_t top = c->used;
    const asc_view v = asc_packed(c, ids), mask = asc_new2(c, ACL_BOOL, v.dims[0], v.dims[1]),
                   sums = asc_new2(c, ACL_FLOAT, 2, 1);
    const int64_t all = 0, R = v.dims[0] * v.dims[1];
    for (int side = 0; side < 2; side++) {
        mark(c, v, side == 0, side == 0 ? low : high, mask);
        const asc_view ones = asc_shape(asc_packed_as(c, mask, ACL_FLOAT), 1, R, 0, 0);
        const aclTensor *from = asc_t(c, ones), *to = asc_t(c, asc_at(sums, side));
        const aclIntArray *dims = asc_ints(c, &all, 1);
        ASC_LAUNCH(c, ReduceSum, from, dims, true, ACL_FLOAT, to);
    }
    float bad[2] = {0, 0};
    asc_to_host(c, bad, sums.data, sizeof bad);
    if (bad[0] + bad[1] > 0)
        asc_fail(c, FMOE_ERR_INDEX, "%.0f of %lld ids are outside [%lld, %lld)", (double)(bad[0] + bad[1]),
                 (long long)R, (long long)low, (long long)high);
    asc_release(c, top);
}

void asc_route_rows(asc_call *c, asc_view x, const fmoe_tensor *ids, asc_view xp, asc_routing *r)
{
    const int64_t R = xp.dims[0], E = c->p->d.E, experts = c->plan->skip ? E + 1 : E;
    if (c->plan->check) check_ids(c, ids);
    asc_view from = c->plan->skip ? skip_ids(c, ids, &r->mask) : asc_of(ids);
    const size_t top = c->used;
    from = asc_packed_as(c, from, ACL_INT32);
    x = asc_packed_as(c, x, x.dtype);
    const asc_view counts = asc_1d(r->counts.data, ACL_INT64, experts); /* room for the extra one is behind it */
    const aclTensor *tx = asc_t(c, x), *ti = asc_t(c, from), *to = asc_t(c, xp), *tm = asc_t(c, r->map);
    if (c->plan->routing_v3) {
        const int64_t range[2] = {0, experts};
        const aclTensor *tc = asc_t(c, counts), *ts = asc_t(c, asc_new1(c, ACL_FLOAT, R)); /* an output nobody reads */
        const aclIntArray *span = asc_ints(c, range, 2);
        ASC_LAUNCH(c, MoeInitRoutingV3, tx, ti, NULL, NULL, R, 0, experts, 0, 1, true, -1, span, 0, to, tm, tc, ts);
    } else {
        const asc_view narrow = asc_new1(c, ACL_INT32, experts);
        const aclTensor *tc = asc_t(c, narrow);
        ASC_LAUNCH(c, MoeInitRoutingV2, tx, ti, 0, 0, experts, 0, 2, false, to, tm, tc, NULL);
        asc_cast(c, counts, narrow);
    }
    asc_release(c, top);
}

asc_view asc_probs(asc_call *c, const fmoe_tensor *p, const asc_routing *r, aclDataType dtype)
{
    const asc_view from = asc_of(p);
    if (!r->mask.data) return asc_packed_as(c, from, dtype);
    const asc_view v = asc_new2(c, dtype, from.dims[0], from.dims[1]); /* a copy: it is written to */
    asc_copy(c, v, from);
    asc_fill_where(c, v, r->mask, 0);
    return v;
}
