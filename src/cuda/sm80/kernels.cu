// SPDX-License-Identifier: Apache-2.0
// kernels.cu - finds a fast general product and launches it.
#include "product.cuh"

// inst_*.cu; each ends with one of no function.
extern const MmaEntry mma_rows[], mma_wgrad[], mma_up[], mma_pairs[], mma_act[], mma_dh[], mma_dh_k[];
static const MmaEntry *const kParts[] = {mma_rows, mma_wgrad, mma_up, mma_pairs, mma_act, mma_dh, mma_dh_k};

cudaError_t mma_setup(size_t shared)
{
    for (const MmaEntry *part : kParts)
        for (const MmaEntry *e = part; e->function; e++) {
            const cudaError_t error =
                cudaFuncSetAttribute(e->function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

cudaError_t mma_launch(Stream &s, MmaKernel kernel, int dtype, MmaArgs &p)
{
    p.stages = s.stages;
    for (const MmaEntry *part : kParts)
        for (const MmaEntry *e = part; e->function; e++)
            if (e->kernel == kernel && e->dtype == dtype) {
                const Grid grid = {(unsigned)s.sms, MMA_THREADS, (size_t)(s.stages * MMA_STAGE + MMA_EXTRA)};
                return launch(s, Product::MMA, e->function, grid, p);
            }
    return cudaErrorInvalidDeviceFunction;
}
