/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api.c - the fault table of bad arguments, for every tensor of every call: the status, a sentence that names the
 * argument and both values, and not one output byte changed. Values inside tensors (ids, NaN, sizes): test_values.c */
#include "calls.h"

#define EACH_CALL(c)                                                                                                   \
    for (int kind_ = 0; kind_ < CALL_KINDS; kind_++)                                                                   \
        for (int pass_ = 0; pass_ < 2; pass_++)                                                                        \
            for (api_call c, *once_ = (call_begin(&c, (call_kind)kind_, (fmoe_pass)pass_, FMOE_F32), &c); once_;       \
                 call_end(&c), once_ = NULL)

/* One slot with a broken header; the whole ones are put back before outputs are looked at. */
typedef struct broken {
    const fmoe_tensor *whole;
    fmoe_tensor *t; /* the copy that may be spoilt: list element 0, or the tensor */
} broken;

static broken break_slot(const call_slot *s)
{
    const int64_t n = s->list ? s->list : 1;
    broken b = {*s->at, test_alloc((size_t)n * sizeof(fmoe_tensor))};
    memcpy(b.t, b.whole, (size_t)n * sizeof *b.t);
    const size_t dims = (size_t)b.t->ndim * sizeof(int64_t);
    int64_t *strides = test_alloc(dims);
    for (int i = 0; i < b.t->ndim; i++) strides[i] = fmoe_stride(b.whole, i);
    b.t->shape = memcpy(test_alloc(dims), b.t->shape, dims);
    b.t->strides = strides;
    *s->at = b.t;
    return b;
}

static void mend_slot(api_call *c, const call_slot *s, broken b)
{
    *s->at = b.whole;
    if (!call_untouched(c))
        TEST_FAIL("%s %s, %s: an output was written", call_names[c->kind], c->pass ? "backward" : "forward", s->name);
}

/* The calls themselves are right: everything below fails for the reason it says. */
TEST(valid_calls_succeed)
{
    for (int dtype = FMOE_F32; dtype <= FMOE_F64; dtype++)
        for (int kind = 0; kind < CALL_KINDS; kind++) {
            if (dtype == FMOE_F64) continue; /* f64 plans want f64 where these have f32: test_ref.c */
            for (int pass = 0; pass < 2; pass++) {
                api_call c;
                call_begin(&c, (call_kind)kind, (fmoe_pass)pass, dtype);
                if (call_make(&c) != FMOE_OK)
                    TEST_FAIL("%s %d dtype %d: %s", call_names[kind], pass, dtype, fmoe_last_error());
                CHECK(!call_untouched(&c));
                call_end(&c);
            }
        }
}

TEST(row01_null_tensor)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++) {
            const fmoe_tensor *whole = *c.slots[i].at;
            if (c.slots[i].role & SLOT_OPTIONAL) continue;
            *c.slots[i].at = NULL;
            expect(&c, c.slots[i].name, FMOE_ERR_NULL, FMOE_ERR_NULL, c.slots[i].name, "NULL");
            *c.slots[i].at = whole;
            CHECK(call_untouched(&c));
        }
    }
}

TEST(row01_null_data_and_shape)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++) {
            broken b = break_slot(&c.slots[i]);
            b.t->data = NULL;
            b.t->byte_offset = 0;
            expect(&c, "data NULL", FMOE_ERR_NULL, FMOE_ERR_NULL, c.slots[i].name, "NULL");
            mend_slot(&c, &c.slots[i], b);
            b = break_slot(&c.slots[i]);
            b.t->shape = NULL;
            expect(&c, "shape NULL", FMOE_ERR_NULL, FMOE_ERR_NULL, c.slots[i].name, "NULL");
            mend_slot(&c, &c.slots[i], b);
        }
    }
}

TEST(row01_null_structs)
{
    EACH_CALL(c)
    {
        api_call empty = c;
        empty.plan = 0;
        CHECK_STATUS(call_make(&empty), FMOE_ERR_HANDLE);
    }
    api_call c;
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    CHECK_STATUS(fmoe_experts_forward(c.plan, NULL, &c.run), FMOE_ERR_NULL);
    CHECK_ERROR_HAS("fmoe_experts_args");
    CHECK_STATUS(fmoe_experts_forward(c.plan, &c.a.experts, NULL), FMOE_ERR_NULL);
    CHECK_ERROR_HAS("fmoe_run");
    size_t bytes = 7;
    CHECK_STATUS(fmoe_workspace_bytes(c.plan, FMOE_FORWARD, 1, NULL), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_saved_bytes(c.plan, 1, NULL), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_workspace_bytes(c.plan, (fmoe_pass)2, 1, &bytes), FMOE_ERR_ARG);
    CHECK_ERROR_HAS("pass is 2");
    CHECK_STATUS(fmoe_workspace_bytes(c.plan, FMOE_FORWARD, -1, &bytes), FMOE_ERR_ARG);
    CHECK_ERROR_HAS("-1");
    CHECK_EQ(bytes, 0);
    CHECK_STATUS(fmoe_plan_create(NULL, &c.d), FMOE_ERR_NULL);
    fmoe_plan plan = 99;
    CHECK_STATUS(fmoe_plan_create(&plan, NULL), FMOE_ERR_NULL);
    CHECK_EQ(plan, 0);
    CHECK_STATUS(fmoe_plan_destroy(NULL), FMOE_ERR_NULL);
    plan = 0;
    CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
    call_end(&c);
}

/* Sizes that no version has. Those of older and newer versions: test_abi.c. */
TEST(row02_struct_sizes)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < 4; i++) {
            const size_t args = c.a.size, run = c.run.size, wrong = (size_t[]){0, 8, 4097, SIZE_MAX}[i];
            c.a.size = wrong;
            expect(&c, "args size", FMOE_ERR_ABI, FMOE_ERR_ABI, number((int64_t)args), fmoe_version_string());
            c.a.size = args;
            c.run.size = (size_t[]){0, run - 1, 4097, SIZE_MAX - 1}[i];
            expect(&c, "run size", FMOE_ERR_ABI, FMOE_ERR_ABI, i < 3 ? number((int64_t)c.run.size) : "fmoe_run.size",
                   number((int64_t)run));
            c.run.size = run;
        }
        CHECK(call_untouched(&c));
    }
    fmoe_desc d = call_desc(CALL_EXPERTS, FMOE_F32);
    fmoe_plan plan;
    d.size -= 8;
    CHECK_STATUS(fmoe_plan_create(&plan, &d), FMOE_ERR_ABI);
    CHECK_ERROR_HAS(number((int64_t)d.size));
    CHECK_ERROR_HAS(number((int64_t)sizeof d));
}

TEST(row03_rank)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++)
            for (int wrong = 0; wrong < 3; wrong++) {
                broken b = break_slot(&c.slots[i]);
                b.t->ndim = (int32_t[]){0, -1, b.t->ndim + 1}[wrong];
                if (wrong == 2) b.t->shape = (int64_t[]){1, 1, 1, 1}, b.t->strides = NULL;
                expect(&c, "rank", FMOE_ERR_SHAPE, FMOE_ERR_SHAPE, c.slots[i].name, number(b.t->ndim));
                CHECK_ERROR_HAS(number(b.whole->ndim));
                mend_slot(&c, &c.slots[i], b);
            }
    }
}

TEST(scales_are_finite)
{
    for (int i = 0; i < 8; i++) {
        api_call c;
        call_begin(&c, i & 1 ? CALL_EXPERTS_LIST : CALL_EXPERTS, i & 2 ? FMOE_BACKWARD : FMOE_FORWARD, FMOE_F32);
        *(i & 4 ? &c.a.experts.w.lora_scale2 : &c.a.experts.w.lora_scale1) = i & 1 ? NAN : -INFINITY;
        expect(&c, "scale", FMOE_ERR_ARG, FMOE_ERR_ARG, i & 4 ? "lora_scale2" : "lora_scale1", i & 1 ? "nan" : "-inf");
        call_end(&c);
    }
}

TEST(row03_absurd_dimensions)
{
    const int64_t absurd[] = {-1, INT64_MIN, INT64_MAX, (INT64_C(1) << 48) + 1};
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++)
            for (int dim = 0; dim < (*c.slots[i].at)->ndim; dim++)
                for (int j = 0; j < 4; j++) {
                    broken b = break_slot(&c.slots[i]);
                    b.t->shape[dim] = absurd[j];
                    b.t->strides = NULL;
                    expect(&c, "dimension", FMOE_ERR_SHAPE, FMOE_ERR_SHAPE, c.slots[i].name, number(absurd[j]));
                    mend_slot(&c, &c.slots[i], b);
                }
    }
}

/* Every dimension one too large and one too small: another tensor or the plan disagrees, and both numbers are in the
 * sentence. Where the tensor is the first to give a free size (T, R), the next one complains. Rows to spare in xp and y
 * are allowed. */
TEST(row06_dimensions_disagree)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++)
            for (int dim = 0; dim < (*c.slots[i].at)->ndim; dim++) {
                const int64_t was = (*c.slots[i].at)->shape[dim];
                for (int64_t delta = -1; delta <= 1; delta += 2) {
                    broken b = break_slot(&c.slots[i]);
                    const size_t bytes = (size_t)tensor_count(b.whole) * fmoe_dtype_size(fmoe_tensor_dtype(b.whole));
                    b.t->shape[dim] = was + delta;
                    b.t->strides = NULL;
                    b.t->data = memcpy(test_alloc(2 * bytes + 64), fmoe_data(b.whole), bytes);
                    b.t->byte_offset = 0;
                    const bool permutes = c.kind == CALL_PERMUTE || c.kind == CALL_UNPERMUTE;
                    const bool spare =
                        permutes && dim == 0 && (!strcmp(c.slots[i].name, "xp") || !strcmp(c.slots[i].name, "y"));
                    const fmoe_status got = call_make(&c);
                    if (got == FMOE_OK) {
                        if (!spare || delta < 0)
                            TEST_FAIL("%s: %s dimension %d is %" PRId64 ": accepted", call_names[c.kind],
                                      c.slots[i].name, dim, was + delta);
                        for (int o = 0; o < c.n_slots; o++) { /* poison again */
                            const fmoe_tensor *t = *c.slots[o].at;
                            if (t != b.t && (c.slots[o].role & SLOT_OUT))
                                memset(fmoe_data(t), 0xa5,
                                       (size_t)tensor_count(t) * fmoe_dtype_size(fmoe_tensor_dtype(t)));
                        }
                    } else if (spare && got == FMOE_ERR_INDEX) {
                        CHECK_ERROR_HAS("map["); /* one row less: an entry points past it */
                    } else if (got != FMOE_ERR_SHAPE && got != FMOE_ERR_PLAN) {
                        TEST_FAIL("%s: %s dimension %d: %s", call_names[c.kind], c.slots[i].name, dim,
                                  fmoe_last_error());
                    } else if (strstr(fmoe_last_error(), "T*k")) { /* the product is compared, and said */
                        CHECK(strstr(fmoe_last_error(), number(N_R)) || strstr(fmoe_last_error(), "5 * 2"));
                    } else if (!strstr(fmoe_last_error(), number(was + delta)) ||
                               !strstr(fmoe_last_error(), number(was))) {
                        TEST_FAIL("%s: %s dimension %d: \"%s\" has not both %" PRId64 " and %" PRId64,
                                  call_names[c.kind], c.slots[i].name, dim, fmoe_last_error(), was, was + delta);
                    }
                    mend_slot(&c, &c.slots[i], b);
                }
            }
    }
}

TEST(row07_dtypes)
{
    const fmoe_datatype wrong[] = {{2, 8, 1}, {1, 32, 1}, {2, 32, 2}, {10, 8, 1}, {0, 8, 1}, {5, 64, 1}, {2, 128, 1}};
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++) {
            for (size_t j = 0; j < sizeof wrong / sizeof *wrong; j++) {
                broken b = break_slot(&c.slots[i]);
                b.t->dtype = wrong[j];
                expect(&c, "dtype", FMOE_ERR_DTYPE, FMOE_ERR_DTYPE, c.slots[i].name, "expected");
                mend_slot(&c, &c.slots[i], b);
            }
            broken b = break_slot(&c.slots[i]); /* a float where an int is due and the other way round */
            b.t->dtype = fmoe_tensor_dtype(b.whole) < 0 ? (fmoe_datatype){2, 32, 1} : (fmoe_datatype){0, 32, 1};
            expect(&c, "dtype", FMOE_ERR_DTYPE, FMOE_ERR_DTYPE, c.slots[i].name, "expected");
            mend_slot(&c, &c.slots[i], b);
            b = break_slot(&c.slots[i]); /* mixed floats: bf16 in an f32 plan */
            b.t->dtype = (fmoe_datatype){4, 16, 1};
            expect(&c, "bf16 in an f32 plan", FMOE_ERR_DTYPE, FMOE_ERR_DTYPE, c.slots[i].name, "bf16");
            mend_slot(&c, &c.slots[i], b);
        }
    }
}

/* A device that is not the plan's. */
TEST(row07_device)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++) {
            broken b = break_slot(&c.slots[i]);
            b.t->device.type = FMOE_CUDA;
            b.t->device.id = 3;
            expect(&c, "device", FMOE_ERR_DEVICE, FMOE_ERR_DEVICE, c.slots[i].name, "3");
            mend_slot(&c, &c.slots[i], b);
        }
    }
}

TEST(row08_strides)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++)
            for (int dim = 0; dim < (*c.slots[i].at)->ndim; dim++) {
                const int64_t was = (*c.slots[i].at)->shape[dim];
                if (was == 1) continue; /* the stride of a single element says nothing */
                const int64_t bad[] = {0, -1, INT64_MIN, 2 * was + 7};
                for (int j = 0; j < 4; j++) {
                    broken b = break_slot(&c.slots[i]);
                    /* Large outer strides are padding; a matrix of one row may have any stride in it. */
                    if (j == 3 && (dim != b.t->ndim - 1 || (dim == 1 && b.t->shape[0] == 1))) {
                        *c.slots[i].at = b.whole;
                        continue;
                    }
                    b.t->strides[dim] = bad[j];
                    expect(&c, "stride", FMOE_ERR_STRIDE, FMOE_ERR_STRIDE, c.slots[i].name, number(bad[j]));
                    mend_slot(&c, &c.slots[i], b);
                }
                if (dim == 0 && (*c.slots[i].at)->ndim > 1) { /* rows that overlap */
                    broken b = break_slot(&c.slots[i]);
                    b.t->strides[0] = b.t->strides[0] - 1;
                    expect(&c, "overlapping rows", FMOE_ERR_STRIDE, FMOE_ERR_STRIDE, c.slots[i].name,
                           number(b.t->strides[0]));
                    mend_slot(&c, &c.slots[i], b);
                }
            }
    }
}

TEST(row09_misaligned)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++)
            for (int odd = 1; odd < 4; odd++) {
                broken b = break_slot(&c.slots[i]);
                if (odd == 2) b.t->byte_offset += 2;
                else b.t->data = (char *)b.t->data + odd;
                expect(&c, "misaligned", FMOE_ERR_ALIGN, FMOE_ERR_ALIGN, c.slots[i].name, "aligned");
                mend_slot(&c, &c.slots[i], b);
            }
    }
    api_call c;
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    c.a.experts.saved = (char *)c.a.experts.saved + 8;
    c.a.experts.saved_bytes -= 8;
    expect(&c, "saved", FMOE_ERR_ALIGN, FMOE_ERR_ALIGN, "saved", "16");
    call_end(&c);
}

/* Every output over every other tensor, over the workspace and over the saved state. */
TEST(row10_aliases)
{
    EACH_CALL(c)
    {
        for (int i = 0; i < c.n_slots; i++) {
            if (!(c.slots[i].role & SLOT_OUT)) continue;
            for (int j = 0; j < c.n_slots; j++) {
                if (i == j) continue;
                broken b = break_slot(&c.slots[i]);
                b.t->data = fmoe_data(*c.slots[j].at);
                b.t->byte_offset = 0;
                expect(&c, "alias", FMOE_ERR_ALIAS, FMOE_ERR_ALIAS, c.slots[i].name, "overlaps");
                mend_slot(&c, &c.slots[i], b);
            }
            if (!c.run.workspace_bytes) continue;
            broken b = break_slot(&c.slots[i]);
            b.t->data = (char *)c.run.workspace + c.run.workspace_bytes / 2 / 64 * 64;
            b.t->byte_offset = 0;
            expect(&c, "workspace", FMOE_ERR_ALIAS, FMOE_ERR_ALIAS, c.slots[i].name, "workspace");
            mend_slot(&c, &c.slots[i], b);
        }
    }
    api_call c;
    call_begin(&c, CALL_EXPERTS, FMOE_BACKWARD, FMOE_F32);
    c.a.experts.saved = fmoe_data(c.a.experts.dx);
    expect(&c, "saved", FMOE_ERR_ALIAS, FMOE_ERR_ALIAS, "saved", "dx");
    call_end(&c);
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    c.run.workspace = (char *)fmoe_data(c.a.experts.x) - 64;
    c.run.workspace_bytes = SIZE_MAX; /* to the end of memory, not around it */
    expect(&c, "workspace without end", FMOE_ERR_ALIAS, FMOE_ERR_ALIAS, "workspace", "overlaps");
    CHECK(call_untouched(&c));
    call_end(&c);
}

TEST(row20_workspace)
{
    EACH_CALL(c)
    {
        const fmoe_run good = c.run;
        if (good.workspace_bytes == 0) continue;
        c.run.workspace = NULL;
        expect(&c, "workspace NULL", FMOE_ERR_WORKSPACE, FMOE_ERR_WORKSPACE, "workspace",
               number((int64_t)good.workspace_bytes));
        c.run = good;
        c.run.workspace_bytes--;
        expect(&c, "one byte short", FMOE_ERR_WORKSPACE, FMOE_ERR_WORKSPACE, number((int64_t)good.workspace_bytes),
               number((int64_t)good.workspace_bytes - 1));
        CHECK(call_untouched(&c));
        /* Exactly enough, at every alignment, and not a byte beyond. */
        for (size_t shift = 0; shift < 3; shift++) {
            unsigned char *memory = memset(test_alloc(good.workspace_bytes + 128), 0x5a, good.workspace_bytes + 128);
            c.run.workspace = memory + 64 + shift;
            c.run.workspace_bytes = good.workspace_bytes;
            CHECK_STATUS(call_make(&c), FMOE_OK);
            for (size_t i = 0; i < 64 + shift; i++) CHECK(memory[i] == 0x5a);
            for (size_t i = 64 + shift + good.workspace_bytes; i < good.workspace_bytes + 128; i++)
                CHECK(memory[i] == 0x5a);
        }
    }
}

TEST(row20_saved_state)
{
    for (int pass = 0; pass < 2; pass++) {
        api_call c;
        call_begin(&c, CALL_EXPERTS, (fmoe_pass)pass, FMOE_F32);
        const size_t need = c.a.experts.saved_bytes;
        c.a.experts.saved_bytes = need - 1;
        expect(&c, "saved short", FMOE_ERR_WORKSPACE, FMOE_ERR_WORKSPACE, "saved", number((int64_t)need));
        CHECK(call_untouched(&c));
        c.a.experts.saved = NULL;
        c.a.experts.saved_bytes = 0;
        if (pass == 0) CHECK_STATUS(call_make(&c), FMOE_OK); /* inference */
        else expect(&c, "saved NULL", FMOE_ERR_WORKSPACE, FMOE_ERR_WORKSPACE, "saved", number((int64_t)need));
        call_end(&c);
    }
}

TEST(unknown_run_flags)
{
    EACH_CALL(c)
    {
        for (uint32_t bit = 2 * FMOE_NEW_WEIGHTS; bit; bit <<= 1) {
            c.run.flags = bit;
            expect(&c, "flags", FMOE_ERR_ARG, FMOE_ERR_ARG, "flags", NULL);
        }
        c.run.flags = c.pass ? FMOE_ADD_OUT : FMOE_ACCUMULATE; /* known, but not here */
        expect(&c, "flags", FMOE_ERR_ARG, FMOE_ERR_ARG, "flags", c.pass ? "backward" : "forward");
        CHECK(call_untouched(&c));
    }
}

TEST(borrowed_memory_is_there_and_its_own)
{
    static const call_kind kinds[] = {CALL_EXPERTS, CALL_BLOCK};
    for (int i = 0; i < 2; i++) {
        api_call c;
        call_begin(&c, kinds[i], FMOE_BACKWARD, FMOE_F32);
        fmoe_plan_destroy(&c.plan);
        c.d.flags |= FMOE_BORROW_DW1;
        REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
        fmoe_weights *dw = i ? &c.a.block.dw : &c.a.experts.dw;
        const fmoe_tensor *const dw1 = dw->w1;
        dw->w1 = NULL;
        expect(&c, "no memory", FMOE_ERR_NULL, FMOE_ERR_NULL, "dw.w1", "FMOE_BORROW_DW1");
        dw->w1 = dw1;
        c.run.flags = FMOE_ACCUMULATE;
        expect(&c, "memory in use", FMOE_ERR_ARG, FMOE_ERR_ARG, "FMOE_ACCUMULATE", "FMOE_BORROW_DW1");
        c.run.flags = 0;
        CHECK(call_untouched(&c));
        const int64_t n = dw1->shape[0] * dw1->shape[1], H = dw1->shape[2];
        const int64_t strides[3] = {dw1->shape[1] * (H + 1), H + 1, 1};
        fmoe_tensor holes = *dw1;
        holes.data = test_alloc((size_t)(n * (H + 1)) * sizeof(float));
        holes.strides = (int64_t *)strides;
        dw->w1 = &holes;
        expect(&c, "holes", FMOE_ERR_STRIDE, FMOE_ERR_STRIDE, number(n * H), number(n * (H + 1) - 1));
        dw->w1 = dw1;
        CHECK(call_untouched(&c));
        CHECK_STATUS(call_make(&c), FMOE_OK);
        call_end(&c);
    }
}

TEST(weights_stacked_or_listed_not_both)
{
    api_call c, l;
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    call_begin(&l, CALL_EXPERTS_LIST, FMOE_FORWARD, FMOE_F32);
    l.a.experts.w.w1 = c.a.experts.w.w1;
    expect(&l, "both", FMOE_ERR_ARG, FMOE_ERR_ARG, "w1", "up");
    l.a.experts.w.w1 = NULL;
    l.a.experts.w.b1 = c.a.experts.w.b1;
    expect(&l, "bias beside a list", FMOE_ERR_ARG, FMOE_ERR_PLAN, "w1", NULL);
    l.a.experts.w.b1 = NULL;
    CHECK(call_untouched(&l));
    c.a.experts.w = l.a.experts.w; /* a plan with FMOE_BIAS and a list */
    expect(&c, "list", FMOE_ERR_UNSUPPORTED, FMOE_ERR_UNSUPPORTED, "up", "FMOE_BIAS");
    CHECK(call_untouched(&c));
    call_end(&c);
    call_end(&l);
    /* Interleaved stacks beside lists: whose order would the rows have? */
    call_begin(&c, CALL_EXPERTS, FMOE_BACKWARD, FMOE_F32);
    call_begin(&l, CALL_EXPERTS_LIST, FMOE_BACKWARD, FMOE_F32);
    fmoe_plan_destroy(&l.plan);
    l.d.flags |= FMOE_INTERLEAVED;
    REQUIRE(fmoe_plan_create(&l.plan, &l.d) == FMOE_OK);
    CHECK_STATUS(call_make(&l), FMOE_OK);
    memset(fmoe_data(l.a.experts.dx), 0xa5, N_T * N_H * 4);
    l.a.experts.w = (fmoe_weights){.w1 = c.a.experts.w.w1, .w2 = c.a.experts.w.w2};
    expect(&l, "mixed", FMOE_ERR_UNSUPPORTED, FMOE_ERR_UNSUPPORTED, "FMOE_INTERLEAVED", NULL);
    for (int64_t i = 0; i < N_T * N_H; i++) CHECK(((const uint32_t *)fmoe_data(l.a.experts.dx))[i] == 0xa5a5a5a5);
    call_end(&c);
    call_end(&l);
    call_begin(&c, CALL_GMM, FMOE_FORWARD, FMOE_F32);
    c.a.gmm.list = 1;
    expect(&c, "list on a stacked plan", FMOE_ERR_PLAN, FMOE_ERR_PLAN, "list", number(N_I));
    c.a.gmm.list = 2;
    expect(&c, "list", FMOE_ERR_ARG, FMOE_ERR_ARG, "list", "2");
    c.a.gmm.list = 0;
    c.a.gmm.cumulative = -1;
    expect(&c, "cumulative", FMOE_ERR_ARG, FMOE_ERR_ARG, "cumulative", "-1");
    call_end(&c);
}
