/* SPDX-License-Identifier: Apache-2.0
 * tune.c - tile and path choice. No CUDA header is included here. */
#include "tune.h"

#include "fusedmoe.h"

fmoe_cuda_path fmoe_cuda_choose_path(const fmoe_cuda_shape *s, const char **why)
{
    *why = "Hopper: wgmma and TMA";
    if (s->cc != 90) {
        *why = "not compute capability 9.0";
        return FMOE_PATH_SM80;
    }
    if (s->general) {
        *why = "FMOE_CUDA_PATH asks for it";
        return FMOE_PATH_SM80;
    }
    if (s->dtype != FMOE_BF16 && s->dtype != FMOE_F16) {
        *why = "f32 runs on plain multiply-adds";
        return FMOE_PATH_SM80;
    }
    if (s->H % 64 != 0) {
        *why = "H is not a multiple of 64";
        return FMOE_PATH_SM80;
    }
    if (s->I % 8 != 0) {
        *why = "I is not a multiple of 8";
        return FMOE_PATH_SM80;
    }
    return FMOE_PATH_SM90;
}

int fmoe_cuda_stages(size_t shared)
{
    const size_t stage = (128 + 256) * 64 * 2, extra = 768; /* sm80/product.cuh */
    for (int n = 4; n >= 2; n--)
        if ((size_t)n * stage + extra <= shared) return n;
    return 0;
}

int64_t fmoe_cuda_rows(int64_t R, int64_t E, int64_t align)
{
    const int64_t used = R < E ? R : E;
    const int64_t rows = R + used * (align - 1);
    return (rows + align - 1) / align * align;
}

int64_t fmoe_cuda_tiles(int64_t R, int64_t E, int64_t tile)
{
    const int64_t used = R < E ? R : E;
    return R / tile + used;
}

int fmoe_cuda_dh_tile(int64_t I)
{
    const int64_t wide = (I + 191) / 192 * 192, narrow = (I + 127) / 128 * 128;
    return wide * 100 <= narrow * 104 ? 192 : 128; /* 192 is about 4 % faster per column */
}

int fmoe_cuda_use_tokens(int64_t R, int64_t E) { return R < FMOE_CUDA_TOKENS_BELOW * E; }

int fmoe_cuda_use_pairs(int64_t R, int64_t E) { return R <= 64 * E || !fmoe_cuda_use_tokens(R, E); }

int fmoe_cuda_use_decode(const fmoe_cuda_shape *s, int64_t T)
{
    const int half = s->dtype == FMOE_BF16 || s->dtype == FMOE_F16;
    const int64_t R = T * s->k;
    /* With more than about one row an expert the tensor cores win: 308 us against 395 at T = 32 of Qwen3-30B-A3B. */
    const int few = T >= 1 && T <= 64 && R <= 1024 && (R <= s->E || R <= 8);
    return few && half && s->H % 8 == 0 && s->I % 8 == 0 && s->E <= 4096 && s->cc >= 80;
}

int fmoe_cuda_use_decode_coded(const fmoe_cuda_shape *s, int64_t T)
{
    const int half = s->dtype == FMOE_BF16 || s->dtype == FMOE_F16;
    const int64_t R = T * s->k;
    /* Weights are decoded again for each eight tokens of an expert; else once and through memory, five times as long,
     * or, in bf16 on Hopper, inside the products: Qwen3-30B-A3B in NF4 at T = 64 309 us against some 410, at 128 910.
     */
    const int64_t most = s->cc == 90 && !s->general && s->dtype == FMOE_BF16 ? 64 : 128;
    const int few = T >= 1 && T <= most && R <= 1024 && R <= 32 * s->E;
    return few && half && s->H % 8 == 0 && s->I % 8 == 0 && s->E <= 4096 && s->cc >= 80;
}

int fmoe_cuda_use_decode_precise(int integers, int64_t T)
{
    /* Qwen3-30B-A3B at T = 1, 4, 16, against the kernels that have the bits of the large products: NF4 31, 72, 160 us
     * (36, 64, 154), MXFP4 34, 67, 167 (37, 62, 139), FP8 38, 83, 217 (41, 75, 179); INT4 28, 54, 132 (36, 62, 158) and
     * INT8 38, 84, 211 (73, 154, 419). */
    return integers || T <= 2;
}

int fmoe_cuda_decode_rank(int64_t rank) { return rank % 8 == 0 && rank <= 128; }

int fmoe_cuda_use_decode_nmajor(const fmoe_cuda_shape *s, int64_t T)
{
    /* Qwen3-30B-A3B T = 8 (600 MB of weights at most) 154 us against 187, T = 16 260 against 239; gpt-oss-20b T = 4
     * (800 MB) 203 against 241, T = 8 322 against 304; Llama 4 Scout T = 4 (1000 MB) 240 against 247, T = 8 459 against
     * 438. */
    const double weights = 6.0 * (double)T * (double)s->k * (double)s->H * (double)s->I;
    const int64_t longest = s->H > s->I ? s->H : s->I; /* a token, or four, in shared memory */
    return fmoe_cuda_use_decode(s, T) && s->gated && weights <= 9e8 && longest <= (T == 1 ? 32768 : 8192);
}

int64_t fmoe_cuda_most_decode_nmajor(const fmoe_cuda_shape *s)
{
    int64_t T = 0;
    while (fmoe_cuda_use_decode_nmajor(s, T + 1)) T++;
    return T;
}

int fmoe_cuda_decode_blocks(int groups, int resident, int results)
{
    for (int blocks = resident; blocks < groups; blocks += resident)
        if ((int64_t)((groups + blocks - 1) / blocks) * results <= 2048) return blocks;
    return groups;
}

int fmoe_cuda_sort_chunk(int64_t R)
{
    const int64_t blocks = R <= 512 * 1024 ? 128 : 512, per = (R + blocks - 1) / blocks;
    return (int)(per <= 256 ? 256 : (per + 255) / 256 * 256);
}
