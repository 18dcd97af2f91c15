/* SPDX-License-Identifier: Apache-2.0
 * runtime.c - as much of the CUDA runtime as the backend and its checks ask for: memory, launches, streams that do
 * everything at once, graphs that repeat what was captured. Linked, or loaded, in the place of cudart.
 *
 * Kernels come as the PTX that nvcc embeds with -no-compress; one that does what the device does not allow is an error
 * of the launch, and its message goes to stderr.
 *
 * FMOE_SIM_CC: the compute capability of the one device, 90 (the default), 80, 86 ...; code for it must be embedded. */
#include "ptx.h"
#include "tensor_map.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

enum { MULTIPROCESSORS = 4, SHARED_DEFAULT = 48 * 1024, MOST_KERNELS = 4096, MOST_MODULES = 512 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* one launch at a time */
static _Thread_local cudaError_t last_error = cudaSuccess;
static cudaError_t broken = cudaSuccess; /* a launch went wrong: as on the device, everything fails from then on */

static struct entry {
    const void *function; /* of the host, which stands for the kernel */
    const char *name, *module;
    kernel *k;
    size_t shared; /* the most that a launch may ask for */
} entries[MOST_KERNELS];
static int entry_count;

static int capability(void)
{
    const char *const text = getenv("FMOE_SIM_CC");
    return text ? atoi(text) : 90;
}
static size_t shared_most(void) /* of a block, by compute capability */
{
    const int cc = capability();
    return cc == 80 ? 166912 : cc == 86 || cc == 89 || cc == 120 ? 101376 : 232448;
}
static cudaError_t result(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    return e;
}
static cudaError_t fault(const char *what)
{
    fprintf(stderr, "simulated device: %s\n", what);
    if (what != sim_message) snprintf(sim_message, sizeof sim_message, "%s", what);
    return result(broken = cudaErrorIllegalAddress);
}

#pragma GCC visibility push(default) /* what programs see of this library is the runtime */

/* ---- Kernels ---- */

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

/* What nvcc embeds: a header of 16 bytes with the size of what follows; the text of the PTX is in it as it is
 * (-no-compress). */
void **__cudaRegisterFatBinary(void *binary)
{
    static const void *modules[MOST_MODULES];
    static int count;
    struct {
        int magic, version;
        const unsigned char *data;
        void *file;
    } wrapper;
    memcpy(&wrapper, binary, sizeof wrapper);
    uint64_t size;
    memcpy(&size, wrapper.data + 8, 8);
    if (count == MOST_MODULES) abort();
    int best = 0;
    const char *p = (const char *)wrapper.data, *const end = p + size + 16;
    while ((p = memmem(p, (size_t)(end - p), "\n.version ", 10)) != NULL) { /* the newest that the device can run */
        const char *const target = strstr(++p, ".target sm_");
        const int cc = target ? atoi(target + 11) : 0;
        if (cc > best && cc <= capability()) best = cc, modules[count] = p;
    }
    return (void **)&modules[count++];
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { return handle == NULL; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    if (entry_count == MOST_KERNELS) abort();
    entries[entry_count++] = (struct entry){host, name, *(const char **)handle, NULL, SHARED_DEFAULT};
}

static struct entry *find(const void *function)
{
    for (int i = 0; i < entry_count; i++)
        if (entries[i].function == function) return &entries[i];
    return NULL;
}
static cudaError_t parsed(struct entry *e)
{
    char error[400], text[1000];
    if (e->k) return cudaSuccess;
    if (!e->module) return fault("a module without PTX: compile for a virtual architecture, with -no-compress");
    e->k = ptx_parse(e->module, e->name, error, sizeof error);
    if (e->k) return cudaSuccess;
    snprintf(text, sizeof text, "%.500s: %s", e->name, error);
    return fault(text);
}

/* ---- What a stream is asked to do, now or, captured, whenever the graph is launched ---- */

typedef struct task {
    struct entry *e; /* or NULL: bytes are set, or copied */
    launch l;
    uint8_t *params;
    void *to;
    const void *from; /* NULL: set to `value` */
    int value;
    size_t bytes;
    struct task *next;
} task;
struct CUgraph_st {
    task *first, **end;
    size_t count;
};
struct CUstream_st {
    struct CUgraph_st *captures;
};
struct CUevent_st {
    int nothing;
};

static cudaError_t perform(task *t)
{
    if (broken) return result(broken);
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (!t->e) {
        if (t->from) memmove(t->to, t->from, t->bytes);
        else memset(t->to, t->value, t->bytes);
    } else if (!sim_run(&t->l)) e = fault(sim_message);
    pthread_mutex_unlock(&lock);
    return e;
}
static cudaError_t give(cudaStream_t s, const task *t)
{
    task *const own = malloc(sizeof *own);
    if (!own) abort();
    *own = *t;
    own->next = NULL;
    struct CUgraph_st *const g = s ? s->captures : NULL;
    if (g) {
        *g->end = own, g->end = &own->next, g->count++;
        return cudaSuccess;
    }
    const cudaError_t e = perform(own);
    free(own->params), free(own);
    return e;
}

static cudaError_t start(const void *function, const cudaLaunchConfig_t *c, void **args)
{
    struct entry *const e = find(function);
    if (!e) return result(cudaErrorInvalidDeviceFunction);
    if (broken) return result(broken);
    if (getenv("FMOE_SIM_NAMES")) fprintf(stderr, "%s\n", e->name);
    pthread_mutex_lock(&lock);
    const cudaError_t status = parsed(e);
    pthread_mutex_unlock(&lock);
    if (status) return status;
    task t = {.e = e};
    launch *const l = &t.l;
    const uint32_t grid[3] = {c->gridDim.x, c->gridDim.y, c->gridDim.z},
                   threads[3] = {c->blockDim.x, c->blockDim.y, c->blockDim.z};
    memcpy(l->grid, grid, sizeof grid), memcpy(l->threads, threads, sizeof threads);
    l->k = e->k, l->shared = c->dynamicSmemBytes, l->cluster = 1;
    bool overlapped = false;
    for (unsigned n = 0; n < c->numAttrs; n++) {
        const cudaLaunchAttribute *const a = &c->attrs[n];
        if (a->id == cudaLaunchAttributeClusterDimension) l->cluster = (int)a->val.clusterDim.x;
        else if (a->id == cudaLaunchAttributeProgrammaticStreamSerialization)
            overlapped = a->val.programmaticStreamSerializationAllowed;
        else return result(cudaErrorNotSupported);
    }
    const uint64_t all = (uint64_t)threads[0] * threads[1] * threads[2];
    if (!grid[0] || !grid[1] || !grid[2] || !all || all > 1024 || grid[1] > 65535 || grid[2] > 65535 ||
        grid[0] > INT32_MAX || l->shared + e->k->shared > (e->shared > SHARED_DEFAULT ? e->shared : SHARED_DEFAULT) ||
        l->cluster < 1 || l->cluster > MOST_CLUSTER || grid[0] % (uint32_t)l->cluster)
        return result(cudaErrorInvalidValue);
    if (capability() < 90 && (overlapped || l->cluster > 1)) return result(cudaErrorNotSupported);
    t.params = aligned_alloc(128, (e->k->params + 127) / 128 * 128 + 128);
    if (!t.params) abort();
    for (int n = 0; n < e->k->param_count; n++) memcpy(t.params + e->k->param_at[n], args[n], e->k->param_size[n]);
    l->params = t.params;
    return give(c->stream, &t);
}
static cudaError_t start_plain(const void *function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s)
{
    cudaLaunchConfig_t c;
    memset(&c, 0, sizeof c);
    c.gridDim = grid, c.blockDim = block, c.dynamicSmemBytes = shared, c.stream = s;
    return start(function, &c, args);
}

static _Thread_local struct {
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
    return start_plain(kernel, grid, block, args, shared, s);
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s)
{
    return start_plain(kernel, grid, block, args, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *kernel, void **args)
{
    return start(kernel, c, args);
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    struct entry *const e = find(kernel);
    if (!e || attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (size_t)value > shared_most())
        return result(cudaErrorInvalidValue);
    e->shared = (size_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel)
{
    memset(attributes, 0, sizeof *attributes);
    return find(kernel) ? cudaSuccess : result(cudaErrorInvalidDeviceFunction);
}

/* ---- Memory ---- */

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    *p = sim_allocate(bytes);
    return *p ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags) { return (void)flags, cudaMalloc(p, bytes); }
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    const cudaError_t e = cudaMalloc(p, bytes);
    if (!e) memset(*p, 0, bytes);
    return e;
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFree(void *p) { return !p || sim_free(p) ? cudaSuccess : result(cudaErrorInvalidValue); }
cudaError_t cudaFreeHost(void *p) { return cudaFree(p); }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s)
{
    if (((kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) && bytes &&
         !sim_allocated((uint64_t)(uintptr_t)to, bytes)) ||
        ((kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice) && bytes &&
         !sim_allocated((uint64_t)(uintptr_t)from, bytes)))
        return result(cudaErrorInvalidValue);
    const task t = {.to = to, .from = from, .bytes = bytes};
    return bytes ? give(s, &t) : cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    return cudaMemcpyAsync(to, from, bytes, kind, NULL);
}
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s)
{
    if (bytes && !sim_allocated((uint64_t)(uintptr_t)p, bytes)) return result(cudaErrorInvalidValue);
    const task t = {.to = p, .value = value, .bytes = bytes};
    return bytes ? give(s, &t) : cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, NULL); }

/* ---- Streams, events, graphs ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    (void)flags;
    *s = calloc(1, sizeof **s);
    return *s ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    free(s);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    if (s && s->captures) return result(cudaErrorStreamCaptureUnsupported);
    return result(broken);
}
cudaError_t cudaDeviceSynchronize(void) { return result(broken); }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaStreamSynchronize(s); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    return (void)s, (void)e, (void)flags, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    *e = calloc(1, sizeof **e);
    return *e ? cudaSuccess : result(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return (void)e, (void)s, result(broken); }
cudaError_t cudaEventQuery(cudaEvent_t e) { return (void)e, result(broken); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return (void)e, result(broken); }
cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    free(e);
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return (void)mode, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    *status = s && s->captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    if (!s || s->captures) return result(cudaErrorInvalidValue);
    s->captures = calloc(1, sizeof *s->captures);
    if (!s->captures) abort();
    s->captures->end = &s->captures->first;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    if (!s || !s->captures) return result(cudaErrorInvalidValue);
    *graph = s->captures;
    s->captures = NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    if (nodes) return result(cudaErrorNotSupported);
    *count = graph->count;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    *exec = (cudaGraphExec_t)graph; /* which must not be destroyed before it */
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    (void)s;
    for (task *t = ((struct CUgraph_st *)exec)->first; t; t = t->next) {
        const cudaError_t e = perform(t);
        if (e) return e;
    }
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return (void)exec, cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    for (task *t = graph->first; t;) {
        task *const next = t->next;
        free(t->params), free(t);
        t = next;
    }
    free(graph);
    return cudaSuccess;
}

/* ---- The device ---- */

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)shared_most(); break;
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
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *p, const cuuint64_t *dim,
                       const cuuint64_t *stride, const cuuint32_t *box, const cuuint32_t *element_strides,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
    tensor_map m = {.magic = TENSOR_MAP, .address = (uint64_t)(uintptr_t)p};
    m.is_f32 = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    m.bytes = m.is_f32 ? 4 : 2;
    m.swizzle = (uint8_t)swizzle, m.rank = (uint8_t)rank;
    bool ok = (uintptr_t)p % 16 == 0 && box[0] * m.bytes <= 128 && rank >= 1 && rank <= 5 && !interleave && !fill;
    (void)element_strides, (void)promotion;
    for (cuuint32_t i = 0; ok && i < rank; i++) {
        ok = dim[i] >= 1 && dim[i] <= 1ull << 32 && box[i] >= 1 && box[i] <= 256;
        m.size[i] = dim[i], m.box[i] = (uint16_t)box[i];
    }
    for (cuuint32_t i = 0; ok && i + 1 < rank; i++) {
        ok = stride[i] % 16 == 0 && stride[i] < 1ull << 40;
        m.stride[i] = stride[i];
    }
    if (!ok) return CUDA_ERROR_INVALID_VALUE;
    _Static_assert(sizeof m <= sizeof *map, "a tensor map holds ours");
    memset(map, 0, sizeof *map);
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}
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
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaSuccess               ? "no error"
           : e == cudaErrorIllegalAddress ? sim_message
                                          : "refused by the simulated device";
}
const char *cudaGetErrorName(cudaError_t e) { return e == cudaSuccess ? "cudaSuccess" : "error"; }
