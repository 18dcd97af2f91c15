/* SPDX-License-Identifier: Apache-2.0
 * tune.h - which path and which tile serve a layer on a CUDA device. Plain C: tested without a GPU. */
#ifndef FMOE_CUDA_TUNE_H
#define FMOE_CUDA_TUNE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { FMOE_CUDA_ALIGN = 16 };      /* an expert's segment of rows begins at a multiple of this */
enum { FMOE_CUDA_SLACK = 128 };     /* entries of the token list past the last row that a tile may look at */
enum { FMOE_CUDA_TILE_M = 64 };     /* rows of a tile of the kernel for everything, sm80/gemm.cu */
enum { FMOE_CUDA_TOKEN_UNITS = 9 }; /* times 16: the most tokens of a tile of gemm_tokens.cuh */

/* What the choice depends on; filled by backend.cu from the description and the device. */
typedef struct fmoe_cuda_shape {
    int64_t H, I, E, k;
    int dtype, gated; /* fmoe_dtype */
    int cc;           /* compute capability, 90 = 9.0 */
    int sms;
    int general; /* FMOE_CUDA_PATH=sm80: the general path was asked for */
} fmoe_cuda_shape;

typedef enum fmoe_cuda_path { FMOE_PATH_SM80 = 0, FMOE_PATH_SM90 = 1 } fmoe_cuda_path;

/* The path of the large products; `why` gets the reason in words (never NULL). */
fmoe_cuda_path fmoe_cuda_choose_path(const fmoe_cuda_shape *s, const char **why);

/* Stages of the fast general products in `shared` bytes of a block: 4, 3 (8.0), 2 (8.6, 8.9, 12.0), or 0: no room. */
int fmoe_cuda_stages(size_t shared);

/* Rows the internal layout needs at most for R routed rows: every expert that can have rows is padded. */
int64_t fmoe_cuda_rows(int64_t R, int64_t E, int64_t align);

/* Tiles of `tile` rows that R rows in E groups need at most. */
int64_t fmoe_cuda_tiles(int64_t R, int64_t E, int64_t tile);

/* Column tile of the fused backward product: 192, or 128 where 192 wastes more. */
int fmoe_cuda_dh_tile(int64_t I);

/* Whether rows times weights run with the tokens on the N side of the product: exact in steps of 16 rows, but 5 %
 * slower a row, so for few rows an expert. */
enum { FMOE_CUDA_TOKENS_BELOW = 400 }; /* rows an expert */
int fmoe_cuda_use_tokens(int64_t R, int64_t E);

/* Whether gate and up as neighbours are multiplied and activated in one kernel, of tiles of 128 rows: gpt-oss-20b's
 * forward takes 4 % less with 64 rows an expert, 1 % more with 128, 6 % more with 256, 4 % less with 1024. */
int fmoe_cuda_use_pairs(int64_t R, int64_t E);

/* Whether T tokens go to the weight-streaming decode kernels (inference only): about one row an expert or fewer. */
int fmoe_cuda_use_decode(const fmoe_cuda_shape *s, int64_t T);

/* The same of quantised weights, up to some 32 rows an expert: decoding the codes in registers, several times over if
 * need be, takes less than decoding them into memory. */
int fmoe_cuda_use_decode_coded(const fmoe_cuda_shape *s, int64_t T);
/* Those of them that keep more precision (decode/coded.cuh). integers: both weights have codes that are integers. */
int fmoe_cuda_use_decode_precise(int integers, int64_t T);

/* Whether they take adapters of a rank, beside weights [out,in]: whole 16 bytes, 8 steps a lane. */
int fmoe_cuda_decode_rank(int64_t rank);

/* And with weights [in,out], gated experts: the products of larger batches begin some 60 us later, but read those
 * faster. */
int fmoe_cuda_use_decode_nmajor(const fmoe_cuda_shape *s, int64_t T);
int64_t fmoe_cuda_most_decode_nmajor(const fmoe_cuda_shape *s); /* the largest such T, or 0 */

/* Blocks that share `groups` of columns, none of them without any: as many as are resident, in multiples of that where
 * the results of a block, `results` floats for each of its groups, would be over 8 KB. */
int fmoe_cuda_decode_blocks(int groups, int resident, int results);

/* Slots a block of the counting sort takes: 128 blocks, which add up each other's counts, or 512 that leave that to a
 * scan. */
int fmoe_cuda_sort_chunk(int64_t R);

#ifdef __cplusplus
}
#endif
#endif
