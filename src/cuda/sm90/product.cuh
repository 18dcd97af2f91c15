// SPDX-License-Identifier: Apache-2.0
// product.cuh - the Hopper products as the layer sees them: arguments, and one entry a product.
#pragma once
#include "cuda/act.cuh"

#include <cuda.h>

static constexpr size_t SM90_MAX_SMEM = 232448;

// Rows of a box of K-major weights: products with an activation of their own order, and all others. Maps and kernels
// both take it from here: were they to differ, a kernel would wait for bytes that never come.
static constexpr int SM90_BOX_ACT = 64, SM90_BOX = 128;
static constexpr int SM90_PIECE = 3; // gemm_tokens: units of 16 rows that are stored at once

// When a product may begin to read: when the launch before it has ended; or as soon as that one lets it in (sched.cuh).
enum Sm90Begin { SM90_AFTER, SM90_EARLY };

// Of each expert's matrix in the outermost dimension of its map: its number, or for a list multiples of 2^shift bytes.
struct Place {
    const MatEntry *list;
    uintptr_t base;
    int shift;
};

struct Sm90Args {
    CUtensorMap a;   // rows {column, row}; gemm_tokens: {column, part, row}
    CUtensorMap a16; // gemm_tokens: the same in boxes of 16 rows
    // Weights {k, n, expert} or {n, k, expert}, one a part (gate, up), or both in b[0]; or rows as a.
    CUtensorMap b[2];
    CUtensorMap lora, lora16; // an adapter: rows of its rank in the order of the results, as a and a16,
    CUtensorMap lora_b[2];    // and the factor they are multiplied by, a stack, as b
    // Results: as a; gemm_tokens: in boxes of 16 rows and of a piece; weight gradients {n, m, expert}, one a part, or
    // (flat) {n, expert * M + m}.
    CUtensorMap d[2];
    CUtensorMap d1;   // gemm_tokens, ragged: in boxes of one row
    CUtensorMap h[2]; // forward with activation: h as d; gemm_tokens: {column, gate or up, row}
    Place place_b[2], place_d[2];
    const int *off; // [E+1]
    const int *tok; // gather: token of each row
    const void *x;  // gather: the tokens, row pitch ldx
    size_t ldx;
    // Column n of expert e at e * bias_g + n * bias_n (pairs: bias_n = 1), of up bias_up further; or NULL.
    const void *bias;
    size_t bias_g;
    int64_t bias_n, bias_up;
    FastAct act;
    const float *prob; // fused backward
    const void *h_in;
    void *dh, *pa;
    float *dp; // [parts of N][dp_pitch]
    size_t dp_pitch;
    int E, M, N;        // M: rows of a part of a weight gradient
    int k_steps, parts; // contraction of a part in steps of 64; parts of the contraction, or of M
    // Of an adapter's rank, after those of all parts: steps of 64, and 16s in one step more (gemm_tokens: 0 or 1).
    int lora_steps, lora_tail;
    int add, keep_h, flat;
    int gated, pairs; // fused backward: h and dh have gate and up; as neighbours
    int ragged;       // an expert's rows begin and end anywhere
    int off_shared;   // set by the launch: the offsets have a copy in shared memory
    int tokens;       // tokens on the N side (gemm_tokens.cuh)
    Sm90Begin begin;
    int lets_in_early; // lets the next launch in when half of the experts are in memory
    Ready *ready;      // lets_in_early: its own; SM90_EARLY: that of the product whose results it reads
};

// Which kernel; kernels.cuh says what each is.
enum Sm90Kernel {
    SM90_UP_SMOOTH, // gathered rows x [gate | up], an activation with a sigmoid; h and a
    SM90_UP_GLU,    // the same with any activation and bias (gemm_tokens.cuh)
    SM90_UP_GLU_N,  // both, of weights [k, n]: any activation and bias in gemm_tokens.cuh, else one with a sigmoid
    SM90_UP_PAIRS,  // of weights [k, n] with gate and up as neighbours, and so h: FAST_CLAMP, bias
    SM90_UP_ACT,    // gathered rows x weights [n, k], activation; h and a
    SM90_GATHER_K,  // gathered rows x weights [n, k]
    SM90_GATHER_N,  // gathered rows x weights [k, n]
    SM90_ROWS_K,    // rows x weights [n, k]
    SM90_ROWS_N,    // rows x weights [k, n]
    // Gathered dout x W2 with the backward of the activation; dh, p*a, parts of dp; column tiles of 192.
    SM90_DH_192,
    SM90_DH_128,   // and of 128
    SM90_DH_192_K, // the same of W2 stored [in,out]
    SM90_DH_128_K,
    SM90_WGRAD_GATHER_A, // D[e] = gather(x)^T rows
    SM90_WGRAD_GATHER_B, // D[e] = rows^T gather(x)
    SM90_WGRAD_ROWS      // D[e] = rows^T rows, ragged
};

struct Sm90Entry { // a compiled kernel
    Sm90Kernel kernel;
    int dtype;
    bool f32, tokens; // results of a weight gradient in f32; tokens on the N side (gemm_tokens.cuh)
    void (*function)(Sm90Args);
    unsigned threads;
    size_t shared; // without the offsets
};
// kernels.cu. f32: results of a weight gradient in f32.
cudaError_t sm90_launch(Stream &s, Product product, Sm90Kernel kernel, int dtype, int f32, Sm90Args &args, int sms);
cudaError_t sm90_setup(); // of the current device

// ---- tensor_map.cu ----

// A 3-D tensor map of 16-bit (or f32) elements, 128-byte swizzle; strides in elements. False: the driver refuses it.
bool sm90_map(CUtensorMap *map, int dtype, const void *p, const int64_t dim[3], const int64_t stride[3],
              const int box[3]);
// The same in two dimensions.
bool sm90_map2(CUtensorMap *map, int dtype, const void *p, int64_t cols, int64_t rows, int64_t pitch, int box_cols,
               int box_rows);
// W1's gates and ups in turns of 8: {k, 8 rows, gate or up, groups, expert}; up lies `half` elements after gate.
bool sm90_map_glu(CUtensorMap *map, int dtype, const void *gate, int64_t H, int64_t I, int64_t E, int64_t row,
                  int64_t half, int64_t expert);
// 16-bit pieces of memory in up to five dimensions; strides in bytes, of all dimensions but the first.
bool sm90_map_bytes(CUtensorMap *map, const void *p, int dims, const int64_t *dim, const int64_t *stride,
                    const int *box, int swizzle_bytes);
bool sm90_driver(); // the encoder is there
