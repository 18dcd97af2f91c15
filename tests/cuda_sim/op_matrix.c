/* SPDX-License-Identifier: Apache-2.0
 * op_matrix.c - fragments of matrices between shared memory and registers, and the products of the tensor cores. The
 * sixteen products of a step are added in double and rounded to f32 once: the silicon's own sum is not the same, but
 * like it does not depend on the order of k within a step, nor on which instruction computes it. */
#include "ptx.h"
#include "races.h"

#include <string.h>

static float value_of(uint32_t bits, type t)
{
    const uint16_t u = (uint16_t)bits;
    if (t == F16) {
        _Float16 h;
        memcpy(&h, &u, 2);
        return (float)h;
    }
    bits <<= 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* d[rows][columns] += a[rows][16] b[columns][16], rounded to f32. */
static inline void multiply(int rows, int columns, float (*d)[256], const float (*a)[16], const float (*b)[256])
{
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < columns; n += 8) {
            double sum[8];
            for (int c = 0; c < 8; c++) sum[c] = d[r][n + c];
            for (int k = 0; k < 16; k++)
                for (int c = 0; c < 8; c++) sum[c] += (double)a[r][k] * (double)b[k][n + c];
            for (int c = 0; c < 8; c++) d[r][n + c] = (float)sum[c];
        }
}

/* mma.sync.m16n8k16 {d}, {a}, {b}, {c}: lane l has row l / 4 (and + 8) and columns 2 (l % 4), + 1 (and + 8). */
static void product(warp *w, const instruction *i, uint32_t lanes)
{
    if (lanes != ~0u) sim_fault(w, i, "a product by %08x of a warp", lanes);
    const type t = i->type[1];
    float a[16][16], b[16][256], d[16][256];
    for (int l = 0; l < LANES; l++) {
        const int row = l / 4, col = l % 4 * 2;
        for (int h = 0; h < 4; h++) {
            const uint32_t v = REG(uint32_t, 4 + h)[l];
            a[row + h % 2 * 8][col + h / 2 * 8] = value_of(v & 0xffff, t);
            a[row + h % 2 * 8][col + h / 2 * 8 + 1] = value_of(v >> 16, t);
            d[row + h / 2 * 8][col + h % 2] = REG(float, 10 + h)[l];
        }
        for (int h = 0; h < 2; h++) {
            const uint32_t v = REG(uint32_t, 8 + h)[l];
            b[col + h * 8][row] = value_of(v & 0xffff, t);
            b[col + h * 8 + 1][row] = value_of(v >> 16, t);
        }
    }
    multiply(16, 8, d, a, b);
    for (int l = 0; l < LANES; l++)
        for (int h = 0; h < 4; h++) REG(float, h)[l] = d[l / 4 + h / 2 * 8][l % 4 * 2 + h % 2];
}

/* ldmatrix: lane l of the 8 n lanes has the address of row l % 8 of matrix l / 8; a row is 16 bytes. */
static void matrix_rows(warp *w, const instruction *i, int address, int matrices, uint16_t *(*row)[8], access how)
{
    for (int m = 0; m < matrices; m++)
        for (int r = 0; r < 8; r++) {
            const uint32_t at = (uint32_t)(lane_value(w, i, address, 8 * m + r) + (uint64_t)i->imm[0]);
            row[m][r] = sim_address(w, i, SHARED, at, 16, 8 * m + r);
            races_touch(w, i, w->b, at, 16, how);
        }
}
static void matrix_load(warp *w, const instruction *i, uint32_t lanes)
{
    if (lanes != ~0u) sim_fault(w, i, "a matrix for %08x of a warp", lanes);
    const int n = i->operands - 1;
    uint16_t *row[4][8];
    uint32_t v[4][LANES];
    matrix_rows(w, i, n, n, row, READ);
    for (int m = 0; m < n; m++)
        for (int l = 0; l < LANES; l++) {
            const int r = l / 4, c = l % 4 * 2;
            v[m][l] = i->kind == 16 ? row[m][c][r] | (uint32_t)row[m][c + 1][r] << 16
                                    : row[m][r][c] | (uint32_t)row[m][r][c + 1] << 16;
        }
    for (int m = 0; m < n; m++) memcpy(REG(uint32_t, m), v[m], sizeof v[m]);
}
static void matrix_store(warp *w, const instruction *i, uint32_t lanes)
{
    if (lanes != ~0u) sim_fault(w, i, "a matrix from %08x of a warp", lanes);
    const int n = i->operands - 1;
    uint16_t *row[4][8];
    matrix_rows(w, i, 0, n, row, WRITE);
    for (int m = 0; m < n; m++)
        for (int l = 0; l < LANES; l++) {
            const int r = l / 4, c = l % 4 * 2;
            const uint32_t v = REG(uint32_t, m + 1)[l];
            *(i->kind == 16 ? &row[m][c][r] : &row[m][r][c]) = (uint16_t)v;
            *(i->kind == 16 ? &row[m][c + 1][r] : &row[m][r][c + 1]) = (uint16_t)(v >> 16);
        }
}

/* wgmma m64nNk16, operands in shared memory of 128-byte swizzle, the first also in registers (sm90/wgmma.cuh). Each
 * warp of the four computes its 16 rows when it comes. */
static uint16_t operand_at(warp *w, const instruction *i, uint64_t descriptor, bool turned, int mn, int k)
{
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4, leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    uint32_t at = start;
    if (turned)
        at += (uint32_t)(mn / 64) * leading + (uint32_t)(k / 8) * stride + (uint32_t)(k % 8 * 128 + mn % 64 * 2);
    else at += (uint32_t)(mn / 8) * stride + (uint32_t)(mn % 8 * 128 + k * 2);
    at ^= (at >> 7 & 7) << 4;
    races_touch(w, i, w->b, at, 2, READ);
    return *(const uint16_t *)sim_address(w, i, SHARED, at, 2, 0);
}
static void group_product(warp *w, const instruction *i, uint32_t lanes)
{
    if (lanes != ~0u) sim_fault(w, i, "a product by %08x of a warp", lanes);
    /* results, a (one descriptor, or four registers), b, add, two signs, (a descriptor: whether a is turned,) b is */
    const bool registers = (i->operands - 9) % 8 == 0;
    const int results = i->operands - (registers ? 9 : 7), N = results * 2, first = w->index % 4 * 16,
              at_b = results + (registers ? 4 : 1);
    const uint64_t da = registers ? 1ull << 62 : lane_value(w, i, results, 0), db = lane_value(w, i, at_b, 0);
    const bool add = lane_value(w, i, at_b + 1, 0), turn_a = !registers && lane_value(w, i, at_b + 4, 0),
               turn_b = lane_value(w, i, i->operands - 1, 0);
    if (da >> 62 != 1 || db >> 62 != 1) sim_fault(w, i, "a descriptor without the swizzle of 128 bytes");
    if (lane_value(w, i, at_b + 2, 0) != 1 || lane_value(w, i, at_b + 3, 0) != 1) sim_fault(w, i, "a sign");
    const type t = i->type[1];
    float a[16][16], b[16][256], d[16][256];
    for (int k = 0; k < 16; k++) {
        for (int r = 0; r < 16; r++) {
            const int lane = r % 8 * 4 + k % 8 / 2, part = r / 8 + k / 8 * 2;
            const uint32_t bits = registers ? REG(uint32_t, results + part)[lane] >> k % 2 * 16
                                            : operand_at(w, i, da, turn_a, first + r, k);
            a[r][k] = value_of(bits & 0xffff, t);
        }
        for (int n = 0; n < N; n++) b[k][n] = value_of(operand_at(w, i, db, turn_b, n, k), t);
    }
    for (int e = 0; e < results; e++)
        for (int l = 0; l < LANES; l++)
            d[l / 4 + e % 4 / 2 * 8][e / 4 * 8 + l % 4 * 2 + e % 2] = add ? REG(float, e)[l] : 0;
    multiply(16, N, d, a, b);
    for (int e = 0; e < results; e++)
        for (int l = 0; l < LANES; l++) REG(float, e)[l] = d[l / 4 + e % 4 / 2 * 8][e / 4 * 8 + l % 4 * 2 + e % 2];
}
static void nothing(warp *w, const instruction *i, uint32_t lanes) { (void)w, (void)i, (void)lanes; }

/* kind: which operand is the mask of lanes; 16 and more: none, the whole warp (16: of a matrix that is turned). */
const op matrix_ops[] = {{"mma.sync.aligned.m16n8k16.row.col.f32.*", "vvvv", product, TOGETHER, 17},
                         {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "vm", matrix_load, TOGETHER, 16},
                         {"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", "vm", matrix_load, TOGETHER, 16},
                         {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "vm", matrix_load, TOGETHER, 17},
                         {"ldmatrix.sync.aligned.m8n8.x2.shared.b16", "vm", matrix_load, TOGETHER, 17},
                         {"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "mv", matrix_store, TOGETHER, 16},
                         {"stmatrix.sync.aligned.m8n8.x4.shared.b16", "mv", matrix_store, TOGETHER, 17},
                         {"wgmma.mma_async.*", "vvdpwww?w", group_product, TOGETHER, 17},
                         {"wgmma.fence.*", "", nothing, TOGETHER, 17},
                         {"wgmma.commit_group.*", "", nothing, TOGETHER, 17},
                         {"wgmma.wait_group.*", "w", nothing, TOGETHER, 17},
                         {0}};
