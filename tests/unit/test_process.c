/* SPDX-License-Identifier: Apache-2.0
 *
 * test_process.c - row 23, and what else concerns the process: fork, exit under a run, threads that cannot be had,
 * stacks, signals, affinity. Run under TSan as well. Bits are compared with one thread's. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/kernels/kernels.h"
#include "shared_layer.h"

static _Atomic int creations_left = INT32_MAX; /* pthread_create fails after that many */
static _Atomic size_t smallest_stack = SIZE_MAX;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    pthread_attr_t defaults;
    size_t stack;
    if (!attr) pthread_getattr_default_np(&defaults);
    pthread_attr_getstacksize(attr ? attr : &defaults, &stack);
    if (stack < atomic_load(&smallest_stack)) atomic_store(&smallest_stack, stack);
    return atomic_fetch_sub(&creations_left, 1) <= 0 ? EAGAIN : __real_pthread_create(thread, attr, fn, arg);
}

/* ---- fork ---- */

TEST(row23_fork_after_use)
{
#ifdef __SANITIZE_THREAD__
    SKIP("TSan cannot follow a fork of a process with threads");
#endif
    const layer l = make_layer(FMOE_F32, 4);
    const results want = alone(&l), r = make_results(&l), again = make_results(&l);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK); /* the pool stands */
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            alarm(30); /* a child that hangs is killed */
            int bad = run_layer(&l, l.plan, &again) != FMOE_OK || !same_results(&again, &want);
            fmoe_plan plan = l.plan;
            bad |= fmoe_plan_destroy(&plan) != FMOE_OK;
            _exit(bad);
        }
        CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
        int code;
        REQUIRE(waitpid(child, &code, 0) == child);
        CHECK(WIFEXITED(code) && WEXITSTATUS(code) == 0);
    }
    CHECK(same_results(&r, &want));
    fmoe_plan plan = l.plan;
    CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
}

static int new_process(void (*fn)(void)) /* 0: it went well */
{
    fflush(stdout);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(60);
        fn();
        fflush(stdout);
        _exit(test_failures > 0);
    }
    int code;
    REQUIRE(waitpid(child, &code, 0) == child);
    return WIFEXITED(code) ? WEXITSTATUS(code) : 1000 + WTERMSIG(code);
}

static void one_plan(void)
{
    const fmoe_desc d = call_desc(CALL_ACTIVATION, FMOE_F32);
    fmoe_plan plan;
    alarm(5);
    const fmoe_status status = fmoe_plan_create(&plan, &d);
    CHECK(status == FMOE_OK || status == FMOE_ERR_NOMEM);
}

/* The other thread holds the table's lock nearly all the time; the child has no thread that would let go of it. */
TEST(row23_fork_while_plans_are_made)
{
#ifdef __SANITIZE_THREAD__
    SKIP("TSan cannot follow a fork of a process with threads");
#endif
    fmoe_desc d = call_desc(CALL_ACTIVATION, FMOE_F32);
    pthread_t thread;
    int n;
    fmoe_plan *plans = fill_table(&d, &n);
    REQUIRE(pthread_create(&thread, NULL, fight_for_a_slot, &d) == 0);
    for (int i = 0; i < 10; i++) CHECK_EQ(new_process(one_plan), 0);
    pthread_join(thread, NULL);
    empty_table(plans, n);
}

static void *run_for_ever(void *arg)
{
    worker *w = arg;
    while (run_layer(w->l, w->plan, &w->mine) == FMOE_OK) atomic_fetch_add(w->go, 1);
    return NULL;
}

static bool ends_early;
static _Atomic int runs;

/* LeakSanitizer asks: such a process leaves behind what the call under way holds, and what was its parent's. */
__attribute__((visibility("default"))) int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) { return ends_early; }

/* The thread that runs layers goes on when the library's destructor has run. */
__attribute__((destructor(101))) static void after_the_library(void)
{
    const int then = atomic_load(&runs);
    for (int i = 0; ends_early && atomic_load(&runs) < then + 3; i++) {
        usleep(1000);
        if (i == 20000) _exit(1); /* it hangs, or a sanitizer would have ended the process */
    }
}

static void exit_under_a_run(void)
{
    const layer l = make_layer(FMOE_F32, 3);
    worker w = {.l = &l, .mine = make_results(&l), .plan = l.plan, .go = &runs};
    ends_early = true;
    REQUIRE(pthread_create(&w.thread, NULL, run_for_ever, &w) == 0);
    while (atomic_load(&runs) < 3) sched_yield();
    exit(test_failures > 0);
}

/* A process may end while a thread of its own is in a call, as a daemon thread of Python's may be. */
TEST(row23_exit_under_a_run)
{
#ifdef __SANITIZE_THREAD__
    SKIP("TSan cannot follow a fork of a process with threads");
#endif
    for (int i = 0; i < 20; i++) CHECK_EQ(new_process(exit_under_a_run), 0);
}

/* ---- threads that cannot be had ---- */

static void fails_to_create(void)
{
    layer l = make_layer(FMOE_F32, 6);
    const results want = alone(&l), r = make_results(&l);
    for (int allowed = 0; allowed < 4; allowed++) {
        atomic_store(&creations_left, allowed);
        CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
        CHECK(same_results(&r, &want));
    }
    atomic_store(&creations_left, INT32_MAX);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
    CHECK(same_results(&r, &want));
}

TEST(row22_thread_creation_fails)
{
#ifdef __SANITIZE_THREAD__
    SKIP("needs a process without a pool: TSan cannot follow a fork of a process with threads");
#endif
    CHECK_EQ(new_process(fails_to_create), 0);
}

/* ---- stacks ---- */

static void runs_with_small_stacks(void)
{
    pthread_attr_t small;
    REQUIRE(pthread_attr_init(&small) == 0 && pthread_attr_setstacksize(&small, 128 << 10) == 0);
    REQUIRE(pthread_setattr_default_np(&small) == 0); /* as ulimit -s 128 does, and musl */
    layer l = make_layer(FMOE_F32, 3);
    const results want = alone(&l), r = make_results(&l);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
    CHECK(same_results(&r, &want));
    CHECK(atomic_load(&smallest_stack) >= 256 << 10 && atomic_load(&smallest_stack) < SIZE_MAX);
}

TEST(row22_workers_have_room_whatever_the_default_stack)
{
#ifdef __SANITIZE_THREAD__
    SKIP("needs a process without a pool: TSan cannot follow a fork of a process with threads");
#endif
    atomic_store(&smallest_stack, SIZE_MAX);
    CHECK_EQ(new_process(runs_with_small_stacks), 0);
}

static void *make_call(void *arg) { return (void *)(uintptr_t)call_make(arg); }
static void *make_none(void *arg) { return arg; }

/* How much of a thread's stack fn takes. */
static size_t stack_of(void *(*fn)(void *), void *arg)
{
    enum { ROOM = 1 << 20 };
    static _Alignas(4096) unsigned char stack[ROOM];
    pthread_attr_t attr;
    pthread_t thread;
    void *status;
    memset(stack, 0x5c, sizeof stack);
    REQUIRE(pthread_attr_init(&attr) == 0 && pthread_attr_setstack(&attr, stack, sizeof stack) == 0);
    REQUIRE(pthread_create(&thread, &attr, fn, arg) == 0 && pthread_join(thread, &status) == 0);
    CHECK_STATUS((fmoe_status)(uintptr_t)status, FMOE_OK);
    size_t untouched = 0;
    while (untouched < sizeof stack && stack[untouched] == 0x5c) untouched++;
    return sizeof stack - untouched;
}

/* What the header promises. A thread's own share, of the C library and the program's thread-local variables, is not
 * the call's. */
TEST(row22_stack_of_a_call)
{
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
    SKIP("stack frames are larger with a sanitizer and without optimization");
#endif
    const size_t empty = stack_of(make_none, NULL);
    for (int level = 0; level < fmoe_cpu_level_count(); level++) {
        if (!fmoe_cpu_level_available(level)) continue;
        REQUIRE(fmoe_cpu_set_max_isa(fmoe_cpu_level_name(level)) == FMOE_OK);
        const size_t most = (size_t)(strncmp(fmoe_cpu_isa(), "amx", 3) == 0 ? 128 : 64) << 10;
        for (unsigned call = 0; call < CALL_KINDS * 2; call++)
            for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
                api_call c = {.kind = call / 2, .pass = call % 2, .d = call_desc(call / 2, dtype)};
                c.d.threads = 1; /* all of it on the caller's thread */
                REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
                call_fill(&c);
                const size_t used = stack_of(make_call, &c) - empty;
                if (used > most)
                    TEST_FAIL("%s, level %s, dtype %d: %zu bytes", call_names[c.kind], fmoe_cpu_isa(), dtype, used);
                call_end(&c);
            }
    }
    fmoe_cpu_set_max_isa(NULL);
}

static _Atomic int signals;
static void count_signal(int number) { atomic_fetch_add(&signals, number == SIGUSR1); }

/* Signals are the application's: one that its own threads block stays pending, the pool's do not take it. */
TEST(row22_signals_are_not_for_the_pool)
{
    const layer l = make_layer(FMOE_F32, 4);
    const results r = make_results(&l);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
    struct sigaction count = {.sa_handler = count_signal}, before;
    sigset_t usr1, pending;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    REQUIRE(sigaction(SIGUSR1, &count, &before) == 0 && pthread_sigmask(SIG_BLOCK, &usr1, NULL) == 0);
    kill(getpid(), SIGUSR1);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
    usleep(10000);
    CHECK_EQ(atomic_load(&signals), 0);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    CHECK_EQ(atomic_load(&signals), 1);
    sigaction(SIGUSR1, &before, NULL);
    fmoe_plan plan = l.plan;
    CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK);
}

TEST(row22_a_thousand_threads)
{
    const int counts[] = {64, 1000, 65536};
    for (int i = 0; i < 3; i++) {
        layer l = make_layer(FMOE_F32, counts[i]);
        const results want = alone(&l), r = make_results(&l);
        CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
        CHECK(same_results(&r, &want));
        fmoe_plan_destroy(&l.plan);
    }
}

TEST(row22_affinity_of_one)
{
    cpu_set_t all, one;
    REQUIRE(sched_getaffinity(0, sizeof all, &all) == 0);
    CPU_ZERO(&one);
    for (size_t i = 0; i < CPU_SETSIZE && !CPU_COUNT(&one); i++)
        if (CPU_ISSET(i, &all)) CPU_SET(i, &one);
    REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
    layer l = make_layer(FMOE_F32, 0);
    const results want = alone(&l), r = make_results(&l);
    char text[300];
    fmoe_plan_describe(l.plan, text, sizeof text);
    CHECK(strstr(text, "1 thread") != NULL);
    CHECK_STATUS(run_layer(&l, l.plan, &r), FMOE_OK);
    CHECK(same_results(&r, &want));
    fmoe_plan_destroy(&l.plan);
    REQUIRE(sched_setaffinity(0, sizeof all, &all) == 0);
}
