/* SPDX-License-Identifier: Apache-2.0
 * fuzz_backward.c - all gradients of the experts layer against the reference. */
#include "fuzz_layer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, data + size};
    const fuzz_layer l = fuzz_layer_draw(&in);
    const fuzz_results got = fuzz_layer_run(&l, false, true);
    if (got.status != (l.bad_ids ? FMOE_ERR_INDEX : FMOE_OK)) FUZZ_FAIL("status %d: %s", got.status, fmoe_last_error());
    if (!l.bad_ids) {
        const fuzz_results want = fuzz_layer_run(&l, true, true);
        if (want.status != FMOE_OK) FUZZ_FAIL("reference: %s", fmoe_last_error());
        const fuzz_layer absolute = fuzz_layer_magnitude(&l);
        const fuzz_results magnitude = fuzz_layer_run(&absolute, true, true);
        fuzz_compare(&l, "dweights", got.dp, want.dp, magnitude.dp, 2);
        if (fuzz_smooth(&l)) {
            fuzz_compare(&l, "dx", got.dx, want.dx, magnitude.dx, 2);
            fuzz_compare(&l, "dw1", got.dw1, want.dw1, magnitude.dw1, 2);
        }
        fuzz_compare(&l, "dw2", got.dw2, want.dw2, magnitude.dw2, 2);
    }
    fuzz_done();
    return 0;
}
