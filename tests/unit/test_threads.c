/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c - rows 22 and 23: one plan on many threads, plans destroyed under a run, fork, re-entry, threads that
 * cannot be had. Run under TSan as well. Bits are compared with one thread's. */
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"
#include "cpu/kernels/kernels.h"

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

/* ---- a layer that many can run ---- */

enum { T = 24, H = 33, I = 20, E = 5, K = 2 };

typedef struct layer { /* shared, read only */
    fmoe_desc d;
    fmoe_plan plan;
    fmoe_tensor *x, *ids, *p, *w1, *w2, *dout;
} layer;

typedef struct results { /* each thread's own */
    fmoe_tensor *out, *dx, *dp, *dw1, *dw2;
    void *workspace, *saved;
    size_t workspace_bytes, saved_bytes;
} results;

static layer make_layer(int dtype, int threads)
{
    layer l = {.d = FMOE_DESC_INIT};
    l.d.op = FMOE_OP_EXPERTS;
    l.d.dtype = dtype;
    l.d.H = H, l.d.I = I, l.d.E = E, l.d.k = K;
    l.d.threads = threads;
    REQUIRE(fmoe_plan_create(&l.plan, &l.d) == FMOE_OK);
    l.x = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.dout = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.p = tensor_random(tensor_new(FMOE_F32, SHAPE(T, K)), 1);
    l.ids = tensor_random_int(tensor_new(I32, SHAPE(T, K)), E);
    l.w1 = tensor_random(tensor_new(dtype, SHAPE(E, 2 * I, H)), 0.5);
    l.w2 = tensor_random(tensor_new(dtype, SHAPE(E, H, I)), 0.5);
    return l;
}

static results make_results(const layer *l)
{
    const int f = l->d.dtype;
    results r = {.out = tensor_new(f, SHAPE(T, H)),
                 .dx = tensor_new(f, SHAPE(T, H)),
                 .dp = tensor_new(FMOE_F32, SHAPE(T, K)),
                 .dw1 = tensor_new(f, SHAPE(E, 2 * I, H)),
                 .dw2 = tensor_new(f, SHAPE(E, H, I))};
    size_t a, b;
    REQUIRE(fmoe_workspace_bytes(l->plan, FMOE_FORWARD, T, &a) == FMOE_OK &&
            fmoe_workspace_bytes(l->plan, FMOE_BACKWARD, T, &b) == FMOE_OK);
    REQUIRE(fmoe_saved_bytes(l->plan, T, &r.saved_bytes) == FMOE_OK);
    r.workspace_bytes = a > b ? a : b;
    r.workspace = test_alloc(r.workspace_bytes);
    r.saved = test_alloc(r.saved_bytes);
    return r;
}

static fmoe_status run_layer(const layer *l, fmoe_plan plan, const results *r)
{
    fmoe_experts_args a = {.size = sizeof a,
                           .x = l->x,
                           .ids = l->ids,
                           .weights = l->p,
                           .w = {.w1 = l->w1, .w2 = l->w2},
                           .out = r->out,
                           .saved = r->saved,
                           .saved_bytes = r->saved_bytes};
    fmoe_run run = FMOE_RUN_INIT;
    run.workspace = r->workspace;
    run.workspace_bytes = r->workspace_bytes;
    const fmoe_status status = fmoe_experts_forward(plan, &a, &run);
    if (status != FMOE_OK) return status;
    a.out = NULL;
    a.dout = l->dout, a.dx = r->dx, a.dweights = r->dp, a.dw = (fmoe_weights){.w1 = r->dw1, .w2 = r->dw2};
    return fmoe_experts_backward(plan, &a, &run);
}

static int same_bits(const fmoe_tensor *a, const fmoe_tensor *b)
{
    return !memcmp(a->data, b->data, (size_t)tensor_count(a) * fmoe_dtype_size(fmoe_tensor_dtype(a)));
}

static int same_results(const results *a, const results *b)
{
    return same_bits(a->out, b->out) && same_bits(a->dx, b->dx) && same_bits(a->dp, b->dp) &&
           same_bits(a->dw1, b->dw1) && same_bits(a->dw2, b->dw2);
}

static results alone(const layer *l) /* one thread */
{
    const results r = make_results(l);
    fmoe_desc d = l->d;
    d.threads = 1;
    d.parallel = NULL;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    CHECK_STATUS(run_layer(l, plan, &r), FMOE_OK);
    fmoe_plan_destroy(&plan);
    return r;
}

/* ---- many threads ---- */

typedef struct worker {
    pthread_t thread;
    const layer *l;
    const results *want;
    results mine;
    fmoe_plan plan;
    _Atomic int *go;
    int runs, wrong, refused;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    for (int i = 0; i < w->runs; i++) {
        const fmoe_status status = run_layer(w->l, w->plan, &w->mine);
        if (status == FMOE_ERR_HANDLE) w->refused++;
        else if (status != FMOE_OK || !same_results(&w->mine, w->want)) w->wrong++;
        if (w->go) atomic_fetch_add(w->go, 1);
    }
    return NULL;
}

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

/* A table of handles with one slot free: creating looks through all of it, and every plan gets the slot of the last. */
static fmoe_plan *fill_table(const fmoe_desc *d, int *n)
{
    enum { MOST = 20000 };
    fmoe_plan *plans = test_alloc(MOST * sizeof *plans);
    for (*n = 0; *n < MOST && fmoe_plan_create(&plans[*n], d) == FMOE_OK;) ++*n;
    REQUIRE(*n > 0 && *n < MOST && fmoe_plan_destroy(&plans[--*n]) == FMOE_OK);
    return plans;
}

static void empty_table(fmoe_plan *plans, int n)
{
    for (int i = 0; i < n; i++) CHECK_STATUS(fmoe_plan_destroy(&plans[i]), FMOE_OK);
}

static void *fight_for_a_slot(void *arg)
{
    const fmoe_desc *d = arg;
    for (int i = 0; i < 4000; i++) {
        fmoe_plan plan;
        size_t bytes;
        const fmoe_status status = fmoe_plan_create(&plan, d);
        if (status == FMOE_ERR_NOMEM) continue; /* the other has it */
        if (status != FMOE_OK || fmoe_saved_bytes(plan, 3, &bytes) != FMOE_OK || fmoe_plan_destroy(&plan) != FMOE_OK)
            return arg;
    }
    return NULL;
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
