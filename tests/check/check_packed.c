/* SPDX-License-Identifier: Apache-2.0
 * check_packed.c - packed weights: the same bits as the weights they were made of, which the forward then does without;
 * and buffers that are not a plan's, refused before a byte is written. */
#include "check_layer.h"

typedef struct packed_buffer {
    void *data;
    size_t bytes; /* 0: this plan reads weights as they are stored */
} packed_buffer;

static packed_buffer pack(fmoe_plan plan, const fmoe_weights *w)
{
    packed_buffer b = {0};
    const fmoe_run run = FMOE_RUN_INIT;
    CHECK_OK(fmoe_packed_bytes(plan, &b.bytes));
    b.data = check_guarded(b.bytes ? b.bytes : 64, 64);
    const fmoe_pack_args args = {.size = sizeof args, .w = *w, .packed = b.data, .packed_bytes = b.bytes};
    const fmoe_status status = fmoe_pack_weights(plan, &args, &run);
    if (status != (b.bytes ? FMOE_OK : FMOE_ERR_UNSUPPORTED))
        check_fail("fmoe_pack_weights with %zu bytes: %s, %s", b.bytes, fmoe_status_string(status), fmoe_last_error());
    return b;
}

/* The weights without W1 and W2, packed ones in their place. */
static fmoe_weights instead(fmoe_weights w, const packed_buffer *b)
{
    w.w1 = w.w2 = w.gate = w.up = w.down = NULL;
    w.packed = b->data;
    w.packed_bytes = b->bytes;
    return w;
}

static check_layer draw_layer(void)
{
    fmoe_desc d = layer_draw();
    d.H = check_below(4) || check_quick ? check_size(200) : CHECK_PICK(513, 1025, 2049); /* a last chunk of one k */
    d.I = check_below(4) || check_quick ? check_size(200) : CHECK_PICK(257, 600, 1025);
    d.threads = (int32_t)CHECK_PICK(1, 2, 5);
    const bool large = d.H > 200 || d.I > 200;
    if (large) d.E = CHECK_PICK(1, 3);
    check_layer l = layer_make(&d, large ? CHECK_PICK(1, 7) : CHECK_PICK(0, 1, 2, 7, 40, 150), (int)check_below(256));
    layer_note(&l);
    return l;
}

static void draw_same(int64_t index)
{
    (void)index;
    check_layer plain = draw_layer();
    layer_run(&plain, 0, 0);
    fmoe_desc d = plain.d;
    d.threads = (int32_t)CHECK_PICK(1, 3);
    check_layer l = layer_again(&plain, &d);
    const packed_buffer b = pack(plain.plan, &plain.forward.w), again = pack(l.plan, &plain.forward.w);
    const fmoe_weights w = l.forward.w;
    l.forward.w = instead(w, &b);
    if (!b.bytes) { /* a clear answer, then the weights as they are */
        const fmoe_run run = check_run(l.plan, FMOE_FORWARD, l.T, 0);
        const fmoe_status status = fmoe_experts_forward(l.plan, &l.forward, &run);
        if (status != FMOE_ERR_UNSUPPORTED) check_fail("a plan without packed form: %s", fmoe_status_string(status));
        l.forward.w = w;
    } else if (memcmp(b.data, again.data, b.bytes)) {
        check_fail("%d and %d threads pack differently", plain.d.threads, d.threads);
    }
    l.backward.w.packed = b.data; /* left alone beside the weights themselves */
    l.backward.w.packed_bytes = b.bytes;
    layer_run(&l, 0, 0);
    layer_equal("packed", &plain, &l);
    if (l.forward.saved && memcmp(l.forward.saved, plain.forward.saved, l.forward.saved_bytes))
        check_fail("packed: the saved state differs");
}

/* A block, its shared expert packed by a plan of its own. */
static void draw_block(int64_t index)
{
    (void)index;
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_BLOCK;
    d.dtype = (int32_t)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    d.H = check_size(150), d.I = check_size(100), d.E = 6, d.k = 2, d.shared_I = check_size(100), d.threads = 2;
    const int64_t T = CHECK_PICK(1, 9, 33);
    const fmoe_tensor *w1 = check_fill(check_stack(d.dtype, d.E, 2 * d.I, d.H, check_below(2)), 0.2),
                      *w2 = check_fill(check_stack(d.dtype, d.E, d.H, d.I, check_below(2)), 0.2),
                      *s1 = check_fill(check_stack(d.dtype, 1, 2 * d.shared_I, d.H, check_below(2)), 0.2),
                      *s2 = check_fill(check_stack(d.dtype, 1, d.H, d.shared_I, check_below(2)), 0.2);
    fmoe_desc shared = d;
    shared.op = FMOE_OP_EXPERTS;
    shared.E = shared.k = 1;
    shared.I = d.shared_I;
    fmoe_block_args a = {.size = sizeof a, .w = {.w1 = w1, .w2 = w2}, .shared = {.w1 = s1, .w2 = s2}};
    const fmoe_plan plan = check_plan(&d), shared_plan = check_plan(&shared);
    const packed_buffer b = pack(plan, &a.w), bs = pack(shared_plan, &a.shared);
    a.x = check_fill(check_rows(d.dtype, T, d.H, 1), 1);
    a.w_router = check_fill(check_tensor(d.dtype, CHECK_SHAPE(d.E, d.H), NULL), 1);
    a.logits = check_tensor(FMOE_F32, CHECK_SHAPE(T, d.E), NULL);
    a.ids = check_tensor(CHECK_I32, CHECK_SHAPE(T, d.k), NULL);
    a.weights = check_tensor(FMOE_F32, CHECK_SHAPE(T, d.k), NULL);
    fmoe_tensor *out[2];
    for (int i = 0; i < (b.bytes ? 2 : 1); i++) {
        a.out = out[i] = check_rows(d.dtype, T, d.H, 2);
        const fmoe_run run = check_run(plan, FMOE_FORWARD, T, 0);
        CHECK_OK(fmoe_block_forward(plan, &a, &run));
        a.w = instead(a.w, &b);
        a.shared = instead(a.shared, &bs);
    }
    if (b.bytes) check_equal("block with packed weights", out[0], out[1]);
}

/* ---- refusals ---- */

static void refused(const check_layer *l, fmoe_status want, const char *first, const char *second)
{
    const fmoe_run run = check_run(l->plan, FMOE_FORWARD, l->T, 0);
    const fmoe_status got = fmoe_experts_forward(l->plan, &l->forward, &run);
    const char *text = fmoe_last_error();
    if (got != want) check_fail("%s instead of %s: %s", fmoe_status_string(got), fmoe_status_string(want), text);
    if (got != FMOE_OK && (!strstr(text, first) || !strstr(text, second)))
        check_fail("\"%s\" names neither %s nor %s", text, first, second);
    const unsigned char *bytes = fmoe_data(l->out);
    for (size_t i = 0; i < (size_t)check_count(l->out) * fmoe_dtype_size(l->d.dtype); i++)
        if (bytes[i] != 0xff) check_fail("%s, but byte %zu of out was written", fmoe_status_string(got), i);
}

static void draw_refused(int64_t index)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_F32;
    d.H = 70, d.I = 40, d.E = 4, d.k = 2, d.threads = 2;
    check_layer l = layer_make(&d, 5, 0);
    fmoe_desc other = d;
    const fmoe_weights w = l.forward.w;
    packed_buffer b = pack(l.plan, &w);
    l.forward.w = instead(w, &b);
    size_t *const bytes = &l.forward.w.packed_bytes;
    switch (index % 10) {
    case 0: other.E = 5; break;
    case 1: other.H = 71; break;
    case 2: other.I = 41; break;
    case 3: other.act = FMOE_ACT_RELU; break;
    case 4: other.flags = FMOE_INTERLEAVED; break;
    case 5:
        l.forward.w.packed = (char *)b.data + 4;
        refused(&l, FMOE_ERR_ALIGN, "packed", "64");
        return;
    case 6:
        --*bytes;
        refused(&l, FMOE_ERR_WORKSPACE, "packed", "bytes");
        return;
    case 7:
        memset(b.data, 0, 8);
        refused(&l, FMOE_ERR_ARG, "packed", "fmoe_pack_weights");
        return;
    case 8: { /* into its own output */
        l.forward.w.packed = l.out->data = b.data;
        const fmoe_run run = check_run(l.plan, FMOE_FORWARD, l.T, 0);
        if (fmoe_experts_forward(l.plan, &l.forward, &run) != FMOE_ERR_ALIAS) check_fail("packed weights under out");
        return;
    }
    default: /* another level */
        if (check_level == 0) return;
        fmoe_cpu_set_max_isa(fmoe_cpu_level_name(0));
        l.plan = check_plan(&d);
        fmoe_cpu_set_max_isa(fmoe_cpu_level_name(check_level));
        l.forward.saved = NULL;
        l.forward.saved_bytes = 0;
        refused(&l, FMOE_ERR_PLAN, fmoe_cpu_level_name(0), check_table.isa);
        return;
    }
    /* A plan of other sizes, its own buffer in length, but with our header. */
    check_layer o = layer_make(&other, 5, 0);
    packed_buffer theirs = pack(o.plan, &o.forward.w);
    memcpy(theirs.data, b.data, 256);
    o.forward.w = instead(o.forward.w, &theirs);
    const int64_t made[] = {4, 70, 40, 80}, has[] = {5, 71, 41, 40};
    char first[24] = "packed", second[24] = "packed";
    if (index % 10 < 4) {
        snprintf(first, sizeof first, "%" PRId64, made[index % 10]);
        snprintf(second, sizeof second, "%" PRId64, has[index % 10]);
    }
    /* Gates and ups apart in an interleaved plan: so come lists, and without biases that is allowed. */
    if (index % 10 == 4) {
        const fmoe_run run = check_run(o.plan, FMOE_FORWARD, o.T, 0);
        CHECK_OK(fmoe_experts_forward(o.plan, &o.forward, &run));
        theirs = pack(o.plan, &(fmoe_weights){.w1 = o.w1, .w2 = o.w2});
        l.forward.w = instead(w, &theirs);
        refused(&l, FMOE_ERR_PLAN, "interleaved", "FMOE_INTERLEAVED");
        return;
    }
    refused(&o, FMOE_ERR_PLAN, first, second);
}

const check_case check_packed_cases[] = {
    {"packed_same", draw_same, 16, 2, 0},
    {"packed_block", draw_block, 4, 0.5, 0},
    {"packed_refused", draw_refused, 40, 0.2, 0}, /* ten kinds, each of them with --quick too */
    {NULL, NULL, 0, 0, 0},
};
