// SPDX-License-Identifier: Apache-2.0
// narrow.cuh - f32 factors of adapters beside a plan of 16 bits.
#pragma once
#include "cuda/common.cuh"

// Room for the four factors in the workspace, and tensors over it.
struct NarrowRoom {
    void *at[4];
    fmoe_tensor t[4];
    int64_t strides[4][3];
};
NarrowRoom narrow_carve(fmoe_carve *c, const fmoe_desc &d, int64_t h_cols);

// The factors of w that are f32 become tensors over `room`, filled for the experts that have rows: those with cnt[e],
// or (cnt NULL) those that ids name, up to 65535 of them. False: none is f32, and nothing was launched.
bool narrow_factors(const fmoe_desc &d, const fmoe_experts_args *args, const int *cnt, NarrowRoom &room,
                    fmoe_weights *w, Stream &s);
