// SPDX-License-Identifier: Apache-2.0
// products.cuh - the products of the layer over the row map: each runs on Hopper where its operands allow, else on the
// fast general kernels, else on the one for everything. All write the same layout, so they mix freely.
#pragma once
#include "sm90/product.cuh"

// Weights as the products see them: one matrix in the order of h's columns, or gate and up apart.
struct Coded;
struct Weight {
    Mat whole;   // rows in the order of h (a split where gate and up lie apart)
    Mat part[2]; // gate, up; or part[0] alone
    int parts;
    bool single;  // `whole` is one matrix an expert
    bool strided; // every part is there
    int64_t rows, cols;
    const Coded *coded; // or NULL; quantised: `whole` and `part` are the ring that experts are decoded into (quant/)
};

struct Layer {
    const Plan *plan;
    Stream *stream;
    int dtype;
    int64_t T, H, I, HC, E, k, R, rows; // HC: columns of h
    int64_t all;                        // experts of the layer, of which these are E
    bool chunk;                         // they were just decoded (quant/)
    bool interleaved;                   // gate and up alternate in h
    bool same_bits;                     // FMOE_SAME_BITS
    bool ragged;                        // groups begin and end anywhere (grouped matmul)
    FastAct act;
    RowMap map;
    Ready *ready; // [readies] of the products so far that let the next one in early
    int readies;
    fmoe_status status; // of the launches so far
};

struct Bias {
    const void *p;
    int64_t g, n, split, delta;
};

struct Rows {
    const void *p;
    int64_t cols, ld;
};

// An adapter's part of a product: rows of `rank` columns (0: none) times a factor, stored as the product's weights are.
// On Hopper they are further steps of its contraction; where the factor does not lie so, one more pass over the result
// adds them.
struct Lora {
    Rows rows;
    Weight factor;
};

// h = gather(x) W1^T + b1, or with the activation in one kernel; a and h are [rows, I] and [rows, HC].
void up_product(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h);
// The same of some columns of h.
void up_rows(Layer &l, const Rows &x, const Weight &w1, const Bias &b1, const Lora &lora, const Rows &h);
// slices.cu: a by two kernels, h in slices in memory of `slice_columns` columns.
int64_t slice_columns(const Layer &l);
void up_in_slices(Layer &l, int act, float alpha, float limit, const void *x, int64_t ldx, const Weight &w1,
                  const Bias &b1, const Lora &lora, void *h, void *a);
bool up_fused_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora);
// The same where gate and up alternate in W1 and h.
bool up_pairs_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora);
void up_fused(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h,
              void *a);
// y = a W2^T + b2
void down_product(Layer &l, const void *a, const Weight &w2, const Bias &b2, const Lora &lora, void *y);
// da = gather(dout) W2
void da_product(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, void *da);
// the same with the backward of the activation; returns the number of parts of dp
bool dh_fused_ok(const Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora);
int dh_fused(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
             void *pa, float *dp);
// dx rows = dh W1
void dx_product(Layer &l, const void *dh, const Weight &w1, const Lora &lora, void *dxr);
// dW1[e] = dh^T gather(x), dW2[e] = gather(dout)^T pa
// product: DW1, or DW1_BORROWED.
void dw1_product(Layer &l, Product product, const void *dh, const void *x, int64_t ldx, const Weight &dw1, int out_f32,
                 int add);
void dw2_product(Layer &l, const void *dout, int64_t ldd, const void *pa, const Weight &dw2, int out_f32, int add);

// The way into an adapter, out = scale x factor (0 means 1), rows of `rank` columns; and the gradients of factors, d[e]
// = x^T y with one side gathered or neither. rows_k: the contraction runs over the factor's rows. product: LORA_DB2, or
// LORA_D for the other factors.
void lora_in_product(Layer &l, const Rows &x, bool gathered, const Weight &factor, bool rows_k, float scale,
                     const Rows &out);
void lora_grad_product(Layer &l, Product product, const Rows &x, bool gather_x, const Rows &y, bool gather_y,
                       const Mat &d, int out_f32, int add);

// The same on the fast general kernels, sm80/products.cu. Those that return a bool launched nothing if it is false.
bool mma_rows_product(Layer &l, const Rows &x, bool gathered, const Weight &w, bool rows_k, const Bias &b,
                      const Lora &lora, const Rows &out);
bool mma_up_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora);
bool mma_pairs_ok(const Layer &l, const void *x, int64_t ldx, const Weight &w1, const Lora &lora);
void mma_up(Layer &l, const void *x, int64_t ldx, const Weight &w1, const Bias &b1, const Lora &lora, void *h, void *a);
bool mma_dh_ok(const Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora);
int mma_dh(Layer &l, const void *dout, int64_t ldd, const Weight &w2, const Lora &lora, const void *h, void *dh,
           void *pa, float *dp);
bool mma_dw1_parts(Layer &l, const void *dh, const void *x, int64_t ldx, const Weight &dw1, int out_f32, int add);

// Grouped matmul on Hopper, rows in l.map's groups: out = x w (rows_k: the contraction runs over w's rows) and dw[e] =
// x^T y. False: the operands do not allow it, and nothing was launched.
bool gmm_rows(Layer &l, const Rows &x, const Weight &w, bool rows_k, const Bias &b, const Rows &out);
bool gmm_wgrad(Layer &l, const Rows &x, const Rows &y, const Mat &dw, int out_f32, int add);
