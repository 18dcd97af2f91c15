/* SPDX-License-Identifier: Apache-2.0
 * fuzz_forward.c - the experts layer forward against the reference; bad ids are refused and nothing is written. */
#include "fuzz_layer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, data + size};
    const fuzz_layer l = fuzz_layer_draw(&in);
    const fuzz_results got = fuzz_layer_run(&l, false, false);
    if (got.status != (l.bad_ids ? FMOE_ERR_INDEX : FMOE_OK)) FUZZ_FAIL("status %d: %s", got.status, fmoe_last_error());
    if (l.bad_ids) {
        for (size_t i = 0; i < (size_t)fuzz_count(got.out) * fmoe_dtype_size(l.d.dtype); i++)
            if (((const uint8_t *)got.out->data)[i] != 0xff) FUZZ_FAIL("byte %zu of out was written", i);
    } else {
        const fuzz_results want = fuzz_layer_run(&l, true, false);
        if (want.status != FMOE_OK) FUZZ_FAIL("reference: %s", fmoe_last_error());
        const fuzz_layer magnitude = fuzz_layer_magnitude(&l);
        fuzz_compare(&l, "out", got.out, want.out, fuzz_layer_run(&magnitude, true, false).out, 1);
    }
    fuzz_done();
    return 0;
}
