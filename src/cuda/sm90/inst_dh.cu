// SPDX-License-Identifier: Apache-2.0
// inst_dh.cu - compiles one of the lists of kernels.cuh.
#include "kernels.cuh"

SM90_TABLE(sm90_dh, SM90_DH_KERNELS);
