// SPDX-License-Identifier: Apache-2.0
// scales.cu - scales of any type and grid as the products that decode read them (inside.cuh).
#include "cuda/quant/values.cuh"
#include "inside.cuh"

static constexpr int THREADS = 128;

// A thread has a row of an expert: of its scales neighbours are read one after the other, and those of neighbouring
// rows are written beside each other.
__global__ void __launch_bounds__(THREADS) scales_kernel(const __grid_constant__ ScalesArgs a)
{
    depend_wait();
    depend_launch();
    const int row = blockIdx.x * THREADS + threadIdx.x, e = blockIdx.y, group = 64 / a.subs;
    const CodedMatrix &m = a.m;
    if (row >= m.N || !a.cnt[e]) return;
    const int64_t from = e * m.scale.g + group_row(m, row) * m.scale.r;
    float *out = a.out + e * a.each + (a.turned ? row / 64 * a.step + row % 64 : row);
    const int per = m.group_cols ? m.group_cols / group : 1 << 30; // of ours in one of theirs
    for (int q = 0; q < m.K / group; q++) {
        const float s = scale_value(m.scale.p, m.scale.kind, from + q / per * m.scale.c);
        if (a.turned) out[(int64_t)q * 64] = s;
        else out[q / a.subs * a.step + q % a.subs * a.sub] = s;
    }
}

void inside_scales(const ScalesArgs &a, int64_t E, Stream &s)
{
    const Grid grid = {dim3((unsigned)((a.m.N + THREADS - 1) / THREADS), (unsigned)E), THREADS};
    launch(s, Product::DEQUANT, scales_kernel, grid, a);
}
