// SPDX-License-Identifier: Apache-2.0
// kernels.cu - finds a Hopper kernel in the table of kernels.cuh and launches it.
#include "product.cuh"

// inst_*.cu; each ends with one of no function.
extern const Sm90Entry sm90_gather[], sm90_rows[], sm90_dh[], sm90_wgrad[];
static const Sm90Entry *const kParts[] = {sm90_gather, sm90_rows, sm90_dh, sm90_wgrad};

cudaError_t sm90_setup()
{
    for (const Sm90Entry *part : kParts)
        for (const Sm90Entry *e = part; e->function; e++) {
            const cudaError_t error =
                cudaFuncSetAttribute(e->function, cudaFuncAttributeMaxDynamicSharedMemorySize, SM90_MAX_SMEM);
            if (error != cudaSuccess) return error;
        }
    return cudaSuccess;
}

static const Sm90Entry *find(Sm90Kernel kernel, int dtype, bool f32, bool tokens)
{
    for (const Sm90Entry *part : kParts)
        for (const Sm90Entry *e = part; e->function; e++)
            if (e->kernel == kernel && e->dtype == dtype && e->f32 == f32 && e->tokens == tokens) return e;
    return nullptr;
}

cudaError_t sm90_launch(Stream &s, Product product, Sm90Kernel kernel, int dtype, int f32, Sm90Args &p, int sms)
{
    const Sm90Entry *const e = find(kernel, dtype, f32 != 0, p.tokens != 0);
    if (!e) return cudaErrorInvalidDeviceFunction;
    const size_t all = e->shared + ((size_t)p.E + 1) * 4;
    p.off_shared = all <= SM90_MAX_SMEM;
    const Grid grid = {(unsigned)(sms / 2 * 2), e->threads, p.off_shared ? all : e->shared, 2}; // pairs of CTAs
    return launch(s, product, e->function, grid, p);
}
