// SPDX-License-Identifier: Apache-2.0
// chunks.cuh - a product of quantised weights, chunk by chunk of experts:
//
//   decode 0 | product 0 | decode 1 | product 1 | ...
//
// A chunk is decoded into one half of the ring while the product before it reads the other: its blocks come in under
// the tail of that one. That is safe because the half is free when the product begins: every product waits for its
// decoding as a whole, and a decoding ends after the product before it (dequant.cu).
#pragma once
#include "coded.cuh"

// product(some experts, their weights, their biases, their adapters)
template <class F> static void by_chunks(Layer &l, const Weight &w, const Bias &b, const Lora &lora, F product)
{
    if (!w.coded) return product(l, w, b, lora);
    const Coded &c = *w.coded;
    const int64_t size = l.dtype == FMOE_F32 ? 4 : 2;
    auto move = [](Mat &m, int64_t bytes) { m.p = (char *)m.p + bytes; };
    int64_t turn = 0;
    for (int64_t e = 0; e < l.E && l.rows; e += c.chunk, turn = c.other - turn) {
        Layer some = l;
        some.E = fmoe_min(c.chunk, l.E - e);
        some.map.off += e;
        some.map.cnt += e;
        some.map.first = (int)e;
        some.chunk = true;
        DequantArgs d = {};
        d.cnt = some.map.cnt;
        d.first = (int)e;
        d.n = (int)some.E;
        d.out_g = c.each / size;
        d.out = (char *)c.ring + turn;
        d.early = e > 0 && c.other; // the product before reads the other half, and began when this one was free
        for (int i = 0; i < c.parts; i++) {
            d.m = c.part[i];
            dequantise(l.dtype, d, *l.stream);
            d.out = (char *)d.out + (int64_t)d.m.N * d.m.K * size;
        }
        Weight v = w;
        move(v.whole, turn), move(v.part[0], turn), move(v.part[1], turn);
        Bias bias = b;
        if (b.p) bias.p = (const char *)b.p + e * b.g * size;
        Lora adapter = lora;
        if (lora.rows.cols)
            for (Mat *m : {&adapter.factor.whole, &adapter.factor.part[0], &adapter.factor.part[1]})
                move(*m, e * m->g * size);
        product(some, v, bias, adapter);
        l.status = some.status;
    }
}
