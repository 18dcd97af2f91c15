/* SPDX-License-Identifier: Apache-2.0
 * check_gemm.c - products and packing, kernel by kernel, against loops in double and in plain order. */
#include "check_kernels.h"

/* ---- panels, as kernels.h describes them ---- */

typedef struct form {
    bool pairs, kmajor;
} form;

static form form_of(const check_kernel *k)
{
    return (form){.pairs = strstr(k->field, "pairs") || strstr(k->field, "gemm_bf16") ||
                           strstr(k->field, "wgrad_bf16") || strstr(k->field, "inplace_bf16") ||
                           strstr(k->field, "kmajor_bf16"),
                  .kmajor = strstr(k->field, "kmajor")};
}

static int64_t unit_of(form f) { return f.pairs ? 2 : 4; } /* bytes of an element */

static int64_t panel_units(form f, int64_t kc) /* of 32 bits */
{
    return f.kmajor ? fmoe_ceil_div(kc * unit_of(f), 16) * 4 * FMOE_NB : (f.pairs ? (kc + 1) / 2 : kc) * FMOE_NB;
}

/* Where element (k,n) of a panel is, in f32 or (pairs) in bf16 elements. */
static int64_t panel_at(form f, int64_t nr, int64_t kc, int64_t k, int64_t n)
{
    if (f.kmajor) {
        const int64_t steps = fmoe_ceil_div(kc * unit_of(f), 16), block = 16 / unit_of(f), nq = nr / 4;
        return ((n / nq * steps + k / block) * nq + n % nq) * block + k % block;
    }
    return f.pairs ? 2 * (k / 2 * FMOE_NB + n) + k % 2 : n / nr * kc * nr + k * nr + n % nr;
}

/* ---- gemm ---- */

typedef struct product {
    form f;
    bool pairs;
    int64_t rows, kc, ldc, a_step;
    const void **a;
    void *panel;
    float *c, *before;
} product;

/* Rows of A where they come from: rows in memory (gathered, so each ends at a forbidden page), or columns of a packed
 * panel. */
static void draw_product(product *p, const check_kernel *k, int64_t index)
{
    static const int64_t rows[] = {1, 2, 3, 5, 6, 7, 11, 12, 13, 18, 0, 25, 30},
                         kcs[] = {1, 2, 3, 31, 32, 64, 97, 511, 512};
    *p = (product){.f = form_of(k), .pairs = form_of(k).pairs};
    p->rows = index < 13 ? rows[index] : check_below(40);
    p->kc = index % 2 ? kcs[check_below(9)] : 1 + check_below(p->pairs ? FMOE_KC_PAIRS : FMOE_KC);
    if (check_below(2)) p->kc = fmoe_ceil_div(p->kc, 32) * 32; /* turns_avx512.h */
    p->ldc = FMOE_NB + (check_below(2) ? 0 : check_below(20));
    const bool packed_a = !p->f.kmajor && check_below(2);
    const int64_t unit = p->pairs ? 2 : 4, strip = p->pairs ? FMOE_NB : check_table.nr;
    p->a_step = packed_a ? strip * 4 : 4;
    p->a = check_alloc((size_t)(p->rows + 1) * sizeof *p->a);
    char *packed = packed_a ? check_guarded((size_t)panel_units(p->f, p->kc) * 4, 64) : NULL;
    /* Equally far apart, the last one ending at a forbidden page: AMX reads such rows in place. */
    const int64_t apart = !packed_a && check_below(2) ? (p->kc + check_below(40)) * unit : 0;
    char *matrix =
        apart && p->rows ? check_guarded((size_t)((p->rows - 1) * apart + p->kc * unit), (size_t)unit) : NULL;
    for (int64_t r = 0; r < p->rows; r++) {
        const int64_t n = r % FMOE_NB;
        if (matrix) {
            p->a[r] = matrix + r * apart;
        } else if (packed_a) {
            p->a[r] = packed + panel_at(p->f, strip, p->kc, 0, n) * unit;
        } else if (check_below(3) == 0 && r > 0) {
            p->a[r] = p->a[check_below(r)]; /* a row may be gathered twice */
        } else {
            p->a[r] = check_guarded((size_t)(p->kc * unit), (size_t)unit);
        }
    }
    p->panel = check_guarded((size_t)panel_units(p->f, p->kc) * 4, 4);
    memset(p->panel, 0, (size_t)panel_units(p->f, p->kc) * 4); /* the padding that packers write */
    const size_t c_elements = p->rows ? (size_t)((p->rows - 1) * p->ldc + FMOE_NB) : 0;
    p->c = check_guarded(c_elements * sizeof *p->c, 4);
    p->before = check_alloc(c_elements * sizeof *p->c);
    check_note("rows=%" PRId64 " kc=%" PRId64 " ldc=%" PRId64 " a_step=%" PRId64, p->rows, p->kc, p->ldc, p->a_step);
}

static char *a_element(const product *p, int64_t r, int64_t k)
{
    return (char *)(uintptr_t)p->a[r] + (p->pairs ? k / 2 * p->a_step + k % 2 * 2 : k * p->a_step);
}

static double a_value(const product *p, int64_t r, int64_t k)
{
    const void *at = a_element(p, r, k);
    return (double)(p->pairs ? fmoe_bf16_to_float(*(const uint16_t *)at) : *(const float *)at);
}

static double b_value(const product *p, int64_t k, int64_t n)
{
    const int64_t at = panel_at(p->f, check_table.nr, p->kc, k, n);
    return (double)(p->pairs ? fmoe_bf16_to_float(((const uint16_t *)p->panel)[at]) : ((const float *)p->panel)[at]);
}

static void fill_product(product *p)
{
    const float scale = p->pairs && check_below(4) == 0 ? 0x1p-62f : 1; /* products on both sides of the denormals */
    for (int64_t r = 0; r < p->rows; r++)
        for (int64_t k = 0; k < p->kc; k++) {
            const float v = scale * (float)(2 * check_uniform() - 1);
            if (p->pairs) *(uint16_t *)(void *)a_element(p, r, k) = fmoe_float_to_bf16(v);
            else *(float *)(void *)a_element(p, r, k) = v;
        }
    for (int64_t k = 0; k < p->kc; k++)
        for (int64_t n = 0; n < FMOE_NB; n++) {
            const float v = scale * (float)(2 * check_uniform() - 1);
            const int64_t at = panel_at(p->f, check_table.nr, p->kc, k, n);
            if (p->pairs) ((uint16_t *)p->panel)[at] = fmoe_float_to_bf16(v);
            else ((float *)p->panel)[at] = v;
        }
}

/* On AMX (or its emulation) every bit is known: one element a row. */
static void check_tile_order(const product *p, int first)
{
    for (int64_t r = 0; r < p->rows; r++) {
        uint16_t a[FMOE_KC_PAIRS], b[FMOE_KC_PAIRS];
        const int64_t n = check_below(FMOE_NB);
        for (int64_t k = 0; k < p->kc; k++) {
            a[k] = *(const uint16_t *)(const void *)a_element(p, r, k);
            b[k] = ((const uint16_t *)p->panel)[panel_at(p->f, 64, p->kc, k, n)];
        }
        const float sum = check_amx_sum(p->kc, a, b), want = first ? sum : p->before[r * p->ldc + n] + sum;
        if (memcmp(&want, &p->c[r * p->ldc + n], 4))
            check_fail("c[%" PRId64 ",%" PRId64 "] is %a, by the manual's order %a", r, n, (double)p->c[r * p->ldc + n],
                       (double)want);
    }
}

/* A chunk to be packed meanwhile: the two halves of its panels' columns in memory of their own, each ending at a
 * forbidden page, and what the panels shall be. */
typedef struct overlapped {
    fmoe_overlap overlap;
    int64_t units; /* of the panels */
    unsigned char *want;
} overlapped;

static void draw_overlap(overlapped *b, form f)
{
    const bool pairs = f.pairs;
    static const int types[] = {FMOE_F32, FMOE_BF16, FMOE_F16};
    const int dtype = pairs ? FMOE_BF16 : types[check_below(3)];
    const int64_t element = (int64_t)fmoe_dtype_size(dtype), unit = pairs ? 2 : 1, pieces = 1 + check_below(4);
    const bool cols = f.kmajor || (pairs && check_below(2)); /* k-major: in kmajor panels, but for AMX */
    const int64_t of_a_piece = f.kmajor ? 4 : 8;             /* columns */
    const int64_t k = (cols ? 16 : 2) * unit, kc = k * pieces, apart = check_below(3) * 16;
    const int64_t panels = cols ? 1 : 1 + check_below(3), columns = (panels - 1) * FMOE_NB + 32; /* of a half */
    const int64_t step = (cols ? kc : columns) * element + apart, lines = cols ? 32 : kc;
    const size_t bytes = (size_t)((lines - 1) * step + (cols ? kc : columns) * element);
    char *half[2];
    *b = (overlapped){.units = panels * panel_units(f, kc)};
    b->want = check_alloc((size_t)b->units * 4);
    for (int h = 0; h < 2; h++) {
        half[h] = check_guarded(bytes, (size_t)element);
        for (size_t i = 0; i < bytes; i++) half[h][i] = (char)check_random();
        for (size_t i = 0; i < bytes / 2 && dtype == FMOE_F16; i++)
            ((uint16_t *)(void *)half[h])[i] &= 0xbbff; /* no NaN */
        for (int64_t n = 0; n < columns; n++)
            for (int64_t i = 0; i < kc && n % FMOE_NB < 32; i++) {
                const char *from = half[h] + (cols ? n * step + i * element : i * step + n * element);
                const int64_t at =
                    n / FMOE_NB * panel_units(f, kc) * unit + panel_at(f, check_table.nr, kc, i, 32 * h + n % FMOE_NB);
                uint16_t bits = 0;
                if (dtype != FMOE_F32) memcpy(&bits, from, 2);
                const float v = dtype == FMOE_BF16 ? fmoe_bf16_to_float(bits) : fmoe_f16_to_float(bits);
                if (pairs) memcpy(b->want + 2 * at, &bits, 2);
                else memcpy(b->want + 4 * at, dtype == FMOE_F32 ? (const void *)from : &v, 4);
            }
    }
    char *const panel = check_guarded((size_t)b->units * 4, 64);
    b->overlap = (fmoe_overlap){.panel = panel,
                                .to = panel,
                                .to_step = cols ? 16 * FMOE_NB * 4 : panel_units(f, kc) * 4,
                                .to_run = cols ? 32 : 2 * FMOE_NB * 4,
                                .kind = f.kmajor ? FMOE_OVERLAP_KMAJOR
                                        : cols   ? FMOE_OVERLAP_TRANSPOSE
                                                 : FMOE_OVERLAP_NMAJOR,
                                .dtype = dtype,
                                .pack = {.at = half[0],
                                         .half = {half[0], half[1]},
                                         .left = pieces * (cols ? FMOE_NB / of_a_piece : panels),
                                         .step = step,
                                         .advance = cols ? k * element : FMOE_NB * element,
                                         .run_step = cols ? of_a_piece * step : k * step,
                                         .in_run = (int32_t)(cols ? pieces : panels),
                                         .length = (int32_t)(cols ? pieces : panels),
                                         .per_half = (int32_t)(cols ? 32 / of_a_piece : pieces)}};
}

static void check_overlap(const overlapped *b, int64_t asked)
{
    const size_t bytes = (size_t)b->units * 4;
    if (b->overlap.pack.left == asked) return; /* a level that packs nothing meanwhile */
    if (b->overlap.pack.left) check_fail("%" PRId64 " of %" PRId64 " pieces were left", b->overlap.pack.left, asked);
    for (size_t i = 0; i < bytes && !check_failed(); i++)
        if ((unsigned char)b->overlap.panel[i] != b->want[i])
            check_fail("packed meanwhile: byte %zu of the panel is %02x, not %02x", i,
                       (unsigned char)b->overlap.panel[i], b->want[i]);
}

/* Lines to prefetch: in the forbidden page, which a prefetch does not mind and a load does. */
static fmoe_walk forbidden_lines(bool into_l1)
{
    const char *edge = (const char *)check_guarded(8192, 8192) + 8192;
    return (fmoe_walk){.at = edge,
                       .half = {edge, edge},
                       .step = 64,
                       .advance = 256,
                       .length = 8,
                       .in_run = 8,
                       .per_half = 1,
                       .into_l1 = into_l1,
                       .left = check_below(9)};
}

void check_gemm(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(gemm, fmoe_gemm_fn, k, &check_table);
    product p;
    draw_product(&p, k, index);
    fill_product(&p);
    const int first = (int)check_below(2);
    const size_t elements = p.rows ? (size_t)((p.rows - 1) * p.ldc + FMOE_NB) : 0;
    for (int64_t r = 0; r < p.rows && !first; r++)
        for (int64_t n = 0; n < FMOE_NB; n++) p.c[r * p.ldc + n] = (float)(2 * check_uniform() - 1);
    memcpy(p.before, p.c, elements * sizeof *p.c);
    overlapped next;
    draw_overlap(&next, p.f);
    const int64_t asked = next.overlap.pack.left;
    fmoe_overlap nothing = {0};
    next.overlap.prefetch = forbidden_lines(check_below(2));
    next.overlap.batched = check_below(4) > 0;
    gemm(p.rows, p.kc, p.a, p.a_step, p.panel, p.c, p.ldc, first, &next.overlap);
    check_overlap(&next, asked);
    for (int64_t r = 0; r < p.rows && !check_failed(); r++) {
        for (int64_t n = 0; n < FMOE_NB; n++) {
            double sum = first ? 0 : (double)p.before[r * p.ldc + n], magnitude = fabs(sum);
            for (int64_t i = 0; i < p.kc; i++) {
                const double one = a_value(&p, r, i) * b_value(&p, i, n);
                sum += one;
                magnitude += fabs(one);
            }
            check_near("c", r * p.ldc + n, (double)p.c[r * p.ldc + n], sum, check_c(p.kc) * U32 * magnitude + 0x1p-120);
        }
        for (int64_t n = FMOE_NB; n < p.ldc && r + 1 < p.rows; n++)
            if (memcmp(&p.c[r * p.ldc + n], &p.before[r * p.ldc + n], 4))
                check_fail("c[%" PRId64 "] past the block was written", n);
    }
    if (next.overlap.prefetch.left < 0)
        check_fail("%" PRId64 " pieces were taken past the last", -next.overlap.prefetch.left);
    if (p.pairs && !p.f.kmajor && strstr(check_table.isa, "amx")) check_tile_order(&p, first);
    /* A row's bits do not depend on its company. */
    if (p.rows > 1) {
        const int64_t r = check_below(p.rows);
        float alone[FMOE_NB];
        memcpy(alone, p.before + r * p.ldc, sizeof alone);
        gemm(1, p.kc, p.a + r, p.a_step, p.panel, alone, FMOE_NB, first, &nothing);
        if (memcmp(alone, p.c + r * p.ldc, sizeof alone))
            check_fail("row %" PRId64 " of %" PRId64 " differs from itself alone", r, p.rows);
    }
}

void bench_gemm(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(gemm, fmoe_gemm_fn, k, table);
    enum { ROWS = 48 };
    static char panel[FMOE_PANEL_BYTES] __attribute__((aligned(64)));
    static float a[ROWS][FMOE_KC], c[ROWS * FMOE_NB];
    const int64_t kc = form_of(k).pairs ? FMOE_KC_PAIRS : FMOE_KC;
    const void *rows[ROWS];
    for (int i = 0; i < ROWS; i++) rows[i] = a[i];
    BENCH_FILL(panel);
    BENCH_FILL(a);
    fmoe_overlap nothing = {0};
    for (int i = 0; i < 20; i++) gemm(ROWS, kc, rows, 4, panel, c, FMOE_NB, 1, &nothing);
    *items = 20;
    *flops = 2.0 * ROWS * (double)kc * FMOE_NB;
}

/* ---- the same by n-major weights in place: the bits of the packed ones ---- */

void check_gemm_nmajor_inplace(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(inplace, fmoe_gemm_nmajor_inplace_fn, k, &check_table);
    product p;
    do draw_product(&p, k, index);
    while (p.a_step != 4);
    fill_product(&p);
    const int dtype = strstr(k->field, "_f32") ? FMOE_F32 : strstr(k->field, "_f16") ? FMOE_F16 : FMOE_BF16;
    const int64_t unit = (int64_t)fmoe_dtype_size(dtype), apart = (FMOE_NB + check_below(3) * 16) * unit;
    const size_t bytes = (size_t)((p.kc - 1) * apart + FMOE_NB * unit), room = (size_t)panel_units(p.f, p.kc) * 4;
    char *w = check_guarded(bytes, (size_t)unit), *panel = check_guarded(room, 4);
    for (int64_t i = 0; i < p.kc; i++)
        for (int64_t n = 0; n < FMOE_NB; n++) {
            char *at = w + i * apart + n * unit;
            float *packed = (float *)p.panel + (p.pairs ? 0 : panel_at(p.f, check_table.nr, p.kc, i, n));
            const uint16_t bits = dtype == FMOE_F16 ? fmoe_float_to_f16(*packed) : fmoe_float_to_bf16(*packed);
            if (p.pairs) memcpy(at, (char *)p.panel + panel_at(p.f, 64, p.kc, i, n) * unit, (size_t)unit);
            else memcpy(at, dtype == FMOE_F32 ? (const void *)packed : &bits, (size_t)unit);
            if (!p.pairs && dtype != FMOE_F32) /* rounded, as it is widened again */
                *packed = dtype == FMOE_F16 ? fmoe_f16_to_float(bits) : fmoe_bf16_to_float(bits);
        }
    const int first = (int)check_below(2);
    float *want = check_alloc((size_t)(p.rows * p.ldc) * sizeof *want + 1);
    for (int64_t i = 0; p.rows && i < (p.rows - 1) * p.ldc + FMOE_NB; i++)
        want[i] = p.c[i] = (float)(2 * check_uniform() - 1);
    fmoe_overlap overlap = {.prefetch = forbidden_lines(false), .batched = check_below(4) > 0}, nothing = {0};
    fmoe_gemm_fn *gemm = p.pairs ? check_table.gemm_bf16 : check_table.gemm_f32;
    gemm(p.rows, p.kc, p.a, 4, p.panel, want, p.ldc, first, &nothing);
    inplace(p.rows, p.kc, p.a, w, apart, panel, p.c, p.ldc, first, &overlap);
    for (int64_t i = 0; i < p.rows * FMOE_NB && !check_failed(); i++) {
        const int64_t at = i / FMOE_NB * p.ldc + i % FMOE_NB;
        if (memcmp(&p.c[at], &want[at], 4))
            check_fail("c[%" PRId64 "] is %a, packed %a", at, (double)p.c[at], (double)want[at]);
    }
    if (p.rows > FMOE_MR && memcmp(panel, p.panel, room)) check_fail("the panel it leaves is not the packed one");
    if (overlap.prefetch.left < 0) check_fail("%" PRId64 " pieces were taken past the last", -overlap.prefetch.left);
}

void bench_gemm_nmajor_inplace(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(inplace, fmoe_gemm_nmajor_inplace_fn, k, table);
    enum { ROWS = 48 };
    static char w[FMOE_PANEL_BYTES], panel[FMOE_PANEL_BYTES] __attribute__((aligned(64)));
    static float a[ROWS][FMOE_KC], c[ROWS * FMOE_NB];
    const int64_t unit = strstr(k->field, "16") ? 2 : 4, kc = FMOE_PANEL_BYTES / FMOE_NB / (form_of(k).pairs ? 2 : 4);
    const void *rows[ROWS];
    for (int i = 0; i < ROWS; i++) rows[i] = a[i];
    BENCH_FILL(w);
    BENCH_FILL(a);
    fmoe_overlap nothing = {0};
    for (int i = 0; i < 20; i++) inplace(ROWS, kc, rows, w, FMOE_NB * unit, panel, c, FMOE_NB, 1, &nothing);
    *items = 20;
    *flops = 2.0 * ROWS * (double)kc * FMOE_NB;
}

/* ---- wgrad: from two packed panels to the rows of a gradient, each of them whole cache lines ---- */

/* On AMX every bit is known here too. */
static void check_wgrad_order(const fmoe_tensor *dst, int64_t i, int64_t kc, const uint16_t *a, const void *panel)
{
    uint16_t b[FMOE_KC_PAIRS];
    for (int64_t k = 0; k < kc; k++)
        b[k] = ((const uint16_t *)panel)[panel_at((form){.pairs = true}, 64, kc, k, i % FMOE_NB)];
    const float sum = check_amx_sum(kc, a, b);
    const int dtype = fmoe_tensor_dtype(dst);
    const float want = dtype == FMOE_BF16  ? fmoe_bf16_to_float(fmoe_float_to_bf16(sum))
                       : dtype == FMOE_F16 ? fmoe_f16_to_float(fmoe_float_to_f16(sum))
                                           : sum;
    if (check_get(dst, i) != (double)want)
        check_fail("element %" PRId64 " is %a, by the manual's order %a", i, check_get(dst, i), (double)want);
}

void check_wgrad(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(wgrad, fmoe_wgrad_fn, k, &check_table);
    static const int64_t ms[] = {1, 6, 7, 63, 64, 65, 128, 130};
    const form f = form_of(k);
    const bool pairs = f.pairs;
    const int64_t m = index < 8 ? ms[index] : 1 + check_below(150),
                  gap = check_below(2) ? 0 : 32 * (1 + check_below(4));
    const bool own_rows =
        pairs && check_table.pack_wgrad_left_pairs; /* AMX: columns of the left operand one after another */
    const int64_t kc = own_rows ? 32 * (1 + check_below(5)) : pairs ? 2 * (1 + check_below(70)) : 1 + check_below(140);
    const int64_t units = panel_units(f, kc);
    const int dtype = (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    const bool more = check_below(2);
    check_note("m=%" PRId64 " kc=%" PRId64 " gap=%" PRId64 " dtype=%d earlier sums=%d", m, kc, gap, dtype, more);
    const int64_t panels = fmoe_ceil_div(m, FMOE_NB);
    char *left = check_guarded((size_t)(panels * units) * 4, 4), *panel = check_guarded((size_t)units * 4, 4);
    for (int64_t i = 0; i < (panels + 1) * units * (pairs ? 2 : 1); i++) {
        const int64_t n = panels * units * (pairs ? 2 : 1);
        const float v = (float)(2 * check_uniform() - 1);
        char *to = i < n ? left : panel;
        if (pairs) ((uint16_t *)(void *)to)[i < n ? i : i - n] = fmoe_float_to_bf16(v);
        else ((float *)(void *)to)[i < n ? i : i - n] = v;
    }
    float *c = check_guarded((size_t)(m * FMOE_NB) * sizeof *c, 4);
    for (int64_t i = 0; i < m * FMOE_NB; i++) c[i] = (float)(2 * check_uniform() - 1);
    fmoe_tensor *dst = check_rows(dtype, m, FMOE_NB, gap);
    if ((uintptr_t)dst->data % 64) check_fail("the draw is not aligned");
    if (check_failed()) return;
    const void *rows[2] = {left, panel};
    const fmoe_prefetch_rows ahead = {.rows = rows, .n = 2};
    wgrad(m, kc, left, panel, more ? c : NULL, dst->data, FMOE_NB + gap, dtype, check_below(2) ? &ahead : NULL);
    const double half_ulp = dtype == FMOE_F32 ? 0 : dtype == FMOE_BF16 ? 0x1p-8 : 0x1p-11;
    for (int64_t i = 0; i < m * FMOE_NB && !check_failed(); i++) {
        const int64_t row = i / FMOE_NB, n = i % FMOE_NB;
        double sum = more ? (double)c[i] : 0, magnitude = fabs(sum);
        for (int64_t r = 0; r < kc; r++) {
            const int64_t a =
                own_rows ? row * kc + r
                         : row / FMOE_NB * units * (pairs ? 2 : 1) + panel_at(f, check_table.nr, kc, r, row % FMOE_NB);
            const int64_t b = panel_at(f, check_table.nr, kc, r, n);
            const double one = pairs ? (double)fmoe_bf16_to_float(((uint16_t *)(void *)left)[a]) *
                                           (double)fmoe_bf16_to_float(((uint16_t *)(void *)panel)[b])
                                     : (double)((float *)(void *)left)[a] * (double)((float *)(void *)panel)[b];
            sum += one;
            magnitude += fabs(one);
        }
        check_near("dst", i, check_get(dst, i), sum,
                   check_c(kc) * U32 * magnitude * 1.01 + half_ulp * fabs(sum) + 0x1p-25);
        if (own_rows && !more) check_wgrad_order(dst, i, kc, (uint16_t *)(void *)left + row * kc, panel);
    }
    check_gaps("dst", dst);
}

void bench_wgrad(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(wgrad, fmoe_wgrad_fn, k, table);
    enum { M = 128, ROWS = 64 };
    static char left[M * ROWS * 4] __attribute__((aligned(64))), panel[FMOE_NB * ROWS * 4] __attribute__((aligned(64)));
    static float dst[M * FMOE_NB] __attribute__((aligned(64)));
    BENCH_FILL(left);
    BENCH_FILL(panel);
    for (int i = 0; i < 20; i++)
        wgrad(M, ROWS, left, panel, NULL, dst, FMOE_NB, form_of(k).pairs ? FMOE_BF16 : FMOE_F32, NULL);
    *items = 20;
    *flops = 2.0 * M * ROWS * FMOE_NB;
}

/* ---- packing: exact ---- */

typedef struct source {
    form f;
    bool pairs, cols;
    int dtype;
} source;

static source source_of(const check_kernel *k)
{
    const char *f = k->field;
    return (source){.f = form_of(k),
                    .pairs = form_of(k).pairs,
                    .cols = strstr(f, "transposed") || form_of(k).kmajor,
                    .dtype = strstr(f, "_f32")   ? FMOE_F32
                             : strstr(f, "_f16") ? FMOE_F16
                                                 : FMOE_BF16};
}

void check_pack(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(pack, fmoe_pack_fn, k, &check_table);
    static const int64_t ns[] = {64, 1, 15, 16, 17, 31, 32, 33, 48, 63},
                         kcs[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 512};
    const source s = source_of(k);
    const int64_t col = check_below(4) * 16;
    const int64_t n = fmoe_min(index < 10 ? ns[index] : 1 + check_below(FMOE_NB), FMOE_NB - col);
    const int64_t kc = check_below(3) ? kcs[check_below(11)] : 1 + check_below(s.pairs ? FMOE_KC_PAIRS : FMOE_KC);
    const int64_t lines = s.cols ? n : kc, length = s.cols ? kc : n;
    const size_t element = fmoe_dtype_size(s.dtype), panel_bytes = (size_t)panel_units(s.f, kc) * 4;
    check_note("kc=%" PRId64 " col=%" PRId64 " n=%" PRId64, kc, col, n);
    const void **pointers = check_alloc((size_t)lines * sizeof *pointers);
    for (int64_t i = 0; i < lines; i++) {
        unsigned char *line = check_guarded((size_t)length * element, element);
        for (size_t b = 0; b < (size_t)length * element; b++) line[b] = (unsigned char)check_random();
        for (int64_t j = 0; j < length && s.dtype == FMOE_F16; j++) /* signalling NaNs may come out quiet */
            if ((((uint16_t *)(void *)line)[j] & 0x7c00) == 0x7c00) ((uint16_t *)(void *)line)[j] &= 0x83ff;
        pointers[i] = line;
    }
    unsigned char *panel = check_guarded(panel_bytes, 64), *want = check_alloc(panel_bytes);
    memcpy(want, panel, panel_bytes);
    for (int64_t i = 0; i < kc; i++)
        for (int64_t j = 0; j < n; j++) {
            const void *from = (const char *)pointers[s.cols ? j : i] + (size_t)(s.cols ? i : j) * element;
            const int64_t at = panel_at(s.f, check_table.nr, kc, i, col + j);
            if (s.pairs) {
                memcpy(want + 2 * at, from, 2);
                if (i == kc - 1 && kc % 2 && !s.f.kmajor) memset(want + 2 * at + 2, 0, 2);
            } else {
                uint16_t bits = 0;
                if (s.dtype != FMOE_F32) memcpy(&bits, from, 2);
                const float v = s.dtype == FMOE_BF16 ? fmoe_bf16_to_float(bits) : fmoe_f16_to_float(bits);
                memcpy(want + 4 * at, s.dtype == FMOE_F32 ? from : &v, 4);
            }
        }
    for (int64_t i = kc; s.f.kmajor && i * unit_of(s.f) % 16; i++) /* the rest of a block is zeros */
        for (int64_t j = 0; j < n; j++)
            memset(want + unit_of(s.f) * panel_at(s.f, check_table.nr, kc, i, col + j), 0, (size_t)unit_of(s.f));
    pack(panel, kc, col, pointers, n);
    for (size_t b = 0; b < panel_bytes; b++)
        if (panel[b] != want[b]) {
            check_fail("byte %zu of the panel is %02x, not %02x", b, panel[b], want[b]);
            return;
        }
}

void bench_pack(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(pack, fmoe_pack_fn, k, table);
    const source s = source_of(k);
    static char panel[FMOE_PANEL_BYTES] __attribute__((aligned(64))), from[FMOE_PANEL_BYTES + 4096];
    const void *pointers[FMOE_KC];
    for (int i = 0; i < FMOE_KC; i++)
        pointers[i] = from + (s.cols ? (i % FMOE_NB) * FMOE_KC : i * FMOE_NB) * (int)fmoe_dtype_size(s.dtype);
    BENCH_FILL(from);
    for (int i = 0; i < 8; i++) pack(panel, FMOE_KC, 0, pointers, FMOE_NB);
    *items = 8 * FMOE_KC * FMOE_NB;
    *flops = 0;
}

void check_peak(const check_kernel *k, int64_t index)
{
    (void)index;
    CHECK_KERNEL_FN(peak, fmoe_peak_fn, k, &check_table);
    const double one = peak(1000), two = peak(2000);
    if (!(one > 0) || two != 2 * one) check_fail("flops of 1000 and 2000 rounds: %g and %g", one, two);
}

/* ---- few rows by k-major weights in place: the bits of the product by a kmajor panel ---- */

void check_gemm_kmajor_few_rows(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(multiply, fmoe_gemm_kmajor_few_rows_fn, k, &check_table);
    enum { MOST = 20 }; /* rows: of one tile, two and three */
    const bool pairs = strstr(k->field, "bf16");
    fmoe_gemm_fn *const by_panel = pairs ? check_table.gemm_kmajor_bf16 : check_table.gemm_kmajor_f32;
    fmoe_pack_fn *const pack = pairs ? check_table.pack_kmajor_bf16 : check_table.pack_kmajor_f32;
    const int dtype = pairs ? FMOE_BF16 : FMOE_F32;
    const int64_t element = pairs ? 2 : 4, rows = 1 + index % MOST, first = check_below(2);
    const int64_t kc = index < 24 ? CHECK_PICK(1, 2, 7, 8, 9, 32, 65) : 1 + check_below(FMOE_KC_PAIRS);
    const int64_t chunk = 32 * (1 + check_below(fmoe_min(FMOE_KC / 32, kc))), width = FMOE_NB / 2;
    const int64_t stride = kc + check_below(9), step = stride * element;
    const void *a[MOST], *of_chunk[MOST], *cols[FMOE_NB / 2];
    check_note("rows=%" PRId64 " kc=%" PRId64 " chunk=%" PRId64 " first=%" PRId64, rows, kc, chunk, first);
    for (int64_t i = 0; i < rows; i++) a[i] = fmoe_data(check_fill(check_tensor(dtype, CHECK_SHAPE(kc), NULL), 1));
    const char *const w = fmoe_data(check_fill(check_rows(dtype, width, kc, stride - kc), 1));
    char *panel = check_alloc((size_t)fmoe_ceil_div(chunk * element, 16) * 16 * FMOE_NB);
    fmoe_tensor *got = check_tensor(FMOE_F32, CHECK_SHAPE(rows, FMOE_NB), NULL),
                *want = check_tensor(FMOE_F32, CHECK_SHAPE(rows, FMOE_NB), NULL);
    check_fill(got, 1);
    memcpy(fmoe_data(want), fmoe_data(got), (size_t)(rows * FMOE_NB) * sizeof(float));
    for (int64_t k0 = 0; k0 < kc; k0 += chunk) {
        const int64_t n = fmoe_min(chunk, kc - k0);
        fmoe_overlap none = {0};
        for (int64_t j = 0; j < width; j++) cols[j] = w + j * step + k0 * element;
        for (int64_t i = 0; i < rows; i++) of_chunk[i] = (const char *)a[i] + k0 * element;
        for (int64_t half = 0; half < 2; half++) pack(panel, n, half * width, cols, width);
        by_panel(rows, n, of_chunk, 4, panel, fmoe_data(want), FMOE_NB, first && k0 == 0, &none);
    }
    for (int64_t half = 0; half < 2; half++) {
        fmoe_walk prefetch = {
            .at = w, .half = {w, w}, .left = 9, .length = 1, .in_run = 1, .advance = 512, .per_half = 9};
        if (check_below(2)) prefetch.same_columns = true, prefetch.left = kc * element;
        float *const c = (float *)fmoe_data(got) + half * width;
        multiply(rows, kc, chunk, a, w, step, c, FMOE_NB, (int)first, &prefetch);
    }
    check_equal("in place", want, got);
}
