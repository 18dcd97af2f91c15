/* SPDX-License-Identifier: Apache-2.0
 * test_sim.c - the simulator itself: that it computes what CANN's documentation says, and notices what a device would
 * not. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "device.h"

typedef int (*phase2)(void *workspace, uint64_t bytes, void *executor, void *stream);

static struct {
    void *(*tensor)(const int64_t *, uint64_t, int, const int64_t *, int64_t, int, const int64_t *, uint64_t, void *);
    int (*drop)(void *), (*drop_list)(void *), (*drop_executor)(void *), (*repeatable)(void *);
    void *(*list)(void *const *, uint64_t);
    int (*swiglu)(void *, int64_t, void *, uint64_t *, void **);
    int (*gmm)(void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, int64_t,
               int64_t, int64_t, int64_t, void *, void *, void *, uint64_t *, void **);
    phase2 run_swiglu, run_gmm;
    int (*memset_async)(void *, size_t, int32_t, size_t, void *);
} cann;

static void load(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/libopapi.so", getenv("FMOE_ASCEND_PATH"));
    void *lib = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
    REQUIRE(lib != NULL);
#define FIND(field, name) REQUIRE((*(void **)&cann.field = dlsym(lib, name)) != NULL)
    FIND(tensor, "aclCreateTensor");
    FIND(list, "aclCreateTensorList");
    FIND(drop, "aclDestroyTensor");
    FIND(drop_list, "aclDestroyTensorList");
    FIND(drop_executor, "aclDestroyAclOpExecutor");
    FIND(repeatable, "aclSetAclOpExecutorRepeatable");
    FIND(swiglu, "aclnnSwiGluGetWorkspaceSize");
    FIND(run_swiglu, "aclnnSwiGlu");
    FIND(gmm, "aclnnGroupedMatmulV4GetWorkspaceSize");
    FIND(run_gmm, "aclnnGroupedMatmulV4");
    FIND(memset_async, "aclrtMemsetAsync");
#undef FIND
    npu.set("quiet", 1);
}

enum { F32 = 0, INT32_ = 3, INT64_ = 9, ND = 2 };

static void *packed(int dtype, void *data, int64_t a, int64_t b, int64_t c)
{
    const int64_t dims[3] = {a, b, c}, storage = a * (b ? b : 1) * (c ? c : 1);
    return cann.tensor(dims, c ? 3 : b ? 2 : 1, dtype, NULL, 0, ND, &storage, 1, data);
}

static void *view2(int dtype, void *data, int64_t a, int64_t b, int64_t sa, int64_t sb, int64_t storage)
{
    const int64_t dims[2] = {a, b}, strides[2] = {sa, sb};
    return cann.tensor(dims, 2, dtype, strides, 0, ND, &storage, 1, data);
}

static void drop_unused(void *executor) /* so that no cache entry without tasks is left */
{
    CHECK_EQ(cann.repeatable(executor), 0);
    cann.drop_executor(executor);
}

static int64_t violations(void)
{
    const int64_t n = npu.get("violations");
    npu.forgive();
    return n;
}

NPU_TEST(executor_is_used_once)
{
    load();
    void *h = packed(F32, npu_alloc(256), 2, 8, 0), *a = packed(F32, npu_alloc(128), 2, 4, 0), *executor;
    uint64_t bytes;
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    CHECK_EQ(cann.run_swiglu(NULL, 0, executor, npu.main_stream), 0);
    CHECK_EQ(violations(), 0);
    CHECK(cann.run_swiglu(NULL, 0, executor, npu.main_stream) != 0);
    CHECK_EQ(violations(), 1);
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0); /* and not by another operator */
    CHECK(cann.run_gmm(NULL, 0, executor, npu.main_stream) != 0);
    CHECK_EQ(violations(), 1);
    drop_unused(executor);
    cann.drop(h);
    cann.drop(a);
}

/* An executor that is destroyed and was never run leaves a cache entry without tasks: the next one of its shapes
 * answers 0 and runs nothing. Made repeatable first it leaves none, and where opbase guards against it the entry is not
 * used. */
NPU_TEST(cache_entries_without_tasks)
{
    load();
    float *data = npu_alloc(96);
    void *h = packed(F32, data, 3, 2, 0), *a = packed(F32, data + 8, 3, 1, 0), *executor;
    uint64_t bytes;
    for (int guard = 0; guard < 2; guard++) {
        npu.set("cache_guard", guard);
        CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
        cann.drop_executor(executor);
        CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
        npu.reset();
        CHECK_EQ(cann.run_swiglu(NULL, 0, executor, npu.main_stream), 0);
        CHECK_EQ(npu.get("launches"), guard);
        CHECK_EQ(npu.get("hollow_launches"), 1 - guard);
    }
    npu.set("cache_guard", 0);
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    drop_unused(executor);
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    CHECK_EQ(cann.run_swiglu(NULL, 0, executor, npu.main_stream), 0);
    CHECK_EQ(npu.get("launches"), 2);
    npu.sync(npu.main_stream);
    cann.drop(h);
    cann.drop(a);
}

NPU_TEST(descriptors_live_between_the_phases)
{
    load();
    void *h = packed(F32, npu_alloc(256), 2, 8, 0), *a = packed(F32, npu_alloc(128), 2, 4, 0), *executor;
    uint64_t bytes;
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    cann.drop(h);
    CHECK_EQ(violations(), 1);
    cann.drop(h); /* twice */
    CHECK_EQ(violations(), 1);
    drop_unused(executor);
    cann.drop(a);
}

NPU_TEST(views)
{
    load();
    char *p = npu_alloc(4096);
    void *executor, *a = packed(F32, npu_alloc(128), 2, 4, 0), *odd = packed(F32, p + 4, 2, 8, 0);
    uint64_t bytes;
    CHECK_EQ(cann.swiglu(odd, -1, a, &bytes, &executor), 0);
    CHECK_EQ(violations(), 1); /* not aligned to 32 */
    drop_unused(executor);
    void *past = view2(F32, p, 2, 8, 8, 1, 12); /* past its storage */
    CHECK_EQ(cann.swiglu(past, -1, a, &bytes, &executor), 161002);
    void *gaps = view2(F32, p, 2, 8, 16, 1, 64); /* not contiguous */
    CHECK_EQ(cann.swiglu(gaps, -1, a, &bytes, &executor), 161002);
    CHECK_EQ(cann.swiglu(NULL, -1, a, &bytes, &executor), 161001);
    cann.drop(odd);
    cann.drop(past);
    cann.drop(gaps);
    cann.drop(a);
}

/* Phase 1 of a grouped product of 4 rows in 2 groups, K 8, N 4; what the group list and the weight are is the caller's.
 */
static int product(void *x, void *w, void *groups, int64_t type, void *y)
{
    void *lx = cann.list(&x, 1), *lw = cann.list(&w, 1), *ly = cann.list(&y, 1), *executor = NULL;
    uint64_t bytes = 0;
    const int code = cann.gmm(lx, lw, NULL, NULL, NULL, NULL, NULL, NULL, groups, NULL, NULL, NULL, type == 2 ? 3 : 2,
                              type, 1, 0, ly, NULL, NULL, &bytes, &executor);
    if (code == 0) drop_unused(executor);
    cann.drop_list(lx);
    cann.drop_list(lw);
    cann.drop_list(ly);
    cann.drop(groups);
    return code;
}

NPU_TEST(grouped_matmul_rules)
{
    load();
    char *p = npu_alloc(1 << 16);
    const int64_t stacked[3] = {2, 8, 4}, turned[3] = {32, 1, 8}, storage = 64;
#define STACK(strides) cann.tensor(stacked, 3, F32, strides, 0, ND, &storage, 1, p)
    CHECK_EQ(product(packed(F32, p, 4, 8, 0), STACK(NULL), packed(INT64_, p, 2, 0, 0), 0, packed(F32, p, 4, 4, 0)), 0);
    CHECK_EQ(product(packed(F32, p, 4, 8, 0), STACK(turned), packed(INT64_, p, 2, 0, 0), 0, packed(F32, p, 4, 4, 0)),
             0);
    CHECK_EQ(npu.get("hidden_copies"), 0);
    CHECK_EQ(product(packed(F32, p, 4, 8, 0), STACK(NULL), packed(INT32_, p, 2, 0, 0), 0, packed(F32, p, 4, 4, 0)),
             161002); /* int32 list */
    CHECK_EQ(product(packed(F32, p, 4, 8, 0), STACK(NULL), packed(INT64_, p, 3, 0, 0), 0, packed(F32, p, 4, 4, 0)),
             161002); /* 3 entries */
    CHECK_EQ(
        product(view2(F32, p, 4, 8, 10, 1, 64), STACK(NULL), packed(INT64_, p, 2, 0, 0), 0, packed(F32, p, 4, 4, 0)),
        0);
    CHECK_EQ(npu.get("hidden_copies"), 1); /* rows with gaps are copied behind the caller's back */
    CHECK_EQ(product(view2(F32, p, 8, 4, 1, 8, 64), packed(F32, p, 4, 4, 0), packed(INT64_, p, 2, 0, 0), 2,
                     packed(F32, p, 2, 8, 4)),
             0);
    CHECK_EQ(product(packed(F32, p, 8, 4, 0), packed(F32, p, 4, 4, 0), packed(INT64_, p, 2, 0, 0), 2,
                     packed(F32, p, 2, 8, 4)),
             161002); /* x as it is */
    CHECK_EQ(violations(), 0);
}

/* Dtypes, formats and lengths of lists. */
NPU_TEST(what_descriptors_may_be)
{
    load();
    char *p = npu_alloc(1 << 16);
    const int64_t stacked[3] = {2, 8, 4}, storage = 64, flat[2] = {2, 8};
    void *executor, *a = packed(F32, npu_alloc(128), 2, 4, 0);
    uint64_t bytes;
    CHECK_EQ(product(packed(1, p, 4, 8, 0), STACK(NULL), packed(INT64_, p, 2, 0, 0), 0, packed(F32, p, 4, 4, 0)),
             161002); /* f16 beside f32 */
    void *nz = cann.tensor(flat, 2, F32, NULL, 0, 29, &storage, 1, p);
    CHECK_EQ(cann.swiglu(nz, -1, a, &bytes, &executor), 161002); /* a private format */
    void *ints = packed(INT32_, p, 2, 8, 0);
    CHECK_EQ(cann.swiglu(ints, -1, a, &bytes, &executor), 161002);
    void *many[129], *x = packed(1, p, 4, 8, 0), *y = packed(1, p, 4, 4, 0), *groups = packed(INT64_, p, 129, 0, 0);
    for (int i = 0; i < 129; i++) many[i] = packed(1, p, 8, 4, 0);
    void *lx = cann.list(&x, 1), *lw = cann.list(many, 129), *ly = cann.list(&y, 1);
    CHECK_EQ(cann.gmm(lx, lw, NULL, NULL, NULL, NULL, NULL, NULL, groups, NULL, NULL, NULL, 2, 0, 1, 0, ly, NULL, NULL,
                      &bytes, &executor),
             161002); /* 129 matrices */
    cann.drop_list(lx);
    cann.drop_list(lw);
    cann.drop_list(ly);
    cann.drop(groups);
    cann.drop(nz);
    cann.drop(ints);
    cann.drop(a);
    CHECK_EQ(violations(), 0);
}

NPU_TEST(counters)
{
    load();
    void *h = packed(F32, npu_alloc(256), 2, 8, 0), *a = packed(F32, npu_alloc(128), 2, 4, 0), *executor;
    uint64_t bytes;
    npu.reset();
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    CHECK_EQ(npu.get("launches"), 0);
    CHECK_EQ(cann.run_swiglu(NULL, 0, executor, npu.main_stream), 0);
    CHECK_EQ(npu.get("launches"), 1);
    CHECK_EQ(npu.get("bytes_read"), 64);
    CHECK_EQ(npu.get("bytes_written"), 32);
    CHECK_EQ(npu.get("live_tensors"), 2);
    CHECK_EQ(npu.get("syncs"), 0);
    npu.sync(npu.main_stream);
    CHECK_EQ(npu.get("syncs"), 1);
    cann.drop(h);
    cann.drop(a);
}

NPU_TEST(rows_past_the_total_are_not_written)
{
    load();
    const float ones[64] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    const int64_t counts[2] = {1, 2};
    float *x = npu_alloc(128), *w = npu_alloc(256), *y = npu_alloc(64), back[16];
    int64_t *g = npu_alloc(16);
    npu.copy(x, 128, ones, 128, 1);
    npu.copy(w, 256, ones, 256, 1);
    npu.copy(g, 16, counts, 16, 1);
    void *tx = packed(F32, x, 4, 8, 0), *tw = packed(F32, w, 2, 8, 4), *tg = packed(INT64_, g, 2, 0, 0),
         *ty = packed(F32, y, 4, 4, 0);
    void *lx = cann.list(&tx, 1), *lw = cann.list(&tw, 1), *ly = cann.list(&ty, 1), *executor;
    uint64_t bytes;
    REQUIRE(cann.gmm(lx, lw, NULL, NULL, NULL, NULL, NULL, NULL, tg, NULL, NULL, NULL, 2, 0, 1, 0, ly, NULL, NULL,
                     &bytes, &executor) == 0);
    CHECK(bytes > 0);
    CHECK_EQ(cann.run_gmm(npu_alloc(bytes), bytes, executor, npu.main_stream), 0);
    cann.drop_list(lx); /* after phase 2 they may go */
    cann.drop_list(lw);
    cann.drop_list(ly);
    cann.drop(tg);
    npu.sync(npu.main_stream);
    npu.copy(back, 64, y, 64, 2);
    CHECK(back[0] == 8 && back[11] == 8 && isnan(back[12]) && isnan(back[15])); /* fresh memory is NaN */
    CHECK_EQ(violations(), 0);
}

NPU_TEST(streams_are_asynchronous)
{
    load();
    unsigned char *p = npu_alloc(64), back = 1;
    npu.set("delay_us", 50000);
    CHECK_EQ(cann.memset_async(p, 64, 7, 64, npu.main_stream), 0);
    npu.copy(&back, 1, p, 1, 2); /* without waiting */
    CHECK_EQ(back, 0xFF);
    npu.sync(npu.main_stream);
    npu.copy(&back, 1, p, 1, 2);
    CHECK_EQ(back, 7);
}

NPU_TEST(memory_must_live_until_it_runs)
{
    load();
    void *hp, *h, *a = packed(F32, npu_alloc(128), 2, 4, 0), *executor;
    uint64_t bytes;
    REQUIRE(npu.malloc(&hp, 256, 0) == 0);
    h = packed(F32, hp, 2, 8, 0);
    npu.set("delay_us", 20000);
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    CHECK_EQ(cann.run_swiglu(NULL, 0, executor, npu.main_stream), 0);
    npu.free(hp);
    CHECK_EQ(npu.sync(npu.main_stream), 507015);
    CHECK(violations() > 0);
    npu.free(hp);
    CHECK(violations() > 0);
    cann.drop(h);
    cann.drop(a);
}

NPU_TEST(places)
{
    load();
    char host[64] = {0}, *p = npu_alloc(64);
    CHECK(npu.copy(p, 64, host, 64, 2) != 0); /* not that kind */
    CHECK_EQ(violations(), 1);
    void *h = packed(F32, (void *)((uintptr_t)(host + 31) / 32 * 32), 1, 4, 0), *a = packed(F32, p, 1, 2, 0), *executor;
    uint64_t bytes;
    CHECK_EQ(cann.swiglu(h, -1, a, &bytes, &executor), 0);
    CHECK(cann.run_swiglu(NULL, 0, executor, npu.main_stream) != 0); /* host memory */
    CHECK_EQ(violations(), 1);
    cann.drop(h);
    cann.drop(a);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*(volatile char *)p); /* the host cannot touch it */
    }
    int status;
    waitpid(child, &status, 0);
#ifdef __SANITIZE_ADDRESS__
    CHECK(status != 0);
#else
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
#endif
}

NPU_TEST(failures_on_request)
{
    load();
    void *p;
    npu.fail("aclrtMalloc", 2, 207018);
    CHECK_EQ(npu.malloc(&p, 64, 0), 0);
    npu.free(p);
    CHECK_EQ(npu.malloc(&p, 64, 0), 207018);
    CHECK_EQ(npu.malloc(&p, 64, 0), 0);
    npu.free(p);
}
