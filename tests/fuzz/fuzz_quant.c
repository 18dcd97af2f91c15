/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_quant.c - descriptors of quantised weights from any bytes: a layer or a grouped matmul on them is refused and
 * nothing is written, or it gives what it gives on decoded weights, bit for bit. */
#include "fuzz_layer.h"

#include "codes.h"

/* Mostly what fits, now and then anything. */
static int64_t about(fuzz_input *in, int64_t right)
{
    const uint8_t b = fuzz_byte(in);
    return b < 245 ? right : b < 250 ? right + (int64_t)b - 247 : (int64_t)fuzz_bits(in, 2) - 300;
}

static fmoe_tensor *bytes_of(fuzz_input *in, int64_t a, int64_t b, int64_t c)
{
    fmoe_tensor *t = fuzz_tensor(FMOE_BYTE, 3, a, b, c);
    t->dtype = (fmoe_datatype){1, 8, 1};
    uint32_t state = (uint32_t)fuzz_bits(in, 4);
    for (int64_t i = 0; i < a * b * c; i++) {
        state = state * 1664525u + 1013904223u;
        ((uint8_t *)t->data)[i] = (uint8_t)(state >> 24);
    }
    return t;
}

static fmoe_tensor *grid_of(fuzz_input *in, int dtype, int64_t a, int64_t b, int64_t c)
{
    if (dtype == FMOE_BYTE) return bytes_of(in, a, b, c);
    fmoe_tensor *t = fuzz_tensor(dtype, 3, a, b, c);
    for (int64_t i = 0; i < fuzz_count(t); i++) fuzz_set(t, i, fuzz_float(in));
    return t;
}

static int64_t small(int64_t n) { return n < 0 ? 0 : n > 200 ? 200 : n; }

static fmoe_quant *draw_quant(fuzz_input *in, int64_t E, int64_t N, int64_t K, fmoe_tensor **codes)
{
    static const float lut[16] = {-1,   -0.7f, -0.5f, -0.3f, -0.2f, -0.1f, 0,    0.1f,
                                  0.2f, 0.3f,  0.4f,  0.5f,  0.6f,  0.7f,  0.8f, 1};
    fmoe_quant *q = fuzz_alloc(4096); /* as much as a size may claim to have */
    *q = FMOE_QUANT_INIT;
    q->size = (size_t)about(in, (int64_t)sizeof *q);
    q->code = (int32_t)about(in, 1 + fuzz_byte(in) % 7);
    q->flags = (uint32_t)about(in, q->code >= FMOE_CODE_E2M1 ? fuzz_byte(in) % 2 : 0);
    q->group_rows = (int32_t)about(in, fuzz_byte(in) % 5);
    q->group_cols = (int32_t)about(in, (int64_t[]){0, 1, 16, 32, 64, 7}[fuzz_byte(in) % 6]);
    const int dtype = (int[]){FMOE_F32, FMOE_BF16, FMOE_F16, FMOE_BYTE}[fuzz_byte(in) % 4];
    q->scale_type = (int32_t)about(in, dtype == FMOE_BYTE ? 1 + fuzz_byte(in) % 2 : 0);
    const bool integer = q->code == FMOE_CODE_U4 || q->code == FMOE_CODE_S8;
    const int64_t rows = q->group_rows > 0 ? (N + q->group_rows - 1) / q->group_rows : 1;
    const int64_t cols = q->group_cols > 0 ? (K + q->group_cols - 1) / q->group_cols : 1;
    q->scale = grid_of(in, dtype, small(about(in, E)), small(about(in, rows)), small(about(in, cols)));
    if (integer && fuzz_byte(in) % 2)
        q->zeros = grid_of(in, fuzz_byte(in) % 2 ? FMOE_BYTE : FMOE_F32, E, rows, small(about(in, cols)));
    else if (fuzz_byte(in) < (integer ? 128 : 4)) q->zero = fuzz_float(in);
    if (fuzz_byte(in) % 3 == 0) {
        fmoe_tensor *t = fuzz_tensor(FMOE_F32, 1, fuzz_byte(in) % 2 ? 1 : E, 1, 1);
        for (int64_t i = 0; i < fuzz_count(t); i++) fuzz_set(t, i, fuzz_finite(in));
        q->scale2 = t;
    }
    if (about(in, q->code == FMOE_CODE_LUT4)) q->lut = lut;
    if (fuzz_byte(in) > 250) q->scale = NULL;
    *codes = bytes_of(in, E, N, small(about(in, fmoe_code_bytes(q->code, K))));
    return q;
}

static bool same_number(const fmoe_tensor *a, const fmoe_tensor *b, int64_t i)
{
    const double x = fuzz_get(a, i), y = fuzz_get(b, i);
    return memcmp(&x, &y, sizeof x) == 0 || (isnan(x) && isnan(y));
}

static fmoe_status forward(const fuzz_layer *l, const fmoe_weights *w, uint32_t flags, fmoe_tensor *out)
{
    fmoe_desc d = l->d;
    fmoe_plan plan;
    d.flags = flags;
    if (fmoe_plan_create(&plan, &d) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
    const fmoe_experts_args a = {.size = sizeof a, .x = l->x, .ids = l->ids, .weights = l->p, .w = *w, .out = out};
    const fmoe_run run = fuzz_run(plan, FMOE_FORWARD, l->T, 0);
    const fmoe_status status = fmoe_experts_forward(plan, &a, &run);
    fmoe_plan_destroy(&plan);
    return status;
}

static void compare(const char *name, fmoe_status status, const fmoe_tensor *got, const fmoe_tensor *want)
{
    const size_t bytes = (size_t)fuzz_count(got) * fmoe_dtype_size(fmoe_tensor_dtype(got));
    for (size_t i = 0; status != FMOE_OK && i < bytes; i++)
        if (((const uint8_t *)got->data)[i] != 0xff) FUZZ_FAIL("byte %zu of %s was written", i, name);
    for (int64_t i = 0; status == FMOE_OK && i < fuzz_count(got); i++)
        if (!same_number(got, want, i))
            FUZZ_FAIL("%s[%" PRId64 "] is %g, on decoded weights %g", name, i, fuzz_get(got, i), fuzz_get(want, i));
}

/* The codes of W1, drawn as rows of out, or as rows of in; x by them, and x as the gradient of what they give. */
static void matmul(const fuzz_layer *l, fmoe_tensor *codes, fmoe_quant *q, fmoe_tensor *w, bool decoded, bool in_out)
{
    const int64_t rows = l->C, cols = l->d.H, K = in_out ? rows : cols, N = in_out ? cols : rows, T = l->T;
    const int f = l->d.dtype;
    fmoe_tensor turned = *w, *sizes = fuzz_tensor(-32, 1, l->d.E, 1, 1);
    turned.shape = (int64_t[]){l->d.E, K, N};
    turned.strides = in_out ? (int64_t[]){K * N, N, 1} : (int64_t[]){K * N, 1, K};
    for (int64_t e = 0; e < l->d.E; e++) fmoe_set_int(sizes->data, -32, e, T / l->d.E);
    fmoe_tensor *rows_in = fuzz_tensor(f, 2, T, cols, 1), *got[2], *want[2];
    memcpy(rows_in->data, l->x->data, (size_t)(T * cols) * fmoe_dtype_size(f));
    fmoe_tensor *of_codes = fuzz_tensor(f, 2, T, rows, 1);
    for (int64_t i = 0; i < T * rows; i++) fuzz_set(of_codes, i, (float)fuzz_get(l->x, i % (T * cols)));
    for (int pass = 0; pass < 2; pass++) {
        const bool wide = (pass == 0) != in_out; /* x, or dy, has as many columns as a row has codes */
        fmoe_tensor *in = wide ? rows_in : of_codes;
        for (int i = 0; i < 2; i++) {
            fmoe_tensor *out = fuzz_tensor(f, 2, T, wide ? rows : cols, 1);
            memset(out->data, 0xff, (size_t)fuzz_count(out) * fmoe_dtype_size(f));
            (i ? want : got)[pass] = out;
        }
        fmoe_status status[2] = {FMOE_ERR_ARG, FMOE_ERR_ARG};
        for (int i = 0; i < (decoded ? 2 : 1); i++) {
            fmoe_desc d = FMOE_DESC_INIT;
            fmoe_plan plan;
            d.op = FMOE_OP_GROUPED_MATMUL, d.dtype = f, d.E = l->d.E, d.K = K, d.N = N, d.flags = i ? 0 : FMOE_QUANT;
            d.threads = l->d.threads;
            if (fmoe_plan_create(&plan, &d) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
            fmoe_gmm_args a = {.size = sizeof a, .w = i ? &turned : codes, .sizes = sizes, .quant = i ? NULL : q};
            if (pass) a.dy = in, a.dx = (i ? want : got)[1];
            else a.x = in, a.y = (i ? want : got)[0];
            const fmoe_run run = fuzz_run(plan, (fmoe_pass)pass, T, 0);
            status[i] = (pass ? fmoe_grouped_matmul_backward : fmoe_grouped_matmul_forward)(plan, &a, &run);
            fmoe_plan_destroy(&plan);
        }
        if (status[0] == FMOE_OK && status[1] != FMOE_OK)
            FUZZ_FAIL("a matmul read what is refused: %s", fmoe_last_error());
        compare(pass ? "dx" : "y", status[0], got[pass], want[pass]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const size_t head = size < 128 ? size : 128; /* of the descriptors: what a layer reads may be all there is */
    fuzz_input in = {data, data + head}, rest = {data + head, data + size};
    fuzz_layer l = fuzz_layer_draw(&rest);
    const int f = l.d.dtype;
    l.d.flags &= ~(uint32_t)FMOE_BIAS;
    fmoe_tensor *c1, *c2, *w1 = fuzz_tensor(f, 3, l.d.E, l.C, l.d.H), *w2 = fuzz_tensor(f, 3, l.d.E, l.d.H, l.d.I);
    fmoe_quant *q1 = draw_quant(&in, l.d.E, l.C, l.d.H, &c1);
    const fmoe_quant *q2 = draw_quant(&in, l.d.E, l.d.H, l.d.I, &c2);
    const fmoe_weights coded = {.w1 = c1, .w2 = c2, .quant1 = q1, .quant2 = q2}, plain = {.w1 = w1, .w2 = w2};
    fmoe_tensor *got = fuzz_tensor(f, 2, l.T, l.d.H, 1), *want = fuzz_tensor(f, 2, l.T, l.d.H, 1);
    const size_t bytes = (size_t)fuzz_count(got) * fmoe_dtype_size(f);
    memset(got->data, 0xff, bytes);
    const fmoe_status status = forward(&l, &coded, l.d.flags | FMOE_QUANT, got);
    const fmoe_quant_args first = {.size = sizeof first, .w = w1, .codes = c1, .quant = q1},
                          second = {.size = sizeof second, .w = w2, .codes = c2, .quant = q2};
    const bool decoded = fmoe_dequantize(&first) == FMOE_OK && fmoe_dequantize(&second) == FMOE_OK;
    if (status == FMOE_OK && !decoded) FUZZ_FAIL("a layer read what fmoe_dequantize refuses: %s", fmoe_last_error());
    if (status == FMOE_OK && forward(&l, &plain, l.d.flags, want) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
    compare("out", status, got, want);
    const bool in_out = (q1->flags & FMOE_QUANT_IN_OUT) || fuzz_byte(&in) % 2;
    q1->flags &= ~(uint32_t)FMOE_QUANT_IN_OUT;
    const bool readable = fmoe_dequantize(&first) == FMOE_OK;
    if (in_out) q1->flags |= FMOE_QUANT_IN_OUT;
    matmul(&l, c1, q1, w1, readable, in_out);
    q1->flags &= ~(uint32_t)FMOE_QUANT_IN_OUT;
    if (decoded) fmoe_quantize(&first); /* whatever it says, it stays in bounds */
    fuzz_done();
    return 0;
}
