/* SPDX-License-Identifier: Apache-2.0
 * check_amx.c - what only level amx_bf16 has: the transposed left operand of weight gradients, and the order of its
 * sums. */
#include "check_kernels.h"

void check_pack_wgrad_left(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(pack, fmoe_pack_wgrad_left_fn, k, &check_table);
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

static uint16_t draw_bf16(void) { return fmoe_float_to_bf16((float)(2 * check_uniform() - 1)); }

/* Rows in memory of their own, each ending at a forbidden page. */
static const void **draw_rows(int64_t rows, int64_t K)
{
    const void **a = check_alloc((size_t)rows * sizeof *a);
    for (int64_t i = 0; i < rows; i++) {
        uint16_t *row = check_guarded((size_t)K * 2, 2);
        for (int64_t k = 0; k < K; k++) row[k] = draw_bf16();
        a[i] = row;
    }
    return a;
}

void check_pack_tiles(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(pack, fmoe_pack_tiles_fn, k, &check_table);
    const int64_t n = 1 + index % 16, K = check_below(2) ? CHECK_PICK(1, 2, 31, 32, 33, 64) : 1 + check_below(200);
    const int64_t padded = fmoe_ceil_div(K, 32) * 32;
    check_note("K=%" PRId64 " n=%" PRId64, K, n);
    const void **rows = draw_rows(n, K);
    uint16_t *tiles = check_guarded((size_t)(padded * n) * 2, 4);
    pack(tiles, K, rows, n);
    for (int64_t i = 0; i < padded; i++)
        for (int64_t j = 0; j < n; j++) {
            const uint16_t got = tiles[(i / 2 * n + j) * 2 + i % 2];
            const uint16_t want = i < K ? ((const uint16_t *)rows[j])[i] : 0;
            if (got != want) {
                check_fail("k %" PRId64 " of row %" PRId64 " is %04x, not %04x", i, j, got, want);
                return;
            }
        }
}

void check_gemm_inplace(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(gemm, fmoe_gemm_inplace_fn, k, &check_table);
    static const int64_t ns[] = {32, 1, 15, 16, 17, 31, 33, 64}, row_counts[] = {1, 15, 16, 17, 32, 33, 48, 65};
    const int64_t rows = index < 8 ? row_counts[index] : 1 + check_below(70);
    const int64_t n = check_below(2) ? 32 : check_below(2) ? ns[check_below(8)] : 1 + check_below(70);
    const int64_t K = check_below(2) ? CHECK_PICK(2, 31, 32, 33, 64, 96, 320) : 1 + check_below(300);
    const int64_t stride = K + check_below(40), ldc = n + check_below(40);
    check_note("rows=%" PRId64 " K=%" PRId64 " n=%" PRId64 " stride=%" PRId64, rows, K, n, stride);
    const void **a = draw_rows(rows, K);
    uint16_t *w = check_guarded((size_t)((n - 1) * stride + K) * 2, 2);
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < K; i++) w[j * stride + i] = draw_bf16();
    const int64_t block = fmoe_ceil_div(K, 32) * 1024;
    char *tiles = check_guarded((size_t)(fmoe_ceil_div(rows, 16) * block), 64);
    for (int64_t i = 0; i < rows; i += 16)
        check_table.pack_tiles(tiles + i / 16 * block, K, a + i, fmoe_min(16, rows - i));
    const size_t elements = (size_t)((rows - 1) * ldc + n);
    float *c = check_guarded(elements * sizeof *c, 4), *before = check_alloc(elements * sizeof *c);
    memcpy(before, c, elements * sizeof *c);
    gemm(rows, K, tiles, w, stride * 2, n, c, ldc, check_below(2) ? w : NULL);
    for (int64_t i = 0; i < rows && !check_failed(); i++)
        for (int64_t j = 0; j < fmoe_min(ldc, (int64_t)elements - i * ldc); j++) {
            const float want = j < n ? check_amx_sum(K, a[i], w + j * stride) : before[i * ldc + j];
            if (memcmp(&want, &c[i * ldc + j], 4))
                check_fail("c[%" PRId64 ",%" PRId64 "] is %a, not %a", i, j, (double)c[i * ldc + j], (double)want);
        }
}

void bench_gemm_inplace(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(gemm, fmoe_gemm_inplace_fn, k, table);
    enum { ROWS = 64, K = 1024 };
    static char tiles[ROWS * K * 2] __attribute__((aligned(64)));
    static uint16_t w[32 * K];
    static float c[ROWS * FMOE_NB];
    BENCH_FILL(tiles);
    BENCH_FILL(w);
    for (int i = 0; i < 20; i++) gemm(ROWS, K, tiles, w, K * 2, 32, c, FMOE_NB, w);
    *items = 20;
    *flops = 2.0 * ROWS * K * 32;
}
