// SPDX-License-Identifier: Apache-2.0
// dequant.cu - codes of some experts to weights of the plan's dtype:
//
//   W[n,k] = (code - zero) * scale * scale2      every result rounded to f32, the last one to the dtype
//
// A warp has a row. Where rows are whole eights of codes a lane decodes eight at a time, 16 bytes of a 16-bit result,
// four of them in flight; else a lane has one code, of any group and alignment.
#include "values.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / 32, ROWS = 2; // rows of a warp
static constexpr int FLIGHT = 4;

// The scales of one row of an expert.
struct GridRow {
    const void *p;
    int64_t at, c;
    ScaleKind kind;
    DEV GridRow(const CodedGrid &g, int e, int row) : p(g.p), at(e * g.g + row * g.r), c(g.c), kind(g.kind)
    {
        if (g.list) p = g.list[e].p, at = row * g.list[e].r, c = g.list[e].c;
    }
    DEV float operator[](int col) const { return scale_value(p, kind, at + col * c); }
};

struct CodedRow {
    const uint8_t *codes;
    GridRow scale, zeros;
    float scale2;
    bool has_zeros, has_scale2;
    DEV CodedRow(const CodedMatrix &m, int e, int row)
        : codes(m.list ? (const uint8_t *)m.list[e].p + row * m.list[e].r : m.codes + e * m.g + row * m.r),
          scale(m.scale, e, group_row(m, row)), zeros(m.zeros, e, group_row(m, row)), scale2(1),
          has_zeros(m.zeros.p || m.zeros.list), has_scale2(m.scale2 || m.scale2_list)
    {
        if (has_scale2) scale2 = m.scale2_list ? *(const float *)m.scale2_list[e].p : m.scale2[e * m.scale2_g];
    }
    DEV float weight(float v, float s) const
    {
        v = __fmul_rn(v, s);
        return has_scale2 ? __fmul_rn(v, scale2) : v;
    }
};

template <class T> DEV void store8(T *p, const float (&v)[8]);
template <> DEV void store8<float>(float *p, const float (&v)[8])
{
    ((float4 *)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
template <class T> DEV void store8(T *p, const float (&v)[8])
{
    *(uint4 *)p = make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
}

// Values of eight codes that lie in order.
struct Eight4 {
    typedef uint32_t Word;
    static DEV void values(const CodedMatrix &m, const float *table, Word w, float (&v)[8])
    {
        if (m.high_first) w = (w & 0x0f0f0f0fu) << 4 | (w >> 4 & 0x0f0f0f0fu);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = table[w >> 4 * i & 15];
    }
};
struct Eight8 {
    typedef uint2 Word;
    static DEV void values(const CodedMatrix &m, const float *, Word w, float (&v)[8])
    {
        const bool integers = m.code == FMOE_CODE_S8;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const uint16_t two = (uint16_t)((i < 4 ? w.x : w.y) >> 8 * (i % 4));
            const float2 f = integers ? make_float2((float)(int8_t)two - m.zero, (float)(int8_t)(two >> 8) - m.zero)
                                      : e4m3_pair(two);
            v[i] = f.x, v[i + 1] = f.y;
        }
    }
};

// PLAIN: no zeros, no second scale; KIND: of the scales, or -1, any.
template <class T, class Code, int KIND, bool PLAIN>
DEV void row_by_eights(const CodedMatrix &m, const CodedRow &row, const float *table, T *out)
{
    typedef typename Code::Word Word;
    const int units = m.K / 8, lane = threadIdx.x % 32, group = m.group_cols / 8;
    const int shift = !group ? 31 : group & (group - 1) ? -1 : 31 - __clz(group);
    const Word *const codes = (const Word *)row.codes;
    const ScaleKind kind = KIND < 0 ? row.scale.kind : (ScaleKind)KIND;
    const char *const scale = (const char *)row.scale.p + row.scale.at * scale_bytes(kind);
    for (int u0 = lane; u0 < units; u0 += 32 * FLIGHT) {
        Word w[FLIGHT];
        float s[FLIGHT], z[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const int u = u0 + 32 * i;
            if (u >= units) break;
            const int col = shift >= 0 ? u >> shift : u / group;
            w[i] = __ldcs(codes + u); // read once: the ring has the cache
            s[i] = scale_value(scale, kind, col * row.scale.c);
            if (!PLAIN) z[i] = row.has_zeros ? row.zeros[col] : 0.f;
        }
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const int u = u0 + 32 * i;
            if (u >= units) break;
            float v[8];
            Code::values(m, table, w[i], v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (!PLAIN && row.has_zeros) v[j] = v[j] - z[i];
                v[j] = PLAIN ? __fmul_rn(v[j], s[i]) : row.weight(v[j], s[i]);
            }
            store8(out + u * 8, v);
        }
    }
}

template <class T, class Code> DEV void row_of(const CodedMatrix &m, const CodedRow &row, const float *table, T *out)
{
    const bool plain = !row.has_zeros && !row.has_scale2;
    if (plain && m.scale.kind == SCALE_F32) row_by_eights<T, Code, SCALE_F32, true>(m, row, table, out);
    else if (plain && m.scale.kind == SCALE_E8M0) row_by_eights<T, Code, SCALE_E8M0, true>(m, row, table, out);
    else row_by_eights<T, Code, -1, false>(m, row, table, out);
}

template <class T> DEV void row_by_one(const CodedMatrix &m, const CodedRow &row, const float *table, T *out)
{
    const bool small = m.code >= FMOE_CODE_E2M1;
    for (int k = threadIdx.x % 32; k < m.K; k += 32) {
        const int col = m.group_cols ? k / m.group_cols : 0;
        const uint8_t b = row.codes[small ? k / 2 : k];
        float v = small                    ? table[(k & 1) == (m.high_first != 0) ? b & 15 : b >> 4]
                  : m.code == FMOE_CODE_S8 ? (float)(int8_t)b - m.zero
                                           : e4m3(b);
        if (row.has_zeros) v = v - row.zeros[col];
        out[k] = from_float<T>(row.weight(v, row.scale[col]));
    }
}

template <class T> __global__ void __launch_bounds__(THREADS) dequant_kernel(const __grid_constant__ DequantArgs a)
{
    __shared__ float table[16];
    depend_wait();
    depend_launch();
    if (threadIdx.x < 16) table[threadIdx.x] = a.m.table[threadIdx.x];
    __syncthreads();
    const int e = blockIdx.y, warp = threadIdx.x / 32;
    if (!a.cnt || a.cnt[e])
        for (int i = 0; i < ROWS; i++) {
            const int row = (blockIdx.x * ROWS + i) * WARPS + warp;
            if (row >= a.m.N) break;
            const CodedRow r(a.m, a.first + e, row);
            T *const out = (T *)a.out + e * a.out_g + row * a.out_r;
            if (!a.m.vectors) row_by_one<T>(a.m, r, table, out);
            else if (a.m.code >= FMOE_CODE_E2M1) row_of<T, Eight4>(a.m, r, table, out);
            else row_of<T, Eight8>(a.m, r, table, out);
        }
}

void dequantise(int dtype, const DequantArgs &a, Stream &s)
{
    const Grid grid = {dim3((unsigned)((a.m.N + ROWS * WARPS - 1) / (ROWS * WARPS)), (unsigned)a.n), THREADS};
    if (dtype == FMOE_F32) launch(s, Product::DEQUANT, dequant_kernel<float>, grid, a);
    else if (dtype == FMOE_BF16) launch(s, Product::DEQUANT, dequant_kernel<bf16>, grid, a);
    else launch(s, Product::DEQUANT, dequant_kernel<f16>, grid, a);
}
