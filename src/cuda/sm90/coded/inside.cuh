// SPDX-License-Identifier: Apache-2.0
// inside.cuh - products of many rows that decode the codes inside (gemm_coded.cuh), in the place of decoding
// experts ahead into the ring. Hopper, bf16.
#pragma once
#include "cuda/quant/coded.cuh"

// Each launches the product and its scales, or nothing and returns false: the operands do not allow it.
bool inside_up(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
               void *a);
int inside_dh(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
              void *pa, float *dp); // parts of dp, or 0
bool inside_rows(Layer &l, Product product, const Rows &x, bool gathered, const Weight &w, bool rows_k, const Bias &b,
                 const Lora &lora, const Rows &out);

// ---- Scales in the order that a product reads them: one launch before it, into the ring ----

// f32, [E][steps of 64 in the contraction], then
//   rows of codes are features   [subs][rows]                    subs: 1, or 2 where groups are 32 codes
//   rows are the contraction     [groups of 64 / subs features][64 rows]
// with rows, or features, filled up to whole tiles.
struct ScalesArgs {
    CodedMatrix m;
    float *out;
    int64_t each, step, sub; // floats: from expert to expert, from step to step, and from the first 32 of k to the next
    const int *cnt;          // experts without rows are left out
    int turned, subs;        // rows are the contraction
};
void inside_scales(const ScalesArgs &a, int64_t E, Stream &s);

// ---- The kernels ----

// Gates and ups of gathered rows, with the activation; rows x weights [n,k], and x weights [k,n], each also of gathered
// rows; the last of them with the backward of the activation.
enum CodedKernel { CODED_UP, CODED_ROWS_K, CODED_GATHER_K, CODED_ROWS_N, CODED_GATHER_N, CODED_DH };

static constexpr int CODED_TILE = 128;                    // features of the weights in a tile
static constexpr int CODED_PIECE_UP = 4, CODED_PIECE = 2; // units of 16 rows that are stored at once
static constexpr int DH_UNITS = 4;                        // units of h in a stage of CODED_DH

// `p` as for gemm_tokens.cuh, but that p.b[0] describes codes, as 16-bit elements, {k, n, expert} or {n, k, expert}
// (CODED_UP: {k, 8 rows, gate or up, groups, expert}). CODED_DH: p.h are maps of h, p.d of dh, p.a and p.a16 of p a.
struct Sm90CodedArgs {
    Sm90Args p;
    const float *scales;                                     // as above
    int64_t scales_each, scales_step, scales_sub, scales_up; // floats; scales_up: from gates to ups
    const float *scale2;                                     // CODE_S8: of expert e at e * scale2_g, or NULL
    int64_t scale2_g;
    int subs, high_first;
    float zero, table[16];
};
cudaError_t sm90_coded_launch(Stream &s, Product product, CodedKernel kernel, CodeKind code, Sm90CodedArgs &args,
                              int sms);
cudaError_t sm90_coded_setup(); // of the current device
