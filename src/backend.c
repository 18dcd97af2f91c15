/* SPDX-License-Identifier: Apache-2.0
 * backend.c - which backend serves a device, and the loading of the CUDA one. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend.h"
#include "util.h"

/* ---- CUDA: a shared object of its own, beside this library or where FMOE_CUDA_LIBRARY says ---- */

static struct {
    const fmoe_backend *backend;
    char problem[320]; /* why there is none */
} cuda;
static pthread_once_t cuda_once = PTHREAD_ONCE_INIT;

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
        snprintf(cuda.problem, sizeof cuda.problem, "the CUDA backend could not be loaded: %.250s", why ? why : path);
        if (!override && path_beside_us(FMOE_LIB_FROM_BIN "/libfusedmoe_cuda.so", path, sizeof path))
            handle = dlopen(path, RTLD_NOW | RTLD_LOCAL); /* for bin/fusedmoe, which has the library inside */
        if (!handle) return;
    }
    fmoe_backend_entry entry;
    *(void **)&entry = dlsym(handle, "fmoe_cuda_backend");
    const fmoe_backend *b = entry ? entry(&core) : NULL;
    if (!b || b->version != FMOE_BACKEND_VERSION) {
        snprintf(cuda.problem, sizeof cuda.problem, "%.200s is not a CUDA backend of version %u (found %u)", path,
                 FMOE_BACKEND_VERSION, b ? b->version : 0);
        dlclose(handle);
        return;
    }
    cuda.backend = b;
}

size_t fmoe_cuda_info(char *text, size_t n)
{
    pthread_once(&cuda_once, load_cuda);
    return (size_t)(cuda.backend ? snprintf(text, n, "cuda: loaded\n") : snprintf(text, n, "cuda: %s\n", cuda.problem));
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
        if (!cuda.backend) return fmoe_fail(FMOE_ERR_BACKEND, "%s", cuda.problem);
        *backend = cuda.backend;
        return FMOE_OK;
    case FMOE_ASCEND: *backend = &fmoe_backend_ascend; return FMOE_OK;
    default:
        return fmoe_fail(FMOE_ERR_BACKEND, "device.type is %d: there are CPU (1), CUDA (2) and Ascend (12) backends",
                         device.type);
    }
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
