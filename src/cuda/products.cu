// SPDX-License-Identifier: Apache-2.0
// products.cu - see products.cuh.
#include "products.cuh"

#include "sm90.cuh"

static bool hopper(const Layer &l) { return l.plan->path == FMOE_PATH_SM90 && l.rows > 0; }

static bool done(Layer &l, cudaError_t e)
{
    if (e != cudaSuccess && l.status == FMOE_OK) l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: launch of a product failed: %s", cudaGetErrorString(e));
    return true;
}

// ---- Tensor maps ----

// Weights of one part: rows n, columns k. K-major {k, n, e} in boxes of 64 x 128, N-major {n, k, e} in boxes of 64 x 64; the
// names are those of the product in which rows are n. `swap`: rows are the contraction.
struct WeightMap {
    bool ok, n_major;
};
static WeightMap weight_map(CUtensorMap *m, const Layer &l, const Mat &w, int64_t rows, int64_t cols, bool swap)
{
    const bool unit_cols = w.c == 1, unit_rows = w.r == 1;
    if (!unit_cols && !unit_rows) return {false, false};
    // The contiguous dimension is the inner one; whether that is k or n decides the product.
    const int64_t dim[3] = {unit_cols ? cols : rows, unit_cols ? rows : cols, l.E}, stride[3] = {1, unit_cols ? w.r : w.c, w.g};
    const bool n_major = unit_cols == swap;
    const int box[3] = {64, n_major ? 64 : 128, 1};
    return {sm90_map(m, l.dtype, w.p, dim, stride, box), n_major};
}

// Rows of an activation: {column, row}, boxes of 64 columns x `box_rows` rows.
static bool rows_map2(CUtensorMap *m, const Layer &l, const void *p, int64_t cols, int box_rows) { return sm90_map2(m, l.dtype, p, cols, l.rows, cols, 64, box_rows); }

// And with the column cut in parts: {column, part, row}.
static bool rows_map(CUtensorMap *m, const Layer &l, const void *p, int64_t cols, int64_t parts, int box_rows)
{
    const int64_t dim[3] = {cols / parts, parts, l.rows}, stride[3] = {1, cols / parts, cols};
    const int box[3] = {64, 1, box_rows};
    return sm90_map(m, l.dtype, p, dim, stride, box);
}

// Weight gradient {n, m, e}: rows m, columns n, boxes of 128 bytes x 16.
static bool grad_map(CUtensorMap *m, const Layer &l, const Mat &w, int64_t rows, int64_t cols, int f32)
{
    const int64_t dim[3] = {cols, rows, l.E}, stride[3] = {w.c, w.r, w.g};
    const int box[3] = {f32 ? 32 : 64, 16, 1};
    return sm90_map(m, f32 ? FMOE_F32 : l.dtype, w.p, dim, stride, box);
}

static bool gather_ok(const Layer &l, const void *x, int64_t ldx)
{
    (void)l;
    return (uintptr_t)x % 16 == 0 && ldx % 8 == 0;
}

static Sm90Args base_args(const Layer &l)
{
    Sm90Args a = {};
    a.off = l.map.off;
    a.tok = l.map.tok;
    a.prob = l.map.prob;
    a.E = (int)l.E;
    a.parts = 1;
    return a;
}

static void gather_from(Sm90Args &a, const void *x, int64_t ldx)
{
    a.x = x;
    a.ldx = (size_t)ldx;
}

static int steps(int64_t k) { return (int)((k + 63) / 64); }

// ---- General kernel ----

static GemmArgs general(const Layer &l)
{
    GemmArgs g = {};
    g.E = l.E;
    g.R = l.R;
    g.map_value = l.map;
    g.bias_dtype = l.dtype;
    return g;
}

static Mat rows_mat(const void *p, int64_t ld)
{
    Mat m = {};
    m.p = (void *)p;
    m.r = ld;
    m.c = 1;
    m.split = INT64_MAX;
    return m;
}

static void set_bias(GemmArgs &g, const Bias &b)
{
    g.bias = b.p;
    g.bias_g = b.g;
    g.bias_n = b.n;
    g.bias_split = b.split;
    g.bias_delta = b.delta;
}

// Rows (gathered or not) times weights, on either kernel. rows_k: the contraction runs over the rows of the weight.
static void rows_product(Layer &l, const void *x, int64_t ldx, bool gathered, int64_t K, const Weight &w, bool rows_k, const Bias &b, void *out)
{
    const int64_t N = rows_k ? w.cols : w.rows;
    if (hopper(l) && (!b.p || (b.n == 1 && b.split == INT64_MAX))) {
        Sm90Args a = base_args(l);
        // The contraction may be cut in two parts (gate and up); a result may not.
        const bool whole = w.single, cut = !whole && rows_k && w.strided && w.parts == 2 && !gathered;
        const int parts = cut ? 2 : 1;
        bool ok = whole || cut, n_major = false;
        for (int i = 0; ok && i < parts; i++) {
            const WeightMap m = weight_map(&a.b[i], l, cut ? w.part[i] : w.whole, w.rows / parts, w.cols, rows_k);
            ok = m.ok && (i == 0 || m.n_major == n_major);
            n_major = m.n_major;
        }
        // Gathered rows, biases, and parts of the contraction that are not whole steps are the tokens kernel's.
        a.tokens = gathered || fmoe_cuda_use_tokens(l.R, l.E) || (K / parts) % 64 != 0 || b.p;
        if (gathered) ok = ok && gather_ok(l, x, ldx) && K % 64 == 0;
        else ok = ok && (a.tokens ? rows_map(&a.a, l, x, K, parts, 64) && rows_map(&a.a16, l, x, K, parts, 16) : rows_map2(&a.a, l, x, K, 64));
        ok = ok && (a.tokens ? rows_map(&a.d[0], l, out, N, 1, 16) : rows_map2(&a.d[0], l, out, N, 16));
        if (ok) {
            if (gathered) gather_from(a, x, ldx);
            a.N = (int)N;
            a.parts = parts;
            a.k_steps = steps(K / parts);
            a.bias = b.p;
            a.bias_g = (size_t)b.g;
            const Sm90Product product = gathered ? (n_major ? SM90_GATHER_N : SM90_GATHER_K) : (n_major ? SM90_ROWS_N : SM90_ROWS_K);
            done(l, sm90_launch(product, l.dtype, 0, a, l.plan->sms, l.stream));
            return;
        }
    }
    GemmArgs g = general(l);
    g.A = rows_mat(x, ldx);
    g.gather_a = gathered ? l.map.tok : nullptr;
    g.B = w.whole;
    g.b_rows_are_k = rows_k;
    g.D = rows_mat(out, N);
    g.N = N;
    g.K = K;
    set_bias(g, b);
    gemm_sm80(l.dtype, g, l.stream);
}

void up_product(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, void *h)
{
    rows_product(l, x, ldx, true, l.H, w1, false, b1, h);
}

void down_product(Layer &l, const void *a, const Weight &w2, const Bias &b2, void *y)
{
    rows_product(l, a, l.I, false, l.I, w2, false, b2, y);
}

void da_product(Layer &l, const void *dout, int64_t ldd, const Weight &w2, void *da)
{
    rows_product(l, dout, ldd, true, l.H, w2, true, Bias{}, da);
}

void dx_product(Layer &l, const void *dh, const Weight &w1, void *dxr)
{
    rows_product(l, dh, l.HC, false, l.HC, w1, true, Bias{}, dxr);
}

// ---- Fused ----

// No launch, no map: only what the operands say, so that forward and backward decide alike.
static bool kmajor_ok(const Mat &w)
{
    return w.c == 1 && w.r % 8 == 0 && w.g % 8 == 0 && (uintptr_t)w.p % 16 == 0;
}

bool up_fused_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1)
{
    // Gate and up must lie one after the other: they are read as one tensor.
    return l.plan->path == FMOE_PATH_SM90 && w1.strided && w1.parts == 2 && kmajor_ok(w1.part[0]) && kmajor_ok(w1.part[1]) && gather_ok(l, x, ldx) &&
           (char *)w1.part[1].p > (char *)w1.part[0].p && w1.part[0].r == w1.part[1].r && (l.E == 1 || w1.part[0].g == w1.part[1].g);
}

void up_fused(Layer &l, const void *x, int64_t ldx, const Weight &w1, void *h, void *a_out)
{
    if (!hopper(l)) return;
    Sm90Args a = base_args(l);
    const int64_t half = ((char *)w1.part[1].p - (char *)w1.part[0].p) / 2;
    a.tokens = fmoe_cuda_use_tokens(l.R, l.E) || l.I % 64 != 0;
    bool ok;
    if (a.tokens)
        ok = sm90_map_glu(&a.b[0], l.dtype, w1.part[0].p, l.H, l.I, l.E, w1.part[0].r, half, w1.part[0].g) && rows_map(&a.d[0], l, a_out, l.I, 1, 16) &&
             (!h || rows_map(&a.h, l, h, 2 * l.I, 2, 16));
    else
        ok = weight_map(&a.b[0], l, w1.part[0], l.I, l.H, false).ok && weight_map(&a.b[1], l, w1.part[1], l.I, l.H, false).ok && rows_map2(&a.d[0], l, a_out, l.I, 16) &&
             (!h || rows_map2(&a.h, l, h, 2 * l.I, 16));
    if (!ok) {
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: the driver refused a tensor map of the up product");
        return;
    }
    gather_from(a, x, ldx);
    a.keep_h = h != nullptr;
    a.N = (int)l.I;
    a.k_steps = steps(l.H);
    done(l, sm90_launch(SM90_UP_GLU, l.dtype, 0, a, l.plan->sms, l.stream));
}

bool dh_fused_ok(const Layer &l, const void *dout, int64_t ldd, const Weight &w2)
{
    return l.plan->path == FMOE_PATH_SM90 && w2.single && kmajor_ok(w2.whole) && gather_ok(l, dout, ldd);
}

int dh_fused(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const void *h, void *dh, void *pa, float *dp)
{
    if (!hopper(l)) return 0;
    Sm90Args a = base_args(l);
    if (!weight_map(&a.b[0], l, w2.whole, l.H, l.I, true).ok) {
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: the driver refused a tensor map of the dh product");
        return 0;
    }
    gather_from(a, dout, ldd);
    a.N = (int)l.I;
    a.k_steps = steps(l.H);
    a.h_in = h;
    a.dh = dh;
    a.pa = pa;
    a.dp = dp;
    a.dp_pitch = (size_t)l.rows;
    const int tile = fmoe_cuda_dh_tile(l.I);
    done(l, sm90_launch(tile == 192 ? SM90_DH_192 : SM90_DH_128, l.dtype, 0, a, l.plan->sms, l.stream));
    return (int)((l.I + tile - 1) / tile);
}

// ---- Weight gradients ----

// D[e] = A^T B with one side gathered; D's rows are A's columns, in up to two parts.
static bool wgrad_hopper(Layer &l, const void *fixed, int64_t fixed_cols, const void *gathered, int64_t ld, int64_t gathered_cols, bool gather_a,
                         const Weight &d, int parts, int f32, int add)
{
    if (!hopper(l) || !gather_ok(l, gathered, ld) || gathered_cols % 64) return false;
    Sm90Args a = base_args(l);
    const int64_t M = (gather_a ? gathered_cols : fixed_cols) / parts, N = gather_a ? fixed_cols : gathered_cols;
    const int64_t tile = gather_a ? 128 : 256;
    for (int i = 0; i < parts; i++) {
        Mat m = d.parts == parts && parts == 2 ? d.part[i] : d.whole;
        // A gradient stored by columns is the transposed product.
        const bool transposed = m.c != 1 && m.r == 1;
        if (transposed) m.c = m.r, m.r = d.whole.c;
        // All experts as one tall matrix where tiles end with them: two dimensions are cheaper than three.
        a.flat = parts == 1 && !add && m.c == 1 && M % tile == 0 && (m.g == M * m.r || l.E == 1) && l.E * M < INT32_MAX &&
                 sm90_map2(&a.d[0], f32 ? FMOE_F32 : l.dtype, m.p, N, l.E * M, m.r, f32 ? 32 : 64, 16);
        if (!a.flat && !grad_map(&a.d[i], l, m, M, N, f32)) return false;
    }
    if (!rows_map2(gather_a ? &a.b[0] : &a.a, l, fixed, fixed_cols, 64)) return false;
    gather_from(a, gathered, ld);
    a.M = (int)M;
    a.N = (int)N;
    a.parts = parts;
    a.add = add;
    return done(l, sm90_launch(gather_a ? SM90_WGRAD_GATHER_A : SM90_WGRAD_GATHER_B, l.dtype, f32, a, l.plan->sms, l.stream));
}

static void wgrad_general(Layer &l, const Mat &A, const int *gather_a, const Mat &B, const int *gather_b, int64_t M, int64_t N, const Mat &D, int f32, int add)
{
    GemmArgs g = general(l);
    g.wgrad = 1;
    g.A = A;
    g.gather_a = gather_a;
    g.B = B;
    g.gather_b = gather_b;
    g.M = M;
    g.N = N;
    g.D = D;
    g.out_f32 = f32;
    g.accumulate = add;
    gemm_sm80(l.dtype, g, l.stream);
}

void dw1_product(Layer &l, const void *dh, const void *x, int64_t ldx, const Weight &d, int f32, int add)
{
    if (d.single) {
        const bool by_columns = d.whole.c != 1 && d.whole.r == 1;
        if (wgrad_hopper(l, dh, l.HC, x, ldx, l.H, by_columns, d, 1, f32, add)) return;
    } else if (d.strided && d.parts == 2 && d.part[0].p && d.part[1].p && d.part[0].c == 1 && d.part[1].c == 1 && !l.mixed) {
        if (wgrad_hopper(l, dh, l.HC, x, ldx, l.H, false, d, 2, f32, add)) return;
    }
    if (!d.whole.list && !d.whole.list2) {
        wgrad_general(l, rows_mat(dh, l.HC), nullptr, rows_mat(x, ldx), l.map.tok, l.HC, l.H, d.whole, f32, add);
        return;
    }
    // A list: gate and up on their own, either may be absent.
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2;
    for (int i = 0; i < d.parts; i++) {
        Mat m = {};
        m.list = i ? d.whole.list2 : d.whole.list;
        m.split = INT64_MAX;
        if (!m.list) continue;
        Mat part = rows_mat((const char *)dh + i * (l.mixed ? 1 : l.I) * size, l.HC);
        if (l.mixed) part.c = 2;
        wgrad_general(l, part, nullptr, rows_mat(x, ldx), l.map.tok, l.I, l.H, m, f32, add);
    }
}

void dw2_product(Layer &l, const void *dout, int64_t ldd, const void *pa, const Weight &d, int f32, int add)
{
    if (d.single) {
        const bool by_columns = d.whole.c != 1 && d.whole.r == 1;
        if (wgrad_hopper(l, pa, l.I, dout, ldd, l.H, !by_columns, d, 1, f32, add)) return;
    }
    wgrad_general(l, rows_mat(dout, ldd), l.map.tok, rows_mat(pa, l.I), nullptr, l.H, l.I, d.whole, f32, add);
}
