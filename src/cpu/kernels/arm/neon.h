/* SPDX-License-Identifier: Apache-2.0
 * neon.h - what gemm_neon.c and gemm_neon_bf16.c share. */
#ifndef FMOE_CPU_NEON_H
#define FMOE_CPU_NEON_H

#include <arm_neon.h>

/* Loads below it stay below. Compilers move all loads of a step to its top, run out of registers there and spill. */
#define KEEP_ORDER() __asm__ volatile("" ::: "memory")

/* 4 x 4 block of 32-bit units. */
static inline __attribute__((always_inline)) void transpose4(uint32x4_t r[4])
{
    const uint64x2_t t0 = vreinterpretq_u64_u32(vtrn1q_u32(r[0], r[1]));
    const uint64x2_t t1 = vreinterpretq_u64_u32(vtrn2q_u32(r[0], r[1]));
    const uint64x2_t t2 = vreinterpretq_u64_u32(vtrn1q_u32(r[2], r[3]));
    const uint64x2_t t3 = vreinterpretq_u64_u32(vtrn2q_u32(r[2], r[3]));
    r[0] = vreinterpretq_u32_u64(vzip1q_u64(t0, t2));
    r[1] = vreinterpretq_u32_u64(vzip1q_u64(t1, t3));
    r[2] = vreinterpretq_u32_u64(vzip2q_u64(t0, t2));
    r[3] = vreinterpretq_u32_u64(vzip2q_u64(t1, t3));
}

#endif
