// SPDX-License-Identifier: Apache-2.0
// stream_bytes.cu - few tokens times codes of 8 bits (stream_coded.cuh).
#include "stream_coded.cuh"

template <class T, DecodeProduct P>
static void run(const DecodeArgs &a, const CodedParams &c, const Plan *plan, Stream &s)
{
    // One scale for a chunk: FP8 in blocks of 128, or a scale a row.
    const bool plain =
        std::is_same_v<T, bf16> && !c.m.zeros.p && !c.m.scale2 && c.m.scale.kind == SCALE_F32 && c.shift >= 7;
    if (plain && c.m.code == FMOE_CODE_E4M3) run_coded<bf16, P, Bytes<BYTE_E4M3>, SCALE_F32, 8>(a, c, plan, s);
    else if (plain && c.m.code == FMOE_CODE_S8 && c.m.zero == 0)
        run_coded<bf16, P, Bytes<BYTE_S8>, SCALE_F32, 8>(a, c, plan, s);
    else run_coded<T, P, Bytes<BYTE_ANY>, -1, 0>(a, c, plan, s);
}

void stream_bytes_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) (down ? run<bf16, DOWN> : run<bf16, UP>)(a, c, plan, s);
    else (down ? run<f16, DOWN> : run<f16, UP>)(a, c, plan, s);
}
