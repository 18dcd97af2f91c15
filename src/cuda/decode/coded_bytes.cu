// SPDX-License-Identifier: Apache-2.0
// coded_bytes.cu - few tokens times codes of 8 bits (coded.cuh).
#include "coded.cuh"

void coded_bytes_run(const DecodeArgs &a, CodedKind kind, bool down, int rows, const CodedFew &f, int blocks, Stream &s)
{
    switch (kind) {
    case CODED_FP8_F32: return launch_form<Fp8Codes, SCALE_F32, 0, 4, 1>(a, down, rows, f, blocks, s);
    case CODED_INT8_F32: return launch_form<Int8Codes, SCALE_F32, 0, 4, 1>(a, down, rows, f, blocks, s);
    case CODED_FP8: return launch_form<Fp8Codes, -1, 0, 1, 1>(a, down, rows, f, blocks, s);
    default: return launch_form<Int8Codes, -1, 0, 1, 1>(a, down, rows, f, blocks, s);
    }
}
