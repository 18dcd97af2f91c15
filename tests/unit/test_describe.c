/* SPDX-License-Identifier: Apache-2.0
 *
 * test_describe.c - fmoe_plan_describe names the kernels that a run calls, all of them and no other. */
#include "described.h"
#include "tensors.h"

#define PICK(...) (((const int64_t[]){__VA_ARGS__})[test_below(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t))])

/* Zeros, from a multiple of 64 bytes on, or `off` elements after it. Kernels do not ask for values. */
static fmoe_tensor *zeros(int dtype, int ndim, const int64_t *shape, const int64_t *strides, int64_t off)
{
    fmoe_tensor *t = tensor_over(NULL, dtype, ndim, shape, strides);
    const size_t element = fmoe_dtype_size(dtype);
    char *data = test_alloc((size_t)(tensor_count(t) + off) * element + 64);
    t->data = data + (64 - (uintptr_t)data % 64) % 64 + (size_t)off * element;
    return t;
}

static fmoe_tensor *zero_stack(int dtype, int64_t E, int64_t N, int64_t K, bool in_out, int64_t off)
{
    return zeros(dtype, SHAPE(E, N, K), in_out ? (const int64_t[]){N * K, 1, N} : NULL, off);
}

typedef struct gradient_facts {
    bool lines, others, over, empty, any;
} gradient_facts;

/* How the blocks of 64 columns of a gradient will be stored. */
static void look_at(gradient_facts *g, const fmoe_tensor *t, bool list, const int64_t *rows, int64_t E)
{
    for (int64_t e = 0; t && e < E; e++) {
        const fmoe_tensor *m = list ? t + e : t;
        const int d = list ? 0 : 1;
        const int64_t element = (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(m));
        const bool swapped = fmoe_stride(m, d + 1) != 1 && m->shape[d + 1] > 1;
        const int64_t columns = m->shape[swapped ? d : d + 1], stride = fmoe_stride(m, swapped ? d + 1 : d);
        const char *base = (const char *)fmoe_data(m) + (list ? 0 : e * fmoe_stride(m, 0) * element);
        const bool aligned = (uintptr_t)base % 64 == 0 && stride * element % 64 == 0;
        g->empty |= rows[e] == 0;
        if (rows[e] == 0) continue;
        g->any = true;
        g->lines |= aligned && columns >= 64;
        g->others |= !aligned || columns % 64;
        g->over |= rows[e] > 1024;
    }
}

static void say_gradients(facts *f, const gradient_facts *g, int dtype, bool accumulate)
{
    is_so(f, g->any, "dw");
    is_so(f, g->lines && !accumulate, "dw in whole cache lines");
    is_so(f, g->any && (g->others || g->over || accumulate), "dw in other lines or of over 1024 rows or added to");
    is_so_in(f, g->others && !accumulate, "dw in other lines", dtype);
    is_so_in(f, g->any && !accumulate, "dw", dtype);
    is_so_in(f, g->any && accumulate, "dw added to", dtype);
    is_so(f, g->empty && !accumulate, "dw of experts without rows");
}

static void say_bias_gradients(facts *f, const gradient_facts *g, int dtype, bool accumulate)
{
    is_so(f, g->any, "dbias");
    is_so_in(f, !accumulate, "dbias", dtype);
    is_so_in(f, g->any && accumulate, "dbias added to", dtype);
}

static fmoe_run run_of(fmoe_plan plan, fmoe_pass pass, int64_t T, uint32_t flags)
{
    fmoe_run run = {.size = sizeof run, .flags = flags};
    REQUIRE(fmoe_workspace_bytes(plan, pass, T, &run.workspace_bytes) == FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    return run;
}

/* A plan at one of the levels of this machine, with its text; its kernels note calls from now on. */
static fmoe_plan noted_plan(const fmoe_desc *d, int level, bool intel, char *text, size_t room)
{
    fmoe_plan plan;
    fmoe_plan_impl *p;
    CHECK_STATUS(fmoe_cpu_set_max_isa(fmoe_cpu_level_name(level)), FMOE_OK);
    REQUIRE(fmoe_plan_create(&plan, d) == FMOE_OK);
    CHECK_STATUS(fmoe_cpu_set_max_isa(NULL), FMOE_OK);
    REQUIRE(fmoe_plan_acquire(plan, &p) == FMOE_OK);
    if (p->priv) ((fmoe_cpu_plan *)p->priv)->intel = intel;
    CHECK(fmoe_plan_describe(plan, text, room) < room);
    note_calls_of(p);
    fmoe_plan_release(plan);
    return plan;
}

static int64_t draw_rows(void) { return test_below(15) ? 1 + test_below(PICK(12, 12, 60, 300)) : 1100; }

/* Levels of this machine, from the lowest on; every test sees all of them. */
static int levels(void)
{
    int n = 0;
    while (n < fmoe_cpu_level_count() && fmoe_cpu_level_available(n)) n++;
    return n;
}

typedef struct weights_of { /* of one draw */
    fmoe_tensor *w1, *w2, *b1, *b2, *factor[4];
} weights_of;

static fmoe_weights as_args(const fmoe_plan_impl *p, const weights_of *w, bool list)
{
    fmoe_weights a = {.b1 = w->b1, .b2 = w->b2, .lora_a1 = w->factor[0], .lora_b1 = w->factor[1]};
    a.lora_a2 = w->factor[2];
    a.lora_b2 = w->factor[3];
    if (!list) {
        a.w1 = w->w1;
        a.w2 = w->w2;
        return a;
    }
    a.up = tensor_slices(p->gated ? tensor_view(w->w1, 1, p->d.I, p->d.I, 1) : w->w1);
    if (p->gated) a.gate = tensor_slices(tensor_view(w->w1, 1, 0, p->d.I, 1));
    a.down = tensor_slices(w->w2);
    return a;
}

static void one_layer(int level)
{
    fmoe_desc d = FMOE_DESC_INIT;
    const bool small = level == 0; /* portable code is slow */
    d.op = FMOE_OP_EXPERTS;
    d.dtype = (int32_t)PICK(FMOE_F32, FMOE_BF16, FMOE_BF16, FMOE_F16);
    d.act = (int32_t)PICK(FMOE_ACT_SWIGLU, FMOE_ACT_SWIGLU, FMOE_ACT_RELU);
    d.E = PICK(1, 2, 3, 9);
    d.k = d.E > 1 ? PICK(1, 2) : 1;
    d.H = small ? PICK(64, 96, 33, 70) : PICK(64, 128, 96, 33, 70, 192, 320, 544);
    d.I = small ? PICK(64, 32, 40) : PICK(64, 128, 32, 40, 1, 65, 97, 256, 1056);
    d.threads = (int32_t)PICK(1, 2, 5);
    const bool list = PICK(0, 0, 1), in_out1 = PICK(0, 1), in_out2 = PICK(in_out1, in_out1, !in_out1);
    d.flags = (uint32_t)(PICK(0, 0, FMOE_INTERLEAVED) | PICK(0, 0, FMOE_RECOMPUTE) | PICK(0, 0, FMOE_ROUND_STEPS));
    if (!list) d.flags |= (uint32_t)PICK(0, FMOE_BIAS);
    d.rank1 = PICK(0, 0, 0, 16, 64);
    d.rank2 = PICK(0, 0, 0, 8, 70);
    const bool bias = d.flags & FMOE_BIAS, intel = PICK(0, 0, 1), accumulate = PICK(0, 0, 1), add = PICK(0, 0, 1);
    const int b_type = (int)PICK(d.dtype, FMOE_F32), f_type = (int)PICK(d.dtype, d.dtype, FMOE_F32);
    const int g_type = (int)PICK(d.dtype, FMOE_F32);
    char text[4096];
    const fmoe_plan plan = noted_plan(&d, level, intel, text, sizeof text);
    fmoe_plan_impl *p;
    REQUIRE(fmoe_plan_acquire(plan, &p) == FMOE_OK);
    fmoe_plan_release(plan);
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);

    /* Routing: some experts may get nothing. */
    const int64_t E = d.E, H = d.H, I = d.I, both_I = p->h_cols, used = E > 2 ? PICK(E, E - 1) : E;
    const int64_t T = draw_rows() * used / d.k + 1;
    fmoe_tensor *ids = tensor_random_int(tensor_new(I32, SHAPE(T, d.k)), used);
    int64_t *rows = test_alloc((size_t)E * sizeof *rows), active = 0;
    for (int64_t i = 0; i < T * d.k; i++) rows[(int64_t)tensor_get(ids, i)]++;
    for (int64_t e = 0; e < E; e++) active += rows[e] > 0;

    weights_of w = {.w1 = zero_stack(d.dtype, E, both_I, H, in_out1, 0),
                    .w2 = zero_stack(d.dtype, E, H, I, in_out2, 0)};
    const int64_t off = PICK(0, 0, 1);
    const bool g_in_out = !list && PICK(0, 1); /* the halves of a transposed stack overlap as outputs */
    weights_of dw = {.w1 = zero_stack(g_type, E, both_I, H, g_in_out, off),
                     .w2 = zero_stack(g_type, E, H, I, g_in_out, off)};
    if (bias) {
        w.b1 = tensor_new(b_type, SHAPE(E, both_I)), w.b2 = tensor_new(b_type, SHAPE(E, H));
        dw.b1 = tensor_new(g_type, SHAPE(E, both_I)), dw.b2 = tensor_new(g_type, SHAPE(E, H));
    }
    const int64_t N[4] = {d.rank1, both_I, d.rank2, H}, K[4] = {H, d.rank1, I, d.rank2};
    for (int i = 0; i < 4; i++)
        if (i < 2 ? d.rank1 : d.rank2) {
            w.factor[i] = zero_stack(f_type, E, N[i], K[i], false, 0);
            dw.factor[i] = zero_stack(g_type, E, N[i], K[i], false, 0);
        }
    fmoe_experts_args a = {.size = sizeof a, .ids = ids};
    a.x = tensor_new(d.dtype, SHAPE(T, H));
    a.weights = tensor_new((int)PICK(d.dtype, FMOE_F32), SHAPE(T, d.k));
    a.w = as_args(p, &w, list);
    REQUIRE(fmoe_saved_bytes(plan, T, &a.saved_bytes) == FMOE_OK);
    a.saved = a.saved_bytes ? test_alloc(a.saved_bytes) : NULL;
    fmoe_experts_args b = a;
    a.out = tensor_new(d.dtype, SHAPE(T, H));
    if (PICK(0, 0, 1)) a.saved = NULL; /* inference: b's is all zeros then */
    size_t packed_bytes = 0;
    CHECK_STATUS(fmoe_packed_bytes(plan, &packed_bytes), FMOE_OK);
    const bool packed = packed_bytes && PICK(0, 0, 1);
    if (packed) {
        char *room = test_alloc(packed_bytes + 64);
        fmoe_pack_args pack = {.size = sizeof pack, .w = as_args(p, &(weights_of){.w1 = w.w1, .w2 = w.w2}, list)};
        pack.packed = room + (64 - (uintptr_t)room % 64) % 64;
        pack.packed_bytes = packed_bytes;
        const fmoe_run run = {.size = sizeof run};
        REQUIRE(fmoe_pack_weights(plan, &pack, &run) == FMOE_OK);
        a.w.packed = pack.packed;
        a.w.packed_bytes = packed_bytes;
    }

    /* What is true of both passes, and of each. */
    facts both = {.out_in1 = !in_out1, .out_in2 = !in_out2, .R = T * d.k, .active = active};
    both.when[0] = list ? "in lists" : "in stacks";
    is_so(&both, true, "out and dx");
    is_so(&both, add, "out or dx added to");
    is_so(&both, d.rank1 || d.rank2, "rows between factors");
    is_so_in(&both, (d.rank1 || d.rank2) && f_type != d.dtype, "factors", FMOE_F32);
    facts forward = both, backward = both;
    facts *up[2] = {&forward, d.flags & FMOE_RECOMPUTE ? &backward : NULL};
    for (int i = 0; i < 2 && up[i]; i++) {
        is_so(up[i], true, "up");
        is_so(up[i], d.rank1, "up.a1");
        is_so(up[i], d.rank1, "up.b1");
        is_so(up[i], bias, "bias");
        is_so_in(up[i], bias, "bias", b_type);
        is_so(up[i], true, "rounded steps");
    }
    forward.packed = packed;
    is_so(&forward, true, "down");
    is_so(&forward, d.rank2, "down.a2");
    is_so(&forward, d.rank2, "down.b2");
    is_so(&forward, true, "activation");
    is_so(&forward, a.saved, "h kept");
    is_so(&backward, true, "h made again");
    is_so(&backward, true, "da");
    is_so(&backward, true, "dx");
    is_so(&backward, true, "gradient of the activation");
    is_so(&backward, bias, "dweights");
    for (int i = 0; i < 3 && d.rank1; i++) is_so(&backward, true, (const char *[]){"dx.b1", "dx.a1", "dw.a1"}[i]);
    for (int i = 0; i < 3 && d.rank2; i++) is_so(&backward, true, (const char *[]){"da.b2", "da.a2", "dw.a2"}[i]);
    b.dw = as_args(p, &dw, list);
    gradient_facts g = {0};
    look_at(&g, list ? b.dw.up : b.dw.w1, list, rows, E);
    look_at(&g, b.dw.gate, list, rows, E);
    look_at(&g, list ? b.dw.down : b.dw.w2, list, rows, E);
    for (int i = 0; i < 4; i++) look_at(&g, dw.factor[i], false, rows, E);
    say_gradients(&backward, &g, g_type, accumulate);
    if (bias) say_bias_gradients(&backward, &g, g_type, accumulate);

    /* Beside packed weights, and on AMX, where all panels have one form, a LoRA term may be packed by the product
     * before it, inside of a kernel that multiplies. */
    uint64_t unless = 0;
    for (int slot = FMOE_SLOT_pack_kmajor_f32; slot <= FMOE_SLOT_pack_transposed_pairs; slot++)
        if ((packed || cpu->gather) && (d.rank1 || d.rank2)) unless |= (uint64_t)1 << slot;
    char what[300];
    snprintf(what, sizeof what,
             "level %s intel %d T %" PRId64 " H %" PRId64 " I %" PRId64 " E %" PRId64 " k %" PRId64 " dtype %d act %d "
             "flags %u rank %" PRId64 " %" PRId64 " in_out %d %d list %d packed %d threads %d",
             cpu->k.isa, intel, T, H, I, E, d.k, d.dtype, d.act, d.flags, d.rank1, d.rank2, in_out1, in_out2, list,
             packed, d.threads);
    fmoe_run run = run_of(plan, FMOE_FORWARD, T, add ? FMOE_ADD_OUT : 0);
    atomic_store(&called, 0);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    compare(text, &forward, unless, what);
    b.dout = tensor_new(d.dtype, SHAPE(T, H));
    b.dx = tensor_new(d.dtype, SHAPE(T, H));
    b.dweights = tensor_new(FMOE_F32, SHAPE(T, d.k));
    run = run_of(plan, FMOE_BACKWARD, T, (add ? FMOE_ADD_DX : 0) | (accumulate ? FMOE_ACCUMULATE : 0));
    atomic_store(&called, 0);
    CHECK_STATUS(fmoe_experts_backward(plan, &b, &run), FMOE_OK);
    compare(text, &backward, cpu->gather ? unless : 0, what);
    CHECK_STATUS(fmoe_plan_destroy(&(fmoe_plan){plan}), FMOE_OK);
}

TEST(layers_call_what_they_describe)
{
    for (int level = 0; level < levels(); level++)
        for (int i = 0; i < 50; i++) one_layer(level);
}

static void one_gmm(int level)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.dtype = (int32_t)PICK(FMOE_F32, FMOE_BF16, FMOE_BF16, FMOE_F16);
    d.E = PICK(1, 2, 9);
    d.K = PICK(64, 96, 33, 192, 1, 544);
    d.N = PICK(64, 128, 40, 1, 97, 320);
    d.threads = (int32_t)PICK(1, 2, 5);
    const int64_t E = d.E, K = d.K, N = d.N, each = draw_rows(), R = each * E;
    const bool in_out = PICK(0, 1), bias = PICK(0, 1), accumulate = PICK(0, 0, 1), add = PICK(0, 0, 1);
    const int y_type = (int)PICK(d.dtype, FMOE_F32), b_type = (int)PICK(d.dtype, FMOE_F32),
              g_type = (int)PICK(d.dtype, FMOE_F32);
    char text[4096];
    const fmoe_plan plan = noted_plan(&d, level, PICK(0, 0, 1), text, sizeof text);
    fmoe_gmm_args a = {.size = sizeof a, .x = tensor_new(d.dtype, SHAPE(R, K))};
    const int64_t strides[] = {K * N, in_out ? N : 1, in_out ? 1 : K};
    a.w = zeros(d.dtype, SHAPE(E, K, N), strides, 0);
    a.sizes = tensor_fill(tensor_new(I64, SHAPE(E)), (double)each);
    fmoe_gmm_args b = a;
    a.y = tensor_new(y_type, SHAPE(R, N));
    if (bias) a.bias = tensor_new(b_type, SHAPE(E, N));
    b.dy = tensor_new(y_type, SHAPE(R, N));
    b.dx = tensor_new(d.dtype, SHAPE(R, K));
    b.dw = zeros(g_type, SHAPE(E, K, N), PICK(0, 1) ? strides : NULL, PICK(0, 0, 1));
    if (bias) b.dbias = tensor_new(g_type, SHAPE(E, N));

    facts both = {.out_in1 = !in_out || N == 1, .R = R, .active = E};
    facts forward = both, backward = both;
    is_so(&forward, true, "y");
    is_so(&forward, bias, "bias");
    is_so_in(&forward, bias, "bias", b_type);
    is_so_in(&forward, true, "y or dx", y_type);
    char when[16];
    snprintf(when, sizeof when, "dy in %s", y_type == FMOE_BF16 ? "bf16" : y_type == FMOE_F16 ? "f16" : "f32");
    backward.when[0] = when;
    is_so(&backward, true, "dx");
    is_so_in(&backward, true, "y or dx", d.dtype);
    is_so_in(&backward, add, "dx added to", d.dtype);
    int64_t *rows = test_alloc((size_t)E * sizeof *rows);
    for (int64_t e = 0; e < E; e++) rows[e] = each;
    gradient_facts g = {0};
    look_at(&g, b.dw, false, rows, E);
    say_gradients(&backward, &g, g_type, accumulate);
    if (bias) say_bias_gradients(&backward, &g, g_type, accumulate);
    char what[200];
    snprintf(what, sizeof what,
             "level %s rows %" PRId64 " E %" PRId64 " K %" PRId64 " N %" PRId64 " dtype %d y %d in_out %d threads %d",
             real.isa, each, E, K, N, d.dtype, y_type, in_out, d.threads);
    fmoe_run run = run_of(plan, FMOE_FORWARD, R, 0);
    atomic_store(&called, 0);
    CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
    compare(text, &forward, 0, what);
    run = run_of(plan, FMOE_BACKWARD, R, (add ? FMOE_ADD_DX : 0) | (accumulate ? FMOE_ACCUMULATE : 0));
    atomic_store(&called, 0);
    CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &b, &run), FMOE_OK);
    compare(text, &backward, 0, what);
    CHECK_STATUS(fmoe_plan_destroy(&(fmoe_plan){plan}), FMOE_OK);
}

TEST(grouped_matmuls_call_what_they_describe)
{
    for (int level = 0; level < levels(); level++)
        for (int i = 0; i < 50; i++) one_gmm(level);
}

/* A block says what each of its parts says; its router and its experts run by that. */
TEST(blocks_call_what_they_describe)
{
    for (int level = 0; level < levels(); level++) {
        fmoe_desc d = FMOE_DESC_INIT;
        d.op = FMOE_OP_BLOCK;
        d.dtype = FMOE_BF16;
        d.H = 128, d.I = 64, d.E = 8, d.k = 2, d.shared_I = 64;
        d.flags = FMOE_SHARED_GATE;
        char text[16384];
        const fmoe_plan plan = noted_plan(&d, level, false, text, sizeof text);
        const int64_t T = 20;
        fmoe_block_args a = {.size = sizeof a, .x = tensor_new(d.dtype, SHAPE(T, d.H))};
        a.w_router = tensor_random(tensor_new(d.dtype, SHAPE(d.E, d.H)), 1);
        a.w.w1 = zero_stack(d.dtype, d.E, 2 * d.I, d.H, false, 0);
        a.w.w2 = zero_stack(d.dtype, d.E, d.H, d.I, false, 0);
        a.shared.w1 = zero_stack(d.dtype, 1, 2 * d.shared_I, d.H, false, 0);
        a.shared.w2 = zero_stack(d.dtype, 1, d.H, d.shared_I, false, 0);
        a.shared_gate = tensor_new(d.dtype, SHAPE(1, d.H));
        a.logits = tensor_new(FMOE_F32, SHAPE(T, d.E));
        a.ids = tensor_new(I32, SHAPE(T, d.k));
        a.weights = tensor_new(FMOE_F32, SHAPE(T, d.k));
        a.out = tensor_new(d.dtype, SHAPE(T, d.H));
        const fmoe_run run = run_of(plan, FMOE_FORWARD, T, 0);
        atomic_store(&called, 0);
        CHECK_STATUS(fmoe_block_forward(plan, &a, &run), FMOE_OK);
        for (int slot = 0; slot < FMOE_SLOTS; slot++)
            if (atomic_load(&called) >> slot & 1) CHECK(strstr(text, fmoe_kernel_name(&real, slot)) != NULL);
        CHECK(atomic_load(&called) & BIT(act_block));
        for (int i = 0; i < 6; i++)
            CHECK(strstr(text, (const char *[]){"router: ", "\nroute: ", "\nexperts: ", "\nshared gate: ",
                                                "\nshared route: ", "\nshared expert: "}[i]));
        CHECK_STATUS(fmoe_plan_destroy(&(fmoe_plan){plan}), FMOE_OK);
    }
}

/* All that a plan of experts can have, at sizes that fit no block: Python's buffer of 4096 bytes holds it. */
TEST(descriptions_are_short)
{
    for (int level = 0; level < levels(); level++)
        for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++)
            for (unsigned flags = 0; flags < 8; flags++)
                for (int op = FMOE_OP_GROUPED_MATMUL; op <= FMOE_OP_EXPERTS; op++) {
                    fmoe_desc d = FMOE_DESC_INIT;
                    d.op = op;
                    d.dtype = dtype;
                    d.H = d.K = flags & 4 ? 2048 : 2049, d.I = d.N = flags & 4 ? 768 : 1055, d.E = 128, d.k = 8;
                    if (op == FMOE_OP_EXPERTS) d.rank1 = 16, d.rank2 = 70;
                    if (op == FMOE_OP_EXPERTS) d.flags = flags & (FMOE_INTERLEAVED | FMOE_BIAS);
                    char text[4096];
                    const fmoe_plan plan = noted_plan(&d, level, true, text, sizeof text);
                    described(text, &(facts){0}); /* every line has less than 120 columns, and kernels */
                    CHECK_STATUS(fmoe_plan_destroy(&(fmoe_plan){plan}), FMOE_OK);
                }
}
