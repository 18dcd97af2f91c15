/* SPDX-License-Identifier: Apache-2.0
 * fuzz_route.c - routing of any logits by any rule: the reference's ids and weights, ids distinct and in range. */
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, data + size};
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_ROUTE;
    d.dtype = 1 + (int32_t)fuzz_below(&in, 3);
    d.E = 1 + fuzz_below(&in, 40);
    d.k = 1 + fuzz_below(&in, d.E < 6 ? d.E : 6);
    d.route.score = fuzz_byte(&in) % 4;
    d.route.renormalize = fuzz_byte(&in) % 2;
    d.route.group_score = fuzz_byte(&in) % 2;
    d.route.groups = fuzz_byte(&in) % 5;
    d.route.topk_groups = fuzz_byte(&in) % 5;
    d.route.excluded_zero = fuzz_byte(&in) % 2;
    d.route.eps = fuzz_byte(&in) % 2 ? 1e-20 : 0;
    d.threads = 1 + fuzz_byte(&in) % 2;
    fmoe_desc f64 = d;
    f64.dtype = FMOE_F64;
    fmoe_plan plan, ref;
    if (fmoe_plan_create(&plan, &d) != FMOE_OK) return 0; /* a rule that makes no sense */
    if (fmoe_plan_create(&ref, &f64) != FMOE_OK) FUZZ_FAIL("only the f64 plan is refused: %s", fmoe_last_error());
    const int64_t T = fuzz_below(&in, 6), E = d.E, k = d.k;
    fmoe_tensor *logits = fuzz_tensor(fuzz_byte(&in) % 2 ? FMOE_F32 : d.dtype, 2, T, E, 1),
                *bias = fuzz_tensor(FMOE_F32, 1, E, 1, 1);
    for (int64_t i = 0; i < T * E; i++) fuzz_set(logits, i, fuzz_float(&in));
    const bool biased = fuzz_byte(&in) % 2;
    for (int64_t i = 0; i < E; i++) fuzz_set(bias, i, fuzz_float(&in));
    fmoe_tensor *ids[2] = {fuzz_tensor(-32, 2, T, k, 1), fuzz_tensor(-64, 2, T, k, 1)};
    fmoe_tensor *weights[2] = {fuzz_tensor(FMOE_F32, 2, T, k, 1), fuzz_tensor(FMOE_F64, 2, T, k, 1)};
    fmoe_tensor *bad[2] = {fuzz_tensor(-64, 1, 1, 1, 1), fuzz_tensor(-64, 1, 1, 1, 1)};
    for (int i = 0; i < 2; i++) {
        const fmoe_route_args a = {.size = sizeof a,
                                   .logits = i ? fuzz_f64(logits) : logits,
                                   .select_bias = biased ? (i ? fuzz_f64(bias) : bias) : NULL,
                                   .ids = ids[i],
                                   .weights = weights[i],
                                   .bad_rows = bad[i]};
        const fmoe_run run = fuzz_run(i ? ref : plan, FMOE_FORWARD, T, 0);
        if (fmoe_route_forward(i ? ref : plan, &a, &run) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
    }
    if (fuzz_get(bad[0], 0) != fuzz_get(bad[1], 0))
        FUZZ_FAIL("bad_rows %g and %g", fuzz_get(bad[0], 0), fuzz_get(bad[1], 0));
    for (int64_t i = 0; i < T * k; i++) {
        const double e = fuzz_get(ids[0], i), w = fuzz_get(weights[0], i), want = fuzz_get(weights[1], i);
        if (!(e >= 0 && e < (double)E)) FUZZ_FAIL("id %g, E %" PRId64, e, E);
        for (int64_t j = i / k * k; j < i; j++)
            if (fuzz_get(ids[0], j) == e) FUZZ_FAIL("id %g twice in a token", e);
        if (e != fuzz_get(ids[1], i)) FUZZ_FAIL("slot %" PRId64 ": id %g, reference %g", i, e, fuzz_get(ids[1], i));
        const bool same =
            w == want || (isnan(w) && isnan(want)) || fabs(w - want) <= 1e-6 * fabs(want) + 1e-37 || fabs(want) > 3e38;
        if (!same) FUZZ_FAIL("slot %" PRId64 ": weight %g, reference %g", i, w, want);
    }
    fmoe_plan_destroy(&plan);
    fmoe_plan_destroy(&ref);
    fuzz_done();
    return 0;
}
