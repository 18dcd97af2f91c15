// SPDX-License-Identifier: Apache-2.0
// product.cuh - the fast general products (8.0 and newer) as the layer sees them: arguments, and one way to launch.
#pragma once
#include "cuda/act.cuh"

// A tile: 128 rows x 256 columns of the result, 8 warps of 64 x 64, steps of 64 in the contraction.
static constexpr int MMA_BM = 128, MMA_BN = 256, MMA_BK = 64, MMA_THREADS = 256;
static constexpr int MMA_STAGE = (MMA_BM + MMA_BN) * MMA_BK * 2; // bytes of shared memory
static constexpr int MMA_EXTRA = 768;                            // and what is beside the stages

// One matrix an expert, its longer stride `pitch`; bytes. A list: at list[e].p.
struct MmaMatrix {
    const char *p;
    int64_t g, pitch;
    const MatEntry *list;
};

// A stretch of the contraction: rows times weights. Gate and up of a fused forward are b[0] and b[1]. Weight gradients
// have one, whose b[0] is rows too.
struct MmaPart {
    const char *a;
    int64_t lda; // bytes
    MmaMatrix b[2];
    int gather, k;
};

struct MmaArgs {
    MmaPart part[3]; // gate and up of dx may be apart; an adapter is the last
    int parts;
    const int *off; // [E+1]; NULL: one group of R rows
    const int *cnt; // [E] rows of each group; weight gradients
    const int *tok; // token of each row
    int E, R;
    int M, m_parts; // weight gradients: rows of the result, in up to two parts d
    int N;          // columns of the result; of a fused forward features
    int gather_b;   // weight gradients
    MmaMatrix d[2];
    int d_f32, add, wide; // wide: rows of d may be written 16 bytes at a time
    // Column n of expert e at e * bias_g + n * bias_n, those from bias_split on bias_delta after the first of them.
    const void *bias;
    int bias_dtype;
    int64_t bias_g, bias_n, bias_split, bias_delta;
    FastAct act;
    void *h; // fused forward: [rows, its columns], or NULL; d is a
    const float *prob;
    const void *h_in; // fused backward; d is p*a
    void *dh;
    float *dp; // [64 columns each][dp_pitch]
    int64_t dp_pitch;
    int gated, pairs; // h and dh have gate and up; as neighbours
    int stages;       // set by the launch
};

enum MmaKernel {
    MMA_ROWS_K,   // rows x weights [n, k]
    MMA_ROWS_N,   // rows x weights [k, n]
    MMA_UP_GLU_K, // rows x [gate | up], activation; h and a
    MMA_UP_GLU_N,
    MMA_UP_PAIRS_K, // gate and up as neighbours, in h too
    MMA_UP_PAIRS_N,
    MMA_UP_ACT_K, // not gated
    MMA_UP_ACT_N,
    MMA_DH_K, // rows x weights with the backward of the activation; dh, p*a, parts of dp
    MMA_DH_N,
    MMA_WGRAD // D[e] = rows^T rows
};

// kernels.cu
struct MmaEntry {
    MmaKernel kernel;
    int dtype;
    void (*function)(MmaArgs);
};
cudaError_t mma_setup(size_t shared); // of the current device, for as much as that
cudaError_t mma_launch(Stream &s, MmaKernel kernel, int dtype, MmaArgs &args);
