/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h - the check harness: every kernel of kernels.inc and every operation, at every ISA level, against a
 * computation in double. `fusedmoe check` and the tests run it.
 *
 * A check draws shapes and values: draw i of a check depends on the seed, the check's name and i alone, so that
 * `--seed S -f NAME --draw I` repeats it. Inputs end at a page that may not be touched, or begin after one; outputs are
 * poisoned (all bits one: NaN, -1), and every byte beside their elements must still be poison afterwards. Comparisons
 * have a bound that is derived, |y - ref| <= c(n) * u * sum |a_i b_i|, and the largest share of the bound that was used
 * is printed. */
#ifndef FMOE_CHECK_H
#define FMOE_CHECK_H

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>

#include "acts.h"
#include "cpu/kernels/kernels.h"
#include "util.h"

typedef struct check_case {
    const char *name;
    void (*draw)(int64_t index); /* the first `at_least` draws may be listed corners, all others are free */
    int64_t at_least;            /* draws that are made whatever the time */
    double weight;               /* share of the time */
    int slow;                    /* 1: not with --quick; 2: takes seconds, at the highest level only */
} check_case;

/* Tables of checks, each closed by a NULL name. */
extern const check_case check_op_cases[];     /* check_ops.c: route, permute, unpermute, activation */
extern const check_case check_gmm_cases[];    /* check_gmm.c */
extern const check_case check_layer_cases[];  /* check_layer.c: experts */
extern const check_case check_block_cases[];  /* check_block.c */
extern const check_case check_same_cases[];   /* check_same.c: metamorphic, determinism */
extern const check_case check_packed_cases[]; /* check_packed.c: packed weights */
extern const check_case check_steps_cases[];  /* check_steps.c: FMOE_ROUND_STEPS */

/* One line of kernels.inc at the level under test. */
typedef struct check_kernel {
    const char *type, *field;
    size_t offset; /* in fmoe_kernels */
} check_kernel;

typedef struct check_kernel_case {
    const char *type;
    void (*draw)(const check_kernel *k, int64_t index);
    void (*bench)(const check_kernel *k, const fmoe_kernels *table, int64_t *items,
                  double *flops); /* NULL: not timed */
    int64_t at_least;
} check_kernel_case;

extern const check_kernel_case check_kernel_cases[]; /* check_gemm.c, check_rows.c through check_kernels.c */

extern fmoe_kernels check_table;   /* the level's */
extern int check_level, check_top; /* the level under test, and the last one of this run */
extern bool check_quick;           /* keep it small: an emulator or a sanitizer is at work */
extern bool check_loose;           /* 64 bytes between memory and the forbidden page */

/* ---- drawing ---- */

uint64_t check_random(void);
double check_uniform(void);     /* [0, 1) */
int64_t check_below(int64_t n); /* [0, n) */
int64_t check_pick(const int64_t *v, int n);
#define CHECK_PICK(...)                                                                                                \
    check_pick((const int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))
int64_t check_size(int64_t most); /* 1, primes, multiples of tiles and their neighbours, not above most */

/* ---- failing ---- */

void check_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
_Noreturn void check_leave(void); /* the rest of the draw makes no sense */
void check_note(const char *format, ...)
    __attribute__((format(printf, 1, 2))); /* describes the draw, shown when it fails */
void check_info(const char *format, ...) __attribute__((format(printf, 1, 2))); /* shown on the check's line */
bool check_failed(void);                                                        /* so far in this draw */

#define CHECK_OK(expr)                                                                                                 \
    do {                                                                                                               \
        const fmoe_status status_ = (expr);                                                                            \
        if (status_ != FMOE_OK) {                                                                                      \
            check_fail("%s: %s: %s", #expr, fmoe_status_string(status_), fmoe_last_error());                           \
            check_leave();                                                                                             \
        }                                                                                                              \
    } while (0)

/* One element against its bound; the largest share is kept. NaN and Inf must match. */
void check_near(const char *what, int64_t i, double got, double want, double bound);

/* c(n): the sum of n products in f32. Errors of a chain of n roundings add up like a random walk, sqrt(n) steps of at
 * most u times the sum of magnitudes; 8 + 2 sqrt(n) is 2 sigma of the worst case of every step being a full u, and
 * never more than the certain bound n + 2. */
double check_c(int64_t n);
#define U32 0x1p-24
double check_u(int dtype); /* unit roundoff of storing: f32 2^-24, bf16 2^-8, f16 2^-11, f64 2^-53 */
/* Absolute, for what is too small for a relative bound: of f16 its smallest number, 2^-24, twice the largest error of
 * rounding to it (2^-25); of the others 2^-120, for sums of denormals. */
double check_tiny(int dtype);

/* ---- memory: freed after the draw ---- */

enum { CHECK_I32 = -32, CHECK_I64 = -64 };

void *check_alloc(size_t bytes); /* zeroed heap */
/* Memory of exactly these bytes, at the end of a mapping before a forbidden page, or (now and then) after one.
 * Poisoned. */
void *check_guarded(size_t bytes, size_t align);

#define CHECK_SHAPE(...)                                                                                               \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) { __VA_ARGS__ }

/* A guarded tensor, poisoned. strides NULL: compact. */
fmoe_tensor *check_tensor(int dtype, int ndim, const int64_t *shape, const int64_t *strides);
fmoe_tensor *check_rows(int dtype, int64_t rows, int64_t cols, int64_t gap);                 /* padded rows */
fmoe_tensor *check_stack(int dtype, int64_t E, int64_t rows, int64_t cols, bool transposed); /* [E,rows,cols] */
fmoe_tensor *check_f64(const fmoe_tensor *t);    /* compact copy, plain heap */
fmoe_tensor *check_slices(const fmoe_tensor *t); /* as an array of t[e] */
fmoe_tensor *check_part(const fmoe_tensor *t, int d, int64_t from, int64_t n, int64_t step); /* a view */
int64_t check_count(const fmoe_tensor *t);
double check_get(const fmoe_tensor *t, int64_t i);
void check_set(const fmoe_tensor *t, int64_t i, double v);
fmoe_tensor *check_fill(fmoe_tensor *t, double scale);             /* uniform in [-scale, scale) */
fmoe_tensor *check_ids(fmoe_tensor *t, int64_t E, uint32_t flags); /* routing of a drawn kind */
fmoe_tensor *check_poison(fmoe_tensor *t);                         /* again */
void check_gaps(const char *what, const fmoe_tensor *t);           /* the bytes beside the elements are still poison */
void check_equal(const char *what, const fmoe_tensor *a, const fmoe_tensor *b); /* bitwise */
fmoe_tensor *check_magnitudes(const fmoe_tensor *t);                            /* check_f64 of |t| */
/* Sums in f32 against double: c u times the sum of their terms' magnitudes, and the rounding of what is stored. */
void check_sums(const char *what, const fmoe_tensor *got, const fmoe_tensor *want, const fmoe_tensor *magnitude,
                double c);
double check_rel_l2(const fmoe_tensor *got, const fmoe_tensor *want);

/* ---- plans ---- */

fmoe_plan check_plan(const fmoe_desc *d); /* destroyed after the draw */
/* Workspace of exactly the right size for a pass, guarded, oddly aligned. */
fmoe_run check_run(fmoe_plan plan, fmoe_pass pass, int64_t T, uint32_t flags);
double check_seconds(void);

/* ---- activations in double (check_act.c) ---- */

typedef struct check_act_value {
    double a, dg, du;
} check_act_value;

check_act_value check_act(int act, double alpha, double limit, double g, double u); /* ungated: of u; dg is 0 */
/* Bound on a (which 0), da/dg (1), da/du (2) computed in f32 from g and u that are known to eg and eu. */
double check_act_bound(const fmoe_act_params *p, double g, double u, double eg, double eu, int which);

int fmoe_check_main(int argc, char **argv);

#endif
