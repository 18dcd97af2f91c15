// SPDX-License-Identifier: Apache-2.0
// inside.cu - which operands the products that decode take, and their arguments.
#include "inside.cuh"
#include "cuda/sm90/maps.cuh"

// Codes as 16-bit pieces; strides in bytes.
struct CodesMap {
    int64_t codes;  // in 16 bits
    bool turned;    // rows are the contraction
    bool alternate; // gates and ups take turns of 8 rows
    bool map(CUtensorMap *m, const CodedMatrix &c, int64_t E) const
    {
        const int64_t expert = E > 1 ? c.g : (int64_t)c.N * c.r;
        const int tile = (int)((turned ? CODED_TILE : 64) / codes); // and rows of 32 bytes, or swizzled ones of 64, 128
        const int swizzle = turned ? 256 / (int)codes : codes == 2 ? 64 : 0;
        if (alternate) {
            const int64_t dim[5] = {c.K / codes, 8, 2, c.N / 16, E}, stride[4] = {c.r, c.N / 2 * c.r, 8 * c.r, expert};
            const int box[5] = {tile, 8, 2, 8, 1};
            return sm90_map_bytes(m, c.codes, 5, dim, stride, box, swizzle);
        }
        const int64_t dim[3] = {c.K / codes, c.N, E}, stride[2] = {c.r, expert};
        const int box[3] = {tile, turned ? 64 : CODED_TILE, 1};
        return sm90_map_bytes(m, c.codes, 3, dim, stride, box, swizzle);
    }
};

// What one product reads of the weights. False: not such codes. turned: their rows are the contraction.
static bool describe(const Layer &l, const Weight &w, bool turned, Sm90CodedArgs &a, CodeKind &kind)
{
    const Coded *const c = w.coded;
    if (!w.single) return false; // rows of gates and ups alternate in the codes, and not in h
    if (!l.plan->inside || l.plan->path != FMOE_PATH_SM90 || l.dtype != FMOE_BF16 || l.rows <= 0 || l.ragged || !c ||
        c->parts != 1)
        return false;
    const CodedMatrix &m = c->part[0];
    const bool small = m.code >= FMOE_CODE_E2M1;
    if (w.rows != m.N || w.cols != m.K) return false; // some columns of h (slices.cu)
    if (m.list || m.zeros.p || (m.scale2 && m.code != FMOE_CODE_S8) || m.N % 64 || m.K % 64) return false;
    if (m.group_cols && m.group_cols % 64 && m.group_cols != 32) return false;
    if ((uintptr_t)m.codes % 16 || m.r % 16 || m.r <= 0 || (l.E > 1 && (m.g % 16 || m.g <= 0))) return false;
    kind = small ? CODE_NIBBLES : m.code == FMOE_CODE_S8 ? CODE_S8 : CODE_E4M3;
    a.subs = m.group_cols == 32 ? 2 : 1;
    auto whole = [](int64_t n) { return fmoe_ceil_div(n, CODED_TILE) * CODED_TILE; };
    const int64_t steps = (turned ? m.N : m.K) / 64;
    a.scales_sub = turned ? 0 : whole(m.N);
    a.scales_step = a.subs * (turned ? whole(m.K) : a.scales_sub);
    a.scales_each = steps * a.scales_step;
    a.scales_up = m.N / 2;
    if (l.E * a.scales_each * 4 > c->chunk * c->each) return false; // they lie in the ring
    a.high_first = m.high_first;
    a.zero = m.zero;
    a.scale2 = m.scale2, a.scale2_g = m.scale2_g;
    memcpy(a.table, m.table, sizeof a.table);
    a.scales = (const float *)c->ring;
    return true;
}

// Tokens are found by 32 bits, in 16 bytes.
static bool can_gather(const Layer &l, const void *x, int64_t ldx)
{
    return gather_ok(x, ldx) && ldx > 0 && l.T <= UINT32_MAX / (ldx / 8);
}

static bool codes_map(Sm90CodedArgs &a, const Layer &l, const Weight &w, bool turned, bool alternate)
{
    const CodedMatrix &m = w.coded->part[0];
    return CodesMap{m.code >= FMOE_CODE_E2M1 ? 4 : 2, turned, alternate}.map(&a.p.b[0], m, l.E);
}

static bool run(Layer &l, Product product, CodedKernel kernel, CodeKind kind, const Weight &w, Sm90CodedArgs &a)
{
    ScalesArgs s = {w.coded->part[0], (float *)w.coded->ring, a.scales_each, a.scales_step, a.scales_sub,
                    l.map.cnt,        kernel >= CODED_ROWS_N, a.subs};
    inside_scales(s, l.E, *l.stream);
    const cudaError_t e = sm90_coded_launch(*l.stream, product, kernel, kind, a, l.plan->sms);
    if (e != cudaSuccess && l.status == FMOE_OK)
        l.status = FAIL(FMOE_ERR_DEVICE, "CUDA: launch of a product failed: %s", cudaGetErrorString(e));
    l.stream->last = Product::DEQUANT; // they let nothing in early
    return true;
}

bool inside_up(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
               void *a_out)
{
    Sm90CodedArgs a = {};
    CodeKind kind;
    const bool halves = w1.coded && w1.coded->part[0].N == 2 * l.I;
    if (l.interleaved || !halves || l.I % 64 || !can_gather(l, x, ldx)) return false;
    if (!describe(l, w1, false, a, kind)) return false;
    a.p = base_args(l);
    a.p.tokens = 1;
    if (!codes_map(a, l, w1, false, true)) return false;
    if (lora.rows.cols && (!glu_map(&a.p.lora_b[0], l, lora.factor) || !lora_row_maps(a.p, l, lora.rows))) return false;
    const Rows out = {a_out, l.I, l.I}, kept = {h, l.HC, l.HC};
    if (!token_maps(a.p.d, l, out, 1, CODED_PIECE_UP) || (h && !token_maps(a.p.h, l, kept, 2, CODED_PIECE_UP)))
        return false;
    gather_from(a.p, x, ldx);
    a.p.keep_h = h != nullptr;
    a.p.N = (int)l.I;
    a.p.k_steps = steps(l.H);
    a.p.bias = b1.p;
    a.p.bias_g = (size_t)b1.g;
    a.p.bias_n = b1.n;
    a.p.bias_up = b1.split == INT64_MAX ? l.I * b1.n : b1.delta;
    return run(l, Product::UP, CODED_UP, kind, w1, a);
}

bool inside_rows(Layer &l, Product product, const Rows &x, bool gathered, const Weight &w, bool rows_k, const Bias &b,
                 const Lora &lora, const Rows &out)
{
    Sm90CodedArgs a = {};
    CodeKind kind;
    if (!x.p || !out.p || (b.p && b.split != INT64_MAX) || !describe(l, w, rows_k, a, kind)) return false;
    a.p = base_args(l);
    a.p.tokens = 1;
    if (!codes_map(a, l, w, rows_k, false) || !lora_maps(a.p, l, lora, 1, rows_k, rows_k, SM90_BOX)) return false;
    if (gathered ? !can_gather(l, x.p, x.ld) : !rows_map(&a.p.a, l, x, 1, 64) || !rows_map(&a.p.a16, l, x, 1, 16))
        return false;
    if (!token_maps(a.p.d, l, out, 1, CODED_PIECE)) return false;
    if (gathered) gather_from(a.p, x.p, x.ld);
    a.p.N = (int)out.cols;
    a.p.k_steps = steps(x.cols);
    a.p.bias = b.p;
    a.p.bias_g = (size_t)b.g;
    a.p.bias_n = b.n;
    const CodedKernel kernel = rows_k     ? gathered ? CODED_GATHER_N : CODED_ROWS_N
                               : gathered ? CODED_GATHER_K
                                          : CODED_ROWS_K;
    return run(l, product, kernel, kind, w, a);
}

int inside_dh(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
              void *pa, float *dp)
{
    Sm90CodedArgs a = {};
    CodeKind kind;
    if (l.interleaved || !can_gather(l, dout, ldd) || !describe(l, w2, true, a, kind)) return 0;
    a.p = dh_args(l, dout, ldd, h, dh, pa, dp);
    a.p.tokens = 1;
    if (!codes_map(a, l, w2, true, false) || !lora_maps(a.p, l, lora, 1, true, true, SM90_BOX)) return 0;
    const int64_t parts = l.HC / l.I;
    const Rows kept = {h, l.HC, l.HC}, result = {dh, l.HC, l.HC}, products = {pa, l.I, l.I};
    if (!token_maps(a.p.h, l, kept, parts, DH_UNITS) || !token_maps(a.p.d, l, result, parts, DH_UNITS) ||
        !rows_map(&a.p.a, l, products, 1, 16 * DH_UNITS) || !rows_map(&a.p.a16, l, products, 1, 16))
        return 0;
    run(l, Product::DH, CODED_DH, kind, w2, a);
    return (int)(l.I / 64);
}
