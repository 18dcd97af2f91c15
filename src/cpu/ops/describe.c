/* SPDX-License-Identifier: Apache-2.0
 *
 * describe.c - what a plan says of itself: for every product the kernels of the form that will run, by the same choices
 * (forms.h) that the products make. What a plan does not know is said as a condition: how weights are stored, how many
 * rows an expert gets, of which type gradients are. A line is
 *
 *   what [of [out,in]], what [of [in,out]], condition: kernels
 *
 * and goes on in the next one, which is indented then. tests/unit/test_forms.c reads these lines and compares them with
 * the kernels that runs have called. */
#include <stdarg.h>
#include <stdio.h>

#include "cpu/ops/ops.h"

enum { LINE = 110, MOST = 128 }; /* columns before a word that is still said; entries */

typedef enum storage { ANY_WAY, OUT_IN, IN_OUT } storage; /* of weights */
typedef enum amount { ANY_ROWS, FEW, MANY } amount;

typedef struct entry {
    const char *what, *when; /* when NULL: always */
    storage stored;
    amount rows;
    uint64_t slots;
    unsigned forms; /* of a product: bits of fmoe_form */
    bool said;
} entry;

typedef struct description {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    int dtype, work;
    entry all[MOST];
    int n;
    char *text;
    size_t room, used, column;
} description;

#define BIT(field) ((uint64_t)1 << FMOE_SLOT_##field)

/* ---- kernels of single rows, by type; f32 needs none ---- */

static uint64_t load_bit(int dtype)
{
    return dtype == FMOE_BF16 ? BIT(load_bf16) : dtype == FMOE_F16 ? BIT(load_f16) : 0;
}

static uint64_t store_bit(int dtype)
{
    return dtype == FMOE_BF16 ? BIT(store_bf16) : dtype == FMOE_F16 ? BIT(store_f16) : 0;
}

static uint64_t store_block_bit(int dtype)
{
    return dtype == FMOE_BF16 ? BIT(store_block_bf16) : dtype == FMOE_F16 ? BIT(store_block_f16) : BIT(store_block_f32);
}

/* ---- entries ---- */

static void add_entry(description *d, const char *what, const char *when, storage stored, amount rows, uint64_t slots)
{
    if (slots && d->n < MOST) d->all[d->n++] = (entry){what, when, stored, rows, slots, 0, false};
}

static void add_always(description *d, const char *what, uint64_t slots)
{
    add_entry(d, what, NULL, ANY_WAY, ANY_ROWS, slots);
}

/* ---- products ---- */

/* One product by weights N x K. Without sizes (N 0: lists), columns may be whole panels or not. */
typedef struct product {
    const char *name, *when;
    int64_t N, K;
    int64_t sk[3];               /* elements from one k to the next, as weights are stored */
    int matrices;                /* side by side */
    bool combine, tiles;         /* sums by token; may run by tiles, where the level has them */
    int a_type;                  /* of rows, when they are multiplied */
    uint64_t before;             /* what is called for the rows before that */
    const struct product *steps; /* of a LoRA term: the product whose columns it has; NULL: its own */
} product;

/* The columns of steps, whole blocks and what is left of them; returns how many kinds there are. */
static int column_kinds(const description *d, const product *q, storage stored, bool prepacked, int64_t n[2])
{
    const fmoe_cpu_plan *cpu = d->cpu;
    const bool nmajor = !prepacked && fmoe_is_nmajor(q->sk[stored], q->K);
    if (!q->N) {
        n[0] = FMOE_NB;
        n[1] = FMOE_NB / 2;
        return 2;
    }
    int64_t width = FMOE_NB / q->matrices, unit = width;
    if (q->combine) {
        if (fmoe_choose_panels(cpu->gather, nmajor, FMOE_PANELS, 1) > 1)
            width = fmoe_min(FMOE_PANELS * FMOE_NB, fmoe_combine_columns(cpu, q->N));
        width = fmoe_min(width, fmoe_max(q->N / FMOE_NB, 1) * FMOE_NB);
    } else if (q->matrices == 1) {
        const int64_t blocks = d->p->d.E * fmoe_ceil_div(q->N, FMOE_NB);
        unit = width = FMOE_NB * fmoe_choose_panels(cpu->gather, nmajor, blocks, 4 * cpu->threads);
    }
    int kinds = 0;
    if (q->N >= width) n[kinds++] = width;
    if (q->N % unit) n[kinds++] = q->N % unit;
    return kinds;
}

/* What its steps call, and which forms they have. */
typedef struct calls {
    uint64_t slots;
    unsigned forms;
} calls;

static calls product_calls(const description *d, const product *q, storage stored, bool few, bool prepacked)
{
    const fmoe_cpu_plan *cpu = d->cpu;
    const int64_t sk = q->sk[stored], K = q->K ? q->K : 32;
    fmoe_form_input in = {.has = cpu->has, .pairs = cpu->pairs, .gather = cpu->gather, .intel = cpu->intel};
    in.a_type = q->a_type;
    in.w_type = d->dtype;
    in.matrices = q->matrices;
    in.alike = true;
    in.rows = in.experts = 1;
    in.R = few ? 1 : INT64_MAX;
    in.kmajor = sk == 1 && K > 1;
    in.room_for_tiles = q->tiles && cpu->gather;
    if (fmoe_choose_form(&in) == FMOE_FORM_TILES)
        return (calls){BIT(gemm_inplace) | BIT(pack_tiles), 1 << FMOE_FORM_TILES};
    in.room_for_tiles = false;
    in.prepacked = prepacked && !q->steps; /* adapters are not packed beforehand, but have the columns of weights */
    const int64_t chunk =
        fmoe_choose_chunk(cpu->has, cpu->pairs, cpu->gather, fmoe_is_nmajor(sk, K), q->steps != NULL, q->N, K);
    const int64_t kc[2] = {fmoe_min(chunk, K), K - (K - 1) / chunk * chunk};
    int64_t columns[2];
    const int kinds = column_kinds(d, q->steps ? q->steps : q, stored, prepacked, columns);
    calls c = {.slots = q->before};
    for (int i = 0; i < 2 * kinds; i++) {
        in.columns = columns[i / 2];
        in.kmajor = sk == 1 || kc[i % 2] == 1;
        const fmoe_form form = fmoe_choose_form(&in);
        c.forms |= 1u << form;
        c.slots |= (uint64_t)1 << fmoe_form_gemm(form, cpu->pairs, d->dtype);
        if (fmoe_is_packed_now(form)) c.slots |= (uint64_t)1 << fmoe_form_pack(form, cpu->pairs, d->dtype, in.kmajor);
        if (q->a_type != d->work) c.slots |= load_bit(q->a_type); /* always by panels */
    }
    return c;
}

static bool same_calls(calls a, calls b) { return a.slots == b.slots && a.forms == b.forms; }

static void add_calls(description *d, const product *q, const char *when, storage stored, amount rows, calls c)
{
    add_entry(d, q->name, when, stored, rows, c.slots);
    d->all[d->n - 1].forms = c.forms;
}

/* By how weights are stored and by rows, as far as it makes a difference. */
static void add_packed_or_not(description *d, const product *q, const char *when, bool prepacked)
{
    calls c[3][2];
    for (int s = OUT_IN; s <= IN_OUT; s++)
        for (int few = 0; few < 2; few++) c[s][few] = product_calls(d, q, (storage)s, few, prepacked);
    const bool alike = same_calls(c[OUT_IN][0], c[IN_OUT][0]) && same_calls(c[OUT_IN][1], c[IN_OUT][1]);
    for (int s = OUT_IN; s <= (alike ? OUT_IN : IN_OUT); s++) {
        const storage way = alike ? ANY_WAY : (storage)s;
        const bool any_rows = same_calls(c[s][0], c[s][1]);
        if (!any_rows) add_calls(d, q, when, way, FEW, c[s][1]);
        add_calls(d, q, when, way, any_rows ? ANY_ROWS : MANY, c[s][0]);
    }
}

static void add_product(description *d, const product *q) { add_packed_or_not(d, q, q->when, false); }

static void add_prepacked(description *d, const product *q)
{
    if (!d->cpu->gather) add_packed_or_not(d, q, "packed beforehand", true);
}

/* ---- gradients ---- */

/* A phrase about numbers of the plan's type, which is not f32. */
#define OWN(d, phrase) ((d)->dtype == FMOE_BF16 ? phrase " in bf16" : phrase " in f16")
#define STORED(dtype, phrase)                                                                                          \
    ((dtype) == FMOE_F32 ? phrase " in f32" : (dtype) == FMOE_BF16 ? phrase " in bf16" : phrase " in f16")

/* dW of rows of two types. */
static void add_wgrads(description *d, const char *when, int left, int right)
{
    const fmoe_cpu_plan *cpu = d->cpu;
    const uint64_t gemm = cpu->pairs ? BIT(gemm_bf16) : BIT(gemm_f32);
    uint64_t pack = 0;
    for (int i = 0; i < 4; i++) /* either is the left one, as dW is stored */
        pack |= (uint64_t)1 << fmoe_wgrad_pack(cpu->has, cpu->pairs, i & 1 ? left : right, i & 2);
    if (!fmoe_has_wgrad(cpu->has, cpu->pairs)) {
        add_entry(d, "dw", when, ANY_WAY, ANY_ROWS, pack | gemm);
        return;
    }
    add_entry(d, "dw", when, ANY_WAY, ANY_ROWS, pack);
    add_entry(d, "dw in whole cache lines", when, ANY_WAY, ANY_ROWS, cpu->pairs ? BIT(wgrad_bf16) : BIT(wgrad_f32));
    add_entry(d, "dw in other lines or of over 1024 rows or added to", when, ANY_WAY, ANY_ROWS, gemm);
}

/* How gradients of weights and biases are stored: in the plan's type, or in f32. */
static void add_gradient_stores(description *d, bool biases)
{
    const bool lines = fmoe_has_wgrad(d->cpu->has, d->cpu->pairs);
    for (int in_f32 = 0; in_f32 < (d->dtype == FMOE_F32 ? 1 : 2); in_f32++) {
        const int dtype = in_f32 ? FMOE_F32 : d->dtype;
        add_always(d, lines ? STORED(dtype, "dw in other lines") : STORED(dtype, "dw"), store_block_bit(dtype));
        add_always(d, STORED(dtype, "dw added to"), BIT(axpy) | load_bit(dtype) | store_bit(dtype));
        if (!biases) continue;
        add_always(d, STORED(dtype, "dbias"), store_block_bit(dtype));
        add_always(d, STORED(dtype, "dbias added to"), load_bit(dtype) | store_bit(dtype));
    }
    add_always(d, "dw of experts without rows", BIT(store_block_f32));
    if (biases) add_always(d, "dbias", BIT(axpy));
}

/* ---- operations ---- */

static void add_biases(description *d)
{
    if (!fmoe_steps(d->p)) add_always(d, "bias", BIT(axpy));
    if (d->dtype != FMOE_F32) add_always(d, OWN(d, "bias"), load_bit(d->dtype));
}

/* Adapters, with factors as they are declared: contiguous in their last dimension. */
static void add_adapters(description *d, const product *up, const product *down, const product *da, const product *dx)
{
    const fmoe_desc *D = &d->p->d;
    const int64_t r1 = D->rank1, r2 = D->rank2, C = d->p->h_cols;
    const product a1 = {"up.a1", NULL, r1, D->H, {0, 1, 1}, 1, false, true, up->a_type, up->before, NULL};
    const product b1 = {"up.b1", NULL, up->N, r1, {0, 1, 1}, up->matrices, false, false, d->work, 0, up};
    const product m1 = {"dx.b1", NULL, r1, C, {0, r1, r1}, 1, false, true, d->work, 0, NULL};
    const product n1 = {"dx.a1", NULL, D->H, r1, {0, D->H, D->H}, 1, true, false, d->work, 0, dx};
    const product a2 = {"down.a2", NULL, r2, D->I, {0, 1, 1}, 1, false, true, d->work, 0, NULL};
    const product b2 = {"down.b2", NULL, D->H, r2, {0, 1, 1}, 1, true, false, d->work, 0, down};
    const product m2 = {"da.b2", NULL, r2, D->H, {0, r2, r2}, 1, false, true, da->a_type, da->before, NULL};
    const product n2 = {"da.a2", NULL, D->I, r2, {0, D->I, D->I}, 1, false, false, d->work, 0, da};
    product l1 = a1, l2 = a2;
    l1.name = "dw.a1", l2.name = "dw.a2";
    const product *const of1[] = {&a1, &b1, &m1, &n1, &l1}, *const of2[] = {&a2, &b2, &m2, &n2, &l2};
    for (int i = 0; r1 && i < 5; i++) add_product(d, of1[i]);
    for (int i = 0; r2 && i < 5; i++) add_product(d, of2[i]);
    if (r1) add_prepacked(d, &b1);
    if (r2) add_prepacked(d, &b2);
    if (!r1 && !r2) return;
    add_always(d, "rows between factors", store_bit(d->work));
    add_always(d, "factors in f32", store_bit(d->dtype));
}

/* Products by W1, one matrix or two; down and da, where they were not added yet, and adapters come with the first. */
static void add_products(description *d, const char *when, bool whole, bool first, const product *down,
                         const product *da)
{
    const fmoe_desc *D = &d->p->d;
    const int64_t C = d->p->h_cols, N = whole ? C : D->I;
    const bool widened = d->dtype != d->work;
    const product up = {.name = "up",
                        .when = when,
                        .N = N,
                        .K = D->H,
                        .sk = {0, 1, C},
                        .matrices = whole ? 1 : 2,
                        .tiles = !D->rank1,
                        .a_type = d->work,
                        .before = widened ? load_bit(d->dtype) : 0};
    const product dx = {.name = "dx",
                        .when = when,
                        .N = D->H,
                        .K = N,
                        .sk = {0, D->H, 1},
                        .matrices = 1,
                        .combine = true,
                        .tiles = !D->rank1 && whole,
                        .a_type = d->work};
    add_product(d, &up);
    if (first) add_product(d, down);
    if (first) add_product(d, da);
    add_product(d, &dx);
    const bool packs = !(D->flags & FMOE_QUANT);
    if (packs) add_prepacked(d, &up);
    if (packs && first) add_prepacked(d, down);
    if (first) add_adapters(d, &up, down, da, &dx);
}

static void add_quantised(description *d)
{
    add_always(d, "quantised weights", BIT(dequant) | (d->cpu->pairs ? BIT(gemm_coded_few_rows_bf16) : 0));
}

static void describe_experts(description *d)
{
    const fmoe_plan_impl *p = d->p;
    const fmoe_desc *D = &p->d;
    const bool interleaved = p->gated && D->flags & FMOE_INTERLEAVED, widened = d->dtype != d->work;
    const product down = {.name = "down",
                          .N = D->H,
                          .K = D->I,
                          .sk = {0, 1, D->H},
                          .matrices = 1,
                          .combine = true,
                          .tiles = !D->rank2,
                          .a_type = d->work};
    const product da = {.name = "da",
                        .N = D->I,
                        .K = D->H,
                        .sk = {0, D->I, 1},
                        .matrices = 1,
                        .tiles = !D->rank2,
                        .a_type = d->work,
                        .before = widened ? load_bit(d->dtype) : 0};
    add_products(d, interleaved ? "in stacks" : NULL, interleaved || !p->gated, true, &down, &da);
    if (interleaved && !(D->flags & FMOE_BIAS)) add_products(d, "in lists", false, false, &down, &da);
    if (D->flags & FMOE_QUANT) add_quantised(d);
    add_always(d, "activation", BIT(act_block));
    add_always(d, D->flags & FMOE_RECOMPUTE ? "h made again" : "h kept", store_block_bit(d->dtype));
    if (D->flags & FMOE_BIAS) add_biases(d);
    const int steps = fmoe_steps(p);
    if (steps) add_always(d, "rounded steps", steps == FMOE_BF16 ? BIT(round_bf16) : BIT(round_f16));
    add_always(d, "out and dx", BIT(add_rows) | store_block_bit(d->dtype));
    add_always(d, "out or dx added to", BIT(axpy) | load_bit(d->dtype));
    add_always(d, "gradient of the activation", BIT(act_backward));
    if (interleaved) add_entry(d, "gradient of the activation", "in stacks", ANY_WAY, ANY_ROWS, store_bit(d->work));
    add_wgrads(d, NULL, d->dtype, d->work);
    add_gradient_stores(d, D->flags & FMOE_BIAS);
    if (!(D->flags & FMOE_BIAS)) return;
    add_always(d, "dbias", load_bit(d->work) | load_bit(d->dtype));
    add_always(d, "dweights", BIT(dot) | load_bit(d->dtype));
}

static void describe_gmm(description *d)
{
    const fmoe_desc *D = &d->p->d;
    const fmoe_cpu_plan *const own = d->cpu, f32 = fmoe_cpu_f32(own);
    product y = {.name = "y", .N = D->N, .K = D->K, .sk = {0, 1, D->N}, .matrices = 1, .a_type = d->dtype};
    product dx = {.name = "dx", .N = D->K, .K = D->N, .sk = {0, D->K, 1}, .matrices = 1};
    if (!D->N) y.sk[IN_OUT] = dx.sk[OUT_IN] = FMOE_NB;
    add_product(d, &y);
    if (D->flags & FMOE_QUANT) add_quantised(d);
    add_biases(d);
    if (d->dtype != FMOE_F32) add_always(d, OWN(d, "y or dx"), store_bit(d->dtype));
    add_always(d, STORED(d->dtype, "dx added to"), BIT(axpy) | load_bit(d->dtype));
    for (int in_f32 = 0; in_f32 < (d->dtype == FMOE_F32 ? 1 : 2); in_f32++) { /* dy in f32: all of it */
        dx.a_type = in_f32 ? FMOE_F32 : d->dtype;
        dx.when = d->dtype == FMOE_F32 ? NULL : STORED(dx.a_type, "dy");
        d->cpu = dx.a_type == d->dtype ? own : &f32;
        d->work = d->cpu->work_type;
        add_product(d, &dx);
        add_wgrads(d, dx.when, d->dtype, dx.a_type);
        add_entry(d, "dbias", dx.when, ANY_WAY, ANY_ROWS, load_bit(dx.a_type));
    }
    d->cpu = own;
    d->work = own->work_type;
    add_gradient_stores(d, true);
}

static void describe_rows(description *d)
{
    const uint64_t load = load_bit(d->dtype), store = store_bit(d->dtype);
    const int score = d->p->d.route.score;
    switch (d->p->d.op) {
    case FMOE_OP_ROUTE:
        if (score == FMOE_SCORE_SOFTMAX) add_always(d, "scores that are apart", BIT(softmax));
        if (score == FMOE_SCORE_TOPK_SOFTMAX) add_always(d, "scores", BIT(softmax));
        break;
    case FMOE_OP_PERMUTE:
        add_always(d, "sums by token", BIT(axpy) | load | store);
        add_always(d, "dy", load | store);
        add_always(d, "dweights", BIT(dot) | load);
        break;
    default:
        add_always(d, "forward", BIT(act_block) | load | store);
        add_always(d, "backward", BIT(act_backward) | load | store);
    }
}

/* ---- lines ---- */

__attribute__((format(printf, 2, 3))) static void say(description *d, const char *format, ...)
{
    char piece[80];
    va_list args;
    va_start(args, format);
    const size_t length = (size_t)vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    const bool goes_on = piece[0] == ' ' && d->column + length > LINE;
    const char *const from = goes_on ? piece + 1 : piece;
    const size_t room = d->used < d->room ? d->room - d->used : 0;
    d->used += (size_t)snprintf(room ? d->text + d->used : NULL, room, "%s%s", goes_on ? "\n    " : "", from);
    d->column = *piece == '\n' ? 0 : goes_on ? 3 + length : d->column + length;
}

static bool same_line(const entry *a, const entry *b)
{
    const bool when = a->when && b->when ? !strcmp(a->when, b->when) : a->when == b->when;
    return a->slots == b->slots && a->forms == b->forms && a->rows == b->rows && when;
}

static bool was_said(const description *d, const entry *e)
{
    for (const entry *f = d->all; f < d->all + d->n; f++)
        if (f->said && f->stored == e->stored && same_line(f, e) && !strcmp(f->what, e->what)) return true;
    return false;
}

/* All entries like the first one: those of weights stored in any way, then by how they are stored. */
static void say_what(description *d, const entry *first)
{
    static const char *const names[] = {"", " of [out,in]", " of [in,out]"};
    const char *comma = "";
    for (int s = ANY_WAY; s <= IN_OUT; s++) {
        bool any = false;
        for (entry *e = d->all; e < d->all + d->n; e++) {
            if ((int)e->stored != s || e->said || !same_line(first, e)) continue;
            if (!was_said(d, e)) {
                say(d, "%s", any && s != ANY_WAY ? "" : comma);
                say(d, "%s%s", *comma ? " " : "", e->what);
                comma = ",";
                any = true;
            }
            e->said = true;
        }
        if (any) say(d, "%s", names[s]);
    }
    const long long few = fmoe_few_rows(d->cpu->intel);
    if (first->when) say(d, ","), say(d, " %s", first->when);
    if (first->rows == FEW) say(d, ","), say(d, " 1 to %lld rows an expert", few);
    if (first->rows == MANY) say(d, ","), say(d, " from %lld rows", few + 1);
    bool opened = false;
    for (int form = 0; form < FMOE_FORMS; form++)
        if (first->forms >> form & 1) {
            say(d, "%s", opened ? ";" : "");
            say(d, "%s%s", opened ? " " : " (", fmoe_form_name((fmoe_form)form));
            opened = true;
        }
    say(d, first->forms ? "):" : ":");
}

size_t fmoe_cpu_describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    description d = {.p = p, .cpu = cpu, .dtype = p->d.dtype, .work = cpu->work_type, .text = text, .room = n};
    if (p->d.op == FMOE_OP_EXPERTS) describe_experts(&d);
    else if (p->d.op == FMOE_OP_GROUPED_MATMUL) describe_gmm(&d);
    else describe_rows(&d);
    for (entry *e = d.all; e < d.all + d.n; e++) {
        if (e->said) continue;
        say_what(&d, e);
        for (int slot = 0; slot < FMOE_SLOTS; slot++) {
            const char *name = e->slots >> slot & 1 ? fmoe_kernel_name(&cpu->k, slot) : NULL;
            if (name) say(&d, " %s", name);
        }
        say(&d, "\n");
    }
    return d.used;
}
