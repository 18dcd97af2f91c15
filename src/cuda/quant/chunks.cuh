// SPDX-License-Identifier: Apache-2.0
// chunks.cuh - a product of quantised weights, chunk by chunk of experts:
//
//   decode 0 | product 0 | decode 1 | product 1 | ...
//
// Every launch waits for the one before: a chunk is decoded where the chunk before it was.
#pragma once
#include "coded.cuh"

// Experts of a chunk: no more than the ring has room for, and not so many that a last few tiles of a product keep the
// card waiting, with rows spread evenly. columns: tiles of the result side by side.
static inline int64_t chunk_of(const Layer &l, const Coded &c, int64_t columns)
{
    const int64_t rows = fmoe_ceil_div(l.R, l.all), most = 16 * FMOE_CUDA_TOKEN_UNITS;
    const int64_t pieces = !fmoe_cuda_use_tokens(l.R, l.all) ? fmoe_ceil_div(rows, 128)
                           : rows <= most                    ? 1
                                                             : 2 * fmoe_ceil_div(rows, 2 * most);
    const int64_t tiles = pieces * columns, rounds = c.chunk * tiles / l.plan->sms;
    const int64_t chunk = rounds ? fmoe_max(rounds * l.plan->sms / tiles, 1) : c.chunk, last = l.E % chunk;
    return last && 2 * last < chunk ? fmoe_ceil_div(l.E, fmoe_ceil_div(l.E, chunk)) : chunk;
}

// product(some experts, their weights, their biases, their adapters)
template <class F>
static void by_chunks(Layer &l, const Weight &w, const Bias &b, const Lora &lora, int64_t columns, F product)
{
    if (!w.coded) return product(l, w, b, lora);
    const Coded &c = *w.coded;
    const int64_t chunk = chunk_of(l, c, columns);
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2;
    auto move = [](Mat &m, int64_t bytes) { m.p = (char *)m.p + bytes; };
    for (int64_t e = 0; e < l.E && l.rows; e += chunk) {
        Layer some = l;
        some.E = fmoe_min(chunk, l.E - e);
        some.map.off += e;
        some.map.cnt += e;
        some.map.first = (int)e;
        some.chunk = true;
        DequantArgs d = {};
        d.cnt = some.map.cnt;
        d.first = (int)e;
        d.n = (int)some.E;
        d.out_g = c.each / size;
        d.out = c.ring;
        for (int i = 0; i < c.parts; i++) {
            d.m = c.part[i];
            d.out_r = d.m.K;
            dequantise(l.dtype, d, *l.stream);
            d.out = (char *)d.out + (int64_t)d.m.N * d.m.K * size;
        }
        Bias bias = b;
        if (b.p) bias.p = (const char *)b.p + e * b.g * size;
        Lora adapter = lora;
        if (lora.rows.cols)
            for (Mat *m : {&adapter.factor.whole, &adapter.factor.part[0], &adapter.factor.part[1]})
                move(*m, e * m->g * size);
        product(some, w, bias, adapter);
        l.status = some.status;
    }
    // A product of a chunk lets nothing in early: what comes next must not take it for one of the whole layer.
    l.stream->last = Product::DEQUANT;
}
