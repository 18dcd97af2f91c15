/* SPDX-License-Identifier: Apache-2.0
 * check_quant.c - the kernel that decodes quantised weights, against the reference, bit for bit. Codes and scales end
 * at a forbidden page. */
#include "check_kernels.h"
#include "cpu/ref/ref.h"

static void fill(void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)p)[i] = (uint8_t)check_random();
}

/* Any bits for the bytes of a grid; floats of all sizes, zeros, infinities and NaN among them. */
static fmoe_tensor *grid(int dtype, int64_t rows, int64_t cols)
{
    fmoe_tensor *t = check_tensor(dtype == FMOE_BYTE ? FMOE_BF16 : dtype, CHECK_SHAPE(1, rows, cols), NULL);
    if (dtype == FMOE_BYTE) {
        t->data = check_guarded((size_t)(rows * cols), 1);
        t->dtype = (fmoe_datatype){1, 8, 1};
        fill(t->data, (size_t)(rows * cols));
        return t;
    }
    for (int64_t i = 0; i < rows * cols; i++) {
        const int64_t kind = check_below(12);
        check_set(t, i,
                  kind == 0   ? 0
                  : kind == 1 ? NAN
                  : kind == 2
                      ? INFINITY
                      : ldexp(check_uniform() - 0.5, (int)check_below(kind == 3 ? 130 : 8) - (kind == 3 ? 130 : 6)));
    }
    return t;
}

void check_dequant(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(dequant, fmoe_dequant_fn, k, &check_table);
    static const float lut[16] = {-3,   -2,   -1,   -0.5f, -0.25f, -0.125f, -0.f, 0,
                                  0.1f, 0.2f, 0.3f, 0.7f,  1,      2,       3,    INFINITY};
    const int32_t code = 1 + (int32_t)(index % 7);
    const int64_t N = 2 * check_size(20), K = check_below(2) ? check_size(700) : 32 * (1 + check_below(70));
    fmoe_quant q = FMOE_QUANT_INIT;
    q.code = code;
    if (fmoe_code_is_4bit(code) && check_below(2)) q.flags |= FMOE_QUANT_HIGH_FIRST;
    if (check_below(2)) q.flags |= FMOE_QUANT_HALVES;
    q.group_rows = (int32_t)CHECK_PICK(0, 1, 1, 3, 128);
    q.group_cols = (int32_t)CHECK_PICK(0, 1, 7, 16, 32, 64, 128, 33);
    const int64_t part = q.flags & FMOE_QUANT_HALVES ? N / 2 : N;
    const int64_t rows = (q.group_rows ? fmoe_ceil_div(part, q.group_rows) : 1) * (N / part),
                  cols = q.group_cols ? fmoe_ceil_div(K, q.group_cols) : 1;
    const int dtype = (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16),
              scale_dtype = (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16, FMOE_BYTE);
    if (scale_dtype == FMOE_BYTE) q.scale_type = 1 + (int32_t)check_below(2);
    q.scale = grid(scale_dtype, rows, cols);
    const bool integer = code == FMOE_CODE_U4 || code == FMOE_CODE_S8;
    if (integer && check_below(2)) q.zeros = grid(check_below(2) ? FMOE_BYTE : FMOE_F32, rows, cols);
    else if (integer) q.zero = check_below(2) ? 8 : 0;
    if (code == FMOE_CODE_LUT4) q.lut = lut;
    const float scales2[] = {0.7f, 1, 0, -3e38f, NAN, 1.3f * 0x1p-40f, 1.9f * 0x1p39f}; /* the last two: just regular */
    const float scale2 = check_below(2) ? scales2[check_below(7)] : 1;
    if (scale2 != 1) {
        q.scale2 = check_tensor(FMOE_F32, CHECK_SHAPE(1), NULL);
        check_set(q.scale2, 0, (double)scale2);
    }
    const int64_t bytes = fmoe_code_bytes(code, K), step = bytes + check_below(2) * 3;
    uint8_t *codes = check_guarded((size_t)((N - 1) * step + bytes), 1);
    fill(codes, (size_t)((N - 1) * step + bytes));
    fmoe_coded m = {.code = code,
                    .high_first = q.flags & FMOE_QUANT_HIGH_FIRST,
                    .codes = codes,
                    .step = step,
                    .group_rows = q.group_rows ? q.group_rows : part,
                    .group_cols = q.group_cols ? q.group_cols : INT64_MAX / 2,
                    .half = part < N ? part : INT64_MAX,
                    .half_groups = rows / 2,
                    .scale = q.scale->data,
                    .scale_step = cols,
                    .scale_dtype = scale_dtype,
                    .scale_type = q.scale_type,
                    .zeros = q.zeros ? q.zeros->data : NULL,
                    .zeros_step = cols,
                    .zeros_dtype = q.zeros ? fmoe_tensor_dtype(q.zeros) : 0,
                    .zero = q.zero,
                    .scale2 = scale2,
                    .table = fmoe_code_is_4bit(code) ? fmoe_code_table(code, lut) : NULL};
    /* As fmoe_coded_of says. */
    const bool regular =
        (!q.zeros || m.zeros_dtype == FMOE_BYTE) && code != FMOE_CODE_LUT4 && scale2 > 0x1p-40f && scale2 < 0x1p40f;
    for (int draw = 0; draw < 4 && !check_failed(); draw++) {
        const int64_t row = draw ? check_below(N) : N - 1,
                      k0 = draw > 1 ? (K % 32 ? check_below(K) : 32 * check_below(K / 32)) : 0,
                      n = draw > 2 ? 1 + check_below(K - k0) : K - k0, several = 1 + check_below(fmoe_min(N - row, 9));
        m.for_pairs = dtype == FMOE_BF16 && check_below(2); /* denormals may be zeros then */
        m.regular = regular && check_below(4);
        check_note("code %d flags %u N=%" PRId64 " K=%" PRId64 " groups %dx%d dtype %d scale %d/%d, row %" PRId64
                   " from %" PRId64 ", %" PRId64,
                   code, q.flags, N, K, q.group_rows, q.group_cols, dtype, scale_dtype, q.scale_type, row, k0, n);
        const size_t element = fmoe_dtype_size(dtype);
        const size_t apart = ((size_t)n + (size_t)check_below(3)) * element;
        char *dst = check_guarded((size_t)(several - 1) * apart + (size_t)n * element, element);
        dequant(dst, (int64_t)apart, dtype, &m, row, several, k0, n);
        for (int64_t i = 0; i < several * n && !check_failed(); i++) {
            const int64_t r = row + i / n, at = i % n;
            const char *is = dst + (size_t)(i / n) * apart + (size_t)at * element;
            const ref_vec codes_of = {.p = codes + r * step, .quant = &q, .n = r, .N = N};
            const float want = (float)fmoe_ref_weight(&codes_of, k0 + at);
            float got, rounded = want;
            uint16_t bits;
            if (dtype == FMOE_F32) memcpy(&got, is, 4);
            else memcpy(&bits, is, 2);
            if (dtype == FMOE_BF16)
                got = fmoe_bf16_to_float(bits), rounded = fmoe_bf16_to_float(fmoe_float_to_bf16(want));
            if (dtype == FMOE_F16) got = fmoe_f16_to_float(bits), rounded = fmoe_f16_to_float(fmoe_float_to_f16(want));
            if (m.for_pairs && got == 0 && fabsf(want) < 0x1p-126f) continue;
            if (isnan(rounded) ? !isnan(got) : memcmp(&got, &rounded, 4) != 0)
                check_fail("weight %" PRId64 " of row %" PRId64 " is %a, not %a", k0 + at, r, (double)got,
                           (double)rounded);
        }
    }
}

void bench_dequant(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(dequant, fmoe_dequant_fn, k, table);
    static uint8_t codes[16 * 512];
    static float scales[16 * 16];
    static uint16_t dst[1024];
    BENCH_FILL(codes);
    BENCH_FILL(scales);
    const fmoe_coded m = {.code = FMOE_CODE_NF4,
                          .codes = codes,
                          .step = 512,
                          .group_rows = 1,
                          .group_cols = 64,
                          .half = INT64_MAX,
                          .scale = (const char *)scales,
                          .scale_step = 16,
                          .scale_dtype = FMOE_F32,
                          .scale2 = 1,
                          .table = fmoe_code_table(FMOE_CODE_NF4, NULL)};
    for (int64_t row = 0; row < 16; row++) dequant(dst, 0, FMOE_BF16, &m, row, 1, 0, 1024);
    *items = 16 * 1024;
    *flops = 0;
}

/* ---- few rows by codes: the bits of few rows by what they are decoded to. Scales of any size, or usual ones alone,
 * for which there are faster ways ---- */

void check_gemm_coded_few_rows(const check_kernel *k, int64_t index)
{
    enum { COLUMNS = FMOE_NB / 2 };
    CHECK_KERNEL_FN(gemm, fmoe_gemm_coded_few_rows_fn, k, &check_table);
    const int32_t codes_of[] = {FMOE_CODE_E4M3, FMOE_CODE_S8, FMOE_CODE_E2M1, FMOE_CODE_NF4, FMOE_CODE_U4};
    const int32_t code = codes_of[index % 5];
    const bool four = fmoe_code_is_4bit(code);
    const int64_t K = 32 * (1 + check_below(20)), k0 = 32 * check_below(K / 32), kc = K - k0;
    const int64_t chunk = check_below(2) ? 32 * (1 + check_below(8)) : kc, rows = 1 + check_below(20),
                  first_row = check_below(2) * 4;
    fmoe_coded m = {.code = code,
                    .high_first = four && check_below(2),
                    .group_rows = code == FMOE_CODE_E4M3 ? CHECK_PICK(4, 128) : CHECK_PICK(1, 2, 128),
                    .group_cols = CHECK_PICK(32, 64, 128, INT64_MAX / 2),
                    .half = INT64_MAX,
                    .scale_dtype = (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16, FMOE_BYTE),
                    .scale_type = FMOE_SCALE_E8M0,
                    .scale2 = check_below(2) ? 0.25f : 1,
                    .zero = code == FMOE_CODE_U4                          ? 8
                            : code == FMOE_CODE_S8 && check_below(4) == 0 ? 3
                                                                          : 0,
                    .regular = check_below(4) != 0,
                    .table = four ? fmoe_code_table(code, NULL) : NULL};
    m.step = fmoe_code_bytes(code, K) + check_below(2) * 7;
    const int64_t N = first_row + COLUMNS, cols = m.group_cols > K ? 1 : fmoe_ceil_div(K, m.group_cols);
    uint8_t *codes = check_guarded((size_t)((N - 1) * m.step + fmoe_code_bytes(code, K)), 1);
    fill(codes, (size_t)((N - 1) * m.step + fmoe_code_bytes(code, K)));
    fmoe_tensor *scale = grid(m.scale_dtype, fmoe_ceil_div(N, m.group_rows), cols);
    if (m.scale_dtype != FMOE_BYTE && check_below(2)) check_fill(scale, 0.5); /* all regular */
    for (int64_t i = 0; i < check_count(scale) && m.scale_dtype == FMOE_BYTE; i++)
        ((uint8_t *)scale->data)[i] = (uint8_t)(i % 9 ? 110 + check_below(20) : check_below(256));
    m.codes = codes;
    m.scale = scale->data;
    m.scale_step = cols;
    check_note("code %d K=%" PRId64 " from %" PRId64 " by %" PRId64 ", %" PRId64 " rows, groups %dx%d", code, K, k0,
               chunk, rows, (int)m.group_rows, (int)fmoe_min(m.group_cols, K));
    const void *a[20];
    for (int64_t i = 0; i < rows; i++) {
        uint16_t *row = check_guarded((size_t)kc * 2, 2);
        for (int64_t j = 0; j < kc; j++) row[j] = fmoe_float_to_bf16((float)(2 * check_uniform() - 1));
        a[i] = row;
    }
    uint16_t *decoded = check_guarded((size_t)(COLUMNS * kc) * 2, 2);
    check_table.dequant(decoded, 2 * kc, FMOE_BF16, &m, first_row, COLUMNS, k0, kc);
    const size_t sums = (size_t)(rows * FMOE_NB) * sizeof(float);
    float *got = check_guarded(sums, 4), *want = check_guarded(sums, 4);
    for (int64_t i = 0; i < rows * FMOE_NB; i++) got[i] = want[i] = (float)i;
    const int first = (int)check_below(2);
    fmoe_walk none = {.at = (const char *)decoded,
                      .half = {(const char *)decoded, (const char *)decoded},
                      .in_run = 1,
                      .length = 1,
                      .per_half = 1};
    check_table.gemm_kmajor_few_rows_bf16(rows, kc, chunk, a, (const char *)decoded, kc * 2, want, FMOE_NB, first,
                                          &none);
    gemm(rows, k0, kc, chunk, a, &m, first_row, got, FMOE_NB, first, &m, first_row);
    for (int64_t i = 0; i < rows * FMOE_NB && !check_failed(); i++)
        if (memcmp(&got[i], &want[i], 4) && !(isnan(got[i]) && isnan(want[i])))
            check_fail("sum %" PRId64 " is %a, not %a", i, (double)got[i], (double)want[i]);
}
