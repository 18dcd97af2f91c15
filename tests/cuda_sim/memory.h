/* SPDX-License-Identifier: Apache-2.0
 * memory.h - what is allocated on the device. */
#ifndef CUDA_SIM_MEMORY_H
#define CUDA_SIM_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

void *sim_allocate(size_t bytes); /* full of NaN, and aligned to 512 bytes as cudaMalloc's */
bool sim_free(void *p);           /* false: it is none */

#endif
