/* SPDX-License-Identifier: Apache-2.0
 * backend.c - which backend serves a device, and the loading of the CUDA one. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend.h"
#include "device.h"
#include "util.h"

/* ---- CUDA: a shared object of its own, beside this library or where FMOE_CUDA_LIBRARY says ---- */

static struct {
    const fmoe_backend *backend;
    char problem[400]; /* why there is none */
    char devices[240]; /* for fmoe_info */
} cuda;
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT, devices_once = PTHREAD_ONCE_INIT;

/* An absolute path, from the folder of the library (or program) this code is in: never the working directory or the
 * loader's search path. */
static bool path_beside_us(const char *name, char *path, size_t n)
{
    Dl_info self;
    if (!dladdr((void *)(uintptr_t)&fmoe_version, &self) || !self.dli_fname) return false;
    char *real = realpath(self.dli_fname, NULL);
    if (!real) return false;
    char *slash = strrchr(real, '/');
    if (slash) *slash = 0;
    const int length = snprintf(path, n, "%s/%s", real, name);
    free(real);
    return slash && length > 0 && (size_t)length < n;
}

static void load_cuda(void)
{
    static const fmoe_core core = {FMOE_BACKEND_VERSION, fmoe_fail};
    char path[4096];
    const char *override = getenv("FMOE_CUDA_LIBRARY");
    if (override && *override == '/' && strlen(override) < sizeof path) strcpy(path, override);
    else if (!path_beside_us("libfusedmoe_cuda.so", path, sizeof path))
        strcpy(path, "/nonexistent/libfusedmoe_cuda.so");
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *why = dlerror();
        if (access(path, F_OK) == 0)
            snprintf(cuda.problem, sizeof cuda.problem, "not usable: %.300s", why ? why : path);
        else snprintf(cuda.problem, sizeof cuda.problem, "%s: there is no %.200s", FMOE_WITHOUT_CUDA, path);
        if (!override && path_beside_us(FMOE_LIB_FROM_BIN "/libfusedmoe_cuda.so", path, sizeof path))
            handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* for bin/fusedmoe, which has the library inside */
        if (!handle) return;
    }
    fmoe_backend_entry entry;
    *(void **)&entry = dlsym(handle, "fmoe_cuda_backend");
    const fmoe_backend *b = entry ? entry(&core) : NULL;
    if (!b || b->version != FMOE_BACKEND_VERSION) {
        snprintf(cuda.problem, sizeof cuda.problem, "not usable: %.200s is not a CUDA backend of version %u (found %u)",
                 path, FMOE_BACKEND_VERSION, b ? b->version : 0);
        dlclose(handle);
        return;
    }
    cuda.backend = b;
}

/* What is asked of NVML, the driver's library for questions about cards. CUDA itself is not asked: that would start it,
 * and a process that has started CUDA cannot fork workers that use it. */
typedef struct nvml {
    int (*init)(void), (*shutdown)(void), (*count)(unsigned *), (*card)(unsigned, void **);
    int (*name)(void *, char *, unsigned), (*capability)(void *, int *, int *);
} nvml;

static bool open_nvml(nvml *m)
{
    const struct {
        const char *name;
        void *to;
    } wanted[] = {{"nvmlInit_v2", &m->init},
                  {"nvmlShutdown", &m->shutdown},
                  {"nvmlDeviceGetCount_v2", &m->count},
                  {"nvmlDeviceGetHandleByIndex_v2", &m->card},
                  {"nvmlDeviceGetName", &m->name},
                  {"nvmlDeviceGetCudaComputeCapability", &m->capability}};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL);
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *f = library ? dlsym(library, wanted[i].name) : NULL;
        if (!f) return false;
        memcpy(wanted[i].to, &f, sizeof f);
    }
    return true;
}

static void describe_cards(const nvml *m, char *text, size_t n)
{
    unsigned count = 0;
    int major = 0, minor = 0;
    char name[96] = "?";
    void *first;
    if (m->count(&count) != 0 || count == 0) {
        snprintf(text, n, "no device: the NVIDIA driver finds none");
        return;
    }
    if (m->card(0, &first) == 0) {
        m->name(first, name, sizeof name);
        m->capability(first, &major, &minor);
    }
    snprintf(text, n, "%u device%s, %s%.90s of compute capability %d.%d%s", count, count > 1 ? "s" : "",
             count > 1 ? "the first " : "", name, major, minor, major < 8 ? " (8.0 is the least)" : "");
}

static void look_for_devices(void)
{
    nvml m;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    const char *problem = !driver          ? "no device: there is no NVIDIA driver (libcuda.so.1)"
                          : !open_nvml(&m) ? "devices not counted: libnvidia-ml.so.1 could not be loaded"
                          : m.init() != 0  ? "no device: the NVIDIA driver does not answer"
                                           : NULL;
    if (driver) dlclose(driver);
    if (problem) {
        snprintf(cuda.devices, sizeof cuda.devices, "%s", problem);
        return;
    }
    describe_cards(&m, cuda.devices, sizeof cuda.devices);
    m.shutdown();
}

size_t fmoe_cuda_info(char *text, size_t n)
{
    pthread_once(&cuda_once, load_cuda);
    if (!cuda.backend) return (size_t)snprintf(text, n, "cuda: %s\n", cuda.problem);
    pthread_once(&devices_once, look_for_devices);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return (size_t)snprintf(text, n, "cuda: loaded, %s%s%.100s\n", cuda.devices,
                            visible ? "; CUDA_VISIBLE_DEVICES=" : "", visible ? visible : "");
}

fmoe_status fmoe_backend_find(fmoe_device device, int32_t dtype, const fmoe_backend **backend)
{
    if (dtype == FMOE_F64 && device.type != FMOE_CPU)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "dtype f64 is computed on the CPU only (device type 1), not on device type %d", device.type);
    switch (device.type) {
    case FMOE_CPU:
        if (device.id != 0) return fmoe_fail(FMOE_ERR_ARG, "device.id is %d, the CPU is device 0", device.id);
        *backend = dtype == FMOE_F64 ? &fmoe_backend_reference : &fmoe_backend_cpu;
        return FMOE_OK;
    case FMOE_CUDA:
        pthread_once(&cuda_once, load_cuda);
        if (!cuda.backend) return fmoe_fail(FMOE_ERR_BACKEND, "the CUDA backend could not be loaded: %s", cuda.problem);
        *backend = cuda.backend;
        return FMOE_OK;
    case FMOE_ASCEND: *backend = &fmoe_backend_ascend; return FMOE_OK;
    default:
        return fmoe_fail(FMOE_ERR_BACKEND, "device.type is %d: there are CPU (1), CUDA (2) and Ascend (12) backends",
                         device.type);
    }
}

fmoe_status fmoe_device_find(fmoe_device device, const fmoe_device_ops **ops)
{
    const fmoe_backend *backend = NULL;
    *ops = &fmoe_device_cpu;
    if (device.type == 0 || device.type == FMOE_CPU) return FMOE_OK;
    FMOE_TRY(fmoe_backend_find(device, FMOE_F32, &backend));
    *ops = backend->device;
    if (*ops) return FMOE_OK;
    return fmoe_fail(FMOE_ERR_UNSUPPORTED, "device.type is %d: expert parallelism does not run on %s", device.type,
                     backend->name);
}

size_t fmoe_info(char *text, size_t n)
{
    size_t (*const parts[])(char *, size_t) = {fmoe_cpu_info, fmoe_cuda_info, fmoe_ascend_info};
    if (!text) n = 0;
    size_t used = (size_t)snprintf(text, n, "fusedmoe %s\n", fmoe_version_string());
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        used += parts[i](used < n ? text + used : NULL, used < n ? n - used : 0);
    return used;
}
