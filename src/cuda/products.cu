// SPDX-License-Identifier: Apache-2.0
// products.cu - see products.cuh.
#include "quant/chunks.cuh"
#include "sm90/coded/inside.cuh"
#include "sm90/maps.cuh"

static bool hopper(const Layer &l) { return l.plan->path == FMOE_PATH_SM90 && l.rows > 0; }

// Begins early where launch.cuh grants it, some product of this pass says in memory how far it is, and nothing else
// that it reads may come from the launch before: a list of pointers, or the rows of an adapter's rank.
static bool run_hopper(Layer &l, Product product, Sm90Kernel kernel, int f32, Sm90Args &a)
{
    const bool list = a.place_b[0].list || a.place_b[1].list || a.place_d[0].list || a.place_d[1].list,
               lora = a.lora_steps || a.lora_tail;
    a.lets_in_early = traits(product).lets_in_early && !l.chunk;
    if (a.lets_in_early) l.readies++;
    a.ready = l.readies ? &l.ready[l.readies - 1] : nullptr;
    a.begin = may_begin_early(l.stream->last, product) && a.ready && !list && !lora ? SM90_EARLY : SM90_AFTER;
    const cudaError_t e = sm90_launch(*l.stream, product, kernel, l.dtype, f32, a, l.plan->sms);
    if (e != cudaSuccess && l.status == FMOE_OK)
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: launch of a product failed: %s", cudaGetErrorString(e));
    return true;
}

// Weight gradient {n, m, e}: rows m, columns n, boxes of 128 bytes x 16.
static bool grad_map(Sm90Args &a, int i, const Layer &l, const Mat &w, int64_t rows, int64_t cols, int f32)
{
    int64_t count, step;
    if (w.c != 1 || !place(w, f32 ? 4 : 2, l, &a.place_d[i], &count, &step)) return false;
    const int64_t dim[3] = {cols, rows, count}, stride[3] = {1, w.r, step};
    const int box[3] = {f32 ? 32 : 64, 16, 1};
    return sm90_map(&a.d[i], f32 ? FMOE_F32 : l.dtype, w.p, dim, stride, box);
}

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

// Rows (gathered or not) times weights on Hopper. rows_k: the contraction runs over the rows of the weight.
static bool rows_hopper(Layer &l, Product product, const Rows &x, bool gathered, const Weight &w, bool rows_k,
                        const Bias &b, const Lora &lora, const Rows &out)
{
    if (!hopper(l) || !x.p || !out.p || (b.p && b.split != INT64_MAX)) return false;
    Sm90Args a = base_args(l);
    // The contraction may be cut in two parts (gate and up); a result may not.
    const bool cut = !w.single && rows_k && w.strided && w.parts == 2 && !gathered;
    const int parts = cut ? 2 : 1;
    if (!w.single && !cut) return false;
    // Gathered rows, biases, ragged groups, and parts of the contraction that are not whole steps are the tokens
    // kernel's.
    a.tokens = gathered || l.ragged || fmoe_cuda_use_tokens(l.R, l.all) || (x.cols / parts) % 64 != 0 || b.p;
    bool n_major = false;
    for (int i = 0; i < parts; i++) {
        const WeightMap m =
            weight_map(a.b[i], a.place_b[i], l, cut ? w.part[i] : w.whole, w.rows / parts, w.cols, rows_k, SM90_BOX);
        if (!m.ok || (i && m.n_major != n_major)) return false;
        n_major = m.n_major;
    }
    if (!lora_maps(a, l, lora, 1, rows_k, n_major, SM90_BOX)) return false;
    if (gathered   ? !gather_ok(x.p, x.ld) || x.cols % 64 != 0
        : a.tokens ? !rows_map(&a.a, l, x, parts, 64) || !rows_map(&a.a16, l, x, parts, 16)
                   : !rows_map2(&a.a, l, x, 64))
        return false;
    if (!(a.tokens ? token_maps(a.d, l, out, 1) : rows_map2(&a.d[0], l, out, 16))) return false;
    if (l.ragged && !rows_map(&a.d1, l, out, 1, 1)) return false;
    if (gathered) gather_from(a, x.p, x.ld);
    a.N = (int)out.cols;
    a.parts = parts;
    a.k_steps = steps(x.cols / parts);
    a.bias = b.p;
    a.bias_g = (size_t)b.g;
    a.bias_n = b.n;
    const Sm90Kernel kernel =
        gathered ? (n_major ? SM90_GATHER_N : SM90_GATHER_K) : (n_major ? SM90_ROWS_N : SM90_ROWS_K);
    return run_hopper(l, product, kernel, 0, a);
}

bool gmm_rows(Layer &l, const Rows &x, const Weight &w, bool rows_k, const Bias &b, const Rows &out)
{
    return rows_hopper(l, Product::GMM_ROWS, x, false, w, rows_k, b, Lora{}, out);
}

static GemmArgs rows_args(const Layer &l, const Rows &x, bool gathered, const Weight &w, bool rows_k, const Rows &out)
{
    GemmArgs g = general(l);
    g.A = rows_mat(x.p, x.ld);
    g.gather_a = gathered ? l.map.tok : nullptr;
    g.B = w.whole;
    g.b_rows_are_k = rows_k;
    g.D = rows_mat(out.p, out.ld);
    g.N = out.cols;
    g.K = x.cols;
    return g;
}

static void rows_some(Layer &l, Product product, const Rows &x, bool gathered, const Weight &w, bool rows_k,
                      const Bias &b, const Lora &lora, const Rows &out)
{
    if (rows_hopper(l, product, x, gathered, w, rows_k, b, lora, out)) return;
    if (!lora.rows.cols || !rows_hopper(l, product, x, gathered, w, rows_k, b, Lora{}, out)) {
        if (mma_rows_product(l, x, gathered, w, rows_k, b, lora, out)) return;
        GemmArgs g = rows_args(l, x, gathered, w, rows_k, out);
        set_bias(g, b);
        gemm_sm80(l.dtype, g, *l.stream);
    }
    if (!lora.rows.cols) return;
    GemmArgs g = rows_args(l, lora.rows, false, lora.factor, rows_k, out);
    g.accumulate = 1;
    gemm_sm80(l.dtype, g, *l.stream);
}

static void rows_product(Layer &l, Product product, const Rows &x, bool gathered, const Weight &w, bool rows_k,
                         const Bias &b, const Lora &lora, const Rows &out)
{
    if (inside_rows(l, product, x, gathered, w, rows_k, b, lora, out)) return;
    by_chunks(l, w, b, lora, fmoe_ceil_div(out.cols, 256),
              [&](Layer &some, const Weight &v, const Bias &bias, const Lora &adapter) {
                  rows_some(some, product, x, gathered, v, rows_k, bias, adapter, out);
              });
}

void up_rows(Layer &l, const Rows &x, const Weight &w1, const Bias &b1, const Lora &lora, const Rows &h)
{
    rows_product(l, Product::GATHER, x, true, w1, false, b1, lora, h);
}

void up_product(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h)
{
    up_rows(l, Rows{x, l.H, ldx}, w1, b1, lora, Rows{h, l.HC, l.HC});
}

void down_product(Layer &l, const void *a, const Weight &w2, const Bias &b2, const Lora &lora, void *y)
{
    rows_product(l, Product::DOWN, Rows{a, l.I, l.I}, false, w2, false, b2, lora, Rows{y, l.H, l.H});
}

void da_product(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, void *da)
{
    rows_product(l, Product::GATHER, Rows{dout, l.H, ldd}, true, w2, true, Bias{}, lora, Rows{da, l.I, l.I});
}

void dx_product(Layer &l, const void *dh, const Weight &w1, const Lora &lora, void *dxr)
{
    rows_product(l, Product::DX, Rows{dh, l.HC, l.HC}, false, w1, true, Bias{}, lora, Rows{dxr, l.H, l.H});
}

void lora_in_product(Layer &l, const Rows &x, bool gathered, const Weight &factor, bool rows_k, float scale,
                     const Rows &out)
{
    const float by = fmoe_lora_scale(scale);
    if (lora_rows(l.dtype, rows_args(l, x, gathered, factor, rows_k, out), by, *l.stream)) return;
    rows_product(l, Product::LORA_IN, x, gathered, factor, rows_k, Bias{}, Lora{}, out);
    if (by == 1) return;
    lora_scale(l.dtype, (void *)out.p, l.rows * out.ld, by, *l.stream);
}

// ---- Fused ----

// No launch, no map: only what the operands say, so that forward and backward decide alike.
static bool by_columns(const Mat &w) { return w.c != 1 && w.r == 1; } // neighbours in memory are those of a column

static bool map_ok(const Layer &l, const Mat &w, bool columns)
{
    const int64_t pitch = columns ? w.c : w.r;
    const bool far =
        w.list ? w.shift >= 4 && w.shift < 40 && w.span < INT32_MAX : l.E == 1 || (w.g > 0 && w.g % 8 == 0);
    return by_columns(w) == columns && (columns || w.c == 1) && pitch > 0 && pitch % 8 == 0 && far &&
           (uintptr_t)w.p % 16 == 0;
}

// The factor lies as the weights do.
static bool lora_ok(const Layer &l, const Lora &lora, int parts, bool columns)
{
    bool ok = true;
    for (int i = 0; i < parts && lora.rows.cols; i++) ok = ok && map_ok(l, lora.factor.part[i], columns);
    return ok;
}

bool up_fused_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora)
{
    const bool gated = w1.parts == 2, columns = gated && w1.strided && by_columns(w1.part[0]);
    if (l.plan->path != FMOE_PATH_SM90) return mma_up_ok(l, x, ldx, w1, lora);
    if (!gather_ok(x, ldx) || !lora_ok(l, lora, w1.parts, columns)) return false;
    return gated ? w1.strided && map_ok(l, w1.part[0], columns) && map_ok(l, w1.part[1], columns)
                 : w1.single && map_ok(l, w1.whole, false);
}

bool up_pairs_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora)
{
    if (l.plan->path != FMOE_PATH_SM90) return mma_pairs_ok(l, x, ldx, w1, lora);
    const bool bias = !b1.p || (b1.n == 1 && b1.g % 2 == 0 && (uintptr_t)b1.p % 4 == 0); // read two at a time
    return l.interleaved && w1.single && l.act.kind <= FAST_CLAMP && l.I % 64 == 0 && bias &&
           (l.same_bits || fmoe_cuda_use_pairs(l.R, l.all)) && gather_ok(x, ldx) && map_ok(l, w1.whole, true) &&
           lora_ok(l, lora, 1, true);
}

static void up_some(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
                    void *a_out)
{
    if (l.plan->path != FMOE_PATH_SM90) return mma_up(l, x, ldx, w1, b1, lora, h, a_out);
    if (!hopper(l)) return;
    Sm90Args a = base_args(l);
    const bool gated = w1.parts == 2, pairs = l.interleaved,
               columns = gated && by_columns(pairs ? w1.whole : w1.part[0]),
               smooth = gated && l.act.kind <= FAST_TANH && !b1.p;
    a.tokens = !pairs && (fmoe_cuda_use_tokens(l.R, l.all) || l.I % 64 != 0 || !smooth);
    // Few rows: gates and ups alternate in the tile, 8 rows of each.
    const bool alternate =
        smooth && a.tokens && !columns && glu_map(&a.b[0], l, w1) &&
        (!lora.rows.cols || (glu_map(&a.lora_b[0], l, lora.factor) && lora_row_maps(a, l, lora.rows)));
    const Sm90Kernel kernel = pairs                                ? SM90_UP_PAIRS
                              : columns                            ? SM90_UP_GLU_N
                              : alternate || (smooth && !a.tokens) ? SM90_UP_SMOOTH
                              : gated                              ? SM90_UP_GLU
                                                                   : SM90_UP_ACT;
    const int box = kernel == SM90_UP_SMOOTH ? SM90_BOX : SM90_BOX_ACT;
    const Rows out = {a_out, l.I, l.I}, kept = {h, l.HC, l.HC};
    const int parts = pairs ? 1 : w1.parts;
    bool ok = true;
    for (int i = 0; i < parts && !alternate; i++)
        ok = ok &&
             weight_map(a.b[i], a.place_b[i], l, pairs ? w1.whole : w1.part[i], w1.rows / parts, l.H, false, box).ok;
    ok = ok && (alternate || lora_maps(a, l, lora, parts, false, columns, box));
    ok = ok && (a.tokens ? token_maps(a.d, l, out, 1) && (!h || token_maps(a.h, l, kept, parts))
                         : rows_map2(&a.d[0], l, out, 16) && (!h || rows_map2(&a.h[0], l, kept, 16)));
    if (!ok) {
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: the driver refused a tensor map of the up product");
        return;
    }
    gather_from(a, x, ldx);
    a.keep_h = h != nullptr;
    a.N = (int)l.I;
    a.k_steps = steps(l.H);
    a.bias = b1.p;
    a.bias_g = (size_t)b1.g;
    a.bias_n = b1.n;
    a.bias_up = b1.split == INT64_MAX ? l.I * b1.n : b1.delta;
    run_hopper(l, Product::UP, kernel, 0, a);
}

void up_fused(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
              void *a_out)
{
    if (inside_up(l, x, ldx, w1, b1, lora, h, a_out)) return;
    by_chunks(l, w1, b1, lora, fmoe_ceil_div(l.I, 128),
              [&](Layer &some, const Weight &v, const Bias &bias, const Lora &adapter) {
                  up_some(some, x, ldx, v, bias, adapter, h, a_out);
              });
}

bool dh_fused_ok(const Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora)
{
    if (l.plan->path != FMOE_PATH_SM90) return mma_dh_ok(l, dout, ldd, w2, lora);
    const bool columns = by_columns(w2.whole);
    // Gate and up as neighbours, with few rows: 1 to 2 % slower.
    const bool order =
        !l.interleaved || (l.act.kind <= FAST_CLAMP && (l.same_bits || !fmoe_cuda_use_tokens(l.R, l.all)));
    return order && w2.single && map_ok(l, w2.whole, columns) && gather_ok(dout, ldd) && lora_ok(l, lora, 1, columns);
}

static int dh_some(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
                   void *pa, float *dp)
{
    if (l.plan->path != FMOE_PATH_SM90) return mma_dh(l, dout, ldd, w2, lora, h, dh, pa, dp);
    if (!hopper(l)) return 0;
    Sm90Args a = dh_args(l, dout, ldd, h, dh, pa, dp);
    const bool columns = by_columns(w2.whole);
    if (!weight_map(a.b[0], a.place_b[0], l, w2.whole, l.H, l.I, true, SM90_BOX_ACT).ok ||
        !lora_maps(a, l, lora, 1, true, !columns, SM90_BOX_ACT)) {
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: the driver refused a tensor map of the dh product");
        return 0;
    }
    const int tile = fmoe_cuda_dh_tile(l.I);
    run_hopper(l, Product::DH,
               tile == 192 ? (columns ? SM90_DH_192_K : SM90_DH_192)
               : columns   ? SM90_DH_128_K
                           : SM90_DH_128,
               0, a);
    return (int)((l.I + tile - 1) / tile);
}

int dh_fused(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
             void *pa, float *dp)
{
    int parts = inside_dh(l, dout, ldd, w2, lora, h, dh, pa, dp);
    if (parts) return parts;
    by_chunks(l, w2, Bias{}, lora, fmoe_ceil_div(l.I, fmoe_cuda_dh_tile(l.I)),
              [&](Layer &some, const Weight &v, const Bias &, const Lora &adapter) {
                  parts = dh_some(some, dout, ldd, v, adapter, h, dh, pa, dp);
              });
    return parts;
}

// ---- Weight gradients ----

// The result of a weight gradient of M rows an expert (in up to two parts) and N columns.
static bool grad_maps(Sm90Args &a, const Layer &l, const Mat (&d)[2], int parts, int64_t M, int64_t N, int f32, int add)
{
    for (int i = 0; i < parts; i++) {
        const Mat &m = d[i];
        // All experts as one tall matrix where tiles end with them: two dimensions are cheaper than three.
        a.flat = parts == 1 && !add && m.c == 1 && !m.list && M % 128 == 0 && (m.g == M * m.r || l.E == 1) &&
                 l.E * M < INT32_MAX &&
                 sm90_map2(&a.d[0], f32 ? FMOE_F32 : l.dtype, m.p, N, l.E * M, m.r, f32 ? 32 : 64, 16);
        if (!a.flat && !grad_map(a, i, l, m, M, N, f32)) return false;
    }
    a.M = (int)M;
    a.N = (int)N;
    a.parts = parts;
    a.add = add;
    return true;
}

static Mat transposed(Mat m)
{
    const int64_t r = m.r;
    m.r = m.c;
    m.c = r;
    return m;
}

// D[e] = A^T B with one side gathered; D's rows are A's columns, in up to two parts. A gradient stored by columns is
// the transposed product.
static bool wgrad_hopper(Layer &l, Product product, const Rows &fixed, const Rows &gathered, bool gather_a,
                         const Mat &first, const Mat &second, int parts, int f32, int add)
{
    if (!hopper(l) || !gather_ok(gathered.p, gathered.ld) || gathered.cols % 64) return false;
    Sm90Args a = base_args(l);
    const int64_t M = (gather_a ? gathered.cols : fixed.cols) / parts, N = gather_a ? fixed.cols : gathered.cols;
    Mat d[2] = {first, second};
    for (Mat &m : d)
        if (m.c != 1 && m.r == 1) m = transposed(m);
    if (!grad_maps(a, l, d, parts, M, N, f32, add) || !rows_map2(gather_a ? &a.b[0] : &a.a, l, fixed, 64)) return false;
    gather_from(a, gathered.p, gathered.ld);
    return run_hopper(l, product, gather_a ? SM90_WGRAD_GATHER_A : SM90_WGRAD_GATHER_B, f32, a);
}

static bool wgrad_rows_hopper(Layer &l, Product product, const Rows &x, const Rows &y, const Mat &dw, int f32, int add)
{
    if (!hopper(l) || !x.p || !y.p) return false;
    Sm90Args a = base_args(l);
    const bool turn = dw.c != 1 && dw.r == 1;
    const Rows &m = turn ? y : x, &n = turn ? x : y;
    const Mat d[2] = {turn ? transposed(dw) : dw, Mat{}};
    if (!grad_maps(a, l, d, 1, m.cols, n.cols, f32, add) || !rows_map2(&a.a, l, m, 64) || !rows_map2(&a.b[0], l, n, 64))
        return false;
    return run_hopper(l, product, SM90_WGRAD_ROWS, f32, a);
}

bool gmm_wgrad(Layer &l, const Rows &x, const Rows &y, const Mat &dw, int f32, int add)
{
    return wgrad_rows_hopper(l, Product::GMM_WGRAD, x, y, dw, f32, add);
}

static GemmArgs wgrad_args(const Layer &l, const Mat &A, const int *gather_a, const Mat &B, const int *gather_b,
                           int64_t M, int64_t N, const Mat &D, int f32, int add)
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
    return g;
}

static void wgrad_general(const Layer &l, const Mat &A, const int *gather_a, const Mat &B, const int *gather_b,
                          int64_t M, int64_t N, const Mat &D, int f32, int add)
{
    gemm_sm80(l.dtype, wgrad_args(l, A, gather_a, B, gather_b, M, N, D, f32, add), *l.stream);
}

void dw1_product(Layer &l, Product product, const void *dh, const void *x, int64_t ldx, const Weight &d, int f32,
                 int add)
{
    const Rows fixed = {dh, l.HC, l.HC}, gathered = {x, l.H, ldx};
    if (d.single) {
        if (wgrad_hopper(l, product, fixed, gathered, by_columns(d.whole), d.whole, d.whole, 1, f32, add)) return;
    } else if (d.strided && d.parts == 2 && d.part[0].p && d.part[1].p && d.part[0].c == 1 && d.part[1].c == 1 &&
               !l.interleaved) {
        if (wgrad_hopper(l, product, fixed, gathered, false, d.part[0], d.part[1], 2, f32, add)) return;
    }
    if (!d.single && d.strided && mma_dw1_parts(l, dh, x, ldx, d, f32, add)) return;
    if (!d.whole.list && !d.whole.list2) {
        wgrad_general(l, rows_mat(dh, l.HC), nullptr, rows_mat(x, ldx), l.map.tok, l.HC, l.H, d.whole, f32, add);
        return;
    }
    // A list: gate and up on their own, either may be absent.
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2;
    for (int i = 0; i < d.parts; i++) {
        const Mat &m = d.part[i];
        if (!(i ? d.whole.list2 : d.whole.list)) continue;
        Mat part = rows_mat((const char *)dh + i * (l.interleaved ? 1 : l.I) * size, l.HC);
        if (l.interleaved) part.c = 2;
        wgrad_general(l, part, nullptr, rows_mat(x, ldx), l.map.tok, l.I, l.H, m, f32, add);
    }
}

void dw2_product(Layer &l, const void *dout, int64_t ldd, const void *pa, const Weight &d, int f32, int add)
{
    if (d.single && wgrad_hopper(l, Product::DW2, Rows{pa, l.I, l.I}, Rows{dout, l.H, ldd}, !by_columns(d.whole),
                                 d.whole, d.whole, 1, f32, add))
        return;
    wgrad_general(l, rows_mat(dout, ldd), l.map.tok, rows_mat(pa, l.I), nullptr, l.H, l.I, d.whole, f32, add);
}

void lora_grad_product(Layer &l, Product product, const Rows &x, bool gather_x, const Rows &y, bool gather_y,
                       const Mat &d, int f32, int add)
{
    const GemmArgs g = wgrad_args(l, rows_mat(x.p, x.ld), gather_x ? l.map.tok : nullptr, rows_mat(y.p, y.ld),
                                  gather_y ? l.map.tok : nullptr, x.cols, y.cols, d, f32, add);
    if (lora_wgrad(l.dtype, g, *l.stream)) return;
    const bool done = gather_x || gather_y ? wgrad_hopper(l, product, gather_x ? y : x, gather_x ? x : y,
                                                          gather_x != by_columns(d), d, d, 1, f32, add)
                                           : wgrad_rows_hopper(l, product, x, y, d, f32, add);
    if (!done) gemm_sm80(l.dtype, g, *l.stream);
}
