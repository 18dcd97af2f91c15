/* SPDX-License-Identifier: Apache-2.0
 * tensor_map.h - what this device keeps in a CUtensorMap. */
#ifndef CUDA_SIM_TENSOR_MAP_H
#define CUDA_SIM_TENSOR_MAP_H

#include <stdint.h>

enum { TENSOR_MAP = 0x746d6170 };
typedef struct tensor_map {
    uint32_t magic;
    uint8_t rank, bytes, is_f32, swizzle; /* bytes: of an element */
    uint64_t address, size[5], stride[4];
    uint16_t box[5];
} tensor_map;

#endif
