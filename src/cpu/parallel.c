/* SPDX-License-Identifier: Apache-2.0
 *
 * parallel.c - threads for the CPU backend: one pool for the process, made at the first run, grown when a plan asks for
 * more.
 *
 * A job is fn(arg, worker) on up to n workers, the caller being worker 0. Jobs divide their work by an atomic counter,
 * so a job is complete with any number of workers >= 1: threads that cannot be had are simply missed, and a job started
 * from inside a job runs on its caller alone. Every worker computes in the default floating point environment, whatever
 * the caller's is: the same bits with or without flush-to-zero, and the caller's state is put back. */
#include "cpu/parallel.h"

#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 1024
/* Rounds of waiting for the next job before sleeping: 0.3 ms (AMD) to 0.8 ms (Intel). A layer is a handful of jobs, one
 * right after the other, and waking a thread takes up to 0.4 ms in a virtual machine. With more threads than cores
 * nobody waits that way: it would keep a core from one that works. */
#define SPINS 16000
/* What a worker's stack has at the least: kernels take up to 80 KiB (AMX), and a default may be less, 128 KiB with musl
 * or what ulimit -s says with glibc, thread-local variables of the whole program included. */
#define STACK_BYTES ((size_t)512 << 10)

typedef struct pool {
    pid_t pid;            /* the process it belongs to: threads do not survive fork() */
    pthread_mutex_t jobs; /* one job at a time */
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    pthread_t threads[MAX_THREADS];
    int n_threads, cores;
    int users; /* calls that hold it, under the_pool_mutex */
    bool stop;
    /* the current job */
    _Atomic unsigned generation;
    void (*fn)(void *, int);
    void *arg;
    int n_workers;
    _Atomic int running;
    _Atomic int spins;
} pool;

typedef struct worker_start {
    pool *pool;
    int index; /* worker number: 1, 2, ... */
    unsigned generation;
} worker_start;

static pthread_mutex_t the_pool_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static pool *the_pool;
static _Thread_local bool inside_job;

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void fmoe_run_worker(void (*fn)(void *, int), void *arg, int worker)
{
    const bool nested = inside_job;
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    inside_job = true;
    fn(arg, worker);
#if defined(__x86_64__)
    __builtin_ia32_sfence(); /* weight gradients are stored nontemporally: done before anybody reads them */
#endif
    inside_job = nested;
    fesetenv(&callers);
}

static void *worker_main(void *p)
{
    const worker_start start = *(worker_start *)p;
    pool *pl = start.pool;
    free(p);
    unsigned seen = start.generation;
    for (;;) {
        const int spins = atomic_load_explicit(&pl->spins, memory_order_relaxed);
        for (int i = 0; i < spins && atomic_load_explicit(&pl->generation, memory_order_acquire) == seen; i++)
            pause_cpu();
        pthread_mutex_lock(&pl->mutex);
        while (atomic_load(&pl->generation) == seen && !pl->stop) pthread_cond_wait(&pl->wake, &pl->mutex);
        const bool stop = pl->stop, mine = atomic_load(&pl->generation) != seen && start.index < pl->n_workers;
        seen = atomic_load(&pl->generation);
        void (*const fn)(void *, int) = pl->fn;
        void *const arg = pl->arg;
        pthread_mutex_unlock(&pl->mutex);
        if (mine) fmoe_run_worker(fn, arg, start.index);
        if (mine && atomic_fetch_sub_explicit(&pl->running, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pl->mutex);
            pthread_cond_signal(&pl->done);
            pthread_mutex_unlock(&pl->mutex);
        }
        if (stop) return NULL;
    }
}

/* A child has only the thread that forked: it must not find the pool locked by another. */
static void lock_pool(void) { pthread_mutex_lock(&the_pool_mutex); }
static void unlock_pool(void) { pthread_mutex_unlock(&the_pool_mutex); }
static void watch_forks(void) { pthread_atfork(lock_pool, unlock_pool, unlock_pool); }

static pool *pool_get(void)
{
    pthread_once(&fork_once, watch_forks);
    lock_pool();
    if (the_pool && the_pool->pid != getpid()) the_pool = NULL; /* forked: the old one is not ours to touch */
    if (!the_pool) {
        pool *pl = calloc(1, sizeof *pl);
        if (pl) {
            pl->pid = getpid();
            pl->cores = fmoe_cpu_count();
            pthread_mutex_init(&pl->jobs, NULL);
            pthread_mutex_init(&pl->mutex, NULL);
            pthread_cond_init(&pl->wake, NULL);
            pthread_cond_init(&pl->done, NULL);
            the_pool = pl;
        }
    }
    pool *pl = the_pool;
    if (pl) pl->users++;
    unlock_pool();
    return pl;
}

static void pool_put(pool *pl)
{
    lock_pool();
    pl->users--;
    unlock_pool();
}

/* More threads, as far as they can be had; called with the mutex held. */
static void pool_grow(pool *pl, int n_threads)
{
    sigset_t all, old;
    pthread_attr_t attr;
    size_t stack;
    if (pthread_attr_init(&attr) != 0) return;
    if (pthread_attr_getstacksize(&attr, &stack) == 0 && stack < STACK_BYTES)
        pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the application's business */
    while (pl->n_threads < n_threads && pl->n_threads < MAX_THREADS) {
        worker_start *start = malloc(sizeof *start);
        if (!start) break;
        *start = (worker_start){pl, pl->n_threads + 1, atomic_load(&pl->generation)};
        if (pthread_create(&pl->threads[pl->n_threads], &attr, worker_main, start) != 0) {
            free(start);
            break;
        }
        pl->n_threads++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}

void fmoe_pool_run(int n, void (*fn)(void *, int), void *arg)
{
    pool *pl = n > 1 && !inside_job ? pool_get() : NULL;
    if (!pl) {
        fmoe_run_worker(fn, arg, 0);
        return;
    }
    pthread_mutex_lock(&pl->jobs);
    pthread_mutex_lock(&pl->mutex);
    if (!pl->stop && pl->n_threads < n - 1) pool_grow(pl, n - 1);
    const int threads = pl->stop ? 0 : pl->n_threads, helpers = threads < n - 1 ? threads : n - 1;
    pl->fn = fn;
    pl->arg = arg;
    pl->n_workers = helpers + 1;
    atomic_store_explicit(&pl->spins, helpers < pl->cores ? SPINS : 0, memory_order_relaxed);
    atomic_store(&pl->running, helpers);
    atomic_fetch_add(&pl->generation, 1);
    pthread_cond_broadcast(&pl->wake);
    pthread_mutex_unlock(&pl->mutex);
    fmoe_run_worker(fn, arg, 0);
    const int spins = atomic_load_explicit(&pl->spins, memory_order_relaxed);
    for (int i = 0; i < spins && atomic_load_explicit(&pl->running, memory_order_acquire) > 0; i++) pause_cpu();
    pthread_mutex_lock(&pl->mutex);
    while (atomic_load(&pl->running) > 0) pthread_cond_wait(&pl->done, &pl->mutex);
    pthread_mutex_unlock(&pl->mutex);
    pthread_mutex_unlock(&pl->jobs);
    pool_put(pl);
}

/* When the library is unloaded or the process ends: no thread may be left running code that goes away. A job that
 * another thread is in is finished first, and its pool left to it. */
__attribute__((destructor)) static void pool_destroy(void)
{
    lock_pool();
    pool *pl = the_pool && the_pool->pid == getpid() ? the_pool : NULL;
    const bool idle = pl && !pl->users;
    the_pool = NULL;
    unlock_pool();
    if (!pl) return;
    pthread_mutex_lock(&pl->mutex);
    pl->stop = true;
    pthread_cond_broadcast(&pl->wake);
    pthread_mutex_unlock(&pl->mutex);
    for (int i = 0; i < pl->n_threads; i++) pthread_join(pl->threads[i], NULL);
    if (idle) free(pl);
}

int fmoe_cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* ---- on the threads of a plan ---- */

typedef struct callback {
    void (*fn)(void *, int);
    void *arg;
} callback;

static void call_worker(void *arg, int worker)
{
    const callback *c = arg;
    fmoe_run_worker(c->fn, c->arg, worker);
}

void fmoe_parallel(const fmoe_plan_impl *p, void (*fn)(void *arg, int worker), void *arg)
{
    callback c = {fn, arg};
    if (p->d.parallel) p->d.parallel(p->d.parallel_ctx, fmoe_cpu(p)->threads, call_worker, &c);
    else fmoe_pool_run(fmoe_cpu(p)->threads, fn, arg);
}

typedef struct parts_run {
    const fmoe_part *parts;
    int n;
} parts_run;

static void parts_worker(void *arg, int worker)
{
    const parts_run *run = arg;
    const int first = run->n > 1 && !run->parts[1].never_first ? worker % 2 : 0;
    for (int i = 0; i < run->n; i++) {
        const fmoe_part *part = &run->parts[(i + first) % run->n];
        part->fn(part->arg, worker);
    }
}

void fmoe_parallel_parts(const fmoe_plan_impl *p, const fmoe_part *parts, int n)
{
    parts_run run = {parts, n};
    if (n) fmoe_parallel(p, parts_worker, &run);
}

typedef struct rows_run {
    int64_t n, grain;
    void (*fn)(void *, int64_t, int64_t);
    void *ctx;
    fmoe_tasks tasks;
} rows_run;

static void rows_worker(void *arg, int worker)
{
    (void)worker;
    rows_run *run = arg;
    int64_t task;
    while (fmoe_claim(&run->tasks, &task))
        run->fn(run->ctx, task * run->grain, fmoe_min(run->n, (task + 1) * run->grain));
}

void fmoe_for_rows(const fmoe_plan_impl *p, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                   void *ctx)
{
    rows_run run = {.n = n, .grain = grain, .fn = fn, .ctx = ctx};
    run.tasks.n = fmoe_ceil_div(n, grain);
    if (n) fmoe_parallel(p, rows_worker, &run);
}
