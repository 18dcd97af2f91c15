// SPDX-License-Identifier: Apache-2.0
// check_gmm_quant.cu - the grouped matmul on quantised weights: the same bits as on weights that the reference decoded,
// forward and dx. Drawn descriptors, stacks and lists, codes [out,in] and [in,out], rings of one chunk and of many.
#include "check.cuh"

extern "C" void decode_row(const fmoe_quant *q, const void *row, bool list, int64_t e, int64_t n, int64_t N, int64_t K,
                           float *out);

namespace
{

// A tensor of bytes or numbers on the host and on the device.
struct Both {
    std::vector<char> bytes;
    std::vector<int64_t> shape;
    fmoe_tensor host = {}, dev = {};
    Both(fmoe_datatype type, std::vector<int64_t> dims) : shape(dims)
    {
        int64_t n = type.bits / 8;
        for (int64_t d : dims) n *= d;
        bytes.assign((size_t)n, 0);
        host.ndim = (int32_t)dims.size(), host.dtype = type, host.shape = shape.data();
        dev = host;
        host.device = {FMOE_CPU, 0}, host.data = bytes.data();
        dev.device = {FMOE_CUDA, 0}, dev.data = arena.take(bytes.size());
    }
    void upload() const { CK(cudaMemcpy(dev.data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice)); }
};

const fmoe_datatype kF32 = {2, 32, 1}, kBf16 = {4, 16, 1}, kByte = {1, 8, 1};

struct Case {
    int64_t E, K, N, most; // most: rows of a group
    int dtype, wide, format;
    bool list, alike, in_out, bias, tail;
    uint32_t flags;
    int64_t ring; // bytes, or 0: as it comes
};

fmoe_quant meaning(int format)
{
    fmoe_quant q = {};
    q.size = sizeof q;
    static const struct {
        int code, flags, rows, cols, type;
        float zero;
    } named[] = {{FMOE_CODE_NF4, FMOE_QUANT_HIGH_FIRST, 1, 64, 0, 0},
                 {FMOE_CODE_E4M3, 0, 128, 128, 0, 0},
                 {FMOE_CODE_E2M1, 0, 1, 32, FMOE_SCALE_E8M0, 0},
                 {FMOE_CODE_U4, 0, 1, 128, 0, 8},
                 {FMOE_CODE_S8, 0, 1, 0, 0, 0},
                 {FMOE_CODE_FP4, FMOE_QUANT_HIGH_FIRST, 3, 7, 0, 0},
                 {FMOE_CODE_E2M1, 0, 1, 16, FMOE_SCALE_E4M3, 0},
                 {FMOE_CODE_S8, 0, 0, 0, 0, 2.5f}};
    const auto &f = named[format];
    q.code = f.code, q.flags = (uint32_t)f.flags, q.group_rows = f.rows, q.group_cols = f.cols, q.scale_type = f.type,
    q.zero = f.zero;
    return q;
}

void run_case(const Case &c)
{
    if (too_large(c.E * c.most, c.K, c.N)) return;
    arena.reset();
    char text[300];
    snprintf(text, sizeof text,
             "gmm quant dtype %d E %lld K %lld N %lld rows %lld wide %d format %d list %d alike %d in_out %d bias %d "
             "flags %u ring %lld",
             c.dtype, (long long)c.E, (long long)c.K, (long long)c.N, (long long)c.most, c.wide, c.format, c.list,
             c.alike, c.in_out, c.bias, c.flags, (long long)c.ring);
    context = text;
    if (c.ring) setenv("FMOE_CUDA_RING", std::to_string(c.ring).c_str(), 1);
    else unsetenv("FMOE_CUDA_RING");
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.dtype = c.dtype, d.E = c.E;
    if (!c.list) d.K = c.K, d.N = c.N;
    Pair plain(d);
    d.flags |= FMOE_QUANT;
    Pair coded(d);
    unsetenv("FMOE_CUDA_RING");
    if (!plain.ok || !coded.ok) return;

    // Groups, and of each matrix codes, scales and what they stand for.
    const int64_t G = c.list ? c.E : 1;
    std::vector<int64_t> size((size_t)c.E), Ks, Ns;
    int64_t R = 0;
    for (auto &n : size) n = coin(15) ? 0 : pick(1, c.most), R += n;
    const int64_t total = R + (c.list || !c.tail ? 0 : 17);
    Tensor sizes;
    sizes.init(coin() ? -32 : -64, {c.E});
    for (int64_t e = 0; e < c.E; e++) sizes.ints[(size_t)e] = size[(size_t)e];
    sizes.upload();
    std::deque<Both> codes, scale, zeros, scale2;
    std::deque<Tensor> x, w, bias, y, dy, dx;
    std::vector<fmoe_tensor> v[6], code_t[2], part_t[3][2];
    fmoe_quant q = meaning(c.format);
    const bool small = q.code >= FMOE_CODE_E2M1, has_zeros = q.code == FMOE_CODE_S8 && q.zero == 0 && coin(),
               has2 = coin(), half = !q.scale_type && coin(30);
    if (c.in_out) q.flags |= FMOE_QUANT_IN_OUT;
    for (int64_t g = 0; g < G; g++) {
        const int64_t K = c.list && !c.alike && g ? pick(1, 90) : c.K, N = c.list && !c.alike && g ? pick(1, 90) : c.N,
                      rows = c.in_out ? K : N, cols = c.in_out ? N : K,
                      grid[2] = {q.group_rows ? fmoe_ceil_div(rows, q.group_rows) : 1,
                                 q.group_cols ? fmoe_ceil_div(cols, q.group_cols) : 1};
        Ks.push_back(K), Ns.push_back(N);
        auto dims = [&](int64_t a, int64_t b) {
            return c.list ? std::vector<int64_t>{a, b} : std::vector<int64_t>{c.E, a, b};
        };
        codes.emplace_back(kByte, dims(rows, small ? (cols + 1) / 2 : cols));
        for (char &b : codes.back().bytes) {
            b = (char)rng();
            if (q.code == FMOE_CODE_E4M3 && (b & 127) == 127) b = 0; // NaN
        }
        scale.emplace_back(q.scale_type ? kByte : half ? kBf16 : kF32, dims(grid[0], grid[1]));
        std::vector<char> &s = scale.back().bytes;
        const size_t one = q.scale_type ? 1 : half ? 2 : 4;
        for (size_t i = 0; i < s.size() / one; i++) {
            const float f = (float)(0.002 + 0.01 * uniform());
            if (one == 1) s[i] = (char)(q.scale_type == FMOE_SCALE_E8M0 ? pick(118, 124) : pick(20, 60));
            else if (one == 2) ((uint16_t *)s.data())[i] = fmoe_float_to_bf16(f);
            else ((float *)s.data())[i] = f;
        }
        if (has_zeros) {
            zeros.emplace_back(kByte, dims(grid[0], grid[1]));
            for (char &b : zeros.back().bytes) b = (char)pick(0, 15);
        }
        if (has2) {
            scale2.emplace_back(kF32, std::vector<int64_t>{c.list ? 1 : c.E});
            for (size_t i = 0; i < scale2.back().bytes.size() / 4; i++)
                ((float *)scale2.back().bytes.data())[i] = (float)(0.5 + uniform());
        }
        for (std::deque<Tensor> *t : {&x, &w, &bias, &y, &dy, &dx}) t->emplace_back();
        const int64_t n = c.list ? size[(size_t)g] : total;
        x[g].init(c.dtype, {n, K}), y[g].init(c.wide, {n, N}), dy[g].init(c.wide, {n, N}), dx[g].init(c.dtype, {n, K});
        const std::vector<int> order = c.list ? (c.in_out ? std::vector<int>{0, 1} : std::vector<int>{1, 0})
                                              : (c.in_out ? std::vector<int>{0, 1, 2} : std::vector<int>{0, 2, 1});
        w[g].init(c.dtype, dims(K, N), order);
        bias[g].init(c.wide, c.list ? std::vector<int64_t>{N} : std::vector<int64_t>{c.E, N});
    }
    for (std::deque<Tensor> *rows : {&x, &y, &dy, &dx}) { // alike: one after the other
        const Tensor &first = (*rows)[0];
        char *next =
            c.alike ? (char *)arena.take((size_t)(total * first.size(1)) * fmoe_dtype_size(first.dtype)) : nullptr;
        for (Tensor &t : *rows)
            if (c.alike && t.span) t.dev_t.data = t.dev = next, next += t.bytes();
    }
    std::deque<Both> *const parts[3] = {&scale, &zeros, &scale2};
    for (const Both &b : codes) b.upload(), code_t[0].push_back(b.host), code_t[1].push_back(b.dev);
    for (int i = 0; i < 3; i++)
        for (const Both &b : *parts[i]) b.upload(), part_t[i][0].push_back(b.host), part_t[i][1].push_back(b.dev);
    fmoe_quant dev_q = q;
    for (int side = 0; side < 2; side++) {
        fmoe_quant &t = side ? dev_q : q;
        t.scale = part_t[0][side].data();
        if (has_zeros) t.zeros = part_t[1][side].data();
        if (has2) t.scale2 = part_t[2][side].data();
    }
    for (int64_t g = 0; g < G; g++) {
        const int64_t rows = c.in_out ? Ks[(size_t)g] : Ns[(size_t)g], cols = c.in_out ? Ns[(size_t)g] : Ks[(size_t)g];
        const fmoe_tensor &t = codes[g].host;
        const int64_t pitch = t.shape[t.ndim - 1];
        std::vector<float> row((size_t)cols);
        for (int64_t e = 0; e < (c.list ? 1 : c.E); e++)
            for (int64_t r = 0; r < rows; r++) {
                decode_row(&q, (const char *)t.data + (e * rows + r) * pitch, c.list, c.list ? g : e, r, rows, cols,
                           row.data());
                for (int64_t k = 0; k < cols; k++) w[g].ref[(size_t)((e * rows + r) * cols + k)] = row[(size_t)k];
            }
        w[g].upload();
        for (Tensor *f : {&x[g], &dy[g], &bias[g]}) f->fill(normal), f->upload();
        dx[g].fill(normal), y[g].fill(normal);
        Tensor *all[6] = {&x[g], &w[g], &bias[g], &y[g], &dy[g], &dx[g]};
        for (int i = 0; i < 6; i++) v[i].push_back(all[i]->dev_t);
    }

    const size_t mark = arena.used, blocks = arena.blocks.size();
    std::vector<std::vector<char>> bits[3];
    for (int round = 0; round < 3; round++) { // plain, quantised, quantised again
        Pair &p = round ? coded : plain;
        arena.used = mark;
        arena.blocks.resize(blocks);
        for (int64_t g = 0; g < G; g++) y[g].upload(), dx[g].upload(); // rows of no group keep what they have, or 0
        for (int pass = 0; pass < 2; pass++) {
            fmoe_gmm_args a = {};
            a.size = sizeof a;
            a.list = c.list;
            a.w = round ? code_t[1].data() : v[1].data();
            a.quant = round ? &dev_q : nullptr;
            if (!c.list) a.sizes = &sizes.dev_t;
            if (pass) a.dy = v[4].data(), a.dx = v[5].data();
            else a.x = v[0].data(), a.y = v[3].data(), a.bias = c.bias ? v[2].data() : nullptr;
            const fmoe_run r = p.dev_run((fmoe_pass)pass, total, pass ? c.flags : 0);
            if (round && !c.list)
                verdict((int64_t)r.workspace_bytes <= fmoe_max(c.ring ? c.ring : (int64_t)62 << 20,
                                                               c.K * c.N * (int64_t)fmoe_dtype_size(c.dtype)) +
                                                          (1 << 20) + 64 * total,
                        "workspace of %zu bytes", r.workspace_bytes);
            verdict(p.dev.backend->gmm[pass](&p.dev, &a, &r) == FMOE_OK, "status of pass %d, round %d", pass, round);
        }
        CK(cudaDeviceSynchronize());
        for (int64_t g = 0; g < G; g++) bits[round].push_back(y[g].raw()), bits[round].push_back(dx[g].raw());
    }
    for (size_t i = 0; i < bits[0].size(); i++) {
        verdict(bits[0][i] == bits[1][i], "%s %d is not that of decoded weights", i % 2 ? "dx" : "y", (int)i / 2);
        verdict(bits[1][i] == bits[2][i], "%s %d differs between two runs", i % 2 ? "dx" : "y", (int)i / 2);
    }
    check_guards();
}

} // namespace

void check_gmm_quant(int cases)
{
    static const int types[] = {FMOE_BF16, FMOE_BF16, FMOE_F16, FMOE_F32};
    for (int i = 0; i < cases; i++) {
        Case c = {};
        const bool fast = coin(65);
        c.E = coin(30) ? pick(20, 70) : pick(1, 9);
        c.K = fast ? 64 * pick(1, 5) : pick(1, 130), c.N = fast ? 16 * pick(1, 20) : pick(1, 130);
        c.most = coin(20) ? 300 : 40;
        c.dtype = types[pick(0, 3)], c.wide = coin(70) ? c.dtype : FMOE_F32;
        c.format = i % 8;
        c.list = coin(40), c.alike = c.list && coin();
        c.in_out = coin(), c.bias = coin(30), c.tail = coin();
        c.flags = coin(25) ? FMOE_ADD_DX : 0;
        c.ring = c.list ? 0 : coin() ? 0 : pick(1, 8) * c.K * c.N * 2; // some experts of a stack at a time
        run_case(c);
    }
    // Sizes that the fast products are made for, in several chunks.
    for (int format = 0; format < 8; format++) {
        Case c = {};
        c.E = 24, c.K = 1024, c.N = 768, c.most = format % 2 ? 20 : 250, c.dtype = c.wide = FMOE_BF16;
        c.format = format, c.in_out = format & 2, c.ring = 8 << 20, c.bias = format & 1;
        run_case(c);
    }
}
