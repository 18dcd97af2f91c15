// SPDX-License-Identifier: Apache-2.0
// check_quant.cu - the layer on quantised weights: the same bits as the layer on weights that the reference decoded,
// or, inference of few tokens, nearer to the layer in double. Drawn descriptors, shapes, layouts, adapters; and f32
// factors of adapters, which the library narrows.
#include "check.cuh"

#include <algorithm>

extern "C" void decode_row(const fmoe_quant *q, const void *row, bool list, int64_t e, int64_t n, int64_t N, int64_t K,
                           float *out);

namespace
{

struct QuantCase {
    int64_t T, H, I, E, k;
    int dtype, act;
    uint32_t flags, run_flags;
    bool list, first, second; // which of W1 and W2 is quantised
    int64_t rank1, rank2;
    bool wide;        // factors in f32
    int turned, skew; // factors stored by columns (bits); percent of ids that go to expert 0
    int format[2];    // 0: drawn, else one of the named ones
    int second_scale; // 0: drawn, 1: none, 2: given
};

// Bytes, or numbers of any dtype, on the host and on the device.
struct Buffer {
    std::vector<char> host;
    std::vector<int64_t> shape, strides;
    fmoe_tensor host_t = {}, dev_t = {};
    void init(fmoe_datatype type, std::vector<int64_t> dims, int64_t pad, size_t shift)
    {
        shape = dims;
        strides.assign(dims.size(), 1);
        int64_t s = 1;
        for (size_t i = dims.size(); i-- > 0;) {
            strides[i] = s;
            s *= dims[i];
            if (i + 1 == dims.size() && dims.size() > 1) s += pad;
        }
        host.assign((size_t)s * type.bits / 8, 0);
        host_t.ndim = (int32_t)dims.size();
        host_t.dtype = type;
        host_t.shape = shape.data(), host_t.strides = strides.data();
        dev_t = host_t;
        host_t.device = {FMOE_CPU, 0}, host_t.data = host.data();
        dev_t.device = {FMOE_CUDA, 0}, dev_t.data = arena.take(host.size(), shift);
    }
    void upload() const { CK(cudaMemcpy(dev_t.data, host.data(), host.size(), cudaMemcpyHostToDevice)); }
};

const fmoe_datatype kF32 = {2, 32, 1}, kBf16 = {4, 16, 1}, kF16 = {2, 16, 1}, kByte = {1, 8, 1};

enum { INSIDE = 7 };

fmoe_quant draw_meaning(int format, bool halves)
{
    fmoe_quant q = {};
    q.size = sizeof q;
    if (format == 0) {
        q.code = (int32_t)pick(1, 7);
        q.flags = (q.code >= FMOE_CODE_E2M1 && coin() ? FMOE_QUANT_HIGH_FIRST : 0) |
                  (halves && coin() ? FMOE_QUANT_HALVES : 0);
        q.group_rows = coin() ? 1 : coin(30) ? 0 : (int32_t)pick(1, 40);
        q.group_cols = coin(20) ? 0 : coin(60) ? 8 << pick(0, 4) : (int32_t)pick(1, 70);
        q.scale_type = coin() ? 0 : (int32_t)pick(1, 2);
        if ((q.code == FMOE_CODE_U4 || q.code == FMOE_CODE_S8) && coin()) q.zero = coin() ? 8 : 3.25f;
        return q;
    }
    if (format == INSIDE) { // any that the products which decode take
        static const int columns[] = {0, 32, 64, 128, 192};
        q.code = (int32_t)pick(1, 7);
        q.flags = (q.code >= FMOE_CODE_E2M1 && coin() ? FMOE_QUANT_HIGH_FIRST : 0) |
                  (halves && coin() ? FMOE_QUANT_HALVES : 0);
        q.group_rows = coin() ? 1 : coin(30) ? 0 : (int32_t)pick(1, 140);
        q.group_cols = columns[pick(0, 4)];
        q.scale_type = coin() ? 0 : (int32_t)pick(1, 2);
        q.zero = q.code == FMOE_CODE_U4 ? 8.f : q.code == FMOE_CODE_S8 && coin() ? 3.25f : 0.f;
        if (q.code == FMOE_CODE_U4 && coin(20)) q.zero = 7.5f;
        return q;
    }
    static const struct {
        int code, flags, rows, cols, type;
        float zero;
    } named[] = {{FMOE_CODE_NF4, FMOE_QUANT_HIGH_FIRST, 1, 64, 0, 0},
                 {FMOE_CODE_E4M3, 0, 128, 128, 0, 0},
                 {FMOE_CODE_E2M1, 0, 1, 32, FMOE_SCALE_E8M0, 0},
                 {FMOE_CODE_U4, 0, 1, 128, 0, 8},
                 {FMOE_CODE_S8, 0, 1, 0, 0, 0},
                 {FMOE_CODE_E2M1, 0, 1, 16, FMOE_SCALE_E4M3, 0}};
    const auto &f = named[format - 1];
    q.code = f.code, q.flags = (uint32_t)f.flags, q.group_rows = f.rows, q.group_cols = f.cols, q.scale_type = f.type,
    q.zero = f.zero;
    if (halves && f.rows > 1) q.flags |= FMOE_QUANT_HALVES;
    return q;
}

// Codes [E,N,K] or E times [N,K], their descriptor in both memories, and what they stand for.
struct Codes {
    bool list;
    int64_t E, N, K;
    fmoe_quant q, dev_q;
    std::deque<Buffer> codes, scale, zeros, scale2;
    std::vector<fmoe_tensor> host[4], dev[4];
    float lut[16];
    std::vector<float> weights;

    void init(const fmoe_quant &meaning, bool is_list, int64_t e, int64_t n, int64_t k, int second_scale)
    {
        q = meaning, list = is_list, E = e, N = n, K = k;
        const bool small = q.code >= FMOE_CODE_E2M1, halves = q.flags & FMOE_QUANT_HALVES;
        const int64_t rows = q.group_rows ? fmoe_ceil_div(halves ? N / 2 : N, q.group_rows) : 1,
                      grid[2] = {halves ? 2 * rows : rows, q.group_cols ? fmoe_ceil_div(K, q.group_cols) : 1};
        const bool integer = q.code == FMOE_CODE_U4 || q.code == FMOE_CODE_S8,
                   has_zeros = integer && q.zero == 0 && coin();
        const bool has2 = second_scale ? second_scale == 2 : coin(), all2 = coin();
        const fmoe_datatype types[] = {kF32, kBf16, kF16}, type = q.scale_type ? kByte : types[pick(0, 2)],
                            zero_type = coin() ? kByte : types[pick(0, 2)];
        const int64_t pad = coin(70) ? 0 : pick(0, 9), wide = q.code == FMOE_CODE_E4M3 ? 448
                                                              : q.code == FMOE_CODE_S8 ? 127
                                                              : q.code == FMOE_CODE_U4 ? 8
                                                                                       : 1;
        const size_t shift = coin(80) ? 0 : 16;
        for (int64_t i = 0; i < (list ? E : 1); i++) {
            auto make = [&](std::deque<Buffer> &d, fmoe_datatype t, std::vector<int64_t> dims, int64_t p, size_t s) {
                if (!list) dims.insert(dims.begin(), E);
                d.emplace_back();
                d.back().init(t, dims, p, s);
            };
            make(codes, kByte, {N, small ? (K + 1) / 2 : K}, pad, shift);
            for (char &c : codes.back().host) {
                c = (char)rng();
                if (q.code == FMOE_CODE_E4M3 && (c & 127) == 127) c = 0; // NaN
            }
            make(scale, type, {grid[0], grid[1]}, coin(80) ? 0 : 3, 0);
            fill(scale.back(), type, [&] {
                return coin(3) ? 0 : (0.3 + uniform()) / sqrt((double)K) / (double)wide * (coin(10) ? -1 : 1);
            });
            if (has_zeros) {
                make(zeros, zero_type, {grid[0], grid[1]}, 0, 0);
                fill(zeros.back(), zero_type, [&] { return (double)pick(0, 15); }, true);
            }
            if (has2) {
                scale2.emplace_back();
                scale2.back().init(kF32, {list || !all2 ? 1 : E}, 0, 0);
                fill(scale2.back(), kF32, [&] { return 0.5 + uniform(); });
            }
        }
        for (float &v : lut) v = (float)normal();
        if (q.code == FMOE_CODE_LUT4) q.lut = lut;
        std::deque<Buffer> *const all[4] = {&codes, &scale, &zeros, &scale2};
        for (int i = 0; i < 4; i++)
            for (Buffer &b : *all[i]) {
                b.upload();
                host[i].push_back(b.host_t), dev[i].push_back(b.dev_t);
            }
        dev_q = q;
        q.scale = host[1].data(), dev_q.scale = dev[1].data();
        if (has_zeros) q.zeros = host[2].data(), dev_q.zeros = dev[2].data();
        if (has2) q.scale2 = host[3].data(), dev_q.scale2 = dev[3].data();
        weights.resize((size_t)(E * N * K));
        for (int64_t x = 0; x < E; x++)
            for (int64_t y = 0; y < N; y++) {
                const fmoe_tensor &t = host[0][list ? (size_t)x : 0];
                const char *row = (const char *)t.data + (list ? 0 : x * t.strides[0]) + y * t.strides[list ? 0 : 1];
                decode_row(&q, row, list, x, y, N, K, &weights[(size_t)((x * N + y) * K)]);
            }
    }
    template <class F> void fill(Buffer &b, fmoe_datatype type, F f, bool integers = false)
    {
        const size_t n = b.host.size() * 8 / type.bits;
        for (size_t i = 0; i < n; i++) {
            const double v = f();
            if (type.bits == 32) ((float *)b.host.data())[i] = (float)v;
            else if (type.bits == 16)
                ((uint16_t *)b.host.data())[i] =
                    type.code == 4 ? fmoe_float_to_bf16((float)v) : fmoe_float_to_f16((float)v);
            else if (integers) b.host[i] = (char)(int)v;
            else if (q.scale_type == FMOE_SCALE_E8M0)
                b.host[i] = (char)(coin(2) ? pick(0, 3) : 127 + (int)floor(log2(fabs(v) + 1e-9)));
            else b.host[i] = (char)(coin(4) ? pick(0, 15) : pick(40, 70)); // E4M3, denormals too
        }
    }
    // The weights of expert e as numbers of the plan's dtype.
    void put(Tensor &t, int64_t e0, int64_t e1)
    {
        for (size_t i = 0; i < t.ref.size(); i++) t.ref[i] = weights[(size_t)(e0 * N * K) + i];
        (void)e1;
        t.upload();
    }
};

// Few tokens: sizes that the kernels which read codes are made for, and some that they leave to the others.
QuantCase draw_few()
{
    static const int acts[] = {0, 0, 1, 2, 3, 4, 16, 17, 20};
    static const int64_t tokens[] = {1, 1, 2, 4, 7, 8, 9, 16, 33, 64, 100, 128, 129};
    QuantCase c = {};
    c.dtype = coin(70) ? FMOE_BF16 : FMOE_F16;
    c.act = acts[pick(0, 8)];
    c.H = coin(90) ? 32 * pick(1, coin(30) ? 30 : 9) : 8 * pick(1, 60);
    c.I = coin(90) ? 32 * pick(1, coin(30) ? 20 : 6) : 8 * pick(1, 40);
    c.E = coin(30) ? pick(20, 130) : pick(1, 9);
    if (c.H * c.I > 40000 && c.E > 9) c.E = pick(10, 30);
    c.k = pick(1, coin(30) ? 8 : 3);
    c.T = tokens[pick(0, 12)];
    c.flags = (coin(30) ? FMOE_INTERLEAVED : 0) | (coin(30) ? FMOE_BIAS : 0) | (coin(25) ? FMOE_SKIP_E : 0) |
              (coin(25) ? FMOE_SAME_BITS : 0);
    c.run_flags = coin(20) ? FMOE_ADD_OUT : 0;
    const int which = (int)pick(0, 7);
    c.first = which != 0, c.second = which != 1;
    auto rank = [] { return coin(50) ? 0 : coin(80) ? 8 * pick(1, coin(25) ? 16 : 5) : pick(1, 70); };
    c.rank1 = rank(), c.rank2 = rank();
    if (coin()) c.rank1 = c.rank2 = 0;
    c.wide = coin();
    c.skew = coin(20) ? 80 : 0;
    c.format[0] = coin(70) ? (int)pick(1, 6) : 0, c.format[1] = coin(70) ? (int)pick(1, 6) : 0;
    return c;
}

// What the kernels that keep more precision take (decode/coded.cuh): every division of a row among warps, batches of
// tokens of one expert, columns that are no whole tile.
QuantCase draw_precise()
{
    static const int acts[] = {0, 0, 0, 1, 2, 3, 4, 16, 17, 20};
    static const int64_t tokens[] = {1, 1, 2, 3, 4, 5, 8, 16, 24, 33, 64};
    QuantCase c = {};
    c.dtype = FMOE_BF16, c.first = c.second = true;
    c.act = acts[pick(0, 9)];
    c.T = tokens[pick(0, 10)];
    c.H = c.T == 1 && coin() ? 32 * pick(1, 80) : coin() ? 64 * pick(1, 6) : 32 * pick(1, 12);
    c.I = c.T == 1 && coin() ? 32 * pick(1, 40) : coin() ? 64 * pick(1, 5) : 32 * pick(1, 8);
    c.E = coin(30) ? pick(20, 130) : pick(1, 9);
    c.k = pick(1, coin(30) ? 8 : 3);
    c.flags = (coin(30) ? FMOE_INTERLEAVED : 0) | (coin(30) ? FMOE_BIAS : 0) | (coin(25) ? FMOE_SKIP_E : 0) |
              (coin(10) ? FMOE_SAME_BITS : 0);
    c.run_flags = coin(20) ? FMOE_ADD_OUT : 0;
    c.skew = coin(30) ? 80 : 0;
    for (int &f : c.format) f = coin(85) ? (int)pick(1, 6) : 0;
    c.second_scale = coin(80) ? 1 : 2;
    return c;
}

// Sizes and formats that Hopper's products which decode are made for (sm90/coded), more than one tile either way.
QuantCase draw_inside()
{
    static const int acts[] = {0, 0, 1, 2, 3, 16, 17, 20};
    QuantCase c = {};
    c.dtype = FMOE_BF16;
    c.act = acts[pick(0, 7)];
    c.H = 64 * pick(1, coin(20) ? 9 : 4), c.I = 64 * pick(1, coin(20) ? 7 : 3);
    c.E = coin(20) ? pick(10, 40) : pick(1, 6);
    c.k = pick(1, 3);
    c.T = coin(40) ? pick(129, 700) : pick(2, 200);
    c.flags = (coin(25) ? FMOE_RECOMPUTE : 0) | (coin(25) ? FMOE_SKIP_E : 0) | (coin(30) ? FMOE_BIAS : 0) |
              (coin(25) ? FMOE_INTERLEAVED : 0);
    c.run_flags = (coin(20) ? FMOE_ADD_OUT : 0) | (coin(20) ? FMOE_ADD_DX : 0);
    const int which = (int)pick(0, 5);
    c.first = which != 0, c.second = which != 1;
    auto rank = [] { return coin(40) ? 0 : coin(80) ? 8 * pick(1, coin(25) ? 17 : 5) : pick(1, 70); };
    c.rank1 = rank(), c.rank2 = rank();
    c.wide = coin();
    c.turned = coin(20) ? (int)pick(0, 15) : 0;
    c.skew = coin(20) ? 80 : 0;
    for (int &f : c.format) f = coin(40) ? INSIDE : (int)pick(1, 5);
    c.second_scale = coin(80) ? 1 : 2;
    return c;
}

QuantCase draw()
{
    static const int types[] = {FMOE_BF16, FMOE_BF16, FMOE_F16, FMOE_F32};
    static const int acts[] = {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20};
    QuantCase c = {};
    const bool fast = coin(65);
    c.dtype = types[pick(0, 3)];
    c.act = coin() ? 0 : acts[pick(0, 11)];
    c.H = fast ? 64 * pick(1, coin(30) ? 9 : 4) : pick(1, 150);
    c.I = fast ? 8 * pick(1, coin(30) ? 60 : 24) : pick(1, 120);
    c.E = coin(10) ? pick(60, 300) : pick(1, 9);
    c.k = pick(1, 4);
    c.T = coin(10) ? pick(1, 3) : coin(30) ? pick(100, 260) : pick(4, 90);
    if (c.H * c.I > 20000 && c.E > 9) c.E = pick(10, 30);
    c.list = coin(30);
    c.flags = (!c.list && coin(25) ? FMOE_INTERLEAVED : 0) | (!c.list && coin(30) ? FMOE_BIAS : 0) |
              (coin(25) ? FMOE_RECOMPUTE : 0) | (coin(25) ? FMOE_SKIP_E : 0);
    c.run_flags = (coin(20) ? FMOE_ADD_OUT : 0) | (coin(20) ? FMOE_ADD_DX : 0);
    const int which = (int)pick(0, 5);
    c.first = which != 0, c.second = which != 1;
    auto rank = [] { return coin(50) ? 0 : coin(70) ? 8 * pick(1, coin(25) ? 17 : 5) : pick(1, 70); };
    c.rank1 = rank(), c.rank2 = rank();
    c.wide = coin();
    c.turned = coin(30) ? (int)pick(0, 15) : 0;
    c.skew = coin(20) ? 80 : 0;
    c.format[0] = coin(40) ? (int)pick(1, 6) : 0, c.format[1] = coin(40) ? (int)pick(1, 6) : 0;
    return c;
}

double element(const Tensor &t, const std::vector<char> &raw, int64_t i)
{
    return t.dtype == FMOE_F32 ? ((const float *)raw.data())[i] : fmoe_bf16_to_float(((const uint16_t *)raw.data())[i]);
}

// Whether rows differ by no more than f16's rounding of one factor moves bf16's of what is made of it: elements by a
// unit in their last place, 2^-8; sums of them by 2^-8 of their terms, which may be larger than the row: of an average
// one.
bool close_rows(const Tensor &t, const std::vector<char> &a, const std::vector<char> &b)
{
    const int64_t n = t.shape.back();
    std::vector<double> norm, apart;
    int64_t at = 0;
    double all = 0;
    t.each([&](int64_t i) {
        const double x = element(t, a, i), d = element(t, b, i) - x;
        if (at++ % n == 0) norm.push_back(0), apart.push_back(0);
        norm.back() += x * x, apart.back() += d * d, all += x * x;
    });
    const double average = sqrt(all / (double)(norm.empty() ? 1 : norm.size()));
    for (size_t i = 0; i < norm.size(); i++)
        if (!(sqrt(apart[i]) <= 0.03 * (sqrt(norm[i]) + average))) return false;
    return true;
}

// Distance from the reference, in the norm of all elements.
double distance(const Tensor &t, const std::vector<char> &raw, const std::vector<double> &reference)
{
    double sum = 0;
    t.each([&](int64_t i) {
        const double d = fmoe_bf16_to_float(((const uint16_t *)raw.data())[i]) - reference[(size_t)i];
        sum += d * d;
    });
    return sqrt(sum);
}

bool ahead; // experts are decoded ahead of the products, on Hopper in bf16 too
void decode_ahead(bool yes)
{
    ahead = yes;
    if (yes) setenv("FMOE_CUDA_CODES", "ahead", 1);
    else unsetenv("FMOE_CUDA_CODES");
}

void run_case(const QuantCase &c)
{
    if (too_large(c.T * c.k, c.H, c.I)) return;
    arena.reset();
    char text[400];
    snprintf(text, sizeof text,
             "quant dtype %d act %d T %lld H %lld I %lld E %lld k %lld flags %u run %u list %d quantised %d %d rank "
             "%lld %lld "
             "wide %d turned %d skew %d format %d %d",
             c.dtype, c.act, (long long)c.T, (long long)c.H, (long long)c.I, (long long)c.E, (long long)c.k, c.flags,
             c.run_flags, c.list, c.first, c.second, (long long)c.rank1, (long long)c.rank2, c.wide, c.turned, c.skew,
             c.format[0], c.format[1]);
    context = text;
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = c.dtype;
    d.H = c.H, d.I = c.I, d.E = c.E, d.k = c.k;
    d.act = c.act;
    d.flags = c.flags;
    d.rank1 = c.rank1, d.rank2 = c.rank2;
    Pair plain(d);
    d.flags |= FMOE_QUANT;
    Pair coded(d);
    if (!plain.ok || !coded.ok) return;
    const bool gated = plain.ref.gated, bias = c.flags & FMOE_BIAS;
    const int64_t HC = plain.ref.h_cols;

    // Codes, and the weights that they stand for. Of a list: gates, ups, downs; of stacks: W1 and W2.
    Codes codes[3];
    const bool halves = gated && !c.list && !(c.flags & FMOE_INTERLEAVED);
    const fmoe_quant meaning1 = draw_meaning(c.format[0], halves);
    if (c.list && gated) codes[0].init(coin() ? meaning1 : draw_meaning(0, false), true, c.E, c.I, c.H, c.second_scale);
    codes[1].init(meaning1, c.list, c.E, c.list ? c.I : HC, c.H, c.second_scale);
    codes[2].init(draw_meaning(c.format[1], false), c.list, c.E, c.H, c.I, c.second_scale);
    std::deque<Tensor> w[3];
    std::vector<fmoe_tensor> lists[3], lists_ref[3];
    for (int i = c.list && gated ? 0 : 1; i < 3; i++)
        for (int64_t e = 0; e < (c.list ? c.E : 1); e++) {
            w[i].emplace_back();
            Tensor &t = w[i].back();
            if (c.list) t.init(c.dtype, {codes[i].N, codes[i].K});
            else t.init(c.dtype, {c.E, codes[i].N, codes[i].K});
            codes[i].put(t, e, c.list ? e + 1 : c.E);
            lists[i].push_back(t.dev_t), lists_ref[i].push_back(t.ref_t);
        }
    Tensor x, ids, pr, out, dout, dx, dp, b1, b2, db1, db2, lora[4], narrow[4], dlora[4];
    x.init(c.dtype, {c.T, c.H}, {}, coin() ? 8 : 0);
    dout.init(c.dtype, {c.T, c.H});
    ids.init(coin() ? -32 : -64, {c.T, c.k});
    for (auto &v : ids.ints) v = pick(0, 99) < c.skew ? 0 : pick(0, c.E - 1 + (c.flags & FMOE_SKIP_E && coin(10)));
    pr.init(FMOE_F32, {c.T, c.k});
    out.init(c.dtype, {c.T, c.H}), dx.init(c.dtype, {c.T, c.H}), dp.init(FMOE_F32, {c.T, c.k});
    b1.init(c.dtype, {c.E, HC}), b2.init(c.dtype, {c.E, c.H}), db1.init(c.dtype, {c.E, HC}),
        db2.init(c.dtype, {c.E, c.H});
    for (Tensor *t : {&x, &dout, &b1, &b2}) t->fill(normal);
    pr.fill(uniform);
    std::vector<Tensor *> results = {&out, &dx, &dp};
    if (bias) results.push_back(&db1), results.push_back(&db2);
    const int64_t rows[4] = {c.rank1, HC, c.rank2, c.H}, cols[4] = {c.H, c.rank1, c.I, c.rank2};
    for (int i = 0; i < 4; i++) {
        if (!(i < 2 ? c.rank1 : c.rank2)) continue;
        const std::vector<int> order = c.turned >> i & 1 ? std::vector<int>{0, 2, 1} : std::vector<int>{};
        lora[i].init(c.wide ? FMOE_F32 : c.dtype, {c.E, rows[i], cols[i]}, order);
        lora[i].fill([&] { return normal() / sqrt((double)cols[i]); });
        lora[i].upload();
        // What the library makes of f32: rounded, and lying as the weights do.
        narrow[i].init(c.dtype, {c.E, rows[i], cols[i]}, c.wide && c.dtype != FMOE_F32 ? std::vector<int>{} : order);
        size_t n = 0;
        std::vector<int64_t> at;
        lora[i].each([&](int64_t p) { at.push_back(p); });
        narrow[i].each([&](int64_t p) { narrow[i].ref[(size_t)p] = round_to(lora[i].ref[(size_t)at[n++]], c.dtype); });
        narrow[i].upload();
        dlora[i].init(coin() ? FMOE_F32 : c.dtype, {c.E, rows[i], cols[i]});
        results.push_back(&dlora[i]);
    }
    for (Tensor *t : {&x, &ids, &pr, &dout, &b1, &b2}) t->upload();

    auto weights = [&](bool quant) {
        fmoe_weights v = {};
        const bool q1 = quant && c.first, q2 = quant && c.second;
        if (c.list) {
            if (gated) v.gate = q1 ? codes[0].dev[0].data() : lists[0].data();
            v.up = q1 ? codes[1].dev[0].data() : lists[1].data();
            v.down = q2 ? codes[2].dev[0].data() : lists[2].data();
            if (q1 && gated) v.quant_gate = &codes[0].dev_q;
        } else {
            v.w1 = q1 ? &codes[1].dev[0][0] : &lists[1][0];
            v.w2 = q2 ? &codes[2].dev[0][0] : &lists[2][0];
        }
        if (q1) v.quant1 = &codes[1].dev_q;
        if (q2) v.quant2 = &codes[2].dev_q;
        if (bias) v.b1 = &b1.dev_t, v.b2 = &b2.dev_t;
        const fmoe_tensor **to[4] = {&v.lora_a1, &v.lora_b1, &v.lora_a2, &v.lora_b2};
        for (int i = 0; i < 4; i++)
            if (i < 2 ? c.rank1 : c.rank2) *to[i] = quant ? &lora[i].dev_t : &narrow[i].dev_t;
        v.lora_scale1 = 0.7f, v.lora_scale2 = -1.3f;
        return v;
    };
    std::vector<std::vector<char>> bits[3];
    std::vector<char> inference[2];
    // Inference of few tokens has other bits than the large products, and keeps more precision (decode/coded.cuh).
    const int64_t R = c.T * c.k;
    const bool precise = c.dtype == FMOE_BF16 && !c.list && c.first && c.second && !c.rank1 && !c.rank2 &&
                         !(c.flags & FMOE_SAME_BITS) && c.T <= 128 && R <= 1024 && R <= 32 * c.E;
    const size_t mark = arena.used, blocks = arena.blocks.size();
    out.fill(normal), dx.fill(normal);
    for (int round = 0; round < 3; round++) { // plain, quantised, quantised again
        Pair &p = round ? coded : plain;
        arena.used = mark;
        arena.blocks.resize(blocks);
        for (Tensor *t : results) t->poison();
        if (c.run_flags & FMOE_ADD_OUT) out.upload();
        if (c.run_flags & FMOE_ADD_DX) dx.upload();
        fmoe_run f = p.dev_run(FMOE_FORWARD, c.T, c.run_flags);
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &x.dev_t, a.ids = &ids.dev_t, a.weights = &pr.dev_t, a.out = &out.dev_t;
        a.w = weights(round > 0);
        a.saved = p.dev_saved, a.saved_bytes = p.dev_saved_bytes;
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "forward %d", round);
        fmoe_run b = p.dev_run(FMOE_BACKWARD, c.T, c.run_flags);
        a.dout = &dout.dev_t, a.dx = &dx.dev_t, a.dweights = &dp.dev_t;
        if (bias) a.dw.b1 = &db1.dev_t, a.dw.b2 = &db2.dev_t;
        const fmoe_tensor **to[4] = {&a.dw.lora_a1, &a.dw.lora_b1, &a.dw.lora_a2, &a.dw.lora_b2};
        for (int i = 0; i < 4; i++)
            if (i < 2 ? c.rank1 : c.rank2) *to[i] = &dlora[i].dev_t;
        verdict(p.dev.backend->experts[1](&p.dev, &a, &b) == FMOE_OK, "backward %d", round);
        CK(cudaDeviceSynchronize());
        for (Tensor *t : results) bits[round].push_back(t->raw());
        if (round == 2) break;
        a.saved = nullptr, a.saved_bytes = 0;
        a.dw = {}, a.dout = a.dx = a.dweights = nullptr;
        out.poison();
        if (c.run_flags & FMOE_ADD_OUT) out.upload();
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "inference %d", round);
        CK(cudaDeviceSynchronize());
        inference[round] = out.raw();
        if (!round || !precise) continue;
        out.poison();
        if (c.run_flags & FMOE_ADD_OUT) out.upload();
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "inference again");
        CK(cudaDeviceSynchronize());
        verdict(inference[1] == out.raw(), "inference differs between two runs");
    }
    static const char *const names[] = {"out", "dx", "dweights", "then"};
    // The fused backward that decodes W2 itself keeps da in f32 (sm90/coded/epilogue_dh.cuh), which is rounded
    // elsewhere.
    const Tensor *const of_da[] = {&dx, &dp, &db1, &dlora[0], &dlora[1]};
    const bool inside = !ahead && c.dtype == FMOE_BF16 && !c.list && c.second && c.H % 64 == 0 && c.I % 64 == 0;
    for (size_t i = 0; i < results.size(); i++) {
        const bool near = inside && std::find(of_da, of_da + 5, results[i]) != of_da + 5;
        verdict(bits[0][i] == bits[1][i] || (near && close_rows(*results[i], bits[0][i], bits[1][i])),
                "result %d (%s) is not that of decoded weights", (int)i, names[i < 3 ? i : 3]);
        verdict(bits[1][i] == bits[2][i], "result %d differs between two runs", (int)i);
    }
    if (precise) {
        // The layer in double, on weights that are not rounded to the plan's dtype.
        fmoe_run f = plain.ref_run(FMOE_FORWARD, c.T, c.run_flags);
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &x.ref_t, a.ids = &ids.ref_t, a.weights = &pr.ref_t, a.out = &out.ref_t;
        a.w.w1 = &lists_ref[1][0], a.w.w2 = &lists_ref[2][0];
        if (bias) a.w.b1 = &b1.ref_t, a.w.b2 = &b2.ref_t;
        a.saved = plain.ref_saved.data(), a.saved_bytes = plain.ref_saved.size();
        verdict(plain.ref.backend->experts[0](&plain.ref, &a, &f) == FMOE_OK, "the reference");
        double norm = 0;
        out.each([&](int64_t i) { norm += out.ref[(size_t)i] * out.ref[(size_t)i]; });
        norm = sqrt(norm);
        const double far = distance(out, inference[1], out.ref), rounded = distance(out, bits[0][0], out.ref);
        static const bool aloud = getenv("CHECK_ERRORS") != nullptr;
        if (aloud) printf("error %s: %.3e, of rounded weights %.3e\n", context.c_str(), far / norm, rounded / norm);
        // The large products round weights, and rows of the second one, besides what both round. Few elements: by
        // chance.
        verdict(far <= 1.3 * rounded + 1e-6 * norm,
                "inference is %.3e from the layer in double, rounded weights are %.3e (of %.3e)", far, rounded, norm);
    }
    // Few tokens of plain weights are multiplied by other kernels.
    const bool decodes = c.dtype != FMOE_F32 && c.T <= 64 && (R <= c.E || R <= 8) && c.H % 8 == 0 && c.I % 8 == 0;
    if (!decodes && !precise) verdict(inference[0] == inference[1], "inference is not that of decoded weights");
    // Of quantised stacks inference has the bits of the products that keep h for a backward, where these are the fast
    // ones.
    if (!c.list && c.H % 8 == 0 && c.I % 8 == 0 && !precise)
        verdict(inference[1] == bits[1][0], "inference is not the forward of training");
    check_guards();
}

} // namespace

void check_quant(int cases)
{
    for (int i = 0; i < cases; i++) {
        decode_ahead(coin());
        run_case(draw()), run_case(draw_few()), run_case(draw_precise());
    }
    decode_ahead(true);
    QuantCase c = {};
    c.dtype = FMOE_BF16, c.first = c.second = true;
    // Every format at sizes that the fast products are made for, with few rows an expert and with many, adapters in
    // f32.
    for (int format = 1; format <= 6; format++)
        for (int round = 0; round < 4; round++) {
            c.format[0] = c.format[1] = format;
            c.H = 512, c.I = round & 1 ? 320 : 256, c.E = round & 2 ? 2 : 6, c.k = 2, c.T = round & 2 ? 500 : 300;
            c.rank1 = c.rank2 = 16, c.wide = true, c.list = round == 3;
            c.flags = round == 1 ? FMOE_RECOMPUTE : 0;
            run_case(c);
        }
    // The sizes of two models, few experts: gpt-oss's rows have 90 scales, which begin at odd words.
    for (int format = 1; format <= 6; format++)
        for (int64_t T : {1, 4, 16, 64}) {
            c.format[0] = c.format[1] = format, c.T = T, c.E = 6, c.k = 2, c.flags = 0, c.list = c.wide = false;
            c.rank1 = c.rank2 = format % 2 ? 16 : 0;
            c.H = c.I = 2880 / 4, c.flags = FMOE_INTERLEAVED | FMOE_BIAS;
            if (T > 4) c.H = 2048, c.I = 768, c.flags = 0;
            run_case(c);
            c.rank1 = c.rank2 = 0;
            run_case(c);
        }
    c.rank1 = c.rank2 = 16, c.wide = true;
    // More chunks than one: experts of 12 MB; and many small experts.
    c.list = false, c.flags = 0, c.format[0] = 1, c.format[1] = 3;
    c.H = 1024, c.I = 1024, c.E = 24, c.k = 2, c.T = 160;
    run_case(c);
    c.skew = 50, c.flags = FMOE_BIAS | FMOE_RECOMPUTE;
    run_case(c);
    c.H = 64, c.I = 64, c.E = 1024, c.k = 3, c.T = 300, c.skew = 0, c.flags = 0;
    run_case(c);
    decode_ahead(false);
}

void check_inside(int cases)
{
    decode_ahead(false);
    for (int i = 0; i < 2 * cases; i++) run_case(draw_inside());
    // More tokens of an expert than a tile has, more experts than the card has SMs, columns that end inside a tile.
    QuantCase c = {};
    c.dtype = FMOE_BF16, c.first = c.second = true, c.second_scale = 1;
    for (int format = 1; format <= 5; format++) {
        c.format[0] = c.format[1] = format;
        c.H = 192, c.I = 320, c.E = 2, c.k = 1, c.T = 560, c.rank1 = c.rank2 = 16, c.wide = true;
        run_case(c);
        c.H = 64, c.I = 64, c.E = 150, c.k = 3, c.T = 300, c.rank1 = 72, c.rank2 = 0;
        run_case(c);
    }
}
