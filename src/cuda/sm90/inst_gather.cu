// SPDX-License-Identifier: Apache-2.0
// inst_gather.cu - compiles one of the lists of kernels.cuh.
#include "kernels.cuh"

SM90_TABLE(sm90_gather, SM90_GATHER_KERNELS);
