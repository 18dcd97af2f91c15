// SPDX-License-Identifier: Apache-2.0
// inst_rows.cu - compiles one of the lists of kernels.cuh.
#include "kernels.cuh"

SM90_TABLE(sm90_rows, SM90_ROWS_KERNELS);
