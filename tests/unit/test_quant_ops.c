/* SPDX-License-Identifier: Apache-2.0
 *
 * test_quant_ops.c - grouped matmul and block on quantised weights have the bits of those on decoded ones. */
#include "unit/quantised.h"

#include "cpu/kernels/kernels.h"

/* ---- grouped matmul ---- */

/* y and dx of one set of weights; the list form has arrays of E in the place of each tensor. */
typedef struct matmul {
    fmoe_desc d;
    int64_t R;
    fmoe_gmm_args a;             /* in */
    const fmoe_tensor *dy;       /* in */
    fmoe_tensor *y, *dx, *db;    /* out, of all rows */
    fmoe_tensor *ys, *dxs, *dbs; /* views of them by group */
    uint32_t flags;              /* of the backward */
} matmul;

static void run_matmul(matmul *m)
{
    fmoe_plan plan;
    fmoe_run run = FMOE_RUN_INIT;
    fmoe_gmm_args a = m->a;
    CHECK_STATUS(fmoe_plan_create(&plan, &m->d), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, m->R, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    a.y = a.list ? m->ys : m->y;
    CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, m->R, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    run.flags = m->flags;
    a.y = a.bias = NULL;
    a.x = NULL; /* only dw needs it */
    a.dy = m->dy;
    a.dx = a.list ? m->dxs : m->dx;
    a.dbias = a.list ? m->dbs : m->db;
    CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &a, &run), FMOE_OK);
    fmoe_plan_destroy(&plan);
}

/* Rows of t from one group to the next; per: columns or, of a bias, one row a group. */
static fmoe_tensor *by_group(const fmoe_tensor *t, const int64_t *size, int64_t E)
{
    fmoe_tensor *list = test_alloc((size_t)E * sizeof *list);
    const int dtype = fmoe_tensor_dtype(t);
    for (int64_t e = 0, at = 0; e < E; at += size[e++])
        list[e] = *tensor_over((char *)t->data + (size_t)(at * t->shape[1]) * fmoe_dtype_size(dtype), dtype,
                               SHAPE(size[e], t->shape[1]), NULL);
    return list;
}

static fmoe_tensor *bias_by_group(const fmoe_tensor *t, int64_t E)
{
    fmoe_tensor *list = test_alloc((size_t)E * sizeof *list);
    const int dtype = fmoe_tensor_dtype(t);
    for (int64_t e = 0; e < E; e++)
        list[e] = *tensor_over((char *)t->data + (size_t)(e * t->shape[1]) * fmoe_dtype_size(dtype), dtype,
                               SHAPE(t->shape[1]), NULL);
    return list;
}

static void compare_matmuls(const char *level, int f, int64_t K, int64_t N, int64_t most, int dtype)
{
    const int64_t E = 1 + test_below(4);
    const bool list = test_below(3) == 0, in_out = test_below(2), add = test_below(3) == 0;
    const bool halves = !list && !in_out && N % 2 == 0 && test_below(3) == 0;
    int64_t size[4], R = 0;
    for (int64_t e = 0; e < E; e++) R += size[e] = test_below(4) ? test_below(most + 1) : 0;
    const int64_t rows = R + (list ? 0 : test_below(3)); /* some past the last group */
    quantised w = quant_draw(&quant_formats[f], E, in_out ? K : N, in_out ? N : K, halves);
    if (in_out) w.q.flags |= FMOE_QUANT_IN_OUT;
    fmoe_quant plain_meaning = w.q;
    plain_meaning.flags &= ~(uint32_t)FMOE_QUANT_IN_OUT;
    quantised plain = w;
    plain.q = plain_meaning;
    const fmoe_tensor *stored = quant_weights(&plain, dtype);
    fmoe_tensor *decoded = tensor_over(stored->data, dtype, SHAPE(E, K, N),
                                       in_out ? (const int64_t[]){K * N, N, 1} : (const int64_t[]){K * N, 1, K});
    matmul m[2] = {{.d = FMOE_DESC_INIT, .R = rows}};
    m[0].d.op = FMOE_OP_GROUPED_MATMUL, m[0].d.dtype = dtype, m[0].d.E = E;
    if (!list) m[0].d.K = K, m[0].d.N = N;
    const int out_type = test_below(2) ? dtype : FMOE_F32, dy_type = test_below(3) ? dtype : FMOE_F32;
    const fmoe_tensor *x = tensor_random(tensor_new(dtype, SHAPE(rows, K)), 1),
                      *dy = tensor_random(tensor_new(dy_type, SHAPE(rows, N)), 1),
                      *bias = test_below(2) ? tensor_random(tensor_new(FMOE_F32, SHAPE(E, N)), 1) : NULL;
    fmoe_tensor *sizes = tensor_new(I32, SHAPE(E));
    for (int64_t e = 0; e < E; e++) tensor_set(sizes, e, (double)size[e]);
    m[0].a = (fmoe_gmm_args){.size = sizeof m[0].a, .list = list};
    m[0].a.x = list ? by_group(x, size, E) : x;
    m[0].a.bias = list && bias ? bias_by_group(bias, E) : bias;
    m[0].a.sizes = list ? NULL : sizes;
    m[0].dy = list ? by_group(dy, size, E) : dy;
    m[0].flags = add ? FMOE_ADD_DX : 0;
    m[1] = m[0];
    m[0].a.w = list ? tensor_slices(decoded) : decoded;
    m[1].a.w = list ? tensor_slices(w.codes) : w.codes;
    m[1].a.quant = list ? quant_slices(&w.q, E) : &w.q;
    m[1].d.flags = FMOE_QUANT;
    for (int threads = 1; threads <= 2; threads++) {
        for (int i = 0; i < 2; i++) {
            m[i].d.threads = threads;
            m[i].y = tensor_fill(tensor_new(out_type, SHAPE(rows, N)), 3);
            m[i].dx = tensor_fill(tensor_new(dtype, SHAPE(rows, K)), 2);
            m[i].db = tensor_new(FMOE_F32, SHAPE(E, N));
            m[i].ys = by_group(m[i].y, size, E), m[i].dxs = by_group(m[i].dx, size, E);
            m[i].dbs = bias_by_group(m[i].db, E);
            run_matmul(&m[i]);
        }
        const int64_t wrong[3] = {differences(m[0].y, m[1].y), differences(m[0].dx, m[1].dx),
                                  differences(m[0].db, m[1].db)};
        if (wrong[0] || wrong[1] || wrong[2])
            TEST_FAIL(
                "%s, %s, dtype %d, %d threads: y %d, dx %d, dbias %d differ (K=%d N=%d E=%d R=%d list=%d in_out=%d "
                "halves=%d y=%d dy=%d)",
                level, quant_formats[f].name, dtype, threads, (int)wrong[0], (int)wrong[1], (int)wrong[2], (int)K,
                (int)N, (int)E, (int)R, list, in_out, halves, out_type, dy_type);
    }
}

TEST(the_grouped_matmul_has_the_bits_of_the_one_on_decoded_weights)
{
    for (int level = 0; level < fmoe_cpu_level_count() && fmoe_cpu_level_available(level); level++) {
        const char *name = fmoe_cpu_level_name(level);
        CHECK_STATUS(fmoe_cpu_set_max_isa(name), FMOE_OK);
        for (int f = 0; f < 4 * FORMATS; f++) {
            const int64_t K = test_below(2) ? 64 * (1 + test_below(4)) : 1 + test_below(200),
                          N = test_below(2) ? 64 * (1 + test_below(3)) : 1 + test_below(200);
            compare_matmuls(name, f % FORMATS, K, N, test_below(2) ? 5 : 40, 1 + (int)test_below(3));
        }
        for (int f = 0; f < 6 && level; f++) compare_matmuls(name, f, 1152, 704, f % 2 ? 3 : 100, FMOE_BF16);
    }
    fmoe_cpu_set_max_isa(NULL);
}

/* Groups of a list have sizes of their own, and so have their codes. */
TEST(matrices_of_a_list_differ_in_size)
{
    enum { E = 3 };
    static const int64_t K[E] = {65, 7, 128}, N[E] = {9, 64, 33}, M[E] = {4, 0, 2};
    for (int turned = 0; turned < 2; turned++)
        for (int f = 0; f < FORMATS; f++) {
            fmoe_tensor x[E], w[E], codes[E], scale[E], zeros[E], scale2[E], y[2][E], dy[E], dx[2][E];
            fmoe_quant q = FMOE_QUANT_INIT;
            for (int e = 0; e < E; e++) {
                const quantised one = turned ? quant_draw(&quant_formats[f], 1, K[e], N[e], false)
                                             : quant_draw(&quant_formats[f], 1, N[e], K[e], false);
                q = one.q;
                codes[e] = tensor_slices(one.codes)[0];
                scale[e] = tensor_slices((fmoe_tensor *)(uintptr_t)one.q.scale)[0];
                if (q.zeros) zeros[e] = tensor_slices((fmoe_tensor *)(uintptr_t)one.q.zeros)[0];
                if (q.scale2) scale2[e] = *one.q.scale2;
                w[e] = *tensor_over(quant_weights(&one, FMOE_BF16)->data, FMOE_BF16, SHAPE(K[e], N[e]),
                                    turned ? (const int64_t[]){N[e], 1} : (const int64_t[]){1, K[e]});
                x[e] = *tensor_random(tensor_new(FMOE_BF16, SHAPE(M[e], K[e])), 1);
                dy[e] = *tensor_random(tensor_new(FMOE_BF16, SHAPE(M[e], N[e])), 1);
                for (int i = 0; i < 2; i++) {
                    y[i][e] = *tensor_new(FMOE_BF16, SHAPE(M[e], N[e]));
                    dx[i][e] = *tensor_new(FMOE_BF16, SHAPE(M[e], K[e]));
                }
            }
            q.scale = scale, q.zeros = q.zeros ? zeros : NULL, q.scale2 = q.scale2 ? scale2 : NULL;
            if (turned) q.flags |= FMOE_QUANT_IN_OUT;
            for (int i = 0; i < 2; i++) {
                matmul m = {.d = FMOE_DESC_INIT, .R = 6, .dy = dy, .ys = y[i], .dxs = dx[i]};
                m.d.op = FMOE_OP_GROUPED_MATMUL, m.d.dtype = FMOE_BF16, m.d.E = E, m.d.flags = i ? FMOE_QUANT : 0;
                m.a = (fmoe_gmm_args){.size = sizeof m.a, .x = x, .w = i ? codes : w, .list = 1};
                m.a.quant = i ? &q : NULL;
                run_matmul(&m);
            }
            for (int e = 0; e < E; e++) {
                CHECK(differences(&y[0][e], &y[1][e]) == 0);
                CHECK(differences(&dx[0][e], &dx[1][e]) == 0);
            }
        }
}

/* The reference itself on codes, by the sums written out. */
TEST(a_grouped_matmul_of_f64_reads_codes)
{
    enum { E = 2, K = 70, N = 6, M = 3 };
    for (int turned = 0; turned < 2; turned++) {
        quantised w =
            turned ? quant_draw(&quant_formats[0], E, K, N, false) : quant_draw(&quant_formats[0], E, N, K, false);
        const fmoe_tensor *decoded = quant_weights(&w, FMOE_F32);
        if (turned) w.q.flags |= FMOE_QUANT_IN_OUT;
        fmoe_tensor *sizes = tensor_fill(tensor_new(I32, SHAPE(E)), M);
        matmul m = {.d = FMOE_DESC_INIT, .R = E * M};
        m.d.op = FMOE_OP_GROUPED_MATMUL, m.d.dtype = FMOE_F64, m.d.E = E, m.d.K = K, m.d.N = N, m.d.flags = FMOE_QUANT;
        const fmoe_tensor *x = tensor_random(tensor_new(FMOE_F64, SHAPE(E * M, K)), 1);
        m.dy = tensor_random(tensor_new(FMOE_F64, SHAPE(E * M, N)), 1);
        m.a = (fmoe_gmm_args){.size = sizeof m.a, .x = x, .w = w.codes, .sizes = sizes, .quant = &w.q};
        m.y = tensor_new(FMOE_F64, SHAPE(E * M, N)), m.dx = tensor_new(FMOE_F64, SHAPE(E * M, K));
        run_matmul(&m);
#define W(e, k, n) tensor_get(decoded, turned ? ((e) * K + (k)) * N + (n) : ((e) * N + (n)) * K + (k))
        for (int64_t r = 0; r < E * M; r++) {
            for (int64_t n = 0; n < N; n++) {
                double sum = 0;
                for (int64_t k = 0; k < K; k++) sum += tensor_get(x, r * K + k) * W(r / M, k, n);
                CHECK(fabs(tensor_get(m.y, r * N + n) - sum) < 1e-12);
            }
            for (int64_t k = 0; k < K; k++) {
                double sum = 0;
                for (int64_t n = 0; n < N; n++) sum += tensor_get(m.dy, r * N + n) * W(r / M, k, n);
                CHECK(fabs(tensor_get(m.dx, r * K + k) - sum) < 1e-12);
            }
        }
#undef W
    }
}

TEST(bad_descriptors_of_a_grouped_matmul_are_named)
{
    enum { E = 2, K = 64, N = 12, R = 5 };
    const quantised w = quant_draw(&quant_formats[0], E, N, K, false),
                    other = quant_draw(&quant_formats[0], E, N, 66, false);
    fmoe_quant q = w.q;
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_GROUPED_MATMUL, d.dtype = FMOE_BF16, d.E = E, d.K = K, d.N = N, d.flags = FMOE_QUANT;
    fmoe_plan plan, plain;
    fmoe_run run = FMOE_RUN_INIT;
    CHECK_STATUS(fmoe_plan_create(&plan, &d), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, R, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    d.flags = 0;
    CHECK_STATUS(fmoe_plan_create(&plain, &d), FMOE_OK);
    fmoe_tensor *y = tensor_new(FMOE_BF16, SHAPE(R, N)), *sizes = tensor_fill(tensor_new(I32, SHAPE(E)), 2);
    const fmoe_tensor *x = tensor_random(tensor_new(FMOE_BF16, SHAPE(R, K)), 1);
    fmoe_gmm_args a = {.size = sizeof a, .x = x, .w = w.codes, .sizes = sizes, .y = y, .quant = &q};
#define BAD(set, status, part)                                                                                         \
    do {                                                                                                               \
        tensor_fill(y, 7);                                                                                             \
        set;                                                                                                           \
        CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), status);                                             \
        CHECK_ERROR_HAS(part);                                                                                         \
        for (int64_t i = 0; i < R * N; i++) CHECK(tensor_get(y, i) == 7);                                              \
        q = w.q, a.w = w.codes;                                                                                        \
    } while (0)
    BAD(q.size = 8, FMOE_ERR_ABI, "fmoe_quant.size is 8");
    BAD(q.code = 9, FMOE_ERR_ARG, "quant.code is 9");
    BAD(q.flags |= 8, FMOE_ERR_ARG, "quant.flags");
    BAD(q.flags |= FMOE_QUANT_IN_OUT, FMOE_ERR_PLAN, "w has K = 12");
    BAD(q.flags |= FMOE_QUANT_IN_OUT | FMOE_QUANT_HALVES, FMOE_ERR_ARG, "IN_OUT");
    BAD(q.group_cols = 32, FMOE_ERR_SHAPE, "quant.scale has columns of groups = 1");
    BAD(q.group_rows = 3, FMOE_ERR_SHAPE, "quant.scale has rows of groups = 12");
    BAD(q.scale = NULL, FMOE_ERR_NULL, "quant.scale is NULL");
    BAD(a.w = NULL, FMOE_ERR_NULL, "w is NULL");
    BAD(a.w = other.codes, FMOE_ERR_SHAPE, "w has bytes of codes = 33");
    BAD(a.w = tensor_new(FMOE_BF16, SHAPE(E, K, N)), FMOE_ERR_DTYPE, "w has dtype bf16");
#undef BAD
    CHECK_STATUS(fmoe_grouped_matmul_forward(plain, &a, &run), FMOE_ERR_PLAN);
    CHECK_ERROR_HAS("quant is given, but the plan was made without FMOE_QUANT");
    fmoe_gmm_args back = {.size = sizeof back, .x = x, .w = w.codes, .sizes = sizes, .dy = y, .quant = &q};
    back.dw = tensor_new(FMOE_BF16, SHAPE(E, K, N));
    CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &back, &run), FMOE_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("dw is given, but quant");
    back.dw = NULL, back.dbias = tensor_new(FMOE_F32, SHAPE(E, N));
    CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &back, &run), FMOE_OK); /* nobody reads the codes */
    CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
    fmoe_plan_destroy(&plan);
    fmoe_plan_destroy(&plain);
}

/* ---- block: experts and the shared expert quantised, each or both ---- */

TEST(a_block_has_the_bits_of_the_one_on_decoded_weights)
{
    for (int draw = 0; draw < 2 * FORMATS; draw++) {
        const int f = draw % FORMATS, dtype = 1 + (int)test_below(3);
        const bool experts = draw % 3 != 1, shared = draw % 3 != 2, gated = test_below(3), interleaved = test_below(2);
        fmoe_desc d = FMOE_DESC_INIT;
        d.op = FMOE_OP_BLOCK, d.dtype = dtype, d.H = test_below(2) ? 128 : 1 + test_below(90), d.I = 1 + test_below(70);
        d.E = 4, d.k = 2, d.shared_I = test_below(2) ? 64 : 1 + test_below(70);
        d.act = gated ? FMOE_ACT_SWIGLU : FMOE_ACT_RELU2;
        d.flags = (interleaved ? FMOE_INTERLEAVED : 0) | (test_below(2) ? FMOE_SHARED_GATE : 0);
        d.threads = 2;
        const int64_t T = 1 + test_below(20), H = d.H, S = d.shared_I, C = gated ? 2 * d.I : d.I,
                      SC = gated ? 2 * S : S;
        const bool halves = gated && !interleaved && test_below(2);
        const quantised w1 = quant_draw(&quant_formats[f], d.E, C, H, halves),
                        w2 = quant_draw(&quant_formats[f], d.E, H, d.I, false),
                        s1 = quant_draw(&quant_formats[(f + 1) % FORMATS], 1, SC, H, halves),
                        s2 = quant_draw(&quant_formats[(f + 1) % FORMATS], 1, H, S, false);
        fmoe_block_args a = {.size = sizeof a, .x = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1)};
        a.w_router = tensor_random(tensor_new(dtype, SHAPE(d.E, H)), 1);
        if (d.flags & FMOE_SHARED_GATE) a.shared_gate = tensor_random(tensor_new(dtype, SHAPE(1, H)), 1);
        const fmoe_tensor *dout = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
        const fmoe_weights plain = {.w1 = quant_weights(&w1, dtype), .w2 = quant_weights(&w2, dtype)},
                           plain_shared = {.w1 = quant_weights(&s1, dtype), .w2 = quant_weights(&s2, dtype)},
                           coded = {.w1 = w1.codes, .w2 = w2.codes, .quant1 = &w1.q, .quant2 = &w2.q},
                           coded_shared = {.w1 = s1.codes, .w2 = s2.codes, .quant1 = &s1.q, .quant2 = &s2.q};
        fmoe_tensor *out[2], *dx[2];
        for (int i = 0; i < 2; i++) {
            fmoe_plan plan;
            fmoe_run run = FMOE_RUN_INIT;
            d.flags = (d.flags & ~(uint32_t)FMOE_QUANT) | (i ? FMOE_QUANT : 0);
            CHECK_STATUS(fmoe_plan_create(&plan, &d), FMOE_OK);
            a.w = i && experts ? coded : plain;
            a.shared = i && shared ? coded_shared : plain_shared;
            a.logits = tensor_new(FMOE_F32, SHAPE(T, d.E));
            a.ids = tensor_new(I32, SHAPE(T, d.k));
            a.weights = tensor_new(FMOE_F32, SHAPE(T, d.k));
            a.out = out[i] = tensor_new(dtype, SHAPE(T, H));
            CHECK_STATUS(fmoe_saved_bytes(plan, T, &a.saved_bytes), FMOE_OK);
            a.saved = test_alloc(a.saved_bytes);
            CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, T, &run.workspace_bytes), FMOE_OK);
            run.workspace = test_alloc(run.workspace_bytes);
            CHECK_STATUS(fmoe_block_forward(plan, &a, &run), FMOE_OK);
            a.out = NULL, a.dout = dout, a.dx = dx[i] = tensor_new(dtype, SHAPE(T, H));
            CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, T, &run.workspace_bytes), FMOE_OK);
            run.workspace = test_alloc(run.workspace_bytes);
            CHECK_STATUS(fmoe_block_backward(plan, &a, &run), FMOE_OK);
            if (i && shared) {
                a.dshared.w2 = tensor_new(dtype, SHAPE(1, H, S));
                CHECK_STATUS(fmoe_block_backward(plan, &a, &run), FMOE_ERR_UNSUPPORTED);
                CHECK_ERROR_HAS("dshared w2 is given, but shared quant2");
                a.dshared.w2 = NULL;
            }
            a.dout = a.dx = NULL;
            fmoe_plan_destroy(&plan);
        }
        if (differences(out[0], out[1]) || differences(dx[0], dx[1]))
            TEST_FAIL("%s, dtype %d: out %d, dx %d differ (T=%d H=%d I=%d S=%d flags=%u)", quant_formats[f].name, dtype,
                      (int)differences(out[0], out[1]), (int)differences(dx[0], dx[1]), (int)T, (int)H, (int)d.I,
                      (int)S, d.flags);
    }
}
