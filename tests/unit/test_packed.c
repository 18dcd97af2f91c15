/* SPDX-License-Identifier: Apache-2.0
 *
 * test_packed.c - weights packed ahead: what is refused, with both values and not one byte packed. */
#include "calls.h"

typedef struct pack_call {
    api_call c; /* an experts forward, whose weights are packed */
    fmoe_pack_args a;
    fmoe_run run;
} pack_call;

static void pack_begin(pack_call *p, call_kind kind)
{
    call_begin(&p->c, kind, FMOE_FORWARD, FMOE_F32);
    p->run = FMOE_RUN_INIT;
    p->a = (fmoe_pack_args){.size = sizeof p->a, .w = kind == CALL_BLOCK ? p->c.a.block.w : p->c.a.experts.w};
    REQUIRE(fmoe_packed_bytes(p->c.plan, &p->a.packed_bytes) == FMOE_OK);
    REQUIRE(p->a.packed_bytes > 0);
    char *memory = test_alloc(p->a.packed_bytes + 64);
    p->a.packed = memset(memory + (64 - (uintptr_t)memory % 64) % 64, 0xa5, p->a.packed_bytes);
}

/* The error names both words, and no byte was packed. */
static void pack_expect(const pack_call *p, const fmoe_pack_args *a, fmoe_status want, const char *first,
                        const char *second)
{
    CHECK_STATUS(fmoe_pack_weights(p->c.plan, a, &p->run), want);
    CHECK(strstr(fmoe_last_error(), first) && strstr(fmoe_last_error(), second));
    for (size_t i = 0; i < p->a.packed_bytes; i++) REQUIRE(((const unsigned char *)p->a.packed)[i] == 0xa5);
}

TEST(packing_checks_everything)
{
    for (call_kind kind = CALL_EXPERTS; kind <= CALL_BLOCK; kind++) {
        pack_call p;
        pack_begin(&p, kind);
        fmoe_pack_args a = p.a;
        CHECK_STATUS(fmoe_pack_weights(p.c.plan, NULL, &p.run), FMOE_ERR_NULL);
        CHECK_STATUS(fmoe_pack_weights(p.c.plan, &a, NULL), FMOE_ERR_NULL);
        CHECK_STATUS(fmoe_pack_weights(p.c.plan + 65536, &a, &p.run), FMOE_ERR_HANDLE);
        CHECK_STATUS(fmoe_packed_bytes(p.c.plan, NULL), FMOE_ERR_NULL);
        a.size--;
        pack_expect(&p, &a, FMOE_ERR_ABI, "fmoe_pack_args.size", number((int64_t)sizeof a));
        a = p.a;
        a.packed = NULL;
        pack_expect(&p, &a, FMOE_ERR_NULL, "packed", "NULL");
        a = p.a;
        a.packed = (char *)a.packed + 16;
        pack_expect(&p, &a, FMOE_ERR_ALIGN, "packed", "64");
        a = p.a;
        a.packed_bytes--;
        pack_expect(&p, &a, FMOE_ERR_WORKSPACE, number((int64_t)a.packed_bytes), number((int64_t)p.a.packed_bytes));
        a = p.a;
        a.w.w2 = a.w.down = NULL;
        pack_expect(&p, &a, FMOE_ERR_NULL, kind == CALL_EXPERTS_LIST ? "down" : "w2", "NULL");
        a = p.a;
        fmoe_tensor turned[N_E];
        if (kind == CALL_EXPERTS_LIST) a.w.up = memcpy(turned, a.w.up, sizeof turned);
        else a.w.w1 = memcpy(turned, a.w.w1, sizeof *turned);
        int64_t shape[3] = {turned->shape[0], turned->shape[1], turned->ndim > 2 ? turned->shape[2] : 0};
        shape[1]++;
        turned->shape = shape;
        pack_expect(&p, &a, FMOE_ERR_PLAN, "plan", number(shape[1]));
        a = p.a;
        a.packed = (void *)((uintptr_t)fmoe_data(kind == CALL_EXPERTS_LIST ? a.w.up : a.w.w1) / 64 * 64);
        CHECK_STATUS(fmoe_pack_weights(p.c.plan, &a, &p.run), FMOE_ERR_ALIAS);
        p.run.flags = FMOE_ADD_OUT;
        pack_expect(&p, &p.a, FMOE_ERR_ARG, "flags", "2");
        p.run = FMOE_RUN_INIT;
        CHECK_STATUS(fmoe_pack_weights(p.c.plan, &p.a, &p.run), FMOE_OK);
        call_end(&p.c);
    }
}

/* A header that lies about an ungated layer: with gates and ups apart, panels and biases would be twice as long. */
TEST(a_packed_header_that_lies)
{
    fmoe_desc d = call_desc(CALL_EXPERTS, FMOE_F32);
    d.act = FMOE_ACT_RELU;
    d.rank1 = d.rank2 = 0;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    fmoe_experts_args a = {.size = sizeof a,
                           .x = tensor_new(FMOE_F32, SHAPE(N_T, N_H)),
                           .ids = tensor_new(I32, SHAPE(N_T, N_K)),
                           .weights = tensor_new(FMOE_F32, SHAPE(N_T, N_K)),
                           .out = tensor_new(FMOE_F32, SHAPE(N_T, N_H)),
                           .w = {.w1 = tensor_new(FMOE_F32, SHAPE(N_E, N_I, N_H)),
                                 .w2 = tensor_new(FMOE_F32, SHAPE(N_E, N_H, N_I)),
                                 .b1 = tensor_new(FMOE_F32, SHAPE(N_E, N_I)),
                                 .b2 = tensor_new(FMOE_F32, SHAPE(N_E, N_H))}};
    fmoe_pack_args pack = {.size = sizeof pack, .w = a.w};
    fmoe_run run = FMOE_RUN_INIT;
    REQUIRE(fmoe_packed_bytes(plan, &pack.packed_bytes) == FMOE_OK);
    REQUIRE(posix_memalign(&pack.packed, 64, pack.packed_bytes) == 0);
    CHECK_STATUS(fmoe_pack_weights(plan, &pack, &run), FMOE_OK);
    REQUIRE(fmoe_workspace_bytes(plan, FMOE_FORWARD, N_T, &run.workspace_bytes) == FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    a.w.packed = pack.packed;
    a.w.packed_bytes = pack.packed_bytes;
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    int64_t *header = pack.packed; /* any eight of its bytes that were 1 become 0: one of them says so */
    int refused = 0;
    for (int i = 3; i < 32; i++) {
        if (header[i] != 1) continue;
        header[i] = 0;
        refused += fmoe_experts_forward(plan, &a, &run) == FMOE_ERR_PLAN && strstr(fmoe_last_error(), "gate");
        header[i] = 1;
    }
    CHECK_EQ(refused, 1);
    free(pack.packed);
    CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
}

TEST(lists_that_lie_both_ways_are_not_packed)
{
    pack_call p;
    pack_begin(&p, CALL_EXPERTS_LIST);
    fmoe_tensor up[N_E];
    memcpy(up, p.a.w.up, sizeof up);
    int64_t strides[2] = {1, up[2].shape[0]};
    up[2].strides = strides;
    p.a.w.up = up;
    pack_expect(&p, &p.a, FMOE_ERR_UNSUPPORTED, "up[2]", "[in,out]");
    call_end(&p.c);
}

TEST(other_operations_pack_nothing)
{
    for (call_kind kind = 0; kind < CALL_EXPERTS; kind++) {
        api_call c;
        size_t bytes = 1;
        call_begin(&c, kind, FMOE_FORWARD, FMOE_F32);
        CHECK_STATUS(fmoe_packed_bytes(c.plan, &bytes), FMOE_ERR_PLAN);
        CHECK_EQ(bytes, 0);
        call_end(&c);
    }
    api_call c; /* the reference reads weights as they are stored */
    size_t bytes = 1;
    const fmoe_run run = FMOE_RUN_INIT;
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F64);
    CHECK_STATUS(fmoe_packed_bytes(c.plan, &bytes), FMOE_OK);
    CHECK_EQ(bytes, 0);
    const fmoe_pack_args a = {.size = sizeof a, .w = c.a.experts.w};
    CHECK_STATUS(fmoe_pack_weights(c.plan, &a, &run), FMOE_ERR_UNSUPPORTED);
    c.a.experts.w.packed = &c;
    expect(&c, "packed for the reference", FMOE_ERR_UNSUPPORTED, FMOE_ERR_UNSUPPORTED, "packed", NULL);
    CHECK(call_untouched(&c));
    call_end(&c);
}

TEST(packed_weights_and_the_backward)
{
    pack_call p;
    api_call back;
    pack_begin(&p, CALL_EXPERTS);
    CHECK_STATUS(fmoe_pack_weights(p.c.plan, &p.a, &p.run), FMOE_OK);
    call_begin(&back, CALL_EXPERTS, FMOE_BACKWARD, FMOE_F32);
    back.a.experts.w.packed = p.a.packed;
    back.a.experts.w.packed_bytes = p.a.packed_bytes;
    const fmoe_weights w = back.a.experts.w;
    back.a.experts.w.w1 = back.a.experts.w.w2 = NULL;
    expect(&back, "no weights", FMOE_ERR_NULL, FMOE_ERR_NULL, "w1", "packed serves the forward only");
    CHECK(call_untouched(&back));
    back.a.experts.w = w;
    back.a.experts.dw.packed = p.a.packed;
    expect(&back, "a packed gradient", FMOE_ERR_ARG, FMOE_ERR_ARG, "dpacked", "gradients");
    CHECK(call_untouched(&back));
    back.a.experts.dw.packed = NULL;
    CHECK_STATUS(call_make(&back), FMOE_OK);
    call_end(&back);
    call_end(&p.c);
}
