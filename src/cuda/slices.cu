// SPDX-License-Identifier: Apache-2.0
// slices.cu - up and activation in two kernels where nobody keeps h: some features at a time, in the memory where y
// comes later. h as a whole would be the largest buffer of such a forward (Mixtral: 940 MB of 1.5 GB at T = 8192).
#include "products.cuh"

static void skip_rows(Mat &m, int64_t rows, int64_t size)
{
    if (m.list) m.skip = rows;
    else m.p = (char *)m.p + rows * m.r * size;
}

// Features i0 to i0 + n of W1, or of an adapter's factor B1, in the order of h.
static Weight slice(const Layer &l, Weight w, int64_t i0, int64_t n, int64_t size)
{
    if (!w.rows) return w;              // no adapter
    if (l.interleaved || l.HC == l.I) { // one stretch of rows
        const int64_t each = l.HC / l.I;
        skip_rows(w.whole, each * i0, size);
        w.part[0] = w.whole;
        w.rows = each * n;
        return w;
    }
    if (w.single) w.whole.delta = l.I * w.whole.r;
    if (w.whole.list || w.whole.list2) w.whole.skip = i0;
    else skip_rows(w.whole, i0, size);
    w.whole.split = n;
    w.single = false;
    for (Mat &m : w.part) skip_rows(m, i0, size);
    w.rows = 2 * n;
    return w;
}

static Bias slice(const Layer &l, Bias b, int64_t i0, int64_t n)
{
    if (!b.p) return b;
    const bool stretch = l.interleaved || l.HC == l.I;
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2;
    b.p = (const char *)b.p + (stretch ? l.HC / l.I : 1) * i0 * b.n * size;
    if (stretch) return b;
    if (b.split == INT64_MAX) b.delta = l.I * b.n;
    b.split = n;
    return b;
}

int64_t slice_columns(const Layer &l) { return fmoe_max(l.H, fmoe_min(l.HC, (int64_t)128)); }

void up_in_slices(Layer &l, int act, float alpha, float limit, const void *x, int64_t ldx, const Weight &w1,
                  const Bias &b1, const Lora &lora, void *h, void *a)
{
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2, each = l.HC / l.I, most = slice_columns(l) / each;
    const int64_t slices = fmoe_ceil_div(l.I, most > 8 ? most / 8 * 8 : most);
    const int64_t n = fmoe_min(l.I, fmoe_ceil_div(fmoe_ceil_div(l.I, slices), 8) * 8); // whole 16 bytes
    for (int64_t i = 0; i < l.I; i += n) {
        const int64_t m = fmoe_min(n, l.I - i);
        const Rows out = {h, each * m, each * m};
        const bool all = m == l.I;
        up_rows(l, Rows{x, l.H, ldx}, all ? w1 : slice(l, w1, i, m, size), all ? b1 : slice(l, b1, i, m),
                all ? lora : Lora{lora.rows, slice(l, lora.factor, i, m, size)}, out);
        ActArgs q = {};
        q.act = act, q.alpha = alpha, q.limit = limit;
        q.rows = l.rows;
        q.rows_dev = l.map.off + l.E;
        q.I = m;
        q.h = h;
        q.h_r = each * m;
        q.h_i = l.interleaved ? 2 : 1;
        q.h_u = l.interleaved ? 1 : m;
        q.a = (char *)a + i * size;
        q.a_r = l.I;
        act_forward(l.dtype, each == 2, q, *l.stream);
    }
}
