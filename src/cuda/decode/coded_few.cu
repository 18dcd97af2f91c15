// SPDX-License-Identifier: Apache-2.0
// coded_few.cu - which quantised layers the kernels of coded.cuh take, and how their launches are divided.
#include "coded.cuh"

#include <cmath>

static int log2_of(int n) // -1: not a power of two
{
    int s = 0;
    while (s < 30 && 1 << s < n) s++;
    return 1 << s == n ? s : -1;
}

// The form of a weight's codes, and its launch parameters but for the shape. False: there is none.
static bool form_of(const CodedParams &c, CodedKind *kind, CodedFew *f)
{
    const CodedMatrix &m = c.m;
    if (m.zeros.p || m.N % 8) return false;
    const bool f32 = m.scale.kind == SCALE_F32;
    f->m = m;
    f->shift = c.shift;
    f->row_shift = m.group_rows ? log2_of(m.group_rows) : 30;
    f->unit = 1.f;
    f->exponent = m.code == FMOE_CODE_S8 ? Int8Codes::EXPONENT : IntegerCodes::EXPONENT;
    if (m.code < FMOE_CODE_E2M1) {
        if (m.code == FMOE_CODE_S8 && m.zero != 0) return false;
        const bool blocks = f32 && c.shift >= 6;
        *kind =
            m.code == FMOE_CODE_E4M3 ? (blocks ? CODED_FP8_F32 : CODED_FP8) : (blocks ? CODED_INT8_F32 : CODED_INT8);
        return true;
    }
    float most = 0;
    for (const float v : m.table) {
        if (!std::isfinite(v)) return false;
        most = fmaxf(most, fabsf(v));
    }
    if (m.code == FMOE_CODE_U4 && f32 && c.shift == 7 && m.table[0] == rintf(m.table[0]) && fabsf(m.table[0]) <= 512) {
        *kind = CODED_INTEGERS_F32;
        return true;
    }
    // Between 2^3 and 2^4: f16 has 11 bits of what is 2^-17 of that.
    int exponent = 0;
    if (most > 0) frexpf(most, &exponent);
    exponent = exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
    for (float &v : f->m.table) v = ldexpf(v, 4 - exponent);
    f->unit = ldexpf(1.f, exponent - 4);
    *kind = f32 && c.shift == 6                          ? CODED_TABLE_F32
            : m.scale.kind == SCALE_E8M0 && c.shift == 5 ? CODED_TABLE_E8M0
                                                         : CODED_TABLE;
    return true;
}

// Experts that are hit, if every token's k are drawn at random.
static double experts_hit(const DecodeArgs &a)
{
    return fmax(1, a.E * (1 - pow(fmax(0, 1 - (double)a.k / a.E), (double)a.T)));
}

struct Division {
    CodedShape s;
    int blocks, rows; // rows: of a tile of down
    double cost;
};

// The division that should take the least time: a step of a warp is 16 rows of a chunk. False: none fits.
static bool divide(const DecodeArgs &a, bool down, CodedKind kind, const Plan *plan, Division *best)
{
    const bool small = kind <= CODED_INTEGERS_F32;
    const int64_t K = down ? a.I : a.H;
    const int warps = a.T == 1 ? CODED_WARPS_ONE : CODED_WARPS, chunk = small ? 128 : 64, pieces = small ? 4 : 2,
              table = small && kind != CODED_INTEGERS_F32 ? TableCodes::TABLE : 0;
    const double hit = experts_hit(a);
    best->cost = INFINITY;
    for (int most = CODED_TOKENS; most && best->cost == INFINITY; most /= 2)
        for (int rows = 16; rows >= (down ? 8 : 16); rows /= 2)
            for (int team = 1; team <= warps; team++) {
                if (most > 1 && most / 2 >= a.T) continue;
                Division d = {};
                const int64_t tiles = down ? (a.H + rows - 1) / rows : a.gated ? a.I / 8 : (a.I + 15) / 16;
                d.rows = rows;
                d.blocks = (int)fmoe_min(down ? tiles : INT32_MAX, plan->sms);
                const int chunks = (int)((K + chunk - 1) / chunk);
                d.s = {team,
                       warps / team,
                       most,
                       chunks,
                       (chunks + team - 1) / team,
                       down ? (int)fmoe_ceil_div(tiles, d.blocks) * rows : 0};
                if (table + CodedRoom::all(d.s, pieces, a.R, a.E) > (int64_t)plan->shared) continue;
                const double steps = d.s.steps,
                             items = down ? ceil(hit / d.s.teams) * (double)fmoe_ceil_div(tiles, d.blocks)
                                          : ceil(hit * (double)tiles / (d.blocks * d.s.teams)),
                             each = steps * (rows == 16 ? 1 : CODED_HALF / 2) + (team == 1 ? 0.4 : 0.8);
                // Few warps, each of which waits for its own, take longer.
                d.cost = items * each * d.s.teams * team / warps * warps / (team * d.s.teams);
                if (d.cost < best->cost) *best = d;
            }
    return best->cost < INFINITY;
}

bool coded_few_run(const DecodeArgs &a, const CodedParams *const coded[2], const Plan *plan, Stream &s)
{
    CodedFew f[2];
    CodedKind kind[2];
    Division d[2];
    for (int i = 0; i < 2; i++)
        if (!coded[i] || !form_of(*coded[i], &kind[i], &f[i]) || !divide(a, i == 1, kind[i], plan, &d[i])) return false;
    const auto integers = [](CodedKind k) { return k == CODED_INTEGERS_F32 || k == CODED_INT8 || k == CODED_INT8_F32; };
    if (!fmoe_cuda_use_decode_precise(integers(kind[0]) && integers(kind[1]), a.T)) return false;
    for (int i = 0; i < 2; i++) {
        f[i].s = d[i].s;
        (kind[i] <= CODED_INTEGERS_F32 ? coded_nibbles_run : coded_bytes_run)(a, kind[i], i == 1, d[i].rows, f[i],
                                                                              d[i].blocks, s);
    }
    return true;
}
