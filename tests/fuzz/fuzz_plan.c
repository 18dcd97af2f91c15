/* SPDX-License-Identifier: Apache-2.0
 * fuzz_plan.c - any description, any tensor header: an answer that is documented, no crash, no output written on an
 * error. */
#include "fuzz.h"

static int64_t draw_size(fuzz_input *in)
{
    const uint8_t kind = fuzz_byte(in);
    if (kind > 250) return (int64_t)fuzz_bits(in, 8);
    if (kind > 245) return -(int64_t)fuzz_byte(in);
    if (kind > 235) return INT64_C(1) << fuzz_byte(in) % 63;
    return 1 + kind % 4; /* as the tensors below are: most calls get far */
}

static fmoe_desc draw_desc(fuzz_input *in)
{
    fmoe_desc d = FMOE_DESC_INIT;
    if (fuzz_byte(in) == 255) d.size = fuzz_bits(in, 2);
    d.op = 1 + fuzz_byte(in) % 6 + (fuzz_byte(in) > 250);
    d.dtype = 1 + fuzz_byte(in) % 4 + (fuzz_byte(in) > 250);
    d.device.type = fuzz_byte(in) < 230 ? FMOE_CPU : (int32_t)(fuzz_byte(in) == 2 ? 3 : fuzz_byte(in) % 2);
    d.H = draw_size(in), d.I = draw_size(in), d.E = draw_size(in), d.k = draw_size(in);
    d.K = draw_size(in), d.N = draw_size(in), d.shared_I = draw_size(in);
    d.act = fuzz_byte(in) % 7 + (fuzz_byte(in) > 200 ? 16 : 0);
    d.flags = fuzz_byte(in) % 128 & ~(uint32_t)(d.op == FMOE_OP_BLOCK ? 0 : FMOE_SHARED_GATE);
    d.act_alpha = fuzz_finite(in), d.act_limit = fabsf(fuzz_float(in));
    d.route.score = fuzz_byte(in) % 4;
    d.route.renormalize = fuzz_byte(in) % 2;
    d.route.group_score = fuzz_byte(in) % 2;
    d.route.groups = fuzz_byte(in) > 200 ? (int8_t)fuzz_byte(in) : 0;
    d.route.topk_groups = fuzz_byte(in) % 3;
    d.route.excluded_zero = fuzz_byte(in) % 2;
    d.route.eps = fabs((double)fuzz_finite(in)), d.route.scale = (double)fuzz_float(in);
    d.threads = 1 + fuzz_byte(in) % 2;
    if (fuzz_byte(in) > 200) d.rank1 = draw_size(in), d.rank2 = draw_size(in);
    return d;
}

/* A header that may be wrong in every field; its data has as many bytes as the first 64 elements need. */
static fmoe_tensor *draw_header(fuzz_input *in)
{
    static const int dtypes[] = {FMOE_F32, FMOE_BF16, FMOE_F16, FMOE_F64, -32, -64};
    if (fuzz_byte(in) > 250) return NULL;
    fmoe_tensor *t = fuzz_tensor(dtypes[fuzz_byte(in) % 6], 3, 4, 4, 4);
    int64_t *strides = fuzz_alloc(3 * sizeof *strides);
    memset(t->data, 0xa5, 64 * fmoe_dtype_size(fmoe_tensor_dtype(t)));
    t->ndim = fuzz_byte(in) < 250 ? 1 + fuzz_byte(in) % 3 : (int8_t)fuzz_byte(in);
    /* At most 4 x 4 x 4, as the memory has, or absurd. */
    for (int i = 0; i < 3; i++) {
        t->shape[i] = fuzz_byte(in) % 5 % 4 + 1 - (fuzz_byte(in) > 250);
        if (fuzz_byte(in) > 252)
            t->shape[i] = (int64_t)(fuzz_bits(in, 1) > 127 ? -(int64_t)fuzz_bits(in, 2) - 1
                                                           : INT64_MAX - (int64_t)fuzz_bits(in, 2));
        strides[i] = i == 2 ? 1 : i == 1 ? 4 : 16;
        if (fuzz_byte(in) > 252) strides[i] = -(int64_t)fuzz_byte(in);
    }
    if (t->ndim == 2) strides[0] = strides[0] == 16 ? 4 : strides[0], strides[1] = strides[1] == 4 ? 1 : strides[1];
    if (t->ndim == 1) strides[0] = strides[0] == 16 ? 1 : strides[0];
    if (fuzz_byte(in) > 128) t->strides = strides;
    if (fuzz_byte(in) > 245) t->data = NULL;
    if (fuzz_byte(in) > 245) t->dtype.bits = fuzz_byte(in);
    if (fuzz_byte(in) > 245) t->device.type = fuzz_byte(in);
    return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, data + size};
    const fmoe_desc d = draw_desc(&in);
    fmoe_plan plan = 7;
    static union { /* what a larger size says is there */
        fmoe_desc d;
        uint8_t bytes[4096];
    } given;
    given.d = d;
    given.bytes[sizeof d] = d.size % 2; /* a field of a later version that is set */
    const fmoe_status status = fmoe_plan_create(&plan, &given.d);
    if ((status == FMOE_OK) != (plan != 0)) FUZZ_FAIL("status %d and plan 0x%" PRIx64, status, plan);
    if (status > FMOE_ERR_UNSUPPORTED) FUZZ_FAIL("status %d is not documented", status);
    if (status == FMOE_OK && d.size > sizeof d && d.size % 2) FUZZ_FAIL("a field that is unknown was passed over");
    if (status != FMOE_OK) {
        if (!*fmoe_last_error()) FUZZ_FAIL("an error without a sentence");
        return 0;
    }
    size_t bytes;
    for (int pass = 0; pass < 2; pass++) (void)fmoe_workspace_bytes(plan, (fmoe_pass)pass, draw_size(&in), &bytes);
    (void)fmoe_saved_bytes(plan, draw_size(&in), &bytes);
    char text[64];
    (void)fmoe_plan_describe(plan, text, fuzz_byte(&in) % sizeof text);

    const fmoe_tensor *t[12];
    for (int i = 0; i < 12; i++) t[i] = draw_header(&in);
    fmoe_run run = FMOE_RUN_INIT;
    run.workspace_bytes = fuzz_byte(&in) > 40 ? (size_t)1 << 22 : fuzz_byte(&in);
    run.workspace = fuzz_alloc(run.workspace_bytes);
    run.flags = fuzz_byte(&in) > 200 ? fuzz_byte(&in) : 0;
    fmoe_status got[2] = {FMOE_OK, FMOE_OK};
    const fmoe_weights w = {.w1 = t[3],
                            .w2 = t[4],
                            .b1 = d.flags & FMOE_BIAS ? t[5] : NULL,
                            .b2 = d.flags & FMOE_BIAS ? t[6] : NULL,
                            .lora_a1 = d.rank1 ? t[9] : NULL,
                            .lora_b1 = d.rank1 ? t[10] : NULL};
    switch (d.op) {
    case FMOE_OP_ROUTE: {
        const fmoe_route_args a = {sizeof a, t[0], t[1], t[2], t[3], t[4], t[5], t[6]};
        got[0] = fmoe_route_forward(plan, &a, &run), got[1] = fmoe_route_backward(plan, &a, &run);
        break;
    }
    case FMOE_OP_PERMUTE: {
        const fmoe_permute_args a = {sizeof a, t[0], t[1], t[2], t[3], t[4]};
        const fmoe_unpermute_args b = {sizeof b, t[0], t[1], t[2], t[3], t[4], t[5], t[6]};
        got[0] = fmoe_permute_forward(plan, &a, &run), got[1] = fmoe_permute_backward(plan, &a, &run);
        if (fuzz_byte(&in) > 128)
            got[0] = fmoe_unpermute_forward(plan, &b, &run), got[1] = fmoe_unpermute_backward(plan, &b, &run);
        break;
    }
    case FMOE_OP_GROUPED_MATMUL: {
        const fmoe_gmm_args a = {sizeof a,           t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
                                 fuzz_byte(&in) % 2, 0,    NULL};
        got[0] = fmoe_grouped_matmul_forward(plan, &a, &run), got[1] = fmoe_grouped_matmul_backward(plan, &a, &run);
        break;
    }
    case FMOE_OP_ACTIVATION: {
        const fmoe_activation_args a = {sizeof a, t[0], t[1], t[2], t[3]};
        got[0] = fmoe_activation_forward(plan, &a, &run), got[1] = fmoe_activation_backward(plan, &a, &run);
        break;
    }
    case FMOE_OP_EXPERTS: {
        const fmoe_experts_args a = {
            .size = sizeof a, .x = t[0], .ids = t[1], .weights = t[2], .w = w, .out = t[7], .dout = t[8], .dx = t[9]};
        got[0] = fmoe_experts_forward(plan, &a, &run), got[1] = fmoe_experts_backward(plan, &a, &run);
        break;
    }
    default: break;
    }
    for (int i = 0; i < 2; i++)
        if (got[i] < FMOE_OK || got[i] > FMOE_ERR_UNSUPPORTED || (got[i] && !*fmoe_last_error()))
            FUZZ_FAIL("run status %d", got[i]);
    if (got[0] != FMOE_OK && got[1] != FMOE_OK) /* nothing was written, wherever an output might have been */
        for (int i = 0; i < 12; i++)
            for (size_t b = 0; t[i] && t[i]->data && b < 64; b++)
                if (((const uint8_t *)t[i]->data)[b] != 0xa5)
                    FUZZ_FAIL("tensor %d was written by a call that failed", i);
    fmoe_plan_destroy(&plan);
    fuzz_done();
    return 0;
}
