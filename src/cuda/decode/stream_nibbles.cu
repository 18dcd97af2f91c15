// SPDX-License-Identifier: Apache-2.0
// stream_nibbles.cu - few tokens times codes of 4 bits (stream_coded.cuh), and what codes must be for these kernels.
#include "stream_coded.cuh"

template <class T, DecodeProduct P>
static void run(const DecodeArgs &a, const CodedParams &c, const Plan *plan, Stream &s)
{
    const bool plain = std::is_same_v<T, bf16> && !c.m.zeros.p && !c.m.scale2, f32 = c.m.scale.kind == SCALE_F32;
    if (plain && f32 && c.shift == 6) run_coded<bf16, P, Nibbles4, SCALE_F32, 4>(a, c, plan, s);      // NF4
    else if (plain && f32 && c.shift == 7) run_coded<bf16, P, Nibbles4, SCALE_F32, 8>(a, c, plan, s); // INT4
    else if (plain && c.m.code == FMOE_CODE_E2M1 && c.m.scale.kind == SCALE_E8M0 && c.shift == 5)
        run_coded<bf16, P, NibblesX, SCALE_E8M0, 2>(a, c, plan, s); // MXFP4
    else run_coded<T, P, Nibbles4, -1, 0>(a, c, plan, s);
}

void stream_nibbles_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) (down ? run<bf16, DOWN> : run<bf16, UP>)(a, c, plan, s);
    else (down ? run<f16, DOWN> : run<f16, UP>)(a, c, plan, s);
}

void stream_coded_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s)
{
    (c.m.code >= FMOE_CODE_E2M1 ? stream_nibbles_run : stream_bytes_run)(a, down, c, dtype, plan, s);
}

// Scales or zeros: neighbours in a row, and those of a chunk no more than a stage has room for.
static bool grid_ok(const CodedMatrix &m, const CodedGrid &g, int shift, int chunk)
{
    const int room = 4 * CodedSource<bf16, UP, Nibbles4, -1, 0, 16>::WORDS, size = scale_bytes(g.kind),
              groups = fmoe_max(chunk >> shift, 1);
    return !g.p || ((g.c == 1 || (m.K - 1) >> shift == 0) && groups * size + (size < 4 ? 4 - size : 0) <= room);
}

bool stream_coded_ok(const CodedMatrix &m, int64_t E, CodedParams *params)
{
    const bool small = m.code >= FMOE_CODE_E2M1;
    const int whole = small ? 32 : 16, // codes of 16 bytes
        chunk = small ? Nibbles4::CHUNK : Bytes<BYTE_ANY>::CHUNK;
    const int64_t bits = (int64_t)(uintptr_t)m.codes | m.r | (E > 1 ? m.g : 0);
    int shift = m.group_cols ? 0 : 31;
    while (shift < 31 && 1 << shift < m.group_cols) shift++;
    if (m.list || bits % 16 || m.K % whole || (m.group_cols && (shift < 4 || 1 << shift != m.group_cols))) return false;
    *params = {m, shift};
    return grid_ok(m, m.scale, shift, chunk) && grid_ok(m, m.zeros, shift, chunk);
}
