/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ep_ccl.c - the engines over NCCL and HCCL, against a library that has their functions between threads
 * (fake_ccl): whole layers on the CPU, and what goes wrong when the library is loaded. */
#include "ep_layer.h"

#include <dlfcn.h>
#include <pthread.h>

#include "fake_ccl/fake_ccl.h"

static const fake_api *fake(void)
{
    void *library = dlopen(FAKE_CCL, RTLD_NOW | RTLD_LOCAL);
    const fake_api *api = library ? dlsym(library, "fake_ccl_api") : NULL;
    REQUIRE(api);
    return api;
}

/* ---- loading; first, for a library that was loaded stays ---- */

static void refused(const char *path, fmoe_status want, const char *text)
{
    int comm;
    fmoe_ep_nccl *n = NULL;
    fmoe_ep_hccl *h = NULL;
    if (path) setenv("FMOE_NCCL_LIBRARY", path, 1), setenv("FMOE_HCCL_LIBRARY", path, 1);
    CHECK_STATUS(fmoe_ep_nccl_create(&n, &comm, (fmoe_device){FMOE_CPU, 0}, NULL, NULL), want);
    CHECK_ERROR_HAS(text);
    CHECK_STATUS(fmoe_ep_hccl_create(&h, &comm, (fmoe_device){FMOE_CPU, 0}, NULL, NULL), want);
    CHECK_ERROR_HAS(text);
    CHECK(!n && !h);
    unsetenv("FMOE_NCCL_LIBRARY");
    unsetenv("FMOE_HCCL_LIBRARY");
}

TEST(libraries_that_are_not_there)
{
    refused("libnccl.so", FMOE_ERR_BACKEND, "must be an absolute one");
    refused("/nowhere/libnccl.so.2", FMOE_ERR_BACKEND, "/nowhere/libnccl.so.2");
    Dl_info c_library;
    REQUIRE(dladdr((void *)(uintptr_t)&malloc, &c_library) && c_library.dli_fname[0] == '/');
    refused(c_library.dli_fname, FMOE_ERR_BACKEND, " has no ");
    fmoe_ep_nccl *n = NULL;
    fmoe_exchange x;
    CHECK_STATUS(fmoe_ep_nccl_create(NULL, NULL, (fmoe_device){FMOE_CPU, 0}, NULL, NULL), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_ep_nccl_create(&n, NULL, (fmoe_device){FMOE_CPU, 0}, NULL, NULL), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_ep_nccl_exchange(NULL, &x), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_ep_hccl_exchange(NULL, &x), FMOE_ERR_NULL);
    fmoe_ep_nccl_destroy(&n);
    fmoe_ep_hccl_destroy(NULL);
}

/* ---- whole layers ---- */

static void *rank_thread(void *arg)
{
    ep_run_rank(arg);
    return NULL;
}

static void run_layer(const ep_layer *l, ep_rank **s, int hccl)
{
    const fake_api *api = fake();
    fake_group *group = api->group_new(l->ranks);
    fmoe_ep_nccl *n[EP_RANKS] = {0};
    fmoe_ep_hccl *h[EP_RANKS] = {0};
    fmoe_exchange x[EP_RANKS];
    pthread_t threads[EP_RANKS];
    const fmoe_device cpu = {FMOE_CPU, 0};
    setenv(hccl ? "FMOE_HCCL_LIBRARY" : "FMOE_NCCL_LIBRARY", FAKE_CCL, 1);
    for (int r = 0; r < l->ranks; r++) {
        void *const comm = api->comm(group, r);
        CHECK_STATUS(hccl ? fmoe_ep_hccl_create(&h[r], comm, cpu, NULL, NULL)
                          : fmoe_ep_nccl_create(&n[r], comm, cpu, NULL, NULL),
                     FMOE_OK);
        REQUIRE(h[r] || n[r]);
        CHECK_STATUS(hccl ? fmoe_ep_hccl_exchange(h[r], &x[r]) : fmoe_ep_nccl_exchange(n[r], &x[r]), FMOE_OK);
        CHECK_EQ(x[r].rank, r);
        CHECK_EQ(x[r].ranks, l->ranks);
        s[r] = ep_share(l, r, &x[r]);
    }
    for (int r = 0; r < l->ranks; r++) REQUIRE(!pthread_create(&threads[r], NULL, rank_thread, s[r]));
    for (int r = 0; r < l->ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < l->ranks; r++) {
        if (l->ranks > 1) CHECK(api->calls(api->comm(group, r), 2) > 0);
        CHECK_EQ(api->calls(api->comm(group, r), 3), 0);
        fmoe_ep_nccl_destroy(&n[r]);
        fmoe_ep_hccl_destroy(&h[r]);
    }
    api->group_free(group);
}

static void layers(int hccl, int dtype, int mode)
{
    ep_rank *s[EP_RANKS];
    for (int i = 0; i < 32 && !test_failures; i++) {
        ep_layer *l = ep_draw(1 + i % EP_RANKS, dtype, mode);
        ep_one_process(l);
        run_layer(l, s, hccl);
        for (int r = 0; r < l->ranks; r++) ep_compare(l, s[r], r);
    }
}

TEST(nccl_exact_f32) { layers(0, FMOE_F32, FMOE_EP_EXACT); }
TEST(nccl_exact_bf16) { layers(0, FMOE_BF16, FMOE_EP_EXACT); }
TEST(nccl_lean_bf16) { layers(0, FMOE_BF16, FMOE_EP_LEAN); }
TEST(hccl_exact_f32) { layers(1, FMOE_F32, FMOE_EP_EXACT); }
TEST(hccl_lean_bf16) { layers(1, FMOE_BF16, FMOE_EP_LEAN); }
