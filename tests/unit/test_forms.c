/* SPDX-License-Identifier: Apache-2.0
 *
 * test_forms.c - which form of a product runs on the CPU: the choice itself, for every level on any machine; and that
 * fmoe_plan_describe names the kernels that a run calls, all of them and no other. For the latter, every pointer of a
 * plan's kernel table is replaced by a function that notes its slot and goes on to the kernel. No kernel is called but
 * through the table. */
#include <stdatomic.h>

#include "tensors.h"
#include "test.h"

#include "cpu/ops/ops.h"
#include "plan.h"

/* ---- the choice, without the hardware ---- */

#define BIT(field) ((uint64_t)1 << FMOE_SLOT_##field)

/* The kernels of every level that a choice depends on. */
enum { C, AVX2, AVX512, AVX512_BF16, AMX_BF16, NEON, NEON_BF16, LEVELS };
static const char *const level_names[LEVELS] = {"c", "avx2", "avx512", "avx512_bf16", "amx_bf16", "neon", "neon_bf16"};
#define KMAJOR_F32                                                                                                     \
    (BIT(gemm_kmajor_f32) | BIT(pack_kmajor_f32) | BIT(pack_kmajor_widen_bf16) | BIT(pack_kmajor_widen_f16))
#define WIDEN_INPLACE (BIT(gemm_nmajor_inplace_widen_bf16) | BIT(gemm_nmajor_inplace_widen_f16))
#define AVX512_HAS                                                                                                     \
    (BIT(gemm_f32) | KMAJOR_F32 | BIT(gemm_kmajor_few_rows_f32) | BIT(gemm_nmajor_inplace_f32) | BIT(wgrad_f32))
#define BF16_HAS (BIT(gemm_bf16) | BIT(wgrad_bf16))
#define KMAJOR_BF16                                                                                                    \
    (BIT(gemm_kmajor_bf16) | BIT(pack_kmajor_bf16) | BIT(gemm_kmajor_few_rows_bf16) | BIT(gemm_nmajor_inplace_bf16))
#define AMX_HAS (BIT(pack_wgrad_left_pairs) | BIT(pack_tiles) | BIT(gemm_inplace))
static const uint64_t level_has[LEVELS] = {
    BIT(gemm_f32),
    BIT(gemm_f32) | KMAJOR_F32 | BIT(gemm_nmajor_inplace_f32) | WIDEN_INPLACE | BIT(wgrad_f32),
    AVX512_HAS,
    AVX512_HAS | BF16_HAS | KMAJOR_BF16,
    AVX512_HAS | BF16_HAS | AMX_HAS,
    BIT(gemm_f32),
    BIT(gemm_f32) | BIT(gemm_bf16),
};
#define CHOSEN_BY (AVX512_HAS | BF16_HAS | KMAJOR_BF16 | AMX_HAS | WIDEN_INPLACE)

TEST(levels_of_this_build_have_these_kernels)
{
    int known = 0;
    for (int i = 0; i < fmoe_cpu_level_count(); i++)
        for (int j = 0; j < LEVELS; j++) {
            if (strcmp(level_names[j], fmoe_cpu_level_name(i))) continue;
            fmoe_kernels k;
            fmoe_kernels_fill(&k, i);
            CHECK_EQ(fmoe_kernels_has(&k) & CHOSEN_BY, level_has[j]);
            known++;
        }
    CHECK_EQ(known, fmoe_cpu_level_count());
}

/* A regular product of a level: 64 columns, one matrix, weights and rows of one type. */
static fmoe_form_input regular(int level, int dtype, bool kmajor, int64_t rows)
{
    const bool pairs = dtype == FMOE_BF16 && level_has[level] & BIT(gemm_bf16);
    const int work = fmoe_work_type(pairs);
    return (fmoe_form_input){.has = level_has[level],
                             .pairs = pairs,
                             .gather = pairs && level_has[level] & BIT(pack_wgrad_left_pairs),
                             .a_type = work,
                             .w_type = dtype,
                             .kmajor = kmajor,
                             .matrices = 1,
                             .alike = true,
                             .columns = 64,
                             .rows = rows,
                             .R = 4 * rows,
                             .experts = 4};
}

TEST(forms_of_regular_products)
{
    enum { N = FMOE_FORM_NMAJOR_INPLACE, FEW = FMOE_FORM_FEW_ROWS, P = FMOE_FORM_PACK, PK = FMOE_FORM_PACK_KMAJOR };
    static const struct {
        int dtype, kmajor, rows, want[LEVELS]; /* c, avx2, avx512, avx512_bf16, amx_bf16, neon, neon_bf16 */
    } all[] = {
        {FMOE_F32, 1, 1, {P, PK, FEW, FEW, FEW, P, P}}, {FMOE_F32, 1, 7, {P, PK, FEW, FEW, FEW, P, P}},
        {FMOE_F32, 1, 8, {P, PK, PK, PK, PK, P, P}},    {FMOE_F32, 1, 300, {P, PK, PK, PK, PK, P, P}},
        {FMOE_F32, 0, 1, {P, N, N, N, N, P, P}},        {FMOE_F32, 0, 300, {P, N, N, N, N, P, P}},
        {FMOE_BF16, 1, 1, {P, PK, PK, FEW, P, P, P}},   {FMOE_BF16, 1, 7, {P, PK, PK, FEW, P, P, P}},
        {FMOE_BF16, 1, 8, {P, PK, PK, PK, P, P, P}},    {FMOE_BF16, 0, 1, {P, N, P, N, P, P, P}},
        {FMOE_BF16, 0, 300, {P, N, P, N, P, P, P}},     {FMOE_F16, 1, 1, {P, PK, PK, PK, PK, P, P}},
        {FMOE_F16, 1, 300, {P, PK, PK, PK, PK, P, P}},  {FMOE_F16, 0, 1, {P, N, P, P, P, P, P}},
        {FMOE_F16, 0, 300, {P, N, P, P, P, P, P}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int level = 0; level < LEVELS; level++) {
            fmoe_form_input in = regular(level, all[i].dtype, all[i].kmajor, all[i].rows);
            const fmoe_form got = fmoe_choose_form(&in);
            if ((int)got != all[i].want[level])
                TEST_FAIL("%s, dtype %d, kmajor %d, %d rows: %s, not %s", level_names[level], all[i].dtype,
                          all[i].kmajor, all[i].rows, fmoe_form_name(got),
                          fmoe_form_name((fmoe_form)all[i].want[level]));
            in.rows = 0; /* no rows, no work */
            CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_NONE);
            in.rows = 1;
            in.prepacked = true; /* panels as packing makes them, whatever the rows */
            const bool kmajor = got == FMOE_FORM_FEW_ROWS || got == FMOE_FORM_PACK_KMAJOR;
            CHECK_EQ(fmoe_choose_form(&in), kmajor ? FMOE_FORM_PREPACKED_KMAJOR : FMOE_FORM_PREPACKED);
        }
}

TEST(form_for_few_rows)
{
    for (int intel = 0; intel < 2; intel++)
        for (int64_t rows = 1; rows < 20; rows++) {
            fmoe_form_input in = regular(AVX512_BF16, FMOE_BF16, true, rows);
            in.intel = intel;
            const fmoe_form want = rows <= (intel ? 10 : 7) ? FMOE_FORM_FEW_ROWS : FMOE_FORM_PACK_KMAJOR;
            CHECK_EQ(fmoe_choose_form(&in), want);
            in.rows = 100; /* the average decides, not this expert */
            CHECK_EQ(fmoe_choose_form(&in), want);
            in.a_type = FMOE_F32; /* rows to widen first */
            CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK_KMAJOR);
        }
    fmoe_form_input in = regular(AVX512_BF16, FMOE_BF16, true, 1);
    in.columns = 63;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK_KMAJOR);
    in.columns = 128; /* chunks of one k of n-major weights */
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK_KMAJOR);
    in.columns = 32;
    in.matrices = 2;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_FEW_ROWS);
    in.alike = false;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK_KMAJOR);
    in = regular(AVX512_BF16, FMOE_BF16, true, 7);
    in.R++; /* 29 rows of 4 experts */
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK_KMAJOR);
}

TEST(form_of_nmajor_weights)
{
    fmoe_form_input in = regular(AVX512_BF16, FMOE_BF16, false, 50);
    in.columns = 256;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_NMAJOR_INPLACE);
    in.columns = 255;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK);
    in.columns = 32;
    in.matrices = 2;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK);
    in = regular(AVX2, FMOE_BF16, false, 50);
    CHECK_EQ(fmoe_form_gemm(fmoe_choose_form(&in), false, FMOE_BF16), FMOE_SLOT_gemm_nmajor_inplace_widen_bf16);
    CHECK_EQ(fmoe_form_gemm(fmoe_choose_form(&in), false, FMOE_F16), FMOE_SLOT_gemm_nmajor_inplace_widen_f16);
    in.a_type = FMOE_BF16;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK);
}

TEST(form_by_tiles)
{
    for (int level = 0; level < LEVELS; level++)
        for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++)
            for (int kmajor = 0; kmajor < 2; kmajor++) {
                fmoe_form_input in = regular(level, dtype, kmajor, 1);
                const fmoe_form without = fmoe_choose_form(&in);
                in.room_for_tiles = true;
                const bool tiles = level == AMX_BF16 && dtype == FMOE_BF16 && kmajor;
                CHECK_EQ(fmoe_choose_form(&in), tiles ? FMOE_FORM_TILES : without);
            }
    /* The f32 products of a plan that gathers: as on any level below, but never n-major in place. */
    fmoe_form_input in = regular(AMX_BF16, FMOE_F16, false, 100);
    in.w_type = FMOE_F32;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_NMAJOR_INPLACE);
    in.gather = true;
    CHECK_EQ(fmoe_choose_form(&in), FMOE_FORM_PACK);
}

/* Whatever is chosen is there, and no kernel of a product is there that no plan calls: `fusedmoe info` names them. */
TEST(tables_have_the_kernels_that_are_chosen_and_no_other)
{
    const uint64_t products = (BIT(wgrad_f32) - 1) & ~(BIT(gemm_f32) - 1);
    for (int level = 0; level < fmoe_cpu_level_count(); level++) {
        fmoe_kernels k;
        fmoe_kernels_fill(&k, level);
        const uint64_t has = fmoe_kernels_has(&k);
        uint64_t runs = 0;
        for (int i = 0; i < 3 << 9; i++) {
            const int dtype = 1 + (i >> 9);
            fmoe_form_input in = {.has = has, .w_type = dtype, .rows = 1, .experts = 1, .R = i & 1 ? 1 : 100};
            const bool own_pairs = dtype == FMOE_BF16 && has & BIT(gemm_bf16);
            in.pairs = own_pairs && !(i & 2);
            in.gather = own_pairs && has & BIT(pack_wgrad_left_pairs);
            in.a_type = i & 4 && in.pairs == own_pairs ? dtype : fmoe_work_type(in.pairs);
            in.matrices = i & 8 && in.pairs == own_pairs ? 2 : 1; /* the router's backward in f32 has one */
            const bool kmajor[2] = {i & 16, in.matrices == 2 ? i & 32 : i & 16};
            in.kmajor = kmajor[0] && kmajor[1];
            in.alike = kmajor[0] == kmajor[1];
            in.columns = 64 / in.matrices - (i & 64 ? 1 : 0);
            in.prepacked = i & 128;
            in.room_for_tiles = i & 256;
            const fmoe_form form = fmoe_choose_form(&in);
            runs |= (uint64_t)1 << fmoe_form_gemm(form, in.pairs, dtype);
            for (int j = 0; j < 2 && form != FMOE_FORM_TILES; j++)
                if (fmoe_is_packed_now(form)) runs |= (uint64_t)1 << fmoe_form_pack(form, in.pairs, dtype, kmajor[j]);
            for (int j = 0; j < 2; j++) runs |= (uint64_t)1 << fmoe_wgrad_pack(has, in.pairs, dtype, j);
        }
        if ((runs ^ has) & products) TEST_FAIL("level %s: slots %" PRIx64, k.isa, (runs ^ has) & products);
    }
}

TEST(chunks_and_panels)
{
    const uint64_t bf16 = level_has[AVX512_BF16];
    CHECK_EQ(fmoe_choose_chunk(bf16, true, false, false, false, 768, 2048), 1024);
    CHECK_EQ(fmoe_choose_chunk(bf16, true, false, true, false, 768, 2048), 512);  /* in place: two panels' k */
    CHECK_EQ(fmoe_choose_chunk(bf16, true, false, true, false, 770, 2048), 256);  /* packed: four panels' */
    CHECK_EQ(fmoe_choose_chunk(bf16, true, false, true, true, 768, 2048), 256);   /* LoRA terms are packed */
    CHECK_EQ(fmoe_choose_chunk(bf16, true, true, true, false, 768, 2048), 1024);  /* AMX: one panel */
    CHECK_EQ(fmoe_choose_chunk(bf16, false, false, true, false, 768, 2048), 128); /* f32 */
    CHECK_EQ(fmoe_choose_chunk(0, false, false, false, false, 1, 1), 32);
    for (int64_t K = 1; K < 5000; K += 7)
        for (int i = 0; i < 16; i++) {
            const int64_t chunk = fmoe_choose_chunk(bf16, i & 1, i & 2, i & 4, i & 8, 64, K), most = i & 1 ? 1024 : 512;
            CHECK(chunk % 32 == 0 && chunk > 0 && chunk <= most);
        }
    CHECK_EQ(fmoe_choose_panels(false, true, 1000, 8), 4);
    CHECK_EQ(fmoe_choose_panels(false, true, 16, 8), 2);
    CHECK_EQ(fmoe_choose_panels(false, true, 15, 8), 1);
    CHECK_EQ(fmoe_choose_panels(true, true, 1000, 8), 1);
    CHECK_EQ(fmoe_choose_panels(false, false, 1000, 8), 1);
    for (int64_t rows = 0; rows < 1000; rows++) {
        const int64_t part = fmoe_rows_of_task(rows);
        CHECK(part <= FMOE_TASK_ROWS && (rows == 0) == (part == 0));
        if (rows) CHECK_EQ((rows + part - 1) / part, (rows + FMOE_TASK_ROWS - 1) / FMOE_TASK_ROWS);
    }
}

TEST(forms_of_weight_gradients)
{
    for (int level = 0; level < LEVELS; level++)
        for (int i = 0; i < 16; i++) {
            const uint64_t has = level_has[level];
            const bool pairs = i & 1 && has & BIT(gemm_bf16), accumulate = i & 2, last = i & 4, lines = i & 8;
            const bool streams = lines && level != C && level != NEON && level != NEON_BF16;
            const fmoe_wgrad_form want = !last        ? FMOE_WGRAD_KEEP
                                         : accumulate ? FMOE_WGRAD_ADD
                                         : streams    ? FMOE_WGRAD_STREAM
                                                      : FMOE_WGRAD_STORE;
            CHECK_EQ(fmoe_choose_wgrad_form(has, pairs, accumulate, last, lines), want);
            CHECK_EQ(fmoe_wgrad_chunk(has, pairs), pairs || (has & BIT(wgrad_f32)) ? 1024 : 512);
            CHECK_EQ(fmoe_wgrad_pack(has, pairs, FMOE_BF16, true) == FMOE_SLOT_pack_wgrad_left_pairs,
                     pairs && level == AMX_BF16);
        }
}

/* ---- kernels that note that they were called ---- */

static fmoe_kernels real;
static _Atomic uint64_t called;

#define ARGS_gemm                                                                                                      \
    (int64_t r, int64_t kc, const void *const *a, int64_t s, const void *p, float *c, int64_t l, int f, fmoe_overlap *o)
#define PASS_gemm (r, kc, a, s, p, c, l, f, o)
#define ARGS_gemm_kmajor_few_rows                                                                                      \
    (int64_t r, int64_t kc, int64_t n, const void *const *a, const char *w, int64_t s, float *c, int64_t l, int f,     \
     fmoe_walk *p)
#define PASS_gemm_kmajor_few_rows (r, kc, n, a, w, s, c, l, f, p)
#define ARGS_gemm_nmajor_inplace                                                                                       \
    (int64_t r, int64_t kc, const void *const *a, const void *w, int64_t s, void *p, float *c, int64_t l, int f,       \
     fmoe_overlap *o)
#define PASS_gemm_nmajor_inplace (r, kc, a, w, s, p, c, l, f, o)
#define ARGS_pack (void *p, int64_t kc, int64_t col, const void *const *a, int64_t n)
#define PASS_pack (p, kc, col, a, n)
#define ARGS_wgrad                                                                                                     \
    (int64_t m, int64_t kc, const void *l, const void *p, const float *c, void *d, int64_t s, int t,                   \
     const fmoe_prefetch_rows *a)
#define PASS_wgrad (m, kc, l, p, c, d, s, t, a)
#define ARGS_pack_wgrad_left (void *d, int64_t kc, const void *const *r, int64_t n)
#define PASS_pack_wgrad_left (d, kc, r, n)
#define ARGS_pack_tiles (void *t, int64_t K, const void *const *r, int64_t n)
#define PASS_pack_tiles (t, K, r, n)
#define ARGS_gemm_inplace                                                                                              \
    (int64_t r, int64_t K, const void *t, const void *w, int64_t s, int64_t n, float *c, int64_t l, const void *x)
#define PASS_gemm_inplace (r, K, t, w, s, n, c, l, x)
#define ARGS_load (float *d, const void *s, int64_t n)
#define PASS_load (d, s, n)
#define ARGS_store (void *d, const float *s, int64_t n)
#define PASS_store (d, s, n)
#define ARGS_round (float *x, const float *b, int64_t n)
#define PASS_round (x, b, n)
#define ARGS_store_block (void *d, int64_t s, const float *c, int64_t m, int64_t n, bool t)
#define PASS_store_block (d, s, c, m, n, t)
#define ARGS_act_block                                                                                                 \
    (const fmoe_act_params *p, const float *g, const float *u, int64_t m, int64_t n, void *a, int64_t s, int t)
#define PASS_act_block (p, g, u, m, n, a, s, t)
#define ARGS_act_backward (const fmoe_act_params *p, const fmoe_act_rows *r)
#define PASS_act_backward (p, r)
#define ARGS_add_rows (float *s, const int64_t *t, int64_t f, const float *p, const float *c, int64_t r, int64_t n)
#define PASS_add_rows (s, t, f, p, c, r, n)
#define ARGS_axpy (float *y, float s, const float *x, int64_t n)
#define PASS_axpy (y, s, x, n)
#define ARGS_dot (const float *x, const float *y, int64_t n)
#define PASS_dot (x, y, n)
#define ARGS_softmax (double *x, int64_t n)
#define PASS_softmax (x, n)
#define ARGS_peak (int64_t n)
#define PASS_peak (n)
/* What comes before the call: the kernels of two types return something. */
#define RETURN_gemm
#define RESULT_gemm void
#define RETURN_gemm_kmajor_few_rows
#define RESULT_gemm_kmajor_few_rows void
#define RETURN_gemm_nmajor_inplace
#define RESULT_gemm_nmajor_inplace void
#define RETURN_pack
#define RESULT_pack void
#define RETURN_wgrad
#define RESULT_wgrad void
#define RETURN_pack_wgrad_left
#define RESULT_pack_wgrad_left void
#define RETURN_pack_tiles
#define RESULT_pack_tiles void
#define RETURN_gemm_inplace
#define RESULT_gemm_inplace void
#define RETURN_load
#define RESULT_load void
#define RETURN_store
#define RESULT_store void
#define RETURN_round
#define RESULT_round void
#define RETURN_store_block
#define RESULT_store_block void
#define RETURN_act_block
#define RESULT_act_block void
#define RETURN_act_backward
#define RESULT_act_backward void
#define RETURN_add_rows
#define RESULT_add_rows void
#define RETURN_axpy
#define RESULT_axpy void
#define RETURN_softmax
#define RESULT_softmax void
#define RETURN_dot return
#define RESULT_dot float
#define RETURN_peak return
#define RESULT_peak double

#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field)                                                                                 \
    static RESULT_##type noted_##field ARGS_##type                                                                     \
    {                                                                                                                  \
        atomic_fetch_or(&called, BIT(field));                                                                          \
        RETURN_##type real.field PASS_##type;                                                                          \
    }
#include "cpu/kernels/kernels.inc"

static void note_calls_of(const fmoe_plan_impl *p)
{
    for (int i = 0; i < PART_COUNT; i++)
        if (p->part[i]) note_calls_of(p->part[i]);
    if (!p->priv) return;
    fmoe_kernels *k = &((fmoe_cpu_plan *)p->priv)->k;
    real = *k;
#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field)                                                                                 \
    if (k->field) k->field = noted_##field;
#include "cpu/kernels/kernels.inc"
}

/* ---- what a description says ---- */

/* Slots of the kernels that a text names; every name is that of a kernel in the table. */
static uint64_t slots_named(const char *text, size_t n)
{
    uint64_t slots = 0;
    for (size_t i = 0; i < n;) {
        const size_t length = strcspn(text + i, " \n");
        bool found = length == 0;
        for (int slot = 0; slot < FMOE_SLOTS && length; slot++) {
            const char *name = fmoe_kernel_name(&real, slot);
            if (!name || strlen(name) != length || strncmp(name, text + i, length)) continue;
            slots |= (uint64_t)1 << slot;
            found = true;
        }
        if (!found) TEST_FAIL("no kernel has the name %.*s", (int)length, text + i);
        i += length + 1;
    }
    return slots;
}

/* One pass of one case: the phrases and conditions of a description that are true of it. */
typedef struct facts {
    const char *yes[40]; /* products without how weights are stored */
    int n;
    const char *when[2];           /* conditions */
    bool out_in1, out_in2, packed; /* how W1 (or w) and W2 are stored; up and down by packed weights */
    int64_t R, active;             /* rows, and experts that have any */
} facts;

static void is_so(facts *f, bool condition, const char *phrase)
{
    if (condition) f->yes[f->n++] = phrase;
}

/* A phrase that ends in a type. */
static void is_so_in(facts *f, bool condition, const char *phrase, int dtype)
{
    char *text = test_alloc(strlen(phrase) + 10);
    sprintf(text, "%s in %s", phrase, dtype == FMOE_BF16 ? "bf16" : dtype == FMOE_F16 ? "f16" : "f32");
    is_so(f, condition, text);
}

static bool is_one_of(const char *const *all, int n, const char *word, size_t length)
{
    for (int i = 0; i < n; i++)
        if (all[i] && strlen(all[i]) == length && !strncmp(all[i], word, length)) return true;
    return false;
}

static bool starts(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

static bool product_is_true(const facts *f, const char *word, size_t n, bool packed)
{
    static const char *const by_packed[] = {"up", "down", "up.b1", "down.b2"};
    return is_one_of(f->yes, f->n, word, n) && (!is_one_of(by_packed, 4, word, n) || packed == f->packed);
}

/* "down da of [out,in]", "dw of experts without rows": whether any of it is true. */
static bool phrase_is_true(const facts *f, const char *phrase, size_t length, bool packed)
{
    const size_t way = strlen(" of [out,in]");
    if (phrase[length - 1] != ']') return product_is_true(f, phrase, length, packed);
    const bool out_in = starts(phrase + length - way, " of [out,in]");
    for (size_t i = 0; i < length - way;) {
        const size_t word = strcspn(phrase + i, " ");
        const bool second = starts(phrase + i, "da") || starts(phrase + i, "down"); /* W2's */
        if ((second ? f->out_in2 : f->out_in1) == out_in && product_is_true(f, phrase + i, word, packed)) return true;
        i += word + 1;
    }
    return false;
}

/* The part of a line before its colon. */
static bool line_is_true(const facts *f, const char *line, size_t length)
{
    bool any = false;
    char what[512];
    snprintf(what, sizeof what, "%.*s", (int)length, line);
    for (char *on; (on = strstr(what, "\n    "));) memmove(on, on + 4, strlen(on + 4) + 1); /* one long line */
    char *forms = strstr(what, " (");                                                       /* their names come last */
    if (forms) *forms = 0;
    const bool packed = strstr(what, ", packed beforehand") != NULL;
    for (char *at = what, *next; at; at = next) {
        next = strstr(at, ", ");
        if (next) *next = 0, next += 2;
        long long rows;
        if (sscanf(at, "1 to %lld rows an expert", &rows) == 1) {
            if (f->R > rows * f->active) return false;
        } else if (sscanf(at, "from %lld rows", &rows) == 1) {
            if (f->R <= (rows - 1) * f->active) return false;
        } else if (starts(at, "dy in") || !strcmp(at, "in stacks") || !strcmp(at, "in lists")) {
            if (!is_one_of(f->when, 2, at, strlen(at))) return false;
        } else if (strcmp(at, "packed beforehand")) {
            any |= phrase_is_true(f, at, strlen(at), packed);
        }
    }
    return any;
}

/* The kernels of all lines that are true, after the first one, which has none. */
static uint64_t described(const char *text, const facts *f)
{
    uint64_t slots = 0;
    for (const char *line = strchr(text, '\n') + 1; *line;) {
        const char *colon = strchr(line, ':'), *end = line - 1;
        do CHECK(strcspn(end + 1, "\n") < 120), end = strchr(end + 1, '\n');
        while (end && end[1] == ' '); /* lines that go on are indented */
        if (!colon || !end || colon > end) {
            TEST_FAIL("a line without kernels: %s", line);
            break;
        }
        if (line_is_true(f, line, (size_t)(colon - line))) slots |= slots_named(colon + 1, (size_t)(end - colon - 1));
        line = end + 1;
    }
    return slots;
}

static void list_slots(const char *what, uint64_t slots)
{
    for (int i = 0; i < FMOE_SLOTS; i++)
        if (slots >> i & 1) printf("    %s: %s\n", what, fmoe_kernel_name(&real, i));
}

/* `unless`: kernels that may have been named and not called. */
static void compare(const char *text, const facts *f, uint64_t unless, const char *what)
{
    const uint64_t calls = atomic_load(&called), named = described(text, f);
    if (!(calls & ~named) && !(named & ~calls & ~unless)) return;
    TEST_FAIL("%s: described and called differ\n%s", what, text);
    list_slots("called, not described", calls & ~named);
    list_slots("described, not called", named & ~calls & ~unless);
}

/* ---- runs ---- */

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
