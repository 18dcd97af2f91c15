/* SPDX-License-Identifier: Apache-2.0
 * decode_ref.c - row n of expert e of quantised weights on the host, by the reference, for the checks in C++. */
#include "cpu/ref/ref.h"

void decode_row(const fmoe_quant *q, const void *row, bool list, int64_t e, int64_t n, int64_t N, int64_t K,
                float *out);
void decode_row(const fmoe_quant *q, const void *row, bool list, int64_t e, int64_t n, int64_t N, int64_t K, float *out)
{
    const ref_vec v = {.p = (void *)row, .quant = q, .e = e, .n = n, .N = N, .list = list};
    for (int64_t k = 0; k < K; k++) out[k] = (float)fmoe_ref_weight(&v, k);
}
