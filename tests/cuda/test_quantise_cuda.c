/* SPDX-License-Identifier: Apache-2.0
 *
 * test_quantise_cuda.c - fmoe_quantize and fmoe_dequantize on a CUDA device: the bytes of the CPU, of drawn formats,
 * sizes and layouts, and no byte between the rows. SKIP without a card. */
#include "cuda/managed.h" /* before test.h */
#include "unit/quantised.h"

enum { DRAWS = 60 };

static fmoe_tensor *on_cpu(const fmoe_tensor *t)
{
    if (!t) return NULL;
    fmoe_tensor *copy = test_alloc(sizeof *copy);
    *copy = *t;
    copy->device = (fmoe_device){FMOE_CPU, 0};
    return copy;
}

/* A tensor like t, of the same strides, all of whose memory is `byte`. */
static fmoe_tensor *blank(const fmoe_tensor *t, int byte)
{
    if (!t) return NULL;
    fmoe_tensor *copy = test_alloc(sizeof *copy);
    int64_t last = 0;
    for (int i = 0; i < t->ndim; i++) last += (t->shape[i] - 1) * fmoe_stride(t, i);
    const size_t bytes = (size_t)(last + 1) * t->dtype.bits / 8;
    *copy = *t;
    copy->byte_offset = 0;
    copy->data = test_alloc(bytes);
    memset(copy->data, byte, bytes);
    return copy;
}

/* Bytes of two tensors of the same strides, gaps too; but any NaN is as good as another. */
static void same(const char *what, const char *format, const fmoe_tensor *a, const fmoe_tensor *b)
{
    int64_t last = 0;
    for (int i = 0; i < a->ndim; i++) last += (a->shape[i] - 1) * fmoe_stride(a, i);
    const int dtype = fmoe_tensor_dtype(a);
    const int64_t size = a->dtype.bits / 8;
    int64_t one[] = {last + 1};
    fmoe_tensor flat[2] = {*a, *b};
    for (int i = 0; i < 2; i++) flat[i].ndim = 1, flat[i].shape = one, flat[i].strides = NULL;
    for (int64_t i = 0; i <= last; i++) {
        const char *x = (char *)a->data + i * size, *y = (char *)b->data + i * size;
        if (!memcmp(x, y, (size_t)size)) continue;
        if (dtype != FMOE_BYTE && isnan(tensor_get(&flat[0], i)) && isnan(tensor_get(&flat[1], i))) continue;
        TEST_FAIL("%s of %s: element %d of %d differs: %02x.. on the CPU, %02x.. on the device", what, format, (int)i,
                  (int)last + 1, *(uint8_t *)x, *(uint8_t *)y);
        return;
    }
}

/* Weights of a few magnitudes, groups of zeros, now and then something odd. */
static fmoe_tensor *draw_weights(int dtype, int64_t E, int64_t N, int64_t K, bool odd)
{
    const int64_t gap = test_below(3) ? 0 : test_below(20), row = K + gap, expert = N * row + gap;
    fmoe_tensor *w = tensor_strided(dtype, SHAPE(E, N, K), (const int64_t[]){expert, row, 1});
    const double magnitude = test_below(5) ? 0.1 : test_below(2) ? 1e-6 : 300;
    int64_t zeros = 0;
    for (int64_t i = 0; i < E * N * K; i++) {
        if (!zeros && !test_below(300)) zeros = test_below(200);
        double v = zeros ? 0 : magnitude * (test_uniform() + test_uniform() + test_uniform() - 1.5);
        if (zeros) zeros--;
        if (odd && !test_below(400)) v = (const double[]){NAN, INFINITY, -INFINITY, -0., 1e-44, 3e38}[test_below(6)];
        tensor_set(w, i, v);
    }
    return w;
}

TEST(the_bytes_of_the_cpu)
{
    need_card();
    for (int i = 0; i < DRAWS && !test_failures; i++) {
        quant_format format = quant_formats[test_below(FORMATS)];
        if (!test_below(3)) {
            const int32_t groups[] = {0, 1, 2, 3, 16, 33, 64, 128};
            format.rows = groups[test_below(8)], format.cols = groups[test_below(8)];
            if (format.code >= FMOE_CODE_E2M1 && test_below(2)) format.flags ^= FMOE_QUANT_HIGH_FIRST;
        }
        const int64_t E = 1 + test_below(3), N = 2 * (1 + test_below(40)), K = 1 + test_below(test_below(3) ? 70 : 700);
        const int dtype = (const int[]){FMOE_F32, FMOE_BF16, FMOE_F16}[test_below(3)];
        quantised w = quant_draw(&format, E, N, K, test_below(3) == 0);
        if (w.q.scale_type == FMOE_SCALE_E4M3 || (w.q.zeros && w.q.code != FMOE_CODE_U4)) w.q.zeros = NULL;
        fmoe_quant q[2] = {w.q, w.q};
        fmoe_tensor *codes[2], *weights[2], *from = draw_weights(dtype, E, N, K, test_below(2) == 0);
        for (int side = 0; side < 2; side++) { /* the CPU, the device */
            fmoe_tensor *scale = blank(w.q.scale, 0x5a), *zeros = blank(w.q.zeros, 0x5a);
            codes[side] = blank(w.codes, 0x5a), weights[side] = blank(from, 0x5a);
            q[side].scale = side ? scale : on_cpu(scale), q[side].zeros = side ? zeros : on_cpu(zeros);
            if (!side) q[side].scale2 = on_cpu(w.q.scale2);
            fmoe_quant_args a = {.size = sizeof a, .w = side ? from : on_cpu(from), .quant = &q[side]};
            a.codes = side ? codes[side] : on_cpu(codes[side]);
            if (w.q.scale_type == FMOE_SCALE_E4M3) { /* read only */
                memcpy(codes[side]->data, w.codes->data, (size_t)(E * N * fmoe_stride(w.codes, 1)));
                q[side].scale = side ? w.q.scale : on_cpu(w.q.scale);
            } else CHECK_STATUS(fmoe_quantize(&a), FMOE_OK);
            REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
            a.w = side ? weights[side] : on_cpu(weights[side]);
            CHECK_STATUS(fmoe_dequantize(&a), FMOE_OK);
            REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        }
        same("the codes", format.name, codes[0], codes[1]);
        same("the scales", format.name, q[0].scale, q[1].scale);
        if (w.q.zeros) same("the zeros", format.name, q[0].zeros, q[1].zeros);
        same("the weights", format.name, weights[0], weights[1]);
        if (test_failures)
            printf("  draw %d: E %d N %d K %d dtype %d groups %d x %d flags %u\n", i, (int)E, (int)N, (int)K, dtype,
                   format.rows, format.cols, w.q.flags);
    }
}

TEST(bad_calls)
{
    need_card();
    quantised w = quant_draw(&quant_formats[0], 2, 4, 64, false);
    fmoe_tensor *from = tensor_random(tensor_new(FMOE_BF16, SHAPE(2, 4, 64)), 1), elsewhere = *from;
    fmoe_quant_args a = {.size = sizeof a, .w = from, .codes = on_cpu(w.codes), .quant = &w.q};
    CHECK_STATUS(fmoe_quantize(&a), FMOE_ERR_DEVICE);
    CHECK_ERROR_HAS("codes");
    elsewhere.device.id = 97;
    a.w = &elsewhere;
    CHECK_STATUS(fmoe_quantize(&a), FMOE_ERR_DEVICE); /* codes are on device 0 */
    fmoe_tensor codes = *w.codes, scale = *w.q.scale;
    fmoe_quant q = w.q;
    codes.device.id = scale.device.id = 97, q.scale = &scale, a.codes = &codes, a.quant = &q;
    CHECK_STATUS(fmoe_quantize(&a), FMOE_ERR_BACKEND);
    CHECK_ERROR_HAS("97");
}
