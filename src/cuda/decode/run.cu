// SPDX-License-Identifier: Apache-2.0
// run.cu - whether few tokens go to the decode kernels, and their arguments.
#include "decode.cuh"
#include "cuda/ops.cuh"

// first(e), second(e): the addresses of those rows. *p becomes the lowest.
template <class F, class S> static bool make_lists(DecodeLists &l, const void **p, int64_t E, F first, S second)
{
    uintptr_t lowest = UINTPTR_MAX, highest = 0, bits = 0;
    for (int64_t e = 0; e < E; e++)
        for (const uintptr_t v : {first(e), second(e)})
            lowest = v < lowest ? v : lowest, highest = v > highest ? v : highest, bits |= v;
    if (E > DecodeLists::MOST || bits % 16 || (highest - lowest) / 16 >= INT32_MAX) return false;
    *p = (const void *)lowest;
    for (int64_t e = 0; e < E; e++)
        l.at[0][e] = (uint32_t)((first(e) - lowest) / 16), l.at[1][e] = (uint32_t)((second(e) - lowest) / 16);
    return true;
}

static bool alike(const fmoe_tensor *list, int64_t E, int64_t r) // rows of unit stride, r apart
{
    for (int64_t e = 0; e < E; e++)
        if (fmoe_stride(&list[e], 0) != r || fmoe_stride(&list[e], 1) != 1) return false;
    return true;
}

static bool make_lora(DecodeLora &lora, int64_t rank, const fmoe_tensor *a, const fmoe_tensor *b, float scale,
                      const void *rows)
{
    if (!rank) return true;
    lora = {fmoe_data(a),      fmoe_data(b), fmoe_stride(a, 0), fmoe_stride(a, 1),     fmoe_stride(b, 0),
            fmoe_stride(b, 1), (void *)rows, (int)rank,         fmoe_lora_scale(scale)};
    const int64_t E = a->shape[0];
    const bool lie = (E == 1 || (lora.a_g > 0 && lora.b_g > 0)) && lora.a_r > 0 && lora.b_r > 0 && lora.b_r < 1 << 23 &&
                     fmoe_stride(a, 2) == 1 && fmoe_stride(b, 2) == 1 &&
                     (lora.a_g | lora.a_r | lora.b_g | lora.b_r) % 8 == 0;
    return lie && fmoe_cuda_decode_rank(rank) && ((uintptr_t)lora.a | (uintptr_t)lora.b) % 16 == 0;
}

// Which interleaved stacks Hopper's products with an activation take: [out,in] without adapters, and these [in,out]
// (up_pairs_ok).
static bool pairs_ok(const DecodeArgs &a, const fmoe_tensor *b1)
{
    const bool bias = !a.b1.p || (fmoe_stride(b1, 1) == 1 && fmoe_stride(b1, 0) % 2 == 0 && (uintptr_t)a.b1.p % 4 == 0);
    return bias && a.fast.kind <= FAST_CLAMP && a.I % 64 == 0;
}

// Quantised weights: whether the kernels of stream_coded.cuh read their codes.
static bool coded_ok(const Quant *quant, bool list, int64_t E, CodedParams (&params)[2], const CodedParams *(&coded)[2])
{
    const Coded *const of[2] = {quant ? &quant->w1 : nullptr, quant ? &quant->w2 : nullptr};
    for (int i = 0; i < 2; i++) {
        coded[i] = nullptr;
        if (!of[i] || !of[i]->parts) continue;
        if (list || !stream_coded_ok(of[i]->part[0], E, &params[i])) return false;
        coded[i] = &params[i];
    }
    return true;
}

bool decode_run(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_run *run_args,
                const DecodeScratch &scratch, const Quant *quant, Stream &s)
{
    const Plan *plan = plan_of(p);
    const fmoe_weights &w = args->w;
    const int64_t T = args->x->shape[0], E = p->d.E;
    if (!(quant ? fmoe_cuda_use_decode_coded : fmoe_cuda_use_decode)(&plan->shape, T)) return false;
    const bool list = !w.w1, lora = p->d.rank1 || p->d.rank2,
               apart = !list && p->gated && (p->d.flags & FMOE_INTERLEAVED),
               same = quant || (p->d.flags & FMOE_SAME_BITS);
    CodedParams params[2];
    const CodedParams *coded[2];
    if (!coded_ok(quant, list, E, params, coded)) return false;
    const fmoe_tensor *const w1 = w.w1 ? w.w1 : p->gated ? w.gate : w.up, *const w2 = w.w1 ? w.w2 : w.down;
    const int row = list ? 0 : 1; // the dimension
    const bool rows = (coded[0] || fmoe_stride(w1, row + 1) == 1) && (coded[1] || fmoe_stride(w2, row + 1) == 1);
    const bool cols = !quant && !list && !lora && fmoe_stride(w1, 1) == 1 && fmoe_stride(w2, 1) == 1 &&
                      fmoe_cuda_use_decode_nmajor(&plan->shape, T);
    if (!rows && !cols) return false;
    // Without the fast general products the large ones add an adapter's part on its own.
    if (same && plan->path != FMOE_PATH_SM90 && !plan->stages) return false;
    DecodeArgs a = {};
    a.ids = view(args->ids);
    a.p = view(args->weights);
    a.T = T, a.H = p->d.H, a.I = p->d.I;
    a.R = (int)(T * p->d.k), a.k = (int)p->d.k, a.E = (int)E;
    a.flags = p->d.flags;
    a.gated = p->gated;
    a.gate = apart || (!p->gated && !same) ? 2 : 1;
    a.up = a.gate == 2 ? 1 : a.I;
    if (a.flags & FMOE_BIAS) a.b1 = view(w.b1), a.b2 = view(w.b2);
    a.x = fmoe_data(args->x);
    a.x_r = fmoe_stride(args->x, 0);
    a.w1 = fmoe_data(w1);
    a.w2 = fmoe_data(w2);
    a.w1_g = list ? 0 : fmoe_stride(w1, 0), a.w1_r = fmoe_stride(w1, rows ? row : 2);
    a.w2_g = list ? 0 : fmoe_stride(w2, 0), a.w2_r = fmoe_stride(w2, rows ? row : 2);
    // As the ring has them, which the large products read (quant/coded.cuh).
    if (coded[0]) a.w1 = nullptr, a.w1_r = a.H, a.w1_g = p->h_cols * a.H;
    if (coded[1]) a.w2 = nullptr, a.w2_r = a.I, a.w2_g = a.H * a.I;
    const uintptr_t bits = (uintptr_t)a.x | (uintptr_t)a.w1 | (uintptr_t)a.w2;
    if (bits % 16 || (a.x_r | a.w1_g | a.w1_r | a.w2_g | a.w2_r) % 8) return false;
    // Nor do they have the activation with the product where these are not so.
    if (same && !list && E > 1 && (a.w1_g <= 0 || a.w2_g <= 0)) return false;
    if (same && (a.w1_r <= 0 || a.w2_r <= 0 || a.w1_r * a.gate >= 1 << 24 || a.w2_r >= 1 << 24)) return false;
    if (!make_lora(a.lora[0], p->d.rank1, w.lora_a1, w.lora_b1, w.lora_scale1, scratch.lora[0]) ||
        !make_lora(a.lora[1], p->d.rank2, w.lora_a2, w.lora_b2, w.lora_scale2, scratch.lora[1]))
        return false;
    DecodeLists lists[2];
    if (list || (lora && !same)) {
        // Else W1's second row is further on in the same matrix.
        const fmoe_tensor *const beside = list && p->gated ? w.up : nullptr;
        if (list && !(alike(w1, E, a.w1_r) && alike(w2, E, a.w2_r) && (!beside || alike(beside, E, a.w1_r))))
            return false;
        const auto at = [&](const fmoe_tensor *t, int64_t e) {
            return list ? (uintptr_t)fmoe_data(t + e)
                        : (uintptr_t)fmoe_data(t) + (uintptr_t)(e * fmoe_stride(t, 0) * 2);
        };
        const auto up = [&](int64_t e) { return beside ? at(beside, e) : at(w1, e) + (uintptr_t)(a.up * a.w1_r * 2); };
        if (!make_lists(lists[0], &a.w1, E, [&](int64_t e) { return at(w1, e); }, up)) return false;
        const auto down = [&](int64_t e) { return at(w2, e); };
        const auto next = [&](int64_t e) { return at(w2, e) + (uintptr_t)(a.w2_r * 2); };
        if (!make_lists(lists[1], &a.w2, E, down, next)) return false;
    }
    a.a = scratch.a;
    a.out = fmoe_data(args->out);
    a.out_r = fmoe_stride(args->out, 0);
    a.act = p->d.act;
    a.alpha = p->d.act_alpha;
    a.limit = p->d.act_limit;
    a.fast = fast_act(p->d.act, p->d.act_alpha, p->d.act_limit);
    a.y = scratch.y;
    a.done = scratch.done;
    a.round_h = plan->path == FMOE_PATH_SM90 && apart && (rows ? p->d.rank1 != 0 : !pairs_ok(a, w.b1));
    a.add = (run_args->flags & FMOE_ADD_OUT) != 0;
    a.error = plan->error_dev;
    a.part[0] = (float *)scratch.parts;
    a.part[1] = a.part[0] + (size_t)DECODE_PARTS * (size_t)a.R * (size_t)p->h_cols;
    const DecodeLists *const given = list || (lora && !same) ? lists : nullptr;
    // More precision than weights that are rounded one by one, in another order of sums.
    const bool other = quant && !(p->d.flags & FMOE_SAME_BITS) && p->d.dtype == FMOE_BF16 && !lora;
    if (other && coded_few_run(a, coded, plan, s)) return true;
    if (rows && same) stream_kmajor_run(a, given, coded, p->d.dtype, plan, s);
    else if (rows) decode_kmajor_run(a, given, p->d.dtype, plan, s);
    else (same ? stream_nmajor_run : decode_nmajor_run)(a, p->d.dtype, plan, s);
    return true;
}
