// SPDX-License-Identifier: Apache-2.0
// products.cu - the products of the layer on the fast general kernels (mma.sync): what their operands must be, and
// their arguments. 16-bit elements; rows and matrices whose lines begin at 16 bytes and, where a copy runs along them,
// have whole 16 bytes.
#include "cuda/products.cuh"
#include "product.cuh"

// Tiles are counted in 31 bits, and each of eight warps is a round ahead.
static bool count_ok(int64_t row_tiles, int64_t columns) { return row_tiles * ((columns + 127) / 128) < INT32_MAX / 2; }

static bool fast(const Layer &l)
{
    return l.stream->stages && l.dtype != FMOE_F32 && count_ok(l.rows / MMA_BM + l.E, fmoe_max(l.HC, l.H)) &&
           count_ok(l.E * (fmoe_max(l.HC, l.H) / MMA_BM + 2), fmoe_max(l.HC, l.H));
}

static bool launched(Layer &l, MmaKernel kernel, MmaArgs &a)
{
    const cudaError_t e = mma_launch(*l.stream, kernel, l.dtype, a);
    if (e != cudaSuccess && l.status == FMOE_OK)
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: launch of a product failed: %s", cudaGetErrorString(e));
    return true;
}

static bool aligned(const void *p, int64_t elements) { return (uintptr_t)p % 16 == 0 && elements % 8 == 0; }

static bool by_columns(const Mat &w) { return w.c != 1 && w.r == 1; } // neighbours in memory are those of a column

// Weights whose lines, of rows or of columns, begin at 16 bytes, 32 of them in less than 2^31.
static bool matrix_ok(const Mat &w, bool columns, int64_t E)
{
    const int64_t pitch = columns ? w.c : w.r;
    const bool far = w.list ? w.shift >= 4 : E == 1 || w.g % 8 == 0;
    return by_columns(w) == columns && (columns || w.c == 1) && far && aligned(w.p, pitch) && pitch < 1 << 24 &&
           !w.list2 && w.split == INT64_MAX && !w.skip;
}

static MmaMatrix matrix(const Mat &w, bool columns, int64_t size = 2)
{
    return MmaMatrix{(const char *)w.p, w.g * size, (columns ? w.c : w.r) * size, w.list};
}

static bool factor_ok(const Layer &l, const Lora &lora, int parts, bool columns)
{
    bool ok = lora.rows.cols % 8 == 0;
    for (int i = 0; i < parts && lora.rows.cols; i++) ok = ok && matrix_ok(lora.factor.part[i], columns, l.E);
    return ok;
}

static MmaArgs begin(const Layer &l)
{
    MmaArgs a = {};
    a.off = l.map.off;
    a.cnt = l.map.cnt;
    a.tok = l.map.tok;
    a.E = (int)l.E;
    a.R = (int)l.R;
    a.act = l.act;
    a.bias_dtype = l.dtype;
    a.wide = 1;
    return a;
}

static void add_part(MmaArgs &a, const Rows &x, int64_t from, int64_t k, bool gather)
{
    MmaPart &p = a.part[a.parts++];
    p.a = (const char *)x.p + from * 2;
    p.lda = x.ld * 2;
    p.gather = gather;
    p.k = (int)k;
}

// The steps of an adapter, of one factor or (gate, up) two.
static void add_lora(MmaArgs &a, const Lora &lora, int parts, bool columns)
{
    if (!lora.rows.cols) return;
    add_part(a, lora.rows, 0, lora.rows.cols, false);
    for (int i = 0; i < parts; i++) a.part[a.parts - 1].b[i] = matrix(lora.factor.part[i], columns);
}

static void set_bias(MmaArgs &a, const Bias &b)
{
    a.bias = b.p;
    a.bias_g = b.g;
    a.bias_n = b.n;
    a.bias_split = b.split;
    a.bias_delta = b.delta;
}

static void set_result(MmaArgs &a, const Rows &out)
{
    a.d[0] = MmaMatrix{(const char *)out.p, 0, out.ld * 2, nullptr};
    a.N = (int)out.cols;
    a.wide = aligned(out.p, out.ld);
}

// Which way weights of one or two parts lie; false: neither.
static bool layout(const Layer &l, const Weight &w, int parts, bool *columns)
{
    const Mat *m = parts == 1 ? &w.whole : w.part;
    *columns = by_columns(m[0]);
    bool ok = true;
    for (int i = 0; i < parts; i++) ok = ok && m[i].p && matrix_ok(m[i], *columns, l.E);
    return ok;
}

bool mma_rows_product(Layer &l, const Rows &x, bool gathered, const Weight &w, bool rows_k, const Bias &b,
                      const Lora &lora, const Rows &out)
{
    // The contraction may be cut in two parts (gate and up); a result may not.
    const int parts = w.single ? 1 : 2;
    bool columns;
    if (!fast(l) || !x.p || !out.p || !aligned(x.p, x.ld) || x.cols / parts % 8 ||
        (parts == 2 && (!rows_k || !w.strided)) || !layout(l, w, parts, &columns) ||
        (columns != rows_k && out.cols % 8) || !factor_ok(l, lora, 1, columns))
        return false;
    if (l.rows == 0) return true;
    MmaArgs a = begin(l);
    for (int i = 0; i < parts; i++) {
        add_part(a, x, i * x.cols / parts, x.cols / parts, gathered);
        a.part[i].b[0] = matrix(parts == 1 ? w.whole : w.part[i], columns);
    }
    add_lora(a, lora, 1, columns);
    set_bias(a, b);
    set_result(a, out);
    return launched(l, columns == rows_k ? MMA_ROWS_K : MMA_ROWS_N, a);
}

// The same by the arguments of the kernel for everything: grouped matmuls, adapters, gradients that are added to.
bool mma_gemm(int dtype, const GemmArgs &g, Stream &s)
{
    const Mat &w = g.B;
    const bool columns = by_columns(w);
    if (!s.stages || dtype == FMOE_F32 || g.a_f32 || g.b_f32 || g.A.list || g.A.c != 1 || !aligned(g.A.p, g.A.r) ||
        g.A.split != INT64_MAX || !count_ok(g.wgrad ? g.E * (g.M / MMA_BM + 1) : g.R / MMA_BM + g.E, g.N))
        return false;
    MmaArgs a = {};
    a.off = g.map_value.off;
    a.cnt = g.map_value.cnt;
    a.tok = g.gather_a ? g.gather_a : g.gather_b;
    a.E = (int)g.E;
    a.R = (int)g.R;
    a.N = (int)g.N;
    a.d_f32 = g.out_f32;
    a.add = g.accumulate;
    const int64_t size = g.out_f32 ? 4 : 2;
    add_part(a, Rows{g.A.p, 0, g.A.r}, 0, g.K, g.gather_a != nullptr);
    if (g.wgrad) {
        Mat d = g.D;
        if (d.split != INT64_MAX || d.list2 || w.list || w.c != 1 || !aligned(w.p, w.r) || w.split != INT64_MAX ||
            (d.list && !d.shift) || g.M % 8 || g.N % 8)
            return false;
        a.part[0].b[0] = MmaMatrix{(const char *)w.p, 0, w.r * 2, nullptr};
        a.gather_b = g.gather_b != nullptr;
        a.M = (int)g.M;
        a.m_parts = 1;
        if (d.c != 1 && d.r == 1) { // the transposed product
            MmaPart &p = a.part[0];
            const MmaPart q = p;
            p.a = q.b[0].p, p.lda = q.b[0].pitch, p.gather = a.gather_b;
            p.b[0].p = q.a, p.b[0].pitch = q.lda, a.gather_b = q.gather;
            a.M = (int)g.N, a.N = (int)g.M;
            d.r = d.c, d.c = 1;
        }
        if (d.c != 1) return false;
        a.d[0] = matrix(d, false, size);
        a.wide = !g.out_f32 && aligned(d.p, d.r) && (d.list ? d.shift >= 4 : d.g % 8 == 0);
        return mma_launch(s, MMA_WGRAD, dtype, a) == cudaSuccess;
    }
    if (g.K % 8 || (columns != (g.b_rows_are_k != 0) && g.N % 8) || !matrix_ok(w, columns, g.E) || g.D.c != 1 ||
        g.D.list || g.D.split != INT64_MAX)
        return false;
    a.part[0].b[0] = matrix(w, columns);
    a.bias = g.bias;
    a.bias_dtype = g.bias_dtype;
    a.bias_g = g.bias_g, a.bias_n = g.bias_n, a.bias_split = g.bias_split, a.bias_delta = g.bias_delta;
    a.d[0] = MmaMatrix{(const char *)g.D.p, 0, g.D.r * size, nullptr};
    a.wide = !g.out_f32 && aligned(g.D.p, g.D.r);
    return mma_launch(s, columns == (g.b_rows_are_k != 0) ? MMA_ROWS_K : MMA_ROWS_N, dtype, a) == cudaSuccess;
}

// ---- With the activation ----

bool mma_up_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora)
{
    bool columns;
    return fast(l) && l.I % 8 == 0 && l.H % 8 == 0 && aligned(x, ldx) && (w1.parts == 2 ? w1.strided : w1.single) &&
           layout(l, w1, w1.parts, &columns) && factor_ok(l, lora, w1.parts, columns);
}

bool mma_pairs_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora)
{
    bool columns;
    return fast(l) && l.I % 8 == 0 && l.H % 8 == 0 && aligned(x, ldx) && l.interleaved && w1.single &&
           layout(l, w1, 1, &columns) && factor_ok(l, lora, 1, columns);
}

void mma_up(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
            void *out)
{
    if (l.rows == 0) return;
    const bool gated = w1.parts == 2, pairs = gated && l.interleaved;
    const int parts = pairs ? 1 : w1.parts;
    bool columns;
    layout(l, w1, parts, &columns);
    MmaArgs a = begin(l);
    add_part(a, Rows{x, l.H, ldx}, 0, l.H, true);
    for (int i = 0; i < parts; i++) a.part[0].b[i] = matrix(parts == 1 ? w1.whole : w1.part[i], columns);
    add_lora(a, lora, parts, columns);
    set_bias(a, b1);
    if (parts == 2 && b1.split == INT64_MAX) a.bias_delta = l.I * b1.n; // of up
    set_result(a, Rows{out, l.I, l.I});
    if (pairs) a.N = (int)l.HC;
    a.h = h;
    const MmaKernel kernel = pairs   ? (columns ? MMA_UP_PAIRS_N : MMA_UP_PAIRS_K)
                             : gated ? (columns ? MMA_UP_GLU_N : MMA_UP_GLU_K)
                                     : (columns ? MMA_UP_ACT_N : MMA_UP_ACT_K);
    launched(l, kernel, a);
}

bool mma_dh_ok(const Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora)
{
    bool columns;
    return fast(l) && l.I % 8 == 0 && l.H % 8 == 0 && aligned(dout, ldd) && w2.single && layout(l, w2, 1, &columns) &&
           factor_ok(l, lora, 1, columns);
}

int mma_dh(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
           void *pa, float *dp)
{
    if (l.rows == 0) return 0;
    bool columns;
    layout(l, w2, 1, &columns);
    MmaArgs a = begin(l);
    add_part(a, Rows{dout, l.H, ldd}, 0, l.H, true);
    a.part[0].b[0] = matrix(w2.whole, columns);
    add_lora(a, lora, 1, columns);
    set_result(a, Rows{pa, l.I, l.I});
    a.gated = l.HC == 2 * l.I;
    a.pairs = l.interleaved;
    a.prob = l.map.prob;
    a.h_in = h;
    a.dh = dh;
    a.dp = dp;
    a.dp_pitch = l.rows;
    launched(l, columns ? MMA_DH_K : MMA_DH_N, a);
    return (int)((l.I + 63) / 64);
}

// ---- Weight gradients in two parts ----

bool mma_dw1_parts(Layer &l, const void *dh, const void *x, int64_t ldx, const Weight &d, int f32, int add)
{
    const Mat *m = d.part;
    for (int i = 0; i < 2; i++)
        if (!m[i].p || m[i].c != 1 || (m[i].list && !m[i].shift)) return false;
    if (!fast(l) || !aligned(x, ldx) || l.interleaved || l.I % 8 || l.H % 8) return false;
    const int64_t size = f32 ? 4 : 2;
    MmaArgs a = begin(l);
    add_part(a, Rows{dh, l.HC, l.HC}, 0, 0, false);
    a.part[0].b[0] = MmaMatrix{(const char *)x, 0, ldx * 2, nullptr};
    a.gather_b = 1;
    a.M = (int)l.I;
    a.m_parts = 2;
    a.N = (int)l.H;
    a.d_f32 = f32;
    a.add = add;
    for (int i = 0; i < 2; i++) {
        a.d[i] = matrix(m[i], false, size);
        a.wide = a.wide && !f32 && aligned(m[i].p, m[i].r) && (m[i].list ? m[i].shift >= 4 : m[i].g % 8 == 0);
    }
    return launched(l, MMA_WGRAD, a);
}
