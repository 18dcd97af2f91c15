/* SPDX-License-Identifier: Apache-2.0
 * check_device.c - device memory, tensors in two places, and one run on each. */
#include "check_device.h"

#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "util.h"

enum { TO_DEVICE = 1, TO_HOST = 2, REPEATS = 3 };

static struct {
    int (*set_device)(int32_t), (*allocate)(void **, size_t, int), (*release)(void *);
    int (*copy)(void *, size_t, const void *, size_t, int);
    int (*make_stream)(void **), (*wait)(void *), (*end_stream)(void *);
} acl;

const char *probe_open(probe_device *d, int32_t id)
{
    /* A plan loads CANN, or says what is missing; its symbols are the process's then. */
    fmoe_desc desc = FMOE_DESC_INIT;
    desc.op = FMOE_OP_ACTIVATION;
    desc.dtype = FMOE_F32;
    desc.device = (fmoe_device){FMOE_ASCEND, id};
    desc.I = 8;
    fmoe_plan plan = 0;
    if (fmoe_plan_create(&plan, &desc) != FMOE_OK) return fmoe_last_error();
    fmoe_plan_destroy(&plan);
    static const struct {
        void *to;
        const char *name;
    } wanted[] = {{&acl.set_device, "aclrtSetDevice"},
                  {&acl.allocate, "aclrtMalloc"},
                  {&acl.release, "aclrtFree"},
                  {&acl.copy, "aclrtMemcpy"},
                  {&acl.make_stream, "aclrtCreateStream"},
                  {&acl.wait, "aclrtSynchronizeStream"},
                  {&acl.end_stream, "aclrtDestroyStream"}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *f = dlsym(RTLD_DEFAULT, wanted[i].name);
        if (!f) return wanted[i].name;
        memcpy(wanted[i].to, &f, sizeof f);
    }
    d->id = id;
    if (acl.set_device(id) != 0) return "aclrtSetDevice failed";
    if (acl.make_stream(&d->stream) != 0) return "aclrtCreateStream failed";
    return NULL;
}

void probe_close(probe_device *d)
{
    acl.wait(d->stream);
    if (d->workspace) acl.release(d->workspace);
    acl.end_stream(d->stream);
}

static void trouble(probe_device *d, const char *what, const char *text)
{
    d->now->failed = true;
    if (!d->now->problem[0]) snprintf(d->now->problem, sizeof d->now->problem, "%s: %s", what, text);
}

/* ---- Tensors ---- */

double probe_unit(probe_device *d) /* uniform in [-1, 1) */
{
    d->random ^= d->random << 13;
    d->random ^= d->random >> 7;
    d->random ^= d->random << 17;
    return (double)(d->random >> 11) * 0x1p-52 - 1.0;
}

static void *device_memory(probe_device *d, size_t bytes)
{
    void *p = NULL;
    if (d->n_blocks == 4 * MAX_TENSORS || acl.allocate(&p, bytes + 64, 0) != 0) {
        trouble(d, "aclrtMalloc", "no memory on the device");
        return NULL;
    }
    return d->blocks[d->n_blocks++] = p;
}

static void put(void *p, int dtype, int64_t i, double v)
{
    if (dtype == FMOE_F32) ((float *)p)[i] = (float)v;
    else if (dtype == FMOE_BF16) ((uint16_t *)p)[i] = fmoe_float_to_bf16((float)v);
    else if (dtype == FMOE_F16) ((uint16_t *)p)[i] = fmoe_float_to_f16((float)v);
    else fmoe_set_int(p, dtype, i, (int64_t)v);
}

static double get(const void *p, int dtype, int64_t i)
{
    if (dtype == FMOE_F32) return (double)((const float *)p)[i];
    if (dtype == FMOE_BF16) return (double)fmoe_bf16_to_float(((const uint16_t *)p)[i]);
    if (dtype == FMOE_F16) return (double)fmoe_f16_to_float(((const uint16_t *)p)[i]);
    return (double)fmoe_get_int(p, dtype, i);
}

static int64_t count(const twin *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->dev.ndim; i++) n *= t->shape[i];
    return n;
}

static size_t bytes_of(const twin *t) { return (size_t)count(t) * fmoe_dtype_size(t->dtype); }

/* What the reference's tensor holds, rounded, goes to the device. The reference reads double, integers as they are. */
static void upload(probe_device *d, twin *t)
{
    const int64_t n = count(t);
    char *host = malloc(bytes_of(t) + 1);
    if (!host) abort();
    for (int64_t i = 0; i < n; i++) {
        if (t->dtype < 0) {
            put(host, t->dtype, i, (double)fmoe_get_int(t->ref.data, t->dtype, i));
        } else {
            put(host, t->dtype, i, ((double *)t->ref.data)[i]);
            ((double *)t->ref.data)[i] = get(host, t->dtype, i);
        }
    }
    if (t->dev.data && n && acl.copy(t->dev.data, bytes_of(t), host, bytes_of(t), TO_DEVICE) != 0)
        trouble(d, "aclrtMemcpy", t->name);
    free(host);
}

static fmoe_datatype datatype(int dtype)
{
    return dtype < 0            ? (fmoe_datatype){0, (uint8_t)-dtype, 1}
           : dtype == FMOE_BF16 ? (fmoe_datatype){4, 16, 1}
           : dtype == FMOE_F16  ? (fmoe_datatype){2, 16, 1}
           : dtype == FMOE_F64  ? (fmoe_datatype){2, 64, 1}
                                : (fmoe_datatype){2, 32, 1};
}

twin *probe_tensor(probe_device *d, const char *name, int dtype, int ndim, const int64_t *shape, double scale)
{
    twin *t = calloc(1, sizeof *t);
    if (!t || d->count == MAX_TENSORS) abort();
    d->tensors[d->count++] = t;
    t->name = name;
    t->dtype = dtype;
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    t->dev = (fmoe_tensor){.device = {FMOE_ASCEND, d->id}, .ndim = ndim, .dtype = datatype(dtype), .shape = t->shape};
    t->ref = (fmoe_tensor){
        .device = {FMOE_CPU, 0}, .ndim = ndim, .dtype = datatype(dtype < 0 ? dtype : FMOE_F64), .shape = t->shape};
    const int64_t n = count(t);
    t->ref.data = calloc((size_t)n + 1, sizeof(double));
    if (!t->ref.data) abort();
    t->dev.data = device_memory(d, bytes_of(t));
    for (int64_t i = 0; i < n && dtype > 0; i++) ((double *)t->ref.data)[i] = scale * probe_unit(d);
    upload(d, t);
    return t;
}

/* [a,b,c] stored [a,c,b]. */
twin *probe_turned(probe_device *d, const char *name, int dtype, int64_t a, int64_t b, int64_t c, double scale)
{
    twin *t = probe_tensor(d, name, dtype, 3, (const int64_t[]){a, b, c}, scale);
    t->strides[0] = b * c;
    t->strides[1] = 1;
    t->strides[2] = b;
    t->dev.strides = t->ref.strides = t->strides;
    return t;
}

twin *probe_ids(probe_device *d, int64_t T, int64_t k, int64_t E, bool skip)
{
    const int dtype = E == 1 ? I32 : I64;
    twin *t = probe_tensor(d, "ids", dtype, 2, (const int64_t[]){T, k}, 0);
    for (int64_t i = 0; i < T * k; i++) {
        int64_t id = (int64_t)((probe_unit(d) + 1) / 2 * (double)(E - 1)); /* the last expert stays idle */
        if (skip && i % 5 == 0) id = -1;
        fmoe_set_int(t->ref.data, dtype, i, E == 1 ? 0 : id);
    }
    upload(d, t);
    return t;
}

twin *probe_map(probe_device *d, const twin *ids, int64_t E)
{
    const int64_t slots = ids->shape[0] * ids->shape[1];
    twin *t = probe_tensor(d, "map", I32, 1, &slots, 0);
    int64_t row = 0;
    for (int64_t i = 0; i < slots; i++) fmoe_set_int(t->ref.data, I32, i, -1);
    for (int64_t e = 0; e < E; e++)
        for (int64_t i = 0; i < slots; i++)
            if (fmoe_get_int(ids->ref.data, ids->dtype, i) == e) fmoe_set_int(t->ref.data, I32, i, row++);
    upload(d, t);
    return t;
}

twin *probe_sizes(probe_device *d, int64_t E, int64_t rows, bool cumulative)
{
    twin *t = probe_tensor(d, "sizes", I64, 1, &E, 0);
    int64_t sum = 0;
    for (int64_t e = 0; e < E; e++) {
        const int64_t n = e == 1 ? 0 : rows / (E + 1) + e % 3; /* one group is empty, some rows are left over */
        sum += n;
        fmoe_set_int(t->ref.data, I64, e, cumulative ? sum : n);
    }
    upload(d, t);
    return t;
}

twin *probe_out(twin *t)
{
    t->out = true;
    t->exact = t->dtype < 0;
    return t;
}

void probe_list(const twin *stack, fmoe_tensor *dev, fmoe_tensor *ref)
{
    const int64_t E = stack->shape[0], each = stack->shape[1] * stack->shape[2];
    for (int64_t e = 0; e < E; e++) {
        dev[e] = stack->dev;
        ref[e] = stack->ref;
        dev[e].ndim = ref[e].ndim = 2;
        dev[e].shape = ref[e].shape = (int64_t *)stack->shape + 1;
        dev[e].data = (char *)stack->dev.data + (size_t)(e * each) * fmoe_dtype_size(stack->dtype);
        ref[e].data = (double *)stack->ref.data + e * each;
    }
}

/* ---- Runs ---- */

/* Every launch by its name, done at once. */
static int note(void *ctx, const char *name, int (*launch)(void *), void *arg)
{
    probe_device *d = ctx;
    int i = 0;
    while (i < d->n_operators && strcmp(d->operators[i], name) != 0) i++;
    if (i == d->n_operators && i < MAX_OPERATORS) snprintf(d->operators[d->n_operators++], 64, "%s", name);
    if (i < MAX_OPERATORS) d->now->used[i / 64] |= (uint64_t)1 << i % 64;
    d->now->launches++;
    const int code = launch(arg);
    if (code != 0) {
        char text[96];
        snprintf(text, sizeof text, "phase 2 answered %d", code);
        trouble(d, name, text);
    }
    return 0;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void compare(probe_device *d, const twin *t)
{
    probe_case *c = d->now;
    const int64_t n = count(t);
    char *host = malloc(bytes_of(t) + 1);
    if (!host) abort();
    if (n && acl.copy(host, bytes_of(t), t->dev.data, bytes_of(t), TO_HOST) != 0) trouble(d, "aclrtMemcpy", t->name);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        const double g = get(host, t->dtype, i),
                     w = t->dtype < 0 ? (double)fmoe_get_int(t->ref.data, t->dtype, i) : ((double *)t->ref.data)[i];
        error += (g - w) * (g - w);
        norm += w * w;
    }
    free(host);
    const double relative = error == 0 ? 0 : sqrt(error) / sqrt(norm > 0 ? norm : 1);
    const bool bad = !(relative <= (t->exact ? 0 : c->bound)); /* NaN too */
    if (!(relative <= c->worst) || (bad && !c->failed)) {
        c->worst = relative;
        c->where = t->name;
    }
    c->failed = c->failed || bad;
}

static void *workspace_of(probe_device *d, size_t bytes)
{
    if (bytes <= d->workspace_bytes) return bytes ? d->workspace : NULL;
    if (d->workspace) acl.release(d->workspace);
    d->workspace_bytes = bytes + bytes / 4;
    if (acl.allocate(&d->workspace, d->workspace_bytes, 0) == 0) return d->workspace;
    d->workspace_bytes = 0;
    trouble(d, "aclrtMalloc", "no memory on the device for the workspace");
    return d->workspace = NULL;
}

void probe_run(probe_device *d, fmoe_desc desc, fmoe_pass pass, int64_t T, uint32_t flags, probe_call call,
               const void *dev_args, const void *ref_args)
{
    probe_case *c = d->now;
    fmoe_plan plan = 0, ref = 0;
    fmoe_run run = FMOE_RUN_INIT, plain = FMOE_RUN_INIT;
    size_t bytes = 0;
    desc.size = sizeof desc;
    desc.device = (fmoe_device){FMOE_ASCEND, d->id};
    fmoe_desc exact = desc;
    exact.device = (fmoe_device){FMOE_CPU, 0};
    exact.dtype = FMOE_F64;
    run.flags = plain.flags = flags;
    run.stream = d->stream;
    run.submit = note;
    run.submit_ctx = d;
    if (fmoe_plan_create(&plan, &desc) != FMOE_OK ||
        fmoe_workspace_bytes(plan, pass, T, &run.workspace_bytes) != FMOE_OK) {
        trouble(d, "sizing", fmoe_last_error());
    } else if (fmoe_plan_create(&ref, &exact) != FMOE_OK || fmoe_workspace_bytes(ref, pass, T, &bytes) != FMOE_OK) {
        trouble(d, "the reference", fmoe_last_error());
    } else {
        plain.workspace_bytes = bytes;
        plain.workspace = bytes ? malloc(bytes) : NULL;
        run.workspace = workspace_of(d, run.workspace_bytes);
        if (call(ref, ref_args, &plain) != FMOE_OK) trouble(d, "the reference", fmoe_last_error());
        if (call(plan, dev_args, &run) != FMOE_OK) trouble(d, "the call", fmoe_last_error());
        if (acl.wait(d->stream) != 0) trouble(d, "the device", "an error at the synchronisation after the run");
        for (int i = 0; i < d->count; i++)
            if (d->tensors[i]->out) compare(d, d->tensors[i]);
        const int launches = c->launches;
        double best = 1e30;
        for (int i = 0; i < REPEATS && !c->failed; i++) {
            const double begin = now_ms();
            if (call(plan, dev_args, &run) != FMOE_OK) trouble(d, "the call, repeated", fmoe_last_error());
            acl.wait(d->stream);
            best = fmin(best, now_ms() - begin);
        }
        c->launches = launches;
        c->ms += best < 1e29 ? best : 0;
        free(plain.workspace);
    }
    fmoe_plan_destroy(&plan);
    fmoe_plan_destroy(&ref);
    for (int i = 0; i < d->count; i++) d->tensors[i]->out = false;
}

bool probe_saved(probe_device *d, fmoe_desc desc, int64_t T, void **dev, size_t *dev_bytes, void **ref,
                 size_t *ref_bytes)
{
    fmoe_plan plan = 0;
    desc.size = sizeof desc;
    desc.device = (fmoe_device){FMOE_ASCEND, d->id};
    bool good = fmoe_plan_create(&plan, &desc) == FMOE_OK && fmoe_saved_bytes(plan, T, dev_bytes) == FMOE_OK;
    fmoe_plan_destroy(&plan);
    desc.device = (fmoe_device){FMOE_CPU, 0};
    desc.dtype = FMOE_F64;
    good = good && fmoe_plan_create(&plan, &desc) == FMOE_OK && fmoe_saved_bytes(plan, T, ref_bytes) == FMOE_OK;
    fmoe_plan_destroy(&plan);
    if (!good) {
        trouble(d, "sizing", fmoe_last_error());
        return false;
    }
    char *p = device_memory(d, *dev_bytes + 256);
    *dev = p ? p + (256 - (uintptr_t)p % 256) % 256 : NULL;
    *ref = *ref_bytes ? aligned_alloc(64, fmoe_align_up(*ref_bytes, 64)) : NULL;
    return *dev != NULL;
}

void probe_end_case(probe_device *d)
{
    acl.wait(d->stream);
    for (int i = 0; i < d->count; i++) {
        free(d->tensors[i]->ref.data);
        free(d->tensors[i]);
    }
    for (int i = 0; i < d->n_blocks; i++) acl.release(d->blocks[i]);
    d->count = d->n_blocks = 0;
}
