// SPDX-License-Identifier: Apache-2.0
// coded_nibbles.cu - few tokens times codes of 4 bits (coded.cuh).
#include "coded.cuh"

void coded_nibbles_run(const DecodeArgs &a, CodedKind kind, bool down, int rows, const CodedFew &f, int blocks,
                       Stream &s)
{
    switch (kind) {
    case CODED_TABLE_F32: return launch_form<TableCodes, SCALE_F32, 6, 2, 1>(a, down, rows, f, blocks, s);
    case CODED_TABLE_E8M0: return launch_form<TableCodes, SCALE_E8M0, 5, 1, 1>(a, down, rows, f, blocks, s);
    case CODED_INTEGERS_F32: return launch_form<IntegerCodes, SCALE_F32, 7, 4, 1>(a, down, rows, f, blocks, s);
    default: return launch_form<TableCodes, -1, 0, 1, 2>(a, down, rows, f, blocks, s);
    }
}
