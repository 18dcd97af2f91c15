// SPDX-License-Identifier: Apache-2.0
// fake_tensors.h - tensors whose memory nobody touches: addresses that are the same in every run.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "backend.h"

static uintptr_t next_address;
struct Tensor {
    int64_t shape[3], strides[3];
    fmoe_tensor t;
};
static std::deque<Tensor> tensors;

static uintptr_t take(int64_t bytes, int64_t gap)
{
    const uintptr_t p = (next_address + 255) / 256 * 256 + (uintptr_t)gap;
    next_address = p + (uintptr_t)bytes;
    return p;
}

// turned: the last two dimensions are stored the other way round; pad: elements after each row.
static const fmoe_tensor *tensor(int dtype, std::vector<int64_t> shape, bool turned = false, int64_t pad = 0,
                                 int64_t gap = 0)
{
    tensors.emplace_back();
    Tensor &v = tensors.back();
    const int n = (int)shape.size(), bits = dtype < 0 ? -dtype : dtype == FMOE_F32 ? 32 : 16;
    int64_t stride = 1;
    for (int i = n; i-- > 0;) {
        const int d = turned && i >= n - 2 ? 2 * n - 3 - i : i;
        v.shape[d] = shape[(size_t)d], v.strides[d] = stride;
        stride *= shape[(size_t)d];
        if (i == n - 1) stride += pad;
    }
    v.t = fmoe_tensor{};
    v.t.data = (void *)take(stride * bits / 8, gap);
    v.t.device = {FMOE_CUDA, 0};
    v.t.ndim = n;
    v.t.dtype = {(uint8_t)(dtype < 0 ? 0 : dtype == FMOE_BF16 ? 4 : 2), (uint8_t)bits, 1};
    v.t.shape = v.shape, v.t.strides = v.strides;
    return &v.t;
}

// Codes of a stack [E,N,K] and what they mean: NF4, MXFP4, FP8 in blocks, INT8, INT4 with zeros, NVFP4.
struct FakeCodes {
    const fmoe_tensor *codes;
    fmoe_quant q;
};
static std::deque<FakeCodes> fake_codes;
static const FakeCodes &coded(int format, int64_t E, int64_t N, int64_t K)
{
    static const struct {
        int code, rows, cols, type, zeros, scale2;
    } formats[] = {{FMOE_CODE_NF4, 1, 64, 0, 0, 0},     {FMOE_CODE_E2M1, 1, 32, FMOE_SCALE_E8M0, 0, 0},
                   {FMOE_CODE_E4M3, 128, 128, 0, 0, 0}, {FMOE_CODE_S8, 1, 0, 0, 0, 0},
                   {FMOE_CODE_U4, 1, 128, 0, 1, 0},     {FMOE_CODE_E2M1, 1, 16, FMOE_SCALE_E4M3, 0, 1}};
    const auto &f = formats[format - 1];
    const int64_t rows = (N + f.rows - 1) / f.rows, cols = f.cols ? (K + f.cols - 1) / f.cols : 1;
    FakeCodes c = {};
    c.codes = tensor(-8, {E, N, f.code >= FMOE_CODE_E2M1 ? K / 2 : K});
    c.q.size = sizeof c.q;
    c.q.code = f.code, c.q.group_rows = f.rows, c.q.group_cols = f.cols, c.q.scale_type = f.type;
    c.q.scale = tensor(f.type ? -8 : FMOE_F32, {E, rows, cols});
    if (f.zeros) c.q.zeros = tensor(-8, {E, rows, cols});
    if (f.scale2) c.q.scale2 = tensor(FMOE_F32, {E});
    fake_codes.push_back(c);
    return fake_codes.back();
}
