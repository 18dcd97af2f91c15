/* SPDX-License-Identifier: Apache-2.0
 *
 * test.h - the test framework. One program is one .c file: include this first, write TEST(name) { ... }, nothing else.
 *
 *   test_x [--seed N] [--list] [substring ...]     run the tests whose name contains one of the substrings
 *
 * A failed CHECK is reported and the test goes on; REQUIRE and SKIP leave it, also from a helper. Random numbers are
 * drawn from the seed and the test's name, so a test sees the same ones alone and in company. Not for use from several
 * threads at once. */
#ifndef FMOE_TEST_H
#define FMOE_TEST_H

#include <inttypes.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusedmoe.h"

typedef struct test_case {
    const char *name;
    void (*fn)(void);
    struct test_case *next;
} test_case;
typedef union test_block {
    union test_block *next;
    max_align_t align;
} test_block;

static test_case *test_list, **test_tail = &test_list;
static test_block *test_blocks;

#ifndef TEST_CALLOC /* a test on a device has memory that both sides see */
#define TEST_CALLOC calloc
#define TEST_FREE free
#endif
static uint64_t test_seed = 1, test_state;
static int test_failures; /* of the test that runs */
static jmp_buf test_leave;

#define TEST(id)                                                                                                       \
    static void test_##id(void);                                                                                       \
    __attribute__((constructor)) static void register_##id(void)                                                       \
    {                                                                                                                  \
        static test_case c = {#id, test_##id, NULL};                                                                   \
        *test_tail = &c;                                                                                               \
        test_tail = &c.next;                                                                                           \
    }                                                                                                                  \
    static void test_##id(void)

#define TEST_FAIL(...)                                                                                                 \
    (test_failures++, printf("  %s:%d: ", __FILE__, __LINE__), printf(__VA_ARGS__), (void)putchar('\n'))
#define CHECK(cond) ((cond) ? (void)0 : TEST_FAIL("%s", #cond))
#define REQUIRE(cond) ((cond) ? (void)0 : (TEST_FAIL("%s", #cond), longjmp(test_leave, 1)))
#define SKIP(reason) (printf("  %s\n", reason), longjmp(test_leave, 2))
#define CHECK_EQ(a, b) test_check_eq(__FILE__, __LINE__, #a, #b, (int64_t)(a), (int64_t)(b))
#define CHECK_STATUS(expr, want) test_check_status(__FILE__, __LINE__, #expr, (expr), (want))
#define CHECK_ERROR_HAS(part)                                                                                          \
    (strstr(fmoe_last_error(), part) ? (void)0 : TEST_FAIL("\"%s\" has no \"%s\"", fmoe_last_error(), part))

static inline void test_check_eq(const char *file, int line, const char *a, const char *b, int64_t x, int64_t y)
{
    if (x == y) return;
    test_failures++;
    printf("  %s:%d: %s is %" PRId64 ", %s is %" PRId64 "\n", file, line, a, x, b, y);
}

static inline void test_check_status(const char *file, int line, const char *expr, fmoe_status got, fmoe_status want)
{
    if (got == want) return;
    test_failures++;
    printf("  %s:%d: %s: %s (%s), not %s\n", file, line, expr, fmoe_status_string(got), got ? fmoe_last_error() : "",
           fmoe_status_string(want));
}

/* Zeroed memory that lives until the end of the test. Each block is its own malloc, so a sanitizer sees its ends. Not
 * inlined: gcc 12 at -O3 would see the size and warn of loops over shapes that it unrolls too far. */
__attribute__((noinline, unused)) static void *test_alloc(size_t bytes)
{
    test_block *b = TEST_CALLOC(1, sizeof *b + bytes);
    if (!b) abort();
    b->next = test_blocks;
    test_blocks = b;
    return b + 1;
}

/* splitmix64; test_uniform is in [0, 1). */
static inline uint64_t test_random(void)
{
    uint64_t z = test_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline double test_uniform(void) { return (double)(test_random() >> 11) * 0x1p-53; }
static inline int64_t test_below(int64_t n) { return (int64_t)(test_random() % (uint64_t)n); }

static inline int test_run(const test_case *t) /* 0 passed, 1 failed, 2 skipped */
{
    test_failures = 0;
    test_state = test_seed;
    for (const char *c = t->name; *c; c++) test_state = test_state * 0x100000001b3u ^ (uint64_t)*c;
    const int left = setjmp(test_leave);
    if (!left) t->fn();
    while (test_blocks) {
        test_block *b = test_blocks;
        test_blocks = b->next;
        TEST_FREE(b);
    }
    const int result = test_failures ? 1 : left == 2 ? 2 : 0;
    printf("%-7s %s\n", (const char *[]){"ok", "FAILED", "SKIP"}[result], t->name);
    fflush(stdout);
    return result;
}

int main(int argc, char **argv)
{
    int counts[3] = {0, 0, 0}, filters = 0, list = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--seed") && i + 1 < argc) test_seed = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--list")) list = 1;
        else argv[++filters] = argv[i];
    }
    if (!list) printf("seed %" PRIu64 "\n", test_seed);
    for (const test_case *t = test_list; t; t = t->next) {
        int wanted = filters == 0;
        for (int i = 1; i <= filters; i++) wanted |= strstr(t->name, argv[i]) != NULL;
        if (wanted && list) puts(t->name);
        else if (wanted) counts[test_run(t)]++;
    }
    if (!list) printf("%d passed, %d failed, %d skipped\n", counts[0], counts[1], counts[2]);
    return counts[1] > 0;
}

#endif
