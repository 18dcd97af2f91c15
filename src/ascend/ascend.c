/* SPDX-License-Identifier: Apache-2.0
 * ascend.c - the Ascend backend's table. */
#include <dlfcn.h>
#include <stdio.h>

#include "backend.h"

static fmoe_status plan_init(fmoe_plan_impl *p)
{
    (void)p;
    void *lib = dlopen("libascendcl.so", RTLD_NOW | RTLD_LOCAL);
    if (!lib) return fmoe_fail(FMOE_ERR_BACKEND, "Ascend: libascendcl.so not found (%s)", dlerror());
    dlclose(lib);
    return fmoe_fail(FMOE_ERR_UNSUPPORTED, "Ascend: no operation is implemented yet");
}

static void plan_fini(fmoe_plan_impl *p) { (void)p; }

size_t fmoe_ascend_info(char *text, size_t n)
{
    void *lib = dlopen("libascendcl.so", RTLD_NOW | RTLD_LOCAL);
    const int len = snprintf(text, n, "ascend: %s\n", lib ? "libascendcl.so found" : "libascendcl.so not found");
    if (lib) dlclose(lib);
    return len < 0 ? 0 : (size_t)len;
}

const fmoe_backend fmoe_backend_ascend = {
    .version = FMOE_BACKEND_VERSION,
    .name = "ascend",
    .plan_init = plan_init,
    .plan_fini = plan_fini,
};
