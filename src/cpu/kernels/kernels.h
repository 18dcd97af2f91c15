/* SPDX-License-Identifier: Apache-2.0
 *
 * kernels.h - the CPU's kernel table: what each ISA level implements, and the shapes they all agree on.
 *
 * Everything the layer multiplies is C[rows,64] += A[rows,kc] . B[kc,64]: 64 columns at a time, k in chunks, f32
 * accumulators.
 *
 * Weights are stored k-major (k contiguous in memory: [out,in], the forward of Hugging Face's layout) or n-major
 * (columns contiguous: [in,out], and the backward of that layout).
 *
 *   B is packed into a panel of 64 columns. Three forms:
 *     f32     element (k,n) at panel[(n/nr)*kc*nr + k*nr + n%nr]; nr is the level's register width (16 or 64)
 *     pairs   bf16, two k side by side for the dot-product instruction: 32-bit units (k/2,n), nr = 64; an odd kc is
 *             padded
 *     kmajor  f32 or pairs, four units of a column together: blocks of 16 bytes (k/4 or k/8, n), nq = nr/4 columns at
 *             a time: block s of column n at panel[((n/nq*steps + s)*nq + n%nq)*16]; what kc leaves of one is zero
 *
 * Names say what is done to get there. pack_nmajor: n-major weights, copied. pack_transposed: k-major weights,
 * transposed into f32 or pairs. pack_kmajor: k-major weights into a kmajor panel, 16 bytes at a time, nothing
 * transposed. widen: 16-bit weights become f32 on the way. inplace: no panel, or one that the kernel itself fills as it
 * multiplies.
 *
 * A is a list of row pointers. Going from one k (pair) to the next adds a_step bytes: 4 in a row of f32 or bf16, the
 * panel's row length when A is itself a packed panel (weight gradients, which contract over rows: no transposes; not by
 * kmajor panels).
 *
 * The sum over k runs chunk by chunk, from first to last, for every element, whatever the number of rows: that is what
 * makes results independent of the batch and of the number of threads. */
#ifndef FMOE_CPU_KERNELS_H
#define FMOE_CPU_KERNELS_H

#include "cpu/kernels/coded.h"
#include "cpu/kernels/overlap.h"
#include "fusedmoe.h"

enum {
    FMOE_NB = 64,         /* columns of a block */
    FMOE_MR = 6,          /* rows of a register tile, at most */
    FMOE_KC = 512,        /* k of a chunk: an f32 panel of 128 KiB, half of a small L2 */
    FMOE_KC_PAIRS = 1024, /* the same bytes in bf16 */
    FMOE_PANEL_BYTES = FMOE_KC * FMOE_NB * 4
};

/* c[i][0..63] (row stride ldc) = (first ? 0 : c) + sum over k of a[i][k] * panel[k][.], i < rows. The chunk is summed
 * from zero and then added: rounding errors grow with the chunk, not with K. An odd kc in the pairs form reads the last
 * A element alone (nothing after the row's end is read). What `overlap` asks for is done meanwhile: as much of its
 * prefetching as there is time for, all of its packing or none. */
typedef void fmoe_gemm_fn(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                          int64_t ldc, int first, fmoe_overlap *overlap);

/* The same by n-major weights in place: 64 columns at w, w_step bytes from one k to the next, in the type that is
 * multiplied (widen: in bf16 or f16, multiplied as f32). `panel` is room for a panel, which the first rows leave there
 * for the others; a's rows are f32 or bf16 (a_step 4). */
typedef void fmoe_gemm_nmajor_inplace_fn(int64_t rows, int64_t kc, const void *const *a, const void *w, int64_t w_step,
                                         void *panel, float *c, int64_t ldc, int first, fmoe_overlap *overlap);

/* The same, bit for bit, as gemm_kmajor by one panel for each `chunk` of kc, for few rows and without panels: 32
 * columns of k-major weights in place, `step` bytes apart. */
typedef void fmoe_gemm_kmajor_few_rows_fn(int64_t rows, int64_t kc, int64_t chunk, const void *const *a, const char *w,
                                          int64_t step, float *c, int64_t ldc, int first, fmoe_walk *prefetch);

/* The same by 32 columns of quantised weights, rows [row, row+32) of codes, from k0 on: what they would be decoded to.
 * For matrices that fmoe_fits_coded_few_rows (forms.h) lets pass. Row `then_row` of `then` is likely to be the first of
 * what is wanted next, and is prefetched with those after it. */
typedef void fmoe_gemm_coded_few_rows_fn(int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a,
                                         const fmoe_coded *m, int64_t row, float *c, int64_t ldc, int first,
                                         const fmoe_coded *then, int64_t then_row);

/* Write columns [col, col+n) of a panel of kc rows; col is a multiple of 16. nmajor: pointers[k] points to n elements,
 * contiguous in n. transposed, kmajor: pointers[j] points to kc elements, contiguous in k. */
typedef void fmoe_pack_fn(void *panel, int64_t kc, int64_t col, const void *const *pointers, int64_t n);

/* n columns of kc rows of bf16, transposed: dst[j][k], each column ceil(kc/32)*32 long, padded with zeros. */
typedef void fmoe_pack_wgrad_left_fn(void *dst, int64_t kc, const void *const *rows, int64_t n);

/* k-major weights in place (AMX): c[i][0..n-1] = sum over k of x[i][k] * w[j][k], i < rows, n weights, w_stride bytes
 * apart. x is in tiles: 16 rows at a time, in room for ceil(K/32) tiles each, as pack_tiles makes them of n <= 16 rows:
 * 16 pairs of k, each n units long, so that few rows stay in L1 whatever K is. `next`: where the weights of the next
 * call begin, as far apart, which are prefetched into L2 meanwhile; NULL: unknown. */
typedef void fmoe_pack_tiles_fn(void *tiles, int64_t K, const void *const *rows, int64_t n);
typedef void fmoe_gemm_inplace_fn(int64_t rows, int64_t K, const void *tiles, const void *w, int64_t w_stride,
                                  int64_t n, float *c, int64_t ldc, const void *next);

/* Weights [k0, k0+n) of rows [row, row+rows) of a quantised matrix, in `dtype` (f32, bf16, f16), `apart` bytes from row
 * to row: ((code - zero) * scale) * scale2 in f32, rounded once. The same bits on every level. */
typedef void fmoe_dequant_fn(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows,
                             int64_t k0, int64_t n);

typedef void fmoe_load_fn(float *dst, const void *src, int64_t n);  /* bf16 or f16 -> f32 */
typedef void fmoe_store_fn(void *dst, const float *src, int64_t n); /* f32 -> bf16 or f16, nearest even */

/* Each x[i] to the nearest number of the type; with a bias (not NULL): and x[i] + bias[i] again. */
typedef void fmoe_round_fn(float *x, const float *bias, int64_t n);

typedef struct fmoe_act_params {
    int32_t act; /* fmoe_act */
    float alpha, limit;
    int32_t steps; /* fmoe_dtype that every operation's result is rounded to, forward; 0: none */
} fmoe_act_params;

/* a = act(g, u) of a block of sums: m rows of n columns, FMOE_NB floats apart in g and u, to rows of a that are
 * `stride` elements apart. Ungated activations read u only. */
typedef void fmoe_act_block_fn(const fmoe_act_params *act, const float *g, const float *u, int64_t m, int64_t n,
                               void *a, int64_t stride, int type);

/* Given da = dL/da of m rows of n columns: dg and du of p * da, p * a, and <da, a> in a fixed order. Rows of da are
 * FMOE_NB floats apart, the others as many elements as it says: 0 for those that nobody reads. h has one type, dh and
 * pa another; dh may take h's place, element by element. Ungated: g and dg are neither read nor written. */
typedef struct fmoe_act_rows {
    int64_t m, n;
    const void *g, *u;
    void *dg, *du, *pa;
    int64_t h_stride, dh_stride, pa_stride;
    int h_type, type; /* of h; of dh and pa */
    const float *da, *p;
    float *dot;
} fmoe_act_rows;

typedef void fmoe_act_backward_fn(const fmoe_act_params *act, const fmoe_act_rows *rows);

/* m rows of 64 f32 sums to a matrix (row stride in elements), n <= 64 columns of them. `nontemporal`: whole cache lines
 * bypass the cache, as a weight gradient's do, which is written once and not read soon. */
typedef void fmoe_store_block_fn(void *dst, int64_t stride, const float *c, int64_t m, int64_t n, bool nontemporal);

/* The same straight from two packed panels: dst[i][0..63] = (c ? c[i] : 0) + sum over k of left[k][i] * panel[k][.], i
 * < m. `left` is panels of 64 columns, one after another, or as pack_wgrad_left makes it where a level has that. Every
 * row of dst is whole cache lines, in `dtype`, stored nontemporally. The rows of the next panel may be prefetched
 * meanwhile. */
typedef struct fmoe_prefetch_rows {
    const void *const *rows; /* [n], and 64 columns of them `offset` bytes on */
    int64_t n, offset;
} fmoe_prefetch_rows;

typedef void fmoe_wgrad_fn(int64_t m, int64_t kc, const void *left, const void *panel, const float *c, void *dst,
                           int64_t stride, int dtype, const fmoe_prefetch_rows *ahead);

/* sums[token[r] - first][0..n-1] += p[r] * c[r][0..n-1], row after row; both matrices are 64 columns wide. */
typedef void fmoe_add_rows_fn(float *sums, const int64_t *token, int64_t first, const float *p, const float *c,
                              int64_t rows, int64_t n);

typedef void fmoe_axpy_fn(float *y, float s, const float *x, int64_t n); /* y += s * x */
typedef float fmoe_dot_fn(const float *x, const float *y, int64_t n);    /* in a fixed order */
typedef void fmoe_softmax_fn(double *x, int64_t n); /* in place, within a few ulp; a NaN makes all of them NaN */
typedef double fmoe_peak_fn(int64_t rounds);        /* multiply-adds in registers; returns the flops done */

typedef void fmoe_any_fn(void); /* whichever it is: to be converted back before it is called */

typedef struct fmoe_kernels {
    const char *isa; /* the highest level in the table */
    int64_t nr;      /* register width of the f32 panels */
#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field) fmoe_##type##_fn *field;
#include "cpu/kernels/kernels.inc"
} fmoe_kernels;

/* The slots of the table by number, in its order. */
enum {
#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field) FMOE_SLOT_##field,
#include "cpu/kernels/kernels.inc"
    FMOE_SLOTS
};

#define FMOE_KERNEL(level, type, field) fmoe_##type##_fn fmoe_##field##_##level;
#define FMOE_KERNEL_FIELD(type, field)
#include "cpu/kernels/kernels.inc"

/* isa.c */
int fmoe_cpu_level(void);       /* highest usable level, caps applied */
int fmoe_cpu_level_count(void); /* of this build */
const char *fmoe_cpu_level_name(int level);
int fmoe_cpu_level_available(int level);            /* CPU and operating system have it */
void fmoe_kernels_fill(fmoe_kernels *k, int level); /* C first, then upwards */
uint64_t fmoe_kernels_has(const fmoe_kernels *k);   /* one bit for every slot that is filled */
fmoe_any_fn *fmoe_kernel_at(const fmoe_kernels *k, int slot);
const char *fmoe_kernel_name(const fmoe_kernels *k, int slot); /* with its level; NULL: empty, or none of kernels.inc */
bool fmoe_cpu_is_intel(void);
const char *fmoe_cpu_isa_warning(void); /* FMOE_MAX_ISA that was not understood; "" otherwise. After fmoe_cpu_level() */

#endif
