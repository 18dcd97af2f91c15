/* SPDX-License-Identifier: Apache-2.0
 * check_memory.c - guarded memory, tensors and plans that live for one draw of a check. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "check_memory.h"

enum { POISON = 0xff };

typedef struct block {
    struct block *next;
    void *map; /* NULL: the block itself is the memory */
    size_t map_bytes;
    unsigned char *open; /* the pages that may be touched */
    size_t open_bytes;
    max_align_t data[];
} block;

typedef struct held_plan {
    struct held_plan *next;
    fmoe_plan plan;
} held_plan;

static block *blocks;
static held_plan *plans;

static block *new_block(size_t bytes)
{
    block *b = calloc(1, sizeof *b + bytes);
    if (!b) abort();
    b->next = blocks;
    blocks = b;
    return b;
}

void *check_alloc(size_t bytes) { return new_block(bytes)->data; }

void *check_guarded(size_t bytes, size_t align)
{
    /* qemu 7.2 loads 16 bytes for the memory operand of a scalar FMA where a CPU loads 4: under it memory ends before
     * the page. */
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = check_loose ? 64 : 0,
                 open = fmoe_align_up(bytes + room ? bytes + room : 1, page);
    block *b = new_block(0);
    b->map_bytes = open + 2 * page;
    b->map = mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    b->open = (unsigned char *)b->map + page;
    b->open_bytes = open;
    if (b->map == MAP_FAILED || mprotect(b->open, open, PROT_READ | PROT_WRITE)) abort();
    memset(b->open, POISON, open);
    /* One in four begins after the first forbidden page, the others end at the second. */
    return check_below(4) == 0 ? b->open : b->open + (open - room - bytes) / align * align;
}

fmoe_plan check_plan(const fmoe_desc *d)
{
    held_plan *h = check_alloc(sizeof *h);
    CHECK_OK(fmoe_plan_create(&h->plan, d));
    h->next = plans;
    plans = h;
    return h->plan;
}

void check_memory_free(void)
{
    for (; plans; plans = plans->next) fmoe_plan_destroy(&plans->plan);
    while (blocks) {
        block *b = blocks;
        blocks = b->next;
        if (b->map) munmap(b->map, b->map_bytes);
        free(b);
    }
}

fmoe_run check_run(fmoe_plan plan, fmoe_pass pass, int64_t T, uint32_t flags)
{
    fmoe_run run = FMOE_RUN_INIT;
    CHECK_OK(fmoe_workspace_bytes(plan, pass, T, &run.workspace_bytes));
    run.workspace = run.workspace_bytes ? check_guarded(run.workspace_bytes, 1) : NULL;
    run.flags = flags;
    return run;
}

/* ---- tensors ---- */

int64_t check_count(const fmoe_tensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

static fmoe_tensor *header(int dtype, int ndim, const int64_t *shape, const int64_t *strides)
{
    fmoe_tensor *t = check_alloc(sizeof *t + 6 * sizeof(int64_t));
    *t = (fmoe_tensor){.device = {FMOE_CPU, 0}, .ndim = ndim, .shape = (int64_t *)(t + 1)};
    t->dtype = (fmoe_datatype){dtype < 0 ? 0 : dtype == FMOE_BF16 ? 4 : 2, (uint8_t)(8 * fmoe_dtype_size(dtype)), 1};
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    if (strides) t->strides = memcpy(t->shape + 3, strides, (size_t)ndim * sizeof *strides);
    return t;
}

static size_t span_bytes(const fmoe_tensor *t)
{
    int64_t last = check_count(t) ? 1 : 0;
    for (int d = 0; last && d < t->ndim; d++) last += (t->shape[d] - 1) * fmoe_stride(t, d);
    return (size_t)last * fmoe_dtype_size(fmoe_tensor_dtype(t));
}

fmoe_tensor *check_tensor(int dtype, int ndim, const int64_t *shape, const int64_t *strides)
{
    fmoe_tensor *t = header(dtype, ndim, shape, strides);
    t->data = check_guarded(span_bytes(t), fmoe_dtype_size(dtype));
    return t;
}

fmoe_tensor *check_rows(int dtype, int64_t rows, int64_t cols, int64_t gap)
{
    const int64_t strides[] = {cols + gap, 1};
    return check_tensor(dtype, CHECK_SHAPE(rows, cols), gap ? strides : NULL);
}

fmoe_tensor *check_stack(int dtype, int64_t E, int64_t rows, int64_t cols, bool transposed)
{
    const int64_t strides[] = {rows * cols, 1, rows};
    return check_tensor(dtype, CHECK_SHAPE(E, rows, cols), transposed ? strides : NULL);
}

fmoe_tensor *check_part(const fmoe_tensor *t, int d, int64_t from, int64_t n, int64_t step)
{
    int64_t shape[3], strides[3];
    for (int i = 0; i < t->ndim; i++) {
        shape[i] = t->shape[i];
        strides[i] = fmoe_stride(t, i);
    }
    shape[d] = n;
    fmoe_tensor *v = header(fmoe_tensor_dtype(t), t->ndim, shape, strides);
    v->strides[d] *= step;
    v->data = (char *)fmoe_data(t) + from * strides[d] * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
    return v;
}

fmoe_tensor *check_slices(const fmoe_tensor *t)
{
    fmoe_tensor *array = check_alloc((size_t)t->shape[0] * sizeof *array);
    for (int64_t e = 0; e < t->shape[0]; e++) {
        array[e] = *check_part(t, 0, e, 1, 1);
        array[e].ndim--;
        array[e].shape++;
        array[e].strides++;
    }
    return array;
}

static void *element(const fmoe_tensor *t, int64_t i)
{
    int64_t at = 0;
    if (!t->strides) return (char *)fmoe_data(t) + i * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
    for (int d = t->ndim - 1; d > 0; d--) {
        at += i % t->shape[d] * fmoe_stride(t, d);
        i /= t->shape[d];
    }
    at += i * fmoe_stride(t, 0);
    return (char *)fmoe_data(t) + at * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
}

double check_get(const fmoe_tensor *t, int64_t i)
{
    const void *p = element(t, i);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: return *(const double *)p;
    case FMOE_F32: return (double)*(const float *)p;
    case FMOE_BF16: return (double)fmoe_bf16_to_float(*(const uint16_t *)p);
    case FMOE_F16: return (double)fmoe_f16_to_float(*(const uint16_t *)p);
    case CHECK_I32: return *(const int32_t *)p;
    default: return (double)*(const int64_t *)p;
    }
}

void check_set(const fmoe_tensor *t, int64_t i, double v)
{
    void *p = element(t, i);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: *(double *)p = v; break;
    case FMOE_F32: *(float *)p = (float)v; break;
    case FMOE_BF16: *(uint16_t *)p = fmoe_float_to_bf16((float)v); break;
    case FMOE_F16: *(uint16_t *)p = fmoe_float_to_f16((float)v); break;
    case CHECK_I32: *(int32_t *)p = (int32_t)v; break;
    default: *(int64_t *)p = (int64_t)v;
    }
}

fmoe_tensor *check_fill(fmoe_tensor *t, double scale)
{
    const int64_t n = check_count(t);
    for (int64_t i = 0; i < n; i++) check_set(t, i, (2 * check_uniform() - 1) * scale);
    return t;
}

fmoe_tensor *check_f64(const fmoe_tensor *t)
{
    if (!t) return NULL;
    fmoe_tensor *c = header(FMOE_F64, t->ndim, t->shape, NULL);
    const int64_t n = check_count(t);
    c->data = check_alloc((size_t)n * sizeof(double) + 1);
    for (int64_t i = 0; i < n; i++) ((double *)c->data)[i] = check_get(t, i);
    return c;
}

fmoe_tensor *check_poison(fmoe_tensor *t)
{
    const int64_t n = check_count(t);
    const size_t size = fmoe_dtype_size(fmoe_tensor_dtype(t));
    for (int64_t i = 0; i < n; i++) memset(element(t, i), POISON, size);
    return t;
}

void check_gaps(const char *what, const fmoe_tensor *t)
{
    if (!t) return;
    const block *b = blocks;
    const unsigned char *data = fmoe_data(t);
    while (b && !(b->map && data >= b->open && data <= b->open + b->open_bytes)) b = b->next;
    if (!b) return; /* not one of ours */
    const size_t size = fmoe_dtype_size(fmoe_tensor_dtype(t));
    unsigned char *mine = calloc(1, b->open_bytes);
    if (!mine) abort();
    for (int64_t i = 0, n = check_count(t); i < n; i++)
        memset(mine + ((unsigned char *)element(t, i) - b->open), 1, size);
    for (size_t i = 0; i < b->open_bytes; i++)
        if (!mine[i] && b->open[i] != POISON) {
            check_fail("%s: byte %td from its first element was written", what, b->open + i - data);
            break;
        }
    free(mine);
}

void check_equal(const char *what, const fmoe_tensor *a, const fmoe_tensor *b)
{
    const int64_t n = check_count(a);
    const size_t size = fmoe_dtype_size(fmoe_tensor_dtype(a));
    if (n != check_count(b) || fmoe_tensor_dtype(a) != fmoe_tensor_dtype(b)) {
        check_fail("%s: sizes or dtypes differ", what);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        if (memcmp(element(a, i), element(b, i), size)) {
            check_fail("%s[%" PRId64 "]: %.9g and %.9g, bits differ", what, i, check_get(a, i), check_get(b, i));
            return;
        }
}

fmoe_tensor *check_magnitudes(const fmoe_tensor *t)
{
    fmoe_tensor *m = check_f64(t);
    for (int64_t i = 0; m && i < check_count(m); i++) ((double *)m->data)[i] = fabs(((double *)m->data)[i]);
    return m;
}

void check_sums(const char *what, const fmoe_tensor *got, const fmoe_tensor *want, const fmoe_tensor *magnitude,
                double c)
{
    const int dtype = fmoe_tensor_dtype(got);
    for (int64_t i = 0; i < check_count(want) && !check_failed(); i++) {
        const double w = check_get(want, i), m = check_get(magnitude, i);
        check_near(what, i, check_get(got, i), w, c * U32 * m + 1.01 * check_u(dtype) * fabs(w) + check_tiny(dtype));
    }
    check_gaps(what, got);
}

double check_rel_l2(const fmoe_tensor *got, const fmoe_tensor *want)
{
    double error = 0, norm = 0;
    for (int64_t i = 0, n = check_count(want); i < n; i++) {
        const double w = check_get(want, i), d = check_get(got, i) - w;
        error += d * d;
        norm += w * w;
    }
    return error == 0 ? 0 : sqrt(error / norm);
}

/* Uniform, all to one expert, to one half of the experts, duplicates inside a token, skip marks where the plan has
 * them. */
fmoe_tensor *check_ids(fmoe_tensor *t, int64_t E, uint32_t flags)
{
    const int64_t n = check_count(t), kind = check_below(4), one = check_below(E), half = (E + 1) / 2;
    for (int64_t i = 0; i < n; i++) {
        int64_t e = kind == 0 ? one : kind == 1 ? check_below(half) : check_below(E);
        if ((flags & FMOE_SKIP_NEG1) && check_below(4) == 0) e = -1;
        if ((flags & FMOE_SKIP_E) && check_below(4) == 0) e = E;
        check_set(t, i, (double)e);
    }
    return t;
}
