/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h - tensors on the simulated NPU for the tests of the Ascend backend, and runs of an operation there.
 *
 * NPU_TEST(name) { ... } is a TEST that ends with: no violation of CANN's rules, nothing left alive, no memory left.
 * Tensors on the device start at addresses that are aligned to their elements only. */
#ifndef FMOE_TEST_DEVICE_H
#define FMOE_TEST_DEVICE_H

#include <dlfcn.h>

#include "../tensors.h"

/* ---- The simulator ---- */

static struct {
    int64_t (*get)(const char *);
    void (*reset)(void), (*forgive)(void), (*set)(const char *, int64_t), (*fail)(const char *, int64_t, int);
    const char *(*violation)(void);
    size_t (*trace)(char *, size_t);
    int (*set_device)(int32_t), (*malloc)(void **, size_t, int), (*free)(void *),
        (*copy)(void *, size_t, const void *, size_t, int);
    int (*stream)(void **), (*sync)(void *), (*end_stream)(void *);
    void *main_stream;
} npu;

__attribute__((constructor)) static void npu_load(void)
{
    setenv("FMOE_ASCEND_PATH", SIM_FOLDER, 0);
    char path[4096];
    snprintf(path, sizeof path, "%s/libascendcl.so", getenv("FMOE_ASCEND_PATH"));
    void *lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    if (!lib) {
        printf("%s\n0 passed, 1 failed, 0 skipped\n", dlerror());
        exit(1);
    }
#define FIND(field, name) *(void **)&npu.field = dlsym(lib, name)
    FIND(get, "fmoe_sim_get");
    FIND(reset, "fmoe_sim_reset");
    FIND(forgive, "fmoe_sim_forgive");
    FIND(set, "fmoe_sim_set");
    FIND(fail, "fmoe_sim_fail");
    FIND(violation, "fmoe_sim_violation_text");
    FIND(trace, "fmoe_sim_trace");
    FIND(set_device, "aclrtSetDevice");
    FIND(malloc, "aclrtMalloc");
    FIND(free, "aclrtFree");
    FIND(copy, "aclrtMemcpy");
    FIND(stream, "aclrtCreateStream");
    FIND(sync, "aclrtSynchronizeStream");
    FIND(end_stream, "aclrtDestroyStream");
#undef FIND
}

static void *npu_blocks[65536];
static int npu_count;

static void *npu_alloc(size_t bytes)
{
    void *p = NULL;
    REQUIRE(npu.malloc(&p, bytes ? bytes : 1, 0) == 0);
    REQUIRE(npu_count < 65536);
    return npu_blocks[npu_count++] = p;
}

static void npu_begin(void)
{
    npu.set_device(0);
    npu.fail("", 0, 0);
    npu.set("quiet", 0);
    npu.set("delay_us", 0);
    npu.forgive();
    npu.reset();
    npu.stream(&npu.main_stream);
}

static void npu_end(void)
{
    CHECK_EQ(npu.sync(npu.main_stream), 0);
    npu.end_stream(npu.main_stream);
    while (npu_count > 0) npu.free(npu_blocks[--npu_count]);
    if (npu.get("violations")) TEST_FAIL("violation: %s", npu.violation());
    static const char *const live[] = {"live_tensors", "live_lists",     "live_scalars",
                                       "live_arrays",  "live_executors", "live_allocations"};
    for (int i = 0; i < 6; i++)
        if (npu.get(live[i])) TEST_FAIL("%s is %" PRId64, live[i], npu.get(live[i]));
}

#define NPU_TEST(id)                                                                                                   \
    static void npu_##id(void);                                                                                        \
    TEST(id)                                                                                                           \
    {                                                                                                                  \
        npu_begin();                                                                                                   \
        npu_##id();                                                                                                    \
        npu_end();                                                                                                     \
    }                                                                                                                  \
    static void npu_##id(void)

/* ---- Tensors ---- */

static size_t tensor_span(const fmoe_tensor *t)
{
    int64_t last = tensor_count(t) ? 1 : 0;
    for (int d = 0; last && d < t->ndim; d++) last += (t->shape[d] - 1) * fmoe_stride(t, d);
    return (size_t)last * fmoe_dtype_size(fmoe_tensor_dtype(t));
}

/* A copy on the device, somewhere inside an allocation: only aligned to its elements when `odd`. NULL stays NULL. */
static inline fmoe_tensor *to_npu_at(const fmoe_tensor *t, bool odd)
{
    if (!t) return NULL;
    const size_t bytes = tensor_span(t), size = fmoe_dtype_size(fmoe_tensor_dtype(t)),
                 shift = odd ? size * (size_t)test_below(9) : 0;
    fmoe_tensor *d = tensor_over(NULL, fmoe_tensor_dtype(t), t->ndim, t->shape, t->strides);
    d->device = (fmoe_device){FMOE_ASCEND, 0};
    d->data = (char *)npu_alloc(bytes + shift) + shift;
    if (bytes) REQUIRE(npu.copy(d->data, bytes, fmoe_data(t), bytes, 1) == 0);
    return d;
}

static inline fmoe_tensor *to_npu(const fmoe_tensor *t) { return to_npu_at(t, true); }

/* Back, into a tensor of the same layout. */
static inline fmoe_tensor *from_npu(const fmoe_tensor *d)
{
    fmoe_tensor *t = tensor_strided(fmoe_tensor_dtype(d), d->ndim, d->shape, d->strides);
    const size_t bytes = tensor_span(t);
    REQUIRE(npu.sync(npu.main_stream) == 0);
    if (bytes) REQUIRE(npu.copy(fmoe_data(t), bytes, fmoe_data(d), bytes, 2) == 0);
    return t;
}

/* ---- Plans and runs ---- */

static inline fmoe_plan make_plan(fmoe_desc d, int device)
{
    fmoe_plan p = 0;
    d.size = sizeof d;
    d.device.type = device;
    const fmoe_status s = fmoe_plan_create(&p, &d);
    if (s != FMOE_OK) {
        TEST_FAIL("fmoe_plan_create: %s: %s", fmoe_status_string(s), fmoe_last_error());
        longjmp(test_leave, 1);
    }
    return p;
}

/* Run settings with a workspace of exactly the size asked for; on the device it may start anywhere. */
static inline fmoe_run run_for(fmoe_plan p, fmoe_pass pass, int64_t T, int device, uint32_t flags)
{
    fmoe_run r = FMOE_RUN_INIT;
    CHECK_STATUS(fmoe_workspace_bytes(p, pass, T, &r.workspace_bytes), FMOE_OK);
    if (r.workspace_bytes)
        r.workspace = device == FMOE_CPU ? test_alloc(r.workspace_bytes) : npu_alloc(r.workspace_bytes);
    r.flags = flags;
    r.stream = device == FMOE_CPU ? NULL : npu.main_stream;
    return r;
}

/* ---- Comparing ---- */

static inline double unit(int dtype) { return dtype == FMOE_BF16 ? 0x1p-8 : dtype == FMOE_F16 ? 0x1p-11 : 0x1p-22; }

/* Relative L2 error at most `bound`, in what the tensor on the device holds. */
static inline void check_close_at(const char *file, int line, const char *name, const fmoe_tensor *d,
                                  const fmoe_tensor *want, double bound)
{
    const fmoe_tensor *got = from_npu(d);
    double error = 0, norm = 0;
    int64_t bad = -1;
    for (int64_t i = 0; i < tensor_count(want); i++) {
        const double g = tensor_get(got, i), w = tensor_get(want, i);
        if (isnan(g) != isnan(w)) {
            bad = i;
            break;
        }
        if (isnan(w)) continue;
        error += (g - w) * (g - w);
        norm += w * w;
    }
    if (bad >= 0) {
        test_failures++;
        printf("  %s:%d: %s[%" PRId64 "] is %g, not %g\n", file, line, name, bad, tensor_get(got, bad),
               tensor_get(want, bad));
    } else if (!(sqrt(error) <= bound * sqrt(norm) + 1e-30)) {
        test_failures++;
        printf("  %s:%d: %s: relative error %.3g, bound %.3g\n", file, line, name, sqrt(error) / sqrt(norm), bound);
    }
}

#define CHECK_CLOSE(d, want, bound) check_close_at(__FILE__, __LINE__, #d, d, want, bound)

static inline void check_equal_at(const char *file, int line, const char *name, const fmoe_tensor *d,
                                  const fmoe_tensor *want)
{
    const fmoe_tensor *got = from_npu(d);
    for (int64_t i = 0; i < tensor_count(want); i++) {
        const double g = tensor_get(got, i), w = tensor_get(want, i);
        if (g == w || (isnan(g) && isnan(w))) continue;
        test_failures++;
        printf("  %s:%d: %s[%" PRId64 "] is %g, not %g\n", file, line, name, i, g, w);
        return;
    }
}

#define CHECK_EQUAL(d, want) check_equal_at(__FILE__, __LINE__, #d, d, want)

static inline fmoe_tensor *wide(const fmoe_tensor *t) { return t ? tensor_copy(t, FMOE_F64) : NULL; }

#endif
