/* SPDX-License-Identifier: Apache-2.0
 * check_rows.c - elementwise kernels: conversions (exact), activations and sums (with a bound). */
#include "check_kernels.h"

static int64_t length(int64_t index)
{
    static const int64_t n[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000};
    return index < 17 ? n[index] : check_below(300);
}

static float *floats(int64_t n) { return check_guarded((size_t)n * sizeof(float), sizeof(float)); }

/* ---- conversions ---- */

/* All 65536 values, in pieces of the drawn length. NaN must stay NaN with its sign. */
void check_load(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(load, fmoe_load_fn, k, &check_table);
    const bool bf16 = strstr(k->field, "bf16") != NULL;
    const int64_t n = length(index);
    uint16_t *src = check_guarded((size_t)n * 2, 2);
    float *dst = floats(n);
    check_note("n=%" PRId64, n);
    const uint32_t first = (uint32_t)check_random();
    for (int64_t i = 0; i < n; i++) src[i] = (uint16_t)(first + (uint32_t)i * 977);
    load(dst, src, n);
    for (int64_t i = 0; i < n; i++) {
        const float want = bf16 ? fmoe_bf16_to_float(src[i]) : fmoe_f16_to_float(src[i]);
        if (isnan(want) ? !isnan(dst[i]) : memcmp(&dst[i], &want, 4) != 0)
            check_fail("0x%04x becomes %a, not %a", src[i], (double)dst[i], (double)want);
    }
}

/* The nearest value with an even last bit among two, found by searching, not by the formula under test. */
static double value16(bool bf16, int bits)
{
    return (double)(bf16 ? fmoe_bf16_to_float((uint16_t)bits) : fmoe_f16_to_float((uint16_t)bits));
}

static uint16_t nearest(bool bf16, float x)
{
    const int inf = bf16 ? 0x7f80 : 0x7c00, sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x), ulp = bf16 ? 0x1p120 : 0x1p5; /* of the largest numbers */
    int lo = 0, hi = inf;                                           /* positive values grow with their bits */
    while (lo + 1 < hi) {
        const int mid = (lo + hi) / 2;
        if (value16(bf16, mid) <= a) lo = mid;
        else hi = mid;
    }
    if (isinf(x)) return (uint16_t)(sign | inf);
    const double below = value16(bf16, lo), above = hi == inf ? below + ulp : value16(bf16, hi);
    const double down = a - below, up = above - a;
    const int bits = down < up ? lo : up < down ? hi : lo % 2 == 0 ? lo : hi;
    return (uint16_t)(sign | bits);
}

static float awkward(bool bf16)
{
    switch (check_below(6)) {
    case 0: return fmoe_bits_to_float((uint32_t)check_random()); /* anything, NaN too */
    case 1: {                                                    /* halfway between two, and its neighbours */
        const int bits = (int)check_below(bf16 ? 0x7f7f : 0x7bff);
        const double half = 0.5 * (value16(bf16, bits) + value16(bf16, bits + 1));
        const float f = (float)half;
        return fmoe_bits_to_float(fmoe_float_to_bits(f) + (uint32_t)check_below(3) - (f != 0));
    }
    case 2: return (float)((2 * check_uniform() - 1) * (bf16 ? 0x1p-130 : 0x1p-14)); /* denormals */
    case 3: return (float)CHECK_PICK(0, 1, -1, 65504, 65519, 65520, -65520, 65536, 100000);
    default: return (float)(2 * check_uniform() - 1);
    }
}

/* Blocks of sums lose denormals where the level's products take them for zeros anyway. */
static float stored(int dtype, float x)
{
    const char *isa = check_table.isa;
    const bool loses = strcmp(isa, "avx512_bf16") == 0 || strcmp(isa, "amx_bf16") == 0;
    if (dtype == FMOE_F32) return x;
    if (dtype == FMOE_BF16 && loses && fabsf(x) < 0x1p-126f) return 0;
    return (float)value16(dtype == FMOE_BF16, nearest(dtype == FMOE_BF16, x));
}

void check_store(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(store, fmoe_store_fn, k, &check_table);
    const bool bf16 = strstr(k->field, "bf16") != NULL;
    const int64_t n = length(index);
    uint16_t *dst = check_guarded((size_t)n * 2, 2);
    float *src = floats(n);
    check_note("n=%" PRId64, n);
    for (int64_t i = 0; i < n; i++) src[i] = awkward(bf16);
    store(dst, src, n);
    const int inf = bf16 ? 0x7f80 : 0x7c00;
    for (int64_t i = 0; i < n; i++) {
        const bool ok = isnan(src[i]) ? (dst[i] & 0x7fff) > inf : dst[i] == nearest(bf16, src[i]);
        if (!ok) check_fail("%a becomes 0x%04x, not 0x%04x", (double)src[i], dst[i], nearest(bf16, src[i]));
    }
}

void check_round(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(round, fmoe_round_fn, k, &check_table);
    const bool bf16 = strstr(k->field, "bf16") != NULL, add = check_below(2);
    const int64_t n = length(index);
    float *x = floats(n), *bias = add ? floats(n) : NULL, *was = floats(n);
    check_note("n=%" PRId64 " bias=%d", n, add);
    for (int64_t i = 0; i < n; i++) {
        x[i] = was[i] = awkward(bf16);
        if (add) bias[i] = (float)(2 * check_uniform() - 1);
    }
    round(x, bias, n);
    for (int64_t i = 0; i < n; i++) {
        float want = (float)value16(bf16, nearest(bf16, was[i]));
        if (add) want = (float)value16(bf16, nearest(bf16, want + bias[i]));
        if (isnan(was[i]) ? !isnan(x[i]) : x[i] != want)
            check_fail("%a becomes %a, not %a", (double)was[i], (double)x[i], (double)want);
    }
}

void bench_round(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(round, fmoe_round_fn, k, table);
    static float x[4096], bias[4096];
    BENCH_FILL(bias);
    for (int i = 0; i < 50; i++) round(x, bias, 4096);
    *items = 50 * 4096;
    *flops = 0;
}

/* Sums to a matrix: n <= 64 columns of m rows, nothing beside them. */
void check_store_block(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(store, fmoe_store_block_fn, k, &check_table);
    const int dtype = strstr(k->field, "bf16") ? FMOE_BF16 : strstr(k->field, "f16") ? FMOE_F16 : FMOE_F32;
    const int64_t m = index < 8 ? index : check_below(30),
                  n = CHECK_PICK(FMOE_NB, FMOE_NB, FMOE_NB / 2, check_below(FMOE_NB + 1));
    const int64_t gap = check_below(2) ? 0 : CHECK_PICK(1, 7, 16, 64 - n % 64);
    const bool nontemporal = check_below(2);
    check_note("m=%" PRId64 " n=%" PRId64 " gap=%" PRId64 "%s", m, n, gap, nontemporal ? " past the cache" : "");
    fmoe_tensor *dst = check_rows(dtype, m, n, gap);
    float *c = floats(m * FMOE_NB);
    for (int64_t i = 0; i < m * FMOE_NB; i++) c[i] = awkward(dtype == FMOE_BF16);
    store(dst->data, n + gap, c, m, n, nontemporal);
    for (int64_t i = 0; i < m * n && !check_failed(); i++) {
        const float x = c[i / n * FMOE_NB + i % n];
        const double got = check_get(dst, i);
        if (isnan(x) ? !isnan(got) : got != (double)stored(dtype, x))
            check_fail("element %" PRId64 ": %a becomes %a", i, (double)x, got);
    }
    check_gaps("dst", dst);
}

void bench_store_block(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(store, fmoe_store_block_fn, k, table);
    static float c[16 * FMOE_NB], dst[16 * 1024] __attribute__((aligned(64)));
    BENCH_FILL(c);
    for (int i = 0; i < 100; i++) store(dst, 1024, c, 16, FMOE_NB, true);
    *items = 100 * 16 * FMOE_NB;
    *flops = 0;
}

void bench_convert(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    static uint16_t narrow[4096];
    static float wide[4096];
    BENCH_FILL(narrow);
    BENCH_FILL(wide);
    if (strncmp(k->field, "load", 4) == 0) {
        CHECK_KERNEL_FN(load, fmoe_load_fn, k, table);
        for (int i = 0; i < 50; i++) load(wide, narrow, 4096);
    } else {
        CHECK_KERNEL_FN(store, fmoe_store_fn, k, table);
        for (int i = 0; i < 50; i++) store(narrow, wide, 4096);
    }
    *items = 50 * 4096;
    *flops = 0;
}

/* ---- activations ---- */

typedef struct act_draw {
    fmoe_act_params act;
    int64_t n;
    bool gated;
    float *g, *u, *da;
} act_draw;

static float act_input(void)
{
    switch (check_below(10)) {
    case 0: return (float)CHECK_PICK(0, 1, -1, 7, -7, 100, -100, 1000, -1000);
    case 1: return (float)((2 * check_uniform() - 1) * 100);
    case 2: return (float)((2 * check_uniform() - 1) * 1e-6);
    default: return (float)((2 * check_uniform() - 1) * 8);
    }
}

static int any_type(void) { return (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16); }

static act_draw draw_act(int64_t index)
{
    act_draw d = {.act = {check_acts[index % CHECK_ACTS], 1.702f, 7, 0},
                  .n = fmoe_min(FMOE_NB, length(index / CHECK_ACTS * 7 % 18))};
    if (check_below(2)) d.act.limit = 0.5f, d.act.alpha = 1;
    d.gated = d.act.act < FMOE_ACT_SILU;
    d.g = d.gated ? floats(d.n) : NULL; /* an ungated kernel that looks at g meets NULL */
    d.u = floats(d.n);
    d.da = floats(d.n);
    for (int64_t i = 0; i < d.n; i++) {
        if (d.gated) d.g[i] = act_input();
        d.u[i] = act_input();
        d.da[i] = (float)(2 * check_uniform() - 1);
    }
    check_note("act=%d n=%" PRId64 " alpha=%g limit=%g", d.act.act, d.n, (double)d.act.alpha, (double)d.act.limit);
    return d;
}

static check_act_value value_at(const act_draw *d, int64_t i)
{
    return check_act(d->act.act, (double)d->act.alpha, (double)d->act.limit, d->gated ? (double)d->g[i] : 0,
                     (double)d->u[i]);
}

static double bound_at(const act_draw *d, int64_t i, int which)
{
    return check_act_bound(&d->act, d->gated ? (double)d->g[i] : 0, (double)d->u[i], 0, 0, which);
}

/* One row in f32 against the function in double; the same bits from another place in it. */
static void check_act_value_row(fmoe_act_block_fn *block, int64_t index)
{
    const act_draw d = draw_act(index);
    float *a = floats(d.n), *b = floats(d.n);
    block(&d.act, d.g, d.u, 1, d.n, a, 0, FMOE_F32);
    for (int64_t i = 0; i < d.n; i++) check_near("a", i, (double)a[i], value_at(&d, i).a, bound_at(&d, i, 0));
    if (d.n == 0) return;
    const int64_t skip = check_below(d.n);
    block(&d.act, d.gated ? d.g + skip : NULL, d.u + skip, 1, d.n - skip, b, 0, FMOE_F32);
    if (memcmp(a + skip, b, (size_t)(d.n - skip) * sizeof *a))
        check_fail("other bits from column %" PRId64 " on", skip);
    float *x = d.gated && check_below(2) ? d.g : d.u; /* NaN in, NaN out */
    x[d.n - 1] = NAN;
    block(&d.act, d.g, d.u, 1, d.n, a, 0, FMOE_F32);
    if (!isnan(a[d.n - 1])) check_fail("NaN becomes %g", (double)a[d.n - 1]);
}

/* Rows of a block in any type, as the same kernel gives one row in f32, beside gaps that stay as they were. */
static void check_act_values(fmoe_act_block_fn *block, int64_t index)
{
    const act_draw d = draw_act(index);
    const int type = any_type();
    const int64_t m = CHECK_PICK(0, 1, 2, 7, 9), n = CHECK_PICK(1, 17, 31, 32, 32, 33, 64), gap = CHECK_PICK(0, 3);
    const int64_t floats_in = m ? (m - 1) * FMOE_NB + n : 0;
    float *g = floats(floats_in), *u = floats(floats_in), want[FMOE_NB];
    for (int64_t i = 0; i < floats_in; i++) g[i] = act_input(), u[i] = act_input();
    fmoe_tensor *a = check_rows(type, m, n, gap);
    check_note("act=%d m=%" PRId64 " n=%" PRId64 " type=%d", d.act.act, m, n, type);
    block(&d.act, d.gated ? g : NULL, u, m, n, fmoe_data(a), n + gap, type);
    for (int64_t i = 0; i < m; i++) {
        block(&d.act, d.gated ? g + i * FMOE_NB : NULL, u + i * FMOE_NB, 1, n, want, 0, FMOE_F32);
        for (int64_t j = 0; j < n; j++)
            check_near("a", i * n + j, check_get(a, i * n + j), (double)stored(type, want[j]), 0);
    }
    check_gaps("a", a);
}

void check_act_block(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(block, fmoe_act_block_fn, k, &check_table);
    (index % 2 ? check_act_values : check_act_value_row)(block, index / 2);
}

/* One row in f32 against the function in double. */
static void check_act_gradient(fmoe_act_backward_fn *backward, int64_t index)
{
    const act_draw d = draw_act(index);
    float *pa = floats(d.n), *dg = d.gated ? floats(d.n) : NULL, *du = floats(d.n), dot;
    const float p = check_below(2) ? 1 : (float)(0.25 + check_uniform());
    const fmoe_act_rows row = {.m = 1,
                               .n = d.n,
                               .g = d.g,
                               .u = d.u,
                               .dg = dg,
                               .du = du,
                               .pa = pa,
                               .h_type = FMOE_F32,
                               .type = FMOE_F32,
                               .da = d.da,
                               .p = &p,
                               .dot = &dot};
    backward(&d.act, &row);
    double sum = 0, error = 0x1p-130;
    for (int64_t i = 0; i < d.n; i++) {
        const check_act_value v = value_at(&d, i);
        const double da = (double)p * (double)d.da[i];
        check_near("pa", i, (double)pa[i], (double)p * v.a,
                   (double)p * (bound_at(&d, i, 0) + U32 * fabs(v.a)) + 0x1p-130);
        sum += (double)d.da[i] * v.a;
        error += fabs((double)d.da[i]) * (bound_at(&d, i, 0) + check_c(d.n) * U32 * fabs(v.a));
        check_near("du", i, (double)du[i], da * v.du, fabs(da) * bound_at(&d, i, 2) + 0x1p-130);
        if (d.gated) check_near("dg", i, (double)dg[i], da * v.dg, fabs(da) * bound_at(&d, i, 1) + 0x1p-130);
    }
    check_near("<da, a>", 0, (double)dot, sum, error);
}

/* Rows of a block in any type, as the same kernel gives one row in f32, beside gaps that stay as they were. */
static void check_act_gradients(fmoe_act_backward_fn *backward, int64_t index)
{
    const act_draw d = draw_act(index);
    const int h_type = any_type(), type = any_type();
    const int64_t m = CHECK_PICK(0, 1, 2, 7, 9), n = CHECK_PICK(1, 17, 32, 63, 64, 64, 64), gap = CHECK_PICK(0, 3);
    check_note("act=%d m=%" PRId64 " n=%" PRId64 " gap=%" PRId64 " h_type=%d type=%d", d.act.act, m, n, gap, h_type,
               type);
    const int64_t da_floats = m ? (m - 1) * FMOE_NB + n : 0;
    float *da = floats(da_floats), *p = floats(m), *dot = floats(m);
    for (int64_t i = 0; i < da_floats; i++) da[i] = (float)(2 * check_uniform() - 1);
    for (int64_t i = 0; i < m; i++) p[i] = (float)(0.25 + check_uniform());
    float *values[2] = {floats(m * n), floats(m * n)};
    static const char *const names[] = {"dg", "du", "pa"};
    fmoe_tensor *h[2], *out[3];
    for (int i = 0; i < 2; i++) {
        h[i] = check_rows(h_type, m, n, gap);
        for (int64_t j = 0; j < m * n; j++) {
            check_set(h[i], j, (double)act_input());
            values[i][j] = (float)check_get(h[i], j);
        }
    }
    const bool over = h_type == type && check_below(2); /* dh in the place of h */
    for (int i = 0; i < 3; i++) out[i] = over && i < 2 ? h[i] : check_rows(type, m, n, gap);
    const fmoe_act_rows rows = {.m = m,
                                .n = n,
                                .g = d.gated ? fmoe_data(h[0]) : NULL,
                                .u = fmoe_data(h[1]),
                                .dg = d.gated ? fmoe_data(out[0]) : NULL,
                                .du = fmoe_data(out[1]),
                                .pa = fmoe_data(out[2]),
                                .h_stride = n + gap,
                                .dh_stride = n + gap,
                                .pa_stride = n + gap,
                                .h_type = h_type,
                                .type = type,
                                .da = da,
                                .p = p,
                                .dot = dot};
    backward(&d.act, &rows);
    for (int64_t i = 0; i < m; i++) {
        float want[3][FMOE_NB], want_dot;
        const fmoe_act_rows row = {.m = 1,
                                   .n = n,
                                   .g = values[0] + i * n,
                                   .u = values[1] + i * n,
                                   .dg = want[0],
                                   .du = want[1],
                                   .pa = want[2],
                                   .h_type = FMOE_F32,
                                   .type = FMOE_F32,
                                   .da = da + i * FMOE_NB,
                                   .p = p + i,
                                   .dot = &want_dot};
        backward(&d.act, &row);
        check_near("<da, a>", i, (double)dot[i], (double)want_dot, 0);
        for (int o = d.gated ? 0 : 1; o < 3; o++)
            for (int64_t j = 0; j < n; j++)
                check_near(names[o], i * n + j, check_get(out[o], i * n + j), (double)stored(type, want[o][j]), 0);
    }
    for (int o = d.gated ? 0 : 1; o < 3; o++) check_gaps("rows", out[o]);
}

void check_act_backward(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(backward, fmoe_act_backward_fn, k, &check_table);
    if (index % 2) check_act_gradients(backward, index / 2);
    else check_act_gradient(backward, index / 2);
}

void bench_act(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    static float g[64], u[64], da[64], dg[64], du[64], a[64];
    const fmoe_act_params act = {FMOE_ACT_SWIGLU, 1.702f, 7, 0};
    if (strstr(k->field, "block")) {
        CHECK_KERNEL_FN(block, fmoe_act_block_fn, k, table);
        for (int i = 0; i < 200; i++) block(&act, g, u, 1, 64, a, 0, FMOE_F32);
    } else {
        CHECK_KERNEL_FN(backward, fmoe_act_backward_fn, k, table);
        const float p = 0.5f;
        float dot;
        const fmoe_act_rows row = {.m = 1,
                                   .n = 64,
                                   .g = g,
                                   .u = u,
                                   .dg = dg,
                                   .du = du,
                                   .pa = a,
                                   .h_type = FMOE_F32,
                                   .type = FMOE_F32,
                                   .da = da,
                                   .p = &p,
                                   .dot = &dot};
        for (int i = 0; i < 200; i++) backward(&act, &row);
    }
    *items = 200 * 64;
    *flops = 0;
}

/* ---- sums ---- */

void check_axpy(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(axpy, fmoe_axpy_fn, k, &check_table);
    const int64_t n = length(index);
    float *x = floats(n), *y = floats(n), *old = check_alloc((size_t)n * sizeof *old + 1);
    const float s = (float)(2 * check_uniform() - 1);
    check_note("n=%" PRId64, n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)(2 * check_uniform() - 1);
        old[i] = y[i] = (float)(2 * check_uniform() - 1);
    }
    axpy(y, s, x, n);
    for (int64_t i = 0; i < n; i++) {
        const double product = (double)s * (double)x[i];
        check_near("y", i, (double)y[i], (double)old[i] + product, 2 * U32 * (fabs((double)old[i]) + fabs(product)));
    }
}

/* Rows added to the sums of their tokens, some of them twice, and nothing beside their columns. */
void check_add_rows(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(add, fmoe_add_rows_fn, k, &check_table);
    const int64_t rows = index < 8 ? index : check_below(30),
                  n = CHECK_PICK(FMOE_NB, FMOE_NB, check_below(FMOE_NB + 1));
    const int64_t first = check_below(3) * 1000, tokens = 1 + check_below(20);
    float *sums = floats(tokens * FMOE_NB), *p = floats(rows), *c = floats(rows * FMOE_NB);
    int64_t *token = check_guarded((size_t)rows * sizeof *token, sizeof *token);
    double *want = check_alloc((size_t)(tokens * FMOE_NB) * sizeof *want),
           *size = check_alloc((size_t)(tokens * FMOE_NB) * sizeof *size);
    check_note("rows=%" PRId64 " n=%" PRId64 " tokens=%" PRId64, rows, n, tokens);
    for (int64_t i = 0; i < tokens * FMOE_NB; i++) want[i] = size[i] = (double)(sums[i] = (float)check_uniform());
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = check_below(tokens);
        token[r] = first + t;
        p[r] = (float)check_uniform();
        for (int64_t j = 0; j < FMOE_NB; j++) {
            const double y = (double)(c[r * FMOE_NB + j] = (float)(2 * check_uniform() - 1)), py = (double)p[r] * y;
            want[t * FMOE_NB + j] += j < n ? py : 0;
            size[t * FMOE_NB + j] += j < n ? fabs(py) : 0;
        }
    }
    add(sums, token, first, p, c, rows, n);
    for (int64_t i = 0; i < tokens * FMOE_NB; i++)
        check_near("sum", i, (double)sums[i], want[i], i % FMOE_NB < n ? check_c(rows) * U32 * size[i] : 0);
}

void check_dot(const check_kernel *k, int64_t index)
{
    CHECK_KERNEL_FN(dot, fmoe_dot_fn, k, &check_table);
    const int64_t n = length(index);
    float *x = floats(n), *y = floats(n);
    double sum = 0, magnitude = 0;
    check_note("n=%" PRId64, n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)(2 * check_uniform() - 1);
        y[i] = (float)(2 * check_uniform() - 1);
        sum += (double)x[i] * (double)y[i];
        magnitude += fabs((double)x[i] * (double)y[i]);
    }
    const float got = dot(x, y, n);
    check_near("dot", 0, (double)got, sum,
               (check_c(n / 16) + 4) * U32 * magnitude); /* 16 partial sums, then a tree of 4 */
}

void bench_sum(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    static float x[1024], y[1024];
    if (strcmp(k->field, "dot") == 0) {
        CHECK_KERNEL_FN(dot, fmoe_dot_fn, k, table);
        volatile float sink = 0;
        for (int i = 0; i < 100; i++) sink = sink + dot(x, y, 1024);
    } else if (strcmp(k->field, "add_rows") == 0) {
        CHECK_KERNEL_FN(add, fmoe_add_rows_fn, k, table);
        static const int64_t token[16] = {0, 3, 4, 5, 7, 9, 10, 11, 12, 15};
        static float p[16];
        for (int i = 0; i < 100; i++) add(y, token, 0, p, x, 16, FMOE_NB);
    } else {
        CHECK_KERNEL_FN(axpy, fmoe_axpy_fn, k, table);
        for (int i = 0; i < 100; i++) axpy(y, 0.5f, x, 1024);
    }
    *items = 100 * 1024;
    *flops = 2;
}

/* ---- a router's softmax ---- */

static double awkward_logit(void)
{
    static const double odd[] = {0, -0.0, 1e-300, -1e-300, 700, -700, 745, -745, -746, 800, -1e308};
    switch (check_below(8)) {
    case 0: return odd[check_below(sizeof odd / sizeof *odd)];
    case 1: return 1400 * (check_uniform() - 0.5); /* results that are denormal, or zero */
    case 2: return -(double)INFINITY;
    default: return 20 * (check_uniform() - 0.5);
    }
}

/* Within 16 ulp (2 of e^x, the sum's, one of the division) and one for each unit of x - max, which is rounded before it
 * is an exponent. Where e^x is denormal, by steps of those. */
void check_softmax(const check_kernel *k, int64_t index)
{
    static const double wrong[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    CHECK_KERNEL_FN(softmax, fmoe_softmax_fn, k, &check_table);
    const bool bad = index % 8 == 7;
    const int64_t n = length(index);
    double *x = check_guarded((size_t)n * sizeof *x, sizeof *x);
    double *want = check_alloc((size_t)n * sizeof *want), *ulps = check_alloc((size_t)n * sizeof *ulps);
    long double sum = 0, top = -(long double)INFINITY;
    check_note("n=%" PRId64 " bad=%d", n, bad);
    for (int64_t i = 0; i < n; i++) x[i] = i == 0 && !bad ? 1.0 : awkward_logit();
    if (bad && n) x[check_below(n)] = wrong[check_below(3)];
    bool nan = false;
    for (int64_t i = 0; i < n; i++) {
        nan |= isnan(x[i]) || x[i] == (double)INFINITY;
        top = (long double)x[i] > top ? (long double)x[i] : top;
    }
    nan |= top == -(long double)INFINITY;
    for (int64_t i = 0; i < n; i++) sum += expl((long double)x[i] - top);
    for (int64_t i = 0; i < n; i++) {
        ulps[i] = 16 + (double)(top - (long double)x[i]);
        want[i] = (double)(expl((long double)x[i] - top) / sum);
    }
    softmax(x, n);
    for (int64_t i = 0; i < n; i++) {
        const double bound = want[i] == 0 ? 0x1p-1073 : ulps[i] * (0x1p-53 * want[i] + 0x1p-1074);
        if (!nan) check_near("softmax", i, x[i], want[i], bound);
        else if (!isnan(x[i])) check_fail("score %" PRId64 " is %a, not NaN", i, x[i]);
    }
}

void bench_softmax(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops)
{
    CHECK_KERNEL_FN(softmax, fmoe_softmax_fn, k, table);
    static double x[128];
    for (int i = 0; i < 100; i++) softmax(x, 128);
    *items = 100 * 128;
    *flops = 1;
}
