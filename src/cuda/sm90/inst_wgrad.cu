// SPDX-License-Identifier: Apache-2.0
// inst_wgrad.cu - compiles one of the lists of kernels.cuh.
#include "kernels.cuh"

SM90_TABLE(sm90_wgrad, SM90_WGRAD_KERNELS);
