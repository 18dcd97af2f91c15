/* SPDX-License-Identifier: Apache-2.0
 * races.h - who touched shared memory, and which barriers came between. Every function does nothing where races are not
 * looked for. */
#ifndef CUDA_SIM_RACES_H
#define CUDA_SIM_RACES_H

#include "ptx.h"

typedef enum access { READ, WRITE, ATOMIC } access;

races *races_begin(int blocks, int warps); /* of a cluster; NULL: they are not looked for */
void races_end(races *r);
void races_touch(const warp *w, const instruction *i, const block *b, uint64_t at, size_t bytes, access how);

void races_arrive(const warp *w, int id); /* bar.sync, bar.arrive */
void races_released(const warp *w, int id);
void races_cluster(const warp *w, bool arrives);
void races_mbarrier_arrive(const warp *w, const block *b, uint32_t at); /* also a copy that is counted there */
void races_mbarrier_phase(const block *b, uint32_t at);                 /* complete */
void races_mbarrier_passed(const warp *w, const block *b, uint32_t at); /* a wait that succeeded */

#endif
