/* SPDX-License-Identifier: Apache-2.0
 * test_driver.c - what a user hears whose driver is too old for the CUDA backend: test_driver LIBRARY OLD_DRIVER */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "backend.h"

static char said[512];

static fmoe_status fail(fmoe_status status, const char *format, ...)
{
    va_list v;
    va_start(v, format);
    vsnprintf(said, sizeof said, format, v);
    va_end(v);
    return status;
}

int main(int argc, char **argv)
{
    static const fmoe_core core = {FMOE_BACKEND_VERSION, fail};
    /* The runtime opens libcuda.so.1 by that name, and the loader knows this one by it already. */
    void *const driver = argc > 2 ? dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL) : NULL;
    void *const library = driver ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    fmoe_backend_entry entry = NULL;
    if (library) *(void **)&entry = dlsym(library, "fmoe_cuda_backend");
    const fmoe_backend *const cuda = entry ? entry(&core) : NULL;
    if (!cuda) {
        printf("%s\n0 passed, 1 failed, 0 skipped\n", argc > 2 ? dlerror() : "usage: test_driver LIBRARY OLD_DRIVER");
        return 1;
    }
    fmoe_plan_impl plan = {.d = FMOE_DESC_INIT};
    plan.d.op = FMOE_OP_EXPERTS;
    plan.d.dtype = FMOE_BF16;
    plan.d.device.type = FMOE_CUDA;
    plan.d.H = plan.d.I = 64, plan.d.E = 4, plan.d.k = 2;
    const fmoe_status status = cuda->plan_init(&plan);
    int major = 0, minor = -1;
    const char *const built = strstr(said, "built with ");
    if (built) sscanf(built, "built with %d.%d", &major, &minor);
    const int ok =
        status == FMOE_ERR_BACKEND && strstr(said, "the driver supports CUDA 11.4,") && major >= 12 && minor >= 0;
    printf("%s%s (status %d)\n%d passed, %d failed, 0 skipped\n", ok ? "" : "FAILED: ", said, (int)status, ok, !ok);
    return !ok;
}
