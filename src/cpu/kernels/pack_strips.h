/* SPDX-License-Identifier: Apache-2.0
 *
 * pack_strips.h - the f32 panels of levels whose panels are strips of NR columns (kernels.h), from any storage type.
 * Included after a file has defined
 *
 *   enum { NR, LANES };                                      columns of a strip; of a vector
 *   typedef ... lanes;                                       a vector
 *   static inline lanes lanes_load(const int dtype, const char *p);
 *   static inline void lanes_store(float *to, lanes x);
 *   static inline void lanes_transpose(lanes x[LANES]); */

#include "cpu/kernels/load.h"

static inline __attribute__((always_inline)) void strips_nmajor(const int dtype, float *panel, int64_t kc, int64_t col,
                                                                const void *const *rows, int64_t n)
{
    for (int64_t j = 0; j < n; j += LANES) {
        float *to = panel + (col + j) / NR * kc * NR + (col + j) % NR;
        const int64_t nj = fmoe_min(LANES, n - j);
        for (int64_t k = 0; k < kc; k++, to += NR) {
            const char *from = (const char *)rows[k] + j * bytes_of(dtype);
            if (nj == LANES) lanes_store(to, lanes_load(dtype, from));
            else
                for (int64_t i = 0; i < nj; i++) to[i] = load1(dtype, from + i * bytes_of(dtype));
        }
    }
}

static inline __attribute__((always_inline)) void strips_transposed(const int dtype, float *panel, int64_t kc,
                                                                    int64_t col, const void *const *cols, int64_t n)
{
    for (int64_t j = 0; j < n; j += LANES) {
        float *to = panel + (col + j) / NR * kc * NR + (col + j) % NR;
        const int64_t nj = fmoe_min(LANES, n - j);
        int64_t k = 0;
        for (; nj == LANES && k + LANES <= kc; k += LANES) {
            lanes x[LANES];
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) x[i] = lanes_load(dtype, (const char *)cols[j + i] + k * bytes_of(dtype));
            lanes_transpose(x);
#pragma GCC unroll 8
            for (int i = 0; i < LANES; i++) lanes_store(to + (k + i) * NR, x[i]);
        }
        for (; k < kc; k++)
            for (int64_t i = 0; i < nj; i++)
                to[k * NR + i] = load1(dtype, (const char *)cols[j + i] + k * bytes_of(dtype));
    }
}

#define DEFINE_PACK(type, dtype, level)                                                                                \
    void fmoe_pack_nmajor_##type##_##level(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)   \
    {                                                                                                                  \
        strips_nmajor(dtype, panel, kc, col, rows, n);                                                                 \
    }                                                                                                                  \
    void fmoe_pack_transposed_##type##_##level(void *panel, int64_t kc, int64_t col, const void *const *cols,          \
                                               int64_t n)                                                              \
    {                                                                                                                  \
        strips_transposed(dtype, panel, kc, col, cols, n);                                                             \
    }

#define DEFINE_PACKS(level)                                                                                            \
    DEFINE_PACK(f32, FMOE_F32, level)                                                                                  \
    DEFINE_PACK(bf16, FMOE_BF16, level)                                                                                \
    DEFINE_PACK(f16, FMOE_F16, level)
