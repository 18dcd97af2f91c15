// SPDX-License-Identifier: Apache-2.0
// coded.cuh - quantised weights (fmoe_quant) under the products: some experts at a time are decoded into a ring in the
// workspace, just ahead of the product that multiplies them. So there is never a 16-bit copy of the layer, and every
// product is the one of plain weights.
#pragma once
#include "cuda/products.cuh"

// ---- Codes as a kernel sees them ----

enum ScaleKind { SCALE_F32, SCALE_BF16, SCALE_F16, SCALE_E8M0, SCALE_E4M3, SCALE_U8 };

// Of the products that decode (sm90/coded): two codes a byte and a table of 16 values; FP8; integers less a constant
// zero point.
enum CodeKind { CODE_NIBBLES, CODE_E4M3, CODE_S8 };

// Scales or zero points, one a group: a stack, or a list of matrices in device memory.
struct CodedGrid {
    const void *p; // NULL, and no list: there are none
    const MatEntry *list;
    int64_t g, r, c; // strides in elements
    ScaleKind kind;
};

struct CodedMatrix {
    const uint8_t *codes;
    const MatEntry *list;
    int64_t g, r; // bytes from expert to expert and from row to row
    CodedGrid scale, zeros;
    const float *scale2; // of expert e at e * scale2_g, or
    const MatEntry *scale2_list;
    int64_t scale2_g;
    int N, K;
    int code, high_first; // fmoe_code
    int group_rows, group_cols;
    int half, lower_groups; // rows from `half` on count their groups from `lower_groups` on (FMOE_QUANT_HALVES)
    float zero;             // of 8 bits
    float table[16];        // of 4 bits: values, the constant zero point subtracted
    bool vectors;           // rows of codes begin at whole words, groups have whole eights of them
};

// A launch: experts first ... first + n - 1 that have rows, [n, N, K] at `out`.
struct DequantArgs {
    CodedMatrix m;
    void *out;
    int64_t out_g;  // elements from one expert to the next,
    int64_t out_r;  // and from row to row
    const int *cnt; // [n] rows of each, or NULL: all are decoded
    int first, n;
};
void dequantise(int dtype, const DequantArgs &a, Stream &s);
// Codes of a stack [E,N,K].
CodedMatrix coded_stack(const fmoe_tensor *codes, const fmoe_quant *q, int64_t E, int64_t N, int64_t K);

// ---- Codes as the layer sees them ----

// Of one weight: gate and up of a list are two matrices, one after the other in each expert's part of the ring.
struct Coded {
    CodedMatrix part[2];
    int parts;
    void *ring;
    int64_t each;  // bytes of an expert, decoded
    int64_t chunk; // experts that the ring has room for
};

static inline const Coded *coded(const Coded &c) { return c.parts ? &c : nullptr; }

// Experts that are decoded, [chunk, rows, cols] in the ring.
static inline Mat ring_mat(const Coded &c, int64_t rows, int64_t cols)
{
    Mat m = {};
    m.p = c.ring;
    m.g = rows * cols;
    m.r = cols;
    m.c = 1;
    m.split = INT64_MAX;
    return m;
}

// The weights of a layer, and what plans with FMOE_QUANT have in the workspace: the ring, and device copies of lists of
// codes, scales, zeros and second scales (gate or W1, up, W2).
struct Quant {
    Coded w1, w2;
    void *ring;
    MatEntry *lists[3][4];
};
Quant quant_carve(fmoe_carve *c, const Layer &l, const fmoe_desc &d);
void quant_describe(const Layer &l, bool gated, const fmoe_weights *w, Quant &q);

// Of a grouped matmul whose plan has FMOE_QUANT: the ring, and device copies of lists of codes, scales, zeros and
// second scales. A list's plan knows no sizes: its ring has all the bytes there may be.
struct GmmRing {
    void *p;
    int64_t bytes;
    MatEntry *lists[4];
};
GmmRing gmm_ring_carve(fmoe_carve *c, const Plan *plan, const fmoe_desc &d);
// Codes of a stack [E,rows,..], of a list, or (one) of a single matrix of a list. An error: one expert does not fit.
fmoe_status gmm_coded(const Layer &l, const GmmRing &r, const fmoe_tensor *codes, bool list, const fmoe_quant *q,
                      int64_t rows, int64_t cols, Coded *c);
fmoe_status gmm_coded_one(const Layer &l, const GmmRing &r, const fmoe_tensor *codes, int64_t i, const fmoe_quant *q,
                          int64_t rows, int64_t cols, Coded *c);
