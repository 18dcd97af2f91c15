/* SPDX-License-Identifier: Apache-2.0
 *
 * test_alloc.c - row 21: the n-th allocation fails, for every n, once and from then on, in every entry point. The
 * linker puts our malloc, calloc, realloc, posix_memalign and pthread_create before the library's (--wrap). Each
 * attempt is a child process, so that the thread pool is made anew in each; under ASan the child also looks for leaks.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"

static _Atomic int armed, seen;
static int fail_at, fail_on; /* the n-th; 1: and all after it */

static int fails(void)
{
    if (!armed) return 0;
    const int n = atomic_fetch_add(&seen, 1) + 1;
    return n == fail_at || (fail_on && n > fail_at);
}

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
int __real_posix_memalign(void **p, size_t align, size_t n);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
int __wrap_posix_memalign(void **p, size_t align, size_t n);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg);
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

void *__wrap_malloc(size_t n) { return fails() ? NULL : __real_malloc(n); }
void *__wrap_calloc(size_t n, size_t size) { return fails() ? NULL : __real_calloc(n, size); }
void *__wrap_realloc(void *p, size_t n) { return fails() ? NULL : __real_realloc(p, n); }
int __wrap_posix_memalign(void **p, size_t align, size_t n)
{
    return fails() ? ENOMEM : __real_posix_memalign(p, align, n);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    return fails() ? EAGAIN : __real_pthread_create(thread, attr, fn, arg);
}

static void arm(int n, int on)
{
    fail_at = n;
    fail_on = on;
    seen = 0;
    armed = 1;
}

/* Plan, sizes, run, destroy, all while allocations fail: out of memory may be said by the plan only, and the run then
 * gives the same bits with fewer threads. Afterwards everything works. Returns the number of failures (of the test). */
static int attempt(api_call *c, const unsigned char *want, int n, int on)
{
    const fmoe_tensor *out = NULL;
    for (int i = 0; i < c->n_slots; i++)
        if (c->slots[i].role & SLOT_OUT) out = *c->slots[i].at;
    const size_t bytes = (size_t)tensor_count(out) * fmoe_dtype_size(fmoe_tensor_dtype(out));
    size_t saved, workspace;
    int bad = 0;
    for (int again = 0; again < 2; again++) {
        fmoe_plan plan = 0;
        if (again) armed = 0;
        else arm(n, on);
        const fmoe_status status = fmoe_plan_create(&plan, &c->d);
        if (status != FMOE_OK && (again || status != FMOE_ERR_NOMEM || !strstr(fmoe_last_error(), "allocated"))) bad++;
        if (status != FMOE_OK) {
            if (plan) bad++;
            continue;
        }
        c->plan = plan;
        memset(fmoe_data(out), 0xa5, bytes);
        if (fmoe_workspace_bytes(plan, c->pass, c->T, &workspace) || fmoe_saved_bytes(plan, c->T, &saved)) bad++;
        if (call_make(c) != FMOE_OK) bad++;
        if (memcmp(fmoe_data(out), want, bytes)) bad++;
        char text[300];
        fmoe_plan_describe(plan, text, sizeof text);
        fmoe_info(text, sizeof text);
        if (fmoe_plan_destroy(&plan) != FMOE_OK) bad++;
    }
    const int reached = seen >= n;
    armed = 0;
    if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check()) bad += 100;
    return bad ? bad : reached ? 0 : -1;
}

static void sweep(call_kind kind, fmoe_pass pass, int on)
{
    api_call c;
    memset(&c, 0, sizeof c);
    c.kind = kind;
    c.pass = pass;
    c.d = call_desc(kind, FMOE_F32);
    c.d.threads = 1; /* this process makes no pool: children do, from the start */
    REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
    call_fill(&c);
    CHECK_STATUS(call_make(&c), FMOE_OK);
    const fmoe_tensor *out = NULL;
    for (int i = 0; i < c.n_slots; i++)
        if (c.slots[i].role & SLOT_OUT) out = *c.slots[i].at;
    const size_t bytes = (size_t)tensor_count(out) * fmoe_dtype_size(fmoe_tensor_dtype(out));
    const unsigned char *want = memcpy(test_alloc(bytes), fmoe_data(out), bytes);
    fmoe_plan_destroy(&c.plan);
    c.d.threads = 4;
    fmoe_plan wide;
    REQUIRE(fmoe_plan_create(&wide, &c.d) == FMOE_OK);
    REQUIRE(fmoe_workspace_bytes(wide, pass, c.T, &c.run.workspace_bytes) == FMOE_OK);
    fmoe_plan_destroy(&wide);
    c.run.workspace = test_alloc(c.run.workspace_bytes);

    int n = 1;
    for (;; n++) {
        fflush(stdout);
        const pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            const int bad = attempt(&c, want, n, on);
            _exit(bad < 0 ? 255 : bad > 100 ? 100 : bad);
        }
        int code;
        REQUIRE(waitpid(child, &code, 0) == child);
        if (WIFEXITED(code) && WEXITSTATUS(code) == 255) break; /* n was past the last allocation */
        if (!WIFEXITED(code) || WEXITSTATUS(code)) {
            TEST_FAIL("%s %s, allocation %d fails%s: %s %d", call_names[kind], pass ? "backward" : "forward", n,
                      on ? " and all after it" : "",
                      WIFEXITED(code) ? WEXITSTATUS(code) >= 100 ? "leak, failures" : "failures" : "signal",
                      WIFEXITED(code) ? WEXITSTATUS(code) : WTERMSIG(code));
            if (n > 40) break;
        }
        REQUIRE(n < 200);
    }
    CHECK(n > 2); /* there was something to fail: the plan at least */
}

TEST(row21_once)
{
    for (int kind = 0; kind < CALL_KINDS; kind++)
        for (int pass = 0; pass < 2; pass++) sweep((call_kind)kind, (fmoe_pass)pass, 0);
}

TEST(row21_from_then_on)
{
    for (int kind = 0; kind < CALL_KINDS; kind++)
        for (int pass = 0; pass < 2; pass++) sweep((call_kind)kind, (fmoe_pass)pass, 1);
}

/* Run calls do not allocate once the pool stands. */
TEST(run_calls_do_not_allocate)
{
    for (int kind = 0; kind < CALL_KINDS; kind++)
        for (int pass = 0; pass < 2; pass++) {
            api_call c;
            call_begin(&c, (call_kind)kind, (fmoe_pass)pass, FMOE_BF16);
            CHECK_STATUS(call_make(&c), FMOE_OK);
            arm(-1, 0);
            const fmoe_status status = call_make(&c);
            armed = 0;
            CHECK_STATUS(status, FMOE_OK);
            if (seen) TEST_FAIL("%s %d allocates %d times", call_names[kind], pass, seen);
            call_end(&c);
        }
}
