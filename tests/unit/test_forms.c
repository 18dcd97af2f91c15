/* SPDX-License-Identifier: Apache-2.0
 *
 * test_forms.c - which form of a product runs on the CPU: the choice itself, for every level on any machine. */
#include "test.h"

#include "cpu/ops/ops.h"

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
    /* That of quantised weights is chosen by their descriptor (fmoe_fits_coded_few_rows). */
    const uint64_t products = (BIT(wgrad_f32) - 1) & ~(BIT(gemm_f32) - 1) & ~BIT(gemm_coded_few_rows_bf16);
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
