// SPDX-License-Identifier: Apache-2.0
// lora_add.cu - what an adapter adds to rows of the layer: D[r, n] += sum over j of A[r, j] F[e(r)][n, j], few j.
// Reading and writing D once is what takes the time.
//
// A block has 64 rows of an expert and 512 columns, 128 at a time, and asks for the next part of D before it looks at
// the factors of this one. Which column is which n of an mma is ours to choose: a thread's four products of 8 columns
// are 8 neighbours of a row, 16 bytes.
#include "mma.cuh"

// RANK: of the factors at a time.
static constexpr int ROWS = FMOE_CUDA_TILE_M, COLS = 128, SPAN = 4 * COLS, THREADS = 256, RANK = 64;
static constexpr int WORDS = RANK / 2 + 5; // of a line in shared memory: neighbours lie in other banks

// Two neighbours, lo and hi of a word, with something added.
template <class T> DEV uint32_t add2(uint32_t w, float lo, float hi);
template <> DEV uint32_t add2<bf16>(uint32_t w, float lo, float hi)
{
    const __nv_bfloat162 v =
        __floats2bfloat162_rn(__uint_as_float(w << 16) + lo, __uint_as_float(w & 0xffff0000u) + hi);
    return *(const uint32_t *)&v;
}
template <> DEV uint32_t add2<f16>(uint32_t w, float lo, float hi)
{
    const float2 f = __half22float2(*(const __half2 *)&w);
    const __half2 v = __floats2half2_rn(f.x + lo, f.y + hi);
    return *(const uint32_t *)&v;
}

// n elements of a line of a factor, `step` apart, zeros past its end; n is a multiple of 4. `words`: four are 8 bytes.
template <class T> DEV void load_line(uint32_t *to, const T *p, int64_t step, bool words, int n, int64_t left)
{
    const uint16_t *const one = (const uint16_t *)p;
#pragma unroll 1
    for (int j = 0; j < n; j += 4) {
        uint2 v = make_uint2(0, 0);
        if (words) {
            if (j < left) v = *(const uint2 *)(p + j);
        } else {
            if (j < left) v.x = one[j * step];
            if (j + 1 < left) v.x |= (uint32_t)one[(j + 1) * step] << 16;
            if (j + 2 < left) v.y = one[(j + 2) * step];
            if (j + 3 < left) v.y |= (uint32_t)one[(j + 3) * step] << 16;
        }
        to[j / 2] = v.x, to[j / 2 + 1] = v.y;
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 2)
    lora_add_kernel(const __grid_constant__ GemmArgs g, bool a_words, bool b_words)
{
    __shared__ uint32_t fs[COLS][WORDS], as[ROWS][WORDS];
    const RowMap &map = g.map_value;
    const int spans = (int)((g.N + SPAN - 1) / SPAN), thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t tile = blockIdx.x / spans;
    int64_t n0 = (int64_t)(blockIdx.x % spans) * SPAN, row0 = tile * ROWS, end = g.R;
    int e = 0;
    if (map.off) {
        if (tile >= *map.ntile) return;
        e = map.tile[tile].x - map.first;
        if (e < 0 || e >= g.E) return;
        row0 = map.tile[tile].y;
        end = map.off[e + 1];
    }
    const int rows = (int)min(end - row0, (int64_t)ROWS), cols = (int)min(g.N - n0, (int64_t)SPAN);

    // Four warps below each other, two side by side; a thread has two rows, 8 apart, of 2 x 8 columns, 32 apart.
    const int q = lane % 4, r0 = warp % 4 * 16 + lane / 4, c0 = warp / 4 * 64 + q * 8;
    T *const d = (T *)g.D.p + (row0 + r0) * g.D.r + n0 + c0;
    uint4 old[2][2], next[2][2];
    auto read = [&](uint4(&v)[2][2], int at) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (r0 + 8 * i < rows && at + c0 + 32 * j < cols)
                    v[i][j] = *(const uint4 *)(d + 8 * i * g.D.r + at + 32 * j);
    };
    read(old, 0);

    // A thread loads half a column of the factor and a quarter of a row.
    const int column = thread % COLS, row = thread / 4;
    const int64_t step = g.b_rows_are_k ? g.B.r : g.B.c, across = g.b_rows_are_k ? g.B.c : g.B.r;
    const T *const factor = (const T *)g.B.p + e * g.B.g + (n0 + column) * across, *const lora = (const T *)g.A.p +
                                                                                                 (row0 + row) * g.A.r;
    for (int at = 0; at < cols; at += COLS) {
        float acc[2][4][4] = {};
        for (int64_t k0 = 0; k0 < g.K; k0 += RANK) {
            const int n = (int)min((g.K - k0 + 15) / 16 * 16, (int64_t)RANK), half = thread / COLS * (n / 2),
                      quarter = thread % 4 * (n / 4);
            if (at || k0) __syncthreads();
            load_line(fs[column] + half / 2, factor + at * across + (k0 + half) * step, step, b_words, n / 2,
                      at + column < cols ? g.K - k0 - half : 0);
            if (at == 0 || g.K > RANK)
                load_line(as[row] + quarter / 2, lora + k0 + quarter, 1, a_words, n / 4,
                          row < rows ? g.K - k0 - quarter : 0);
            if (k0 == 0) read(next, at + COLS);
            __syncthreads();
            for (int k = 0; k < n / 2; k += 8) {
                const uint32_t *const top = as[r0] + k + q, *const below = as[r0 + 8] + k + q;
                const uint32_t a[4] = {top[0], below[0], top[4], below[4]};
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int t = 0; t < 4; t++) {
                        const uint32_t *const f =
                            fs[warp / 4 * 64 + 32 * j + lane / 8 * 8 + 2 * t + (lane / 4 & 1)] + k + q;
                        mma16816<T>(acc[j][t], a, f[0], f[4]);
                    }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 v = old[i][j];
                const float(&s)[4][4] = acc[j];
                old[i][j] = next[i][j];
                if (r0 + 8 * i >= rows || at + c0 + 32 * j >= cols) continue;
                *(uint4 *)(d + 8 * i * g.D.r + at + 32 * j) =
                    make_uint4(add2<T>(v.x, s[0][2 * i], s[0][2 * i + 1]), add2<T>(v.y, s[1][2 * i], s[1][2 * i + 1]),
                               add2<T>(v.z, s[2][2 * i], s[2][2 * i + 1]), add2<T>(v.w, s[3][2 * i], s[3][2 * i + 1]));
            }
    }
}

template <class T> static void run_add(const GemmArgs &g, Stream &s)
{
    const int64_t tiles =
                      g.map_value.off ? fmoe_cuda_tiles(g.R, g.map_value.first + g.E, ROWS) : (g.R + ROWS - 1) / ROWS,
                  blocks = tiles * ((g.N + SPAN - 1) / SPAN);
    const bool a_words = g.K % 4 == 0 && g.A.r % 4 == 0 && (uintptr_t)g.A.p % 8 == 0;
    const bool b_words =
        g.K % 4 == 0 && !g.b_rows_are_k && g.B.c == 1 && (g.B.r | g.B.g) % 4 == 0 && (uintptr_t)g.B.p % 8 == 0;
    if (blocks) launch(s, Product::LORA_ADD, lora_add_kernel<T>, Grid{(unsigned)blocks, THREADS}, g, a_words, b_words);
}

bool lora_add(int dtype, const GemmArgs &g, Stream &s)
{
    const bool plain = g.accumulate && !g.wgrad && !g.gather_a && !g.gather_b && !g.bias && !g.a_f32 && !g.b_f32 &&
                       !g.out_f32 && !g.B.list && !g.D.list;
    if (!plain || dtype == FMOE_F32 || g.K > 256 || g.A.c != 1 || g.D.c != 1 || (g.D.r | g.N) % 8 ||
        (uintptr_t)g.D.p % 16 || g.B.split < INT64_MAX)
        return false;
    if (dtype == FMOE_BF16) run_add<bf16>(g, s);
    else run_add<f16>(g, s);
    return true;
}
