/* SPDX-License-Identifier: Apache-2.0
 * check_amx.c - what only level amx_bf16 has: the transposed left operand of weight gradients, and the order of its
 * sums. */
#include "check_kernels.h"

void check_pack_left(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(pack, fmoe_pack_left_fn, k, &check_table);
    static const int64_t ns[] = {64, 1, 15, 16, 17, 33}, kcs[] = {1, 2, 31, 32, 33, 63, 64, 65};
    const int64_t n = index < 6 ? ns[index] : 1 + check_below(FMOE_NB);
    const int64_t kc = check_below(2) ? kcs[check_below(8)] : 1 + check_below(300), length = fmoe_ceil_div(kc, 32) * 32;
    check_note("kc=%" PRId64 " n=%" PRId64, kc, n);
    const void **rows = check_alloc((size_t)kc * sizeof *rows);
    for (int64_t i = 0; i < kc; i++) {
        uint16_t *row = check_guarded((size_t)n * 2, 2);
        for (int64_t j = 0; j < n; j++) row[j] = (uint16_t)check_random();
        rows[i] = row;
    }
    uint16_t *to = check_guarded((size_t)(n * length) * 2, 64);
    pack(to, kc, rows, n);
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < length; i++) {
            const uint16_t want = i < kc ? ((const uint16_t *)rows[i])[j] : 0;
            if (to[j * length + i] != want) {
                check_fail("element %" PRId64 " of column %" PRId64 " is %04x, not %04x", i, j, to[j * length + i],
                           want);
                return;
            }
        }
}

static float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

float check_amx_sum(int64_t kc, const uint16_t *a, const uint16_t *b)
{
    float sum = 0;
    for (int64_t k0 = 0; k0 < kc; k0 += 32) {
        float chain[2] = {0, 0};
        for (int64_t k = k0; k < k0 + 32; k++) { /* past kc: 0 * 0 */
            const float x = k < kc ? flush(fmoe_bf16_to_float(a[k])) : 0,
                        y = k < kc ? flush(fmoe_bf16_to_float(b[k])) : 0;
            chain[k % 2] = flush(fmaf(x, y, chain[k % 2]));
        }
        sum = flush(sum + flush(chain[0] + chain[1]));
    }
    return sum;
}
