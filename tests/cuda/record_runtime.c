/* SPDX-License-Identifier: Apache-2.0
 * record_runtime.c - see record_runtime.h. As much of the CUDA runtime as the backend's object files ask for: they are
 * linked with this instead of cudart. It refuses what the real one would refuse: shared memory that no attribute
 * allowed, empty grids, a tensor map against the rules. */
#include "record_runtime.h"

#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void (*record_report)(const record_launch *);
int record_capability = 90;

enum { MULTIPROCESSORS = 132, SHARED_DEFAULT = 48 * 1024, SHARED_MOST = 232448, MOST_KERNELS = 1024 };

static struct {
    const void *function; /* of the host, which stands for the kernel */
    const char *name;
    size_t shared; /* the most that a launch may ask for */
} kernels[MOST_KERNELS];
static int kernel_count;
static cudaError_t last_error = cudaSuccess;

static int shared_most(void) /* of a block, by compute capability */
{
    if (record_capability == 80) return 166912;
    return record_capability == 86 || record_capability == 89 || record_capability == 120 ? 101376 : SHARED_MOST;
}

static int find(const void *function)
{
    int i = 0;
    while (i < kernel_count && kernels[i].function != function) i++;
    return i;
}

static cudaError_t result(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    return e;
}

static cudaError_t record(const void *function, const cudaLaunchConfig_t *c, int is_plain, void **args)
{
    const int i = find(function);
    if (i == kernel_count) return result(cudaErrorInvalidDeviceFunction);
    record_launch l = {kernels[i].name, c->gridDim, c->blockDim, c->dynamicSmemBytes, 1, 0, is_plain, args};
    const int empty = !l.grid.x || !l.grid.y || !l.grid.z || !l.block.x;
    if (empty || l.grid.y > 65535 || l.shared > kernels[i].shared) return result(cudaErrorInvalidValue);
    for (unsigned n = 0; n < c->numAttrs; n++) {
        const cudaLaunchAttribute *a = &c->attrs[n];
        if (a->id == cudaLaunchAttributeClusterDimension) l.cluster = a->val.clusterDim.x;
        else if (a->id == cudaLaunchAttributeProgrammaticStreamSerialization)
            l.overlapped = a->val.programmaticStreamSerializationAllowed;
        else return result(cudaErrorNotSupported);
    }
    if (record_capability < 90 && (l.overlapped || l.cluster > 1)) return result(cudaErrorNotSupported);
    record_report(&l);
    return cudaSuccess;
}

static cudaError_t record_plain(const void *function, dim3 grid, dim3 block, void **args, size_t shared)
{
    cudaLaunchConfig_t c;
    memset(&c, 0, sizeof c);
    c.gridDim = grid, c.blockDim = block, c.dynamicSmemBytes = shared;
    return record(function, &c, 1, args);
}

/* The address and all extents are part of a map's bits, so that two maps are equal only where they mean the same. */
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *p, const cuuint64_t *dim,
                       const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
    const unsigned size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    int ok = (uintptr_t)p % 16 == 0 && box[0] * size <= 128 && rank <= 5;
    (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    for (cuuint32_t i = 0; ok && i < rank; i++)
        ok = dim[i] >= 1 && dim[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256;
    for (cuuint32_t i = 0; ok && i + 1 < rank; i++) ok = stride[i] % 16 == 0 && stride[i] < 1ull << 40;
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    uint64_t word[16] = {(uint64_t)type | (uint64_t)rank << 32, (uintptr_t)p};
    for (cuuint32_t i = 0; i < rank; i++) word[2 + i] = dim[i], word[7] = word[7] * 257 + box[i];
    for (cuuint32_t i = 0; i + 1 < rank; i++) word[8 + i] = stride[i];
    _Static_assert(sizeof word == sizeof *map, "size of a tensor map");
    memcpy(map, word, sizeof word);
    return CUDA_SUCCESS;
}

/* ---- What the compiler's code calls ---- */

void **__cudaRegisterFatBinary(void *binary);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
char __cudaInitModule(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
cudaError_t __cudaGetKernel(const void **kernel, const void *function);
cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s);

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    handle = binary;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return handle == NULL; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)handle, (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    if (kernel_count == MOST_KERNELS) abort();
    kernels[kernel_count].function = host;
    kernels[kernel_count].name = name;
    kernels[kernel_count++].shared = SHARED_DEFAULT;
}

static struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed; /* between the <<<>>> and the kernel's host function */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(const void **kernel, const void *function)
{
    *kernel = function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s)
{
    (void)s;
    return record_plain(kernel, grid, block, args, shared);
}

/* ---- What the backend calls ---- */

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s)
{
    (void)s;
    return record_plain(kernel, grid, block, args, shared);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **args)
{
    return record(kernel, c, 0, args);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    const dim3 one = {1, 1, 1};
    const record_launch l = {"memset", one, one, bytes, 1, 0, 0, NULL};
    (void)p, (void)value, (void)s;
    record_report(&l);
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    const int i = find(kernel);
    if (i == kernel_count || attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > shared_most())
        return result(cudaErrorInvalidValue);
    kernels[i].shared = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    memset(attributes, 0, sizeof *attributes);
    return find(kernel) < kernel_count ? cudaSuccess : result(cudaErrorInvalidDeviceFunction);
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = record_capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = record_capability % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_most(); break;
    default: return result(cudaErrorInvalidValue);
    }
    return device ? result(cudaErrorInvalidDevice) : cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device ? result(cudaErrorInvalidDevice) : cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    *p = calloc(1, bytes);
    return *p ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *p)
{
    free(p);
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)host, (void)flags;
    *device = (void *)0x1000; /* the same in every run */
    return cudaSuccess;
}
/* Of expert parallelism (ep_rows.cu), which is not recorded. */
cudaError_t cudaMalloc(void **p, size_t bytes) { return (void)p, (void)bytes, result(cudaErrorMemoryAllocation); }
cudaError_t cudaFree(void *p) { return p ? result(cudaErrorInvalidValue) : cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
    return (void)to, (void)from, (void)bytes, (void)kind, (void)s, result(cudaErrorNotSupported);
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return (void)s, result(cudaErrorNotSupported); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    return (void)s, (void)status, result(cudaErrorNotSupported);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    return (void)s, (void)e, (void)flags, result(cudaErrorNotSupported);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    return (void)e, (void)flags, result(cudaErrorNotSupported);
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return (void)e, (void)s, result(cudaErrorNotSupported); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return (void)e, result(cudaErrorNotSupported); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return (void)e, result(cudaErrorNotSupported); }

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return (void)mode, cudaSuccess; }

static cudaError_t entry_point(const char *name, void **function, enum cudaDriverEntryPointQueryResult *found)
{
    CUresult (*const encoder)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) = encode;
    if (strcmp(name, "cuTensorMapEncodeTiled") != 0) return result(cudaErrorInvalidValue);
    memcpy(function, &encoder, sizeof *function);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found)
{
    (void)version, (void)flags;
    return entry_point(name, function, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *found)
{
    (void)flags;
    return entry_point(name, function, found);
}
#endif

cudaError_t cudaGetLastError(void)
{
    const cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
const char *cudaGetErrorString(cudaError_t e) { return e == cudaSuccess ? "no error" : "refused by record_runtime.c"; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "error"; }
