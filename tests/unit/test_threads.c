/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c - row 22: one plan on many threads, plans destroyed under a run, re-entry, the floating point state.
 * Run under TSan as well. Bits are compared with one thread's. */
#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>

#include "shared_layer.h"

/* ---- many threads ---- */

static void run_workers(worker *w, int n)
{
    for (int i = 0; i < n; i++) REQUIRE(pthread_create(&w[i].thread, NULL, work, &w[i]) == 0);
}

TEST(row23_one_plan_on_many_threads)
{
    for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
        const layer l = make_layer(dtype, 3);
        const results want = alone(&l);
        enum { N = 8 };
        worker w[N];
        for (int i = 0; i < N; i++)
            w[i] = (worker){.l = &l, .want = &want, .mine = make_results(&l), .plan = l.plan, .runs = 12};
        run_workers(w, N);
        for (int i = 0; i < N; i++) {
            pthread_join(w[i].thread, NULL);
            CHECK_EQ(w[i].wrong, 0);
            CHECK_EQ(w[i].refused, 0);
        }
        fmoe_plan plan = l.plan;
        CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
    }
}

/* A plan destroyed while it runs: runs under way finish with the right bits, later ones are refused. */
TEST(row23_destroy_under_a_run)
{
    for (int round = 0; round < 6; round++) {
        const layer l = make_layer(FMOE_F32, 2);
        const results want = alone(&l);
        enum { N = 4 };
        worker w[N];
        _Atomic int go = 0;
        for (int i = 0; i < N; i++)
            w[i] = (worker){.l = &l, .want = &want, .mine = make_results(&l), .plan = l.plan, .go = &go, .runs = 60};
        run_workers(w, N);
        while (atomic_load(&go) < 20) sched_yield();
        fmoe_plan plan = l.plan, twin = l.plan;
        CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
        CHECK_STATUS(fmoe_plan_destroy(&twin), FMOE_ERR_HANDLE);
        int refused = 0;
        for (int i = 0; i < N; i++) {
            pthread_join(w[i].thread, NULL);
            CHECK_EQ(w[i].wrong, 0);
            refused += w[i].refused;
        }
        CHECK(refused > 0);
    }
}

static void *create_and_destroy(void *arg)
{
    const fmoe_desc *d = arg;
    for (int i = 0; i < 200; i++) {
        fmoe_plan plan;
        size_t bytes;
        if (fmoe_plan_create(&plan, d) != FMOE_OK || fmoe_workspace_bytes(plan, FMOE_FORWARD, 3, &bytes) != FMOE_OK ||
            fmoe_plan_destroy(&plan) != FMOE_OK)
            return arg;
    }
    return NULL;
}

TEST(row23_plans_come_and_go_on_many_threads)
{
    const fmoe_desc d = call_desc(CALL_BLOCK, FMOE_BF16);
    pthread_t threads[6];
    for (int i = 0; i < 6; i++)
        REQUIRE(pthread_create(&threads[i], NULL, create_and_destroy, (void *)(uintptr_t)&d) == 0);
    for (int i = 0; i < 6; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        CHECK(failed == NULL);
    }
}

TEST(row23_a_slot_is_free_once_its_plan_is_gone)
{
    fmoe_desc d = call_desc(CALL_ACTIVATION, FMOE_F32);
    pthread_t threads[2];
    int n;
    fmoe_plan *plans = fill_table(&d, &n);
    for (int i = 0; i < 2; i++) REQUIRE(pthread_create(&threads[i], NULL, fight_for_a_slot, &d) == 0);
    for (int i = 0; i < 2; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        CHECK(failed == NULL);
    }
    empty_table(plans, n);
}

typedef struct speaker {
    int number;
    pthread_barrier_t *all;
    bool heard;
} speaker;

static void *error_of_this_thread(void *arg)
{
    speaker *s = arg;
    fmoe_desc d = call_desc(CALL_EXPERTS, FMOE_F32);
    fmoe_plan plan;
    char word[32];
    snprintf(word, sizeof word, "%d", d.act = 1000 + s->number);
    const fmoe_status status = fmoe_plan_create(&plan, &d);
    pthread_barrier_wait(s->all); /* everybody has had an error by now */
    s->heard = status == FMOE_ERR_ARG && strstr(fmoe_last_error(), word);
    return NULL;
}

TEST(last_error_is_per_thread)
{
    enum { N = 4 };
    pthread_t threads[N];
    pthread_barrier_t all;
    speaker speakers[N];
    pthread_barrier_init(&all, NULL, N);
    for (int i = 0; i < N; i++) {
        speakers[i] = (speaker){i, &all, false};
        REQUIRE(pthread_create(&threads[i], NULL, error_of_this_thread, &speakers[i]) == 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        CHECK(speakers[i].heard);
    }
    pthread_barrier_destroy(&all);
}

/* ---- re-entry ---- */

typedef struct reentry {
    const layer *l;
    fmoe_plan inner;
    const results *want, *mine;
    int calls, wrong;
} reentry;

static void reenter(void *ctx, int n, void (*fn)(void *arg, int worker), void *arg)
{
    reentry *r = ctx;
    if (r->calls++ == 0 && (run_layer(r->l, r->inner, r->mine) != FMOE_OK || !same_results(r->mine, r->want)))
        r->wrong++;
    for (int i = n - 1; i >= 0; i--) fn(arg, i);
}

/* The caller's parallel-for runs another layer, on the library's threads, before it does its work. */
TEST(row23_reentry_from_a_callback)
{
    layer l = make_layer(FMOE_F32, 3);
    const results want = alone(&l), inner = make_results(&l), outer = make_results(&l);
    reentry r = {.l = &l, .inner = l.plan, .want = &want, .mine = &inner};
    fmoe_desc d = l.d;
    d.parallel = reenter;
    d.parallel_ctx = &r;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    CHECK_STATUS(run_layer(&l, plan, &outer), FMOE_OK);
    CHECK(r.calls > 0);
    CHECK_EQ(r.wrong, 0);
    CHECK(same_results(&outer, &want));
    fmoe_plan_destroy(&plan);
    fmoe_plan_destroy(&l.plan);
}

/* ---- the floating point state ---- */

/* Rounding upwards and flags raised: the same bits as ever, and the caller's state as it was. */
TEST(floating_point_state_is_the_callers)
{
    for (int threads = 1; threads <= 3; threads += 2) {
        layer l = make_layer(FMOE_F32, threads);
        const results want = alone(&l), r = make_results(&l);
        fesetround(FE_UPWARD);
        feclearexcept(FE_ALL_EXCEPT);
#ifdef __x86_64__
        const unsigned was = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(was | 0x8040); /* flush to zero, denormals are zero */
        const fmoe_status status = run_layer(&l, l.plan, &r);
        const unsigned now = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(was);
        CHECK((now & 0xffc0) == ((was | 0x8040) & 0xffc0));
#else
        const fmoe_status status = run_layer(&l, l.plan, &r);
#endif
        CHECK(fegetround() == FE_UPWARD);
        fesetround(FE_TONEAREST);
        CHECK_STATUS(status, FMOE_OK);
        CHECK(same_results(&r, &want));
        fmoe_plan_destroy(&l.plan);
    }
}
