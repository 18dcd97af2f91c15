// SPDX-License-Identifier: Apache-2.0
// scales.cu - scales of any type and grid as the products that decode read them (inside.cuh).
#include "cuda/quant/values.cuh"
#include "inside.cuh"

static constexpr int THREADS = 128, FLIGHT = 8; // scales that are asked for at once

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
    const int groups = m.K / group;
    for (int first = 0; first < groups; first += FLIGHT) {
        float v[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; i++)
            if (first + i < groups) v[i] = scale_value(m.scale.p, m.scale.kind, from + (first + i) / per * m.scale.c);
#pragma unroll
        for (int i = 0; i < FLIGHT; i++) {
            const int q = first + i;
            if (q < groups) out[a.turned ? (int64_t)q * 64 : q / a.subs * a.step + q % a.subs * a.sub] = v[i];
        }
    }
}

void inside_scales(const ScalesArgs &a, int64_t E, Stream &s)
{
    const Grid grid = {dim3((unsigned)((a.m.N + THREADS - 1) / THREADS), (unsigned)E), THREADS};
    launch(s, Product::DEQUANT, scales_kernel, grid, a);
}
