/* SPDX-License-Identifier: Apache-2.0
 * call.c - scratch, descriptors and the two-phase launch. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "ascend.h"

/* Sub-allocations: 64-byte starts and 32 bytes of room behind each piece are documented for 910B; operators like 512.
 */
enum { ALIGN = 512, ROOM = 32 };

enum { A_TENSOR, A_LIST, A_SCALAR, A_INTS };

fmoe_status asc_fail(asc_call *c, fmoe_status status, const char *format, ...)
{
    if (c->status != FMOE_OK) return c->status;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    c->status = status;
    return fmoe_fail(status, "Ascend: %s", text);
}

void asc_vendor_text(const fmoe_acl *acl, char *text, size_t n)
{
    const char *m = acl->aclGetRecentErrMsg();
    snprintf(text, n, "%s", m ? m : "no text");
    for (char *s = text; *s; s++)
        if (*s == '\n' || *s == '\r') *s = ' ';
}

static void fail_vendor(asc_call *c, const char *what, int code)
{
    char text[320];
    asc_vendor_text(c->acl, text, sizeof text);
    asc_fail(c, FMOE_ERR_DEVICE, "%s answered %d: %s", what, code, text);
}

/* The plan's device must be current on this thread; another one is put back afterwards. */
static fmoe_status set_device(asc_call *c)
{
    const int32_t want = c->p->d.device.id;
    int32_t now = -1;
    c->device_before = -1;
    if (c->acl->aclrtGetDevice(&now) == 0) {
        if (now == want) return FMOE_OK;
        c->device_before = now;
    }
    const aclError code = c->acl->aclrtSetDevice(want);
    if (code != 0) {
        c->device_before = -1;
        fail_vendor(c, "aclrtSetDevice", code);
    }
    return c->status;
}

/* An executor that phase 2 will not take. Phase 1 has put it into CANN's operator cache, and destroyed as it is it
 * would leave an entry without tasks: the next call of the same shapes would answer 0 and run nothing. Made repeatable
 * it is out of the cache. An operator that refuses that was never in it. */
static void drop_executor(const fmoe_acl *acl, aclOpExecutor *executor)
{
    if (!executor) return;
    if (acl->aclSetAclOpExecutorRepeatable(executor) != 0) acl->aclGetRecentErrMsg();
    acl->aclDestroyAclOpExecutor(executor);
}

static void set_up(asc_call *c, const fmoe_plan_impl *p)
{
    c->p = p;
    c->plan = p->priv;
    c->acl = c->plan->acl;
    c->stream = NULL;
    c->submit = NULL;
    c->submit_ctx = NULL;
    c->measure = false;
    c->status = FMOE_OK;
    c->base = NULL;
    c->used = c->peak = c->limit = 0;
    c->n_held = 0;
    c->device_before = -1;
    c->op_workspace = 0;
    c->executor = NULL;
    /* torch_npu names cached executors by hashes of its own, and leaves that on when one of its calls throws: ours
     * would be stored under its name. */
    if (c->acl->UnInitPTACacheThreadLocal) c->acl->UnInitPTACacheThreadLocal();
}

fmoe_status asc_begin(asc_call *c, const fmoe_plan_impl *p, const fmoe_run *run)
{
    set_up(c, p);
    c->stream = run->stream;
    c->submit = run->submit;
    c->submit_ctx = run->submit_ctx;
    if (run->workspace) {
        const size_t lost = (ALIGN - (uintptr_t)run->workspace % ALIGN) % ALIGN;
        c->base = (char *)run->workspace + lost;
        c->limit = run->workspace_bytes > lost ? run->workspace_bytes - lost : 0;
    }
    return set_device(c);
}

fmoe_status asc_begin_measure(asc_call *c, const fmoe_plan_impl *p)
{
    set_up(c, p);
    c->measure = true;
    c->base = (char *)(uintptr_t)((uint64_t)1 << 40); /* an address nobody follows */
    c->limit = SIZE_MAX / 2;
    return set_device(c);
}

fmoe_status asc_end(asc_call *c)
{
    if (c->device_before >= 0) {
        const aclError code = c->acl->aclrtSetDevice(c->device_before);
        c->device_before = -1;
        if (code != 0) fail_vendor(c, "aclrtSetDevice", code);
    }
    return c->status;
}

/* ---- Scratch ---- */

static bool room(asc_call *c, size_t bytes)
{
    size_t end;
    if (fmoe_add_overflow(c->used, bytes, &end)) {
        asc_fail(c, FMOE_ERR_OVERFLOW, "scratch of %zu bytes does not fit 64 bits", bytes);
        return false;
    }
    if (end > c->peak) c->peak = end;
    if (end <= c->limit) return true;
    asc_fail(c, FMOE_ERR_WORKSPACE, "workspace: %zu bytes are needed here, %zu are left of the caller's", end + ALIGN,
             c->limit);
    return false;
}

void *asc_scratch(asc_call *c, int64_t count, aclDataType dtype)
{
    size_t bytes;
    if (c->status != FMOE_OK) return NULL;
    if (count < 0 || fmoe_mul_overflow((size_t)count, asc_size(dtype), &bytes) ||
        fmoe_add_overflow(bytes, ROOM + ALIGN, &bytes)) {
        asc_fail(c, FMOE_ERR_OVERFLOW, "scratch of %lld elements does not fit 64 bits", (long long)count);
        return NULL;
    }
    bytes = bytes / ALIGN * ALIGN; /* ALIGN was added above: this rounds up */
    if (!room(c, bytes)) return NULL;
    void *p = c->base + c->used;
    c->used += bytes;
    return p;
}

void asc_release(asc_call *c, size_t mark) { c->used = mark; }

/* ---- Views ---- */

size_t asc_size(aclDataType dtype)
{
    switch (dtype) {
    case ACL_INT64: return 8;
    case ACL_FLOAT:
    case ACL_INT32: return 4;
    case ACL_BOOL:
    case ACL_INT8:
    case ACL_UINT8: return 1;
    default: return 2;
    }
}

aclDataType asc_dtype(int dtype)
{
    switch (dtype) {
    case FMOE_F32: return ACL_FLOAT;
    case FMOE_BF16: return ACL_BF16;
    case FMOE_F16: return ACL_FLOAT16;
    case -32: return ACL_INT32;
    default: return ACL_INT64;
    }
}

aclDataType asc_plan_dtype(const fmoe_plan_impl *p) { return asc_dtype(p->d.dtype); }

asc_view asc_3d(void *data, aclDataType dtype, int64_t a, int64_t b, int64_t c)
{
    return (asc_view){data, dtype, 3, {a, b, c}, {b * c, c, 1}};
}

asc_view asc_2d(void *data, aclDataType dtype, int64_t rows, int64_t cols)
{
    return (asc_view){data, dtype, 2, {rows, cols, 0}, {cols, 1, 0}};
}

asc_view asc_1d(void *data, aclDataType dtype, int64_t n) { return (asc_view){data, dtype, 1, {n, 0, 0}, {1, 0, 0}}; }

asc_view asc_of(const fmoe_tensor *t)
{
    asc_view v = {.data = fmoe_data(t), .dtype = asc_dtype(fmoe_tensor_dtype(t)), .ndim = t->ndim};
    for (int i = 0; i < t->ndim && i < 3; i++) {
        v.dims[i] = t->shape[i];
        v.strides[i] = fmoe_stride(t, i);
    }
    return v;
}

asc_view asc_turn(asc_view v)
{
    const int a = v.ndim - 2, b = v.ndim - 1;
    const int64_t d = v.dims[a], s = v.strides[a];
    v.dims[a] = v.dims[b];
    v.strides[a] = v.strides[b];
    v.dims[b] = d;
    v.strides[b] = s;
    return v;
}

asc_view asc_part(asc_view v, int dim, int64_t first, int64_t step, int64_t count)
{
    if (v.data) v.data = (char *)v.data + (size_t)(first * v.strides[dim]) * asc_size(v.dtype);
    v.strides[dim] *= step;
    v.dims[dim] = count;
    return v;
}

asc_view asc_at(asc_view v, int64_t index)
{
    v = asc_part(v, 0, index, 1, 1);
    for (int i = 1; i < v.ndim; i++) {
        v.dims[i - 1] = v.dims[i];
        v.strides[i - 1] = v.strides[i];
    }
    v.ndim--;
    return v;
}

asc_view asc_shape(asc_view v, int ndim, int64_t a, int64_t b, int64_t c)
{
    return ndim == 1   ? asc_1d(v.data, v.dtype, a)
           : ndim == 2 ? asc_2d(v.data, v.dtype, a, b)
                       : asc_3d(v.data, v.dtype, a, b, c);
}

bool asc_is_packed(const asc_view *v)
{
    int64_t run = 1;
    for (int i = v->ndim - 1; i >= 0; i--) {
        if (v->dims[i] != 1 && v->strides[i] != run) return false;
        run *= v->dims[i];
    }
    return true;
}

int64_t asc_count(const asc_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++) n *= v->dims[i];
    return n;
}

asc_view asc_new1(asc_call *c, aclDataType dtype, int64_t n) { return asc_1d(asc_scratch(c, n, dtype), dtype, n); }

/* Sizes were multiplied by the caller's own checks up to T*k*H elements; anything that wraps is caught by asc_scratch.
 */
asc_view asc_new2(asc_call *c, aclDataType dtype, int64_t rows, int64_t cols)
{
    int64_t n = 0;
    if (__builtin_mul_overflow(rows, cols, &n)) n = -1;
    return asc_2d(asc_scratch(c, n, dtype), dtype, rows, cols);
}

asc_view asc_new3(asc_call *c, aclDataType dtype, int64_t a, int64_t b, int64_t d)
{
    int64_t n = 0;
    if (__builtin_mul_overflow(a, b, &n) || __builtin_mul_overflow(n, d, &n)) n = -1;
    return asc_3d(asc_scratch(c, n, dtype), dtype, a, b, d);
}

/* ---- Objects ---- */

static void *hold(asc_call *c, int kind, void *object, const char *what)
{
    if (!object) {
        fail_vendor(c, what, 0);
        return NULL;
    }
    c->held[c->n_held].kind = kind;
    c->held[c->n_held].object = object;
    c->n_held++;
    return object;
}

static bool can_hold(asc_call *c)
{
    if (c->status != FMOE_OK) return false;
    if (c->n_held < ASC_MAX_OBJECTS) return true;
    asc_fail(c, FMOE_ERR_UNSUPPORTED, "one launch with more than %d descriptors", ASC_MAX_OBJECTS);
    return false;
}

static aclTensor *make_tensor(asc_call *c, const asc_view *v)
{
    /* The base must be aligned to 32 bytes: take the start of its 32 bytes and let the offset point to the first
     * element. */
    const size_t size = asc_size(v->dtype), extra = (uintptr_t)v->data % 32;
    const int64_t offset = (int64_t)(extra / size);
    int64_t last = offset, n = 1;
    for (int i = 0; i < v->ndim; i++) {
        last += (v->dims[i] - 1) * v->strides[i];
        n *= v->dims[i];
    }
    const int64_t storage = n > 0 ? last + 1 : 0;
    return c->acl->aclCreateTensor(v->dims, (uint64_t)v->ndim, v->dtype, v->strides, n > 0 ? offset : 0, ACL_FORMAT_ND,
                                   &storage, 1, n > 0 ? (char *)v->data - extra : NULL);
}

const aclTensor *asc_t(asc_call *c, asc_view v)
{
    return can_hold(c) ? hold(c, A_TENSOR, make_tensor(c, &v), "aclCreateTensor") : NULL;
}

const aclTensorList *asc_list(asc_call *c, const asc_view *v, int64_t n)
{
    const aclTensor *member[128] = {NULL};
    if (!can_hold(c)) return NULL;
    if (n > 128) {
        asc_fail(c, FMOE_ERR_UNSUPPORTED, "a list of %lld tensors, CANN takes 128", (long long)n);
        return NULL;
    }
    for (int64_t i = 0; i < n; i++) {
        member[i] = make_tensor(c, &v[i]);
        if (member[i]) continue;
        fail_vendor(c, "aclCreateTensor", 0);
        while (i-- > 0) c->acl->aclDestroyTensor(member[i]);
        return NULL;
    }
    aclTensorList *list = c->acl->aclCreateTensorList(member, (uint64_t)n);
    if (!list)
        for (int64_t i = 0; i < n; i++) c->acl->aclDestroyTensor(member[i]);
    return hold(c, A_LIST, list, "aclCreateTensorList"); /* the list owns its members now */
}

const aclScalar *asc_s(asc_call *c, double value)
{
    float f = (float)value;
    return can_hold(c) ? hold(c, A_SCALAR, c->acl->aclCreateScalar(&f, ACL_FLOAT), "aclCreateScalar") : NULL;
}

const aclScalar *asc_si(asc_call *c, int64_t value)
{
    return can_hold(c) ? hold(c, A_SCALAR, c->acl->aclCreateScalar(&value, ACL_INT64), "aclCreateScalar") : NULL;
}

const aclIntArray *asc_ints(asc_call *c, const int64_t *values, int64_t n)
{
    return can_hold(c) ? hold(c, A_INTS, c->acl->aclCreateIntArray(values, (uint64_t)n), "aclCreateIntArray") : NULL;
}

static void destroy(const fmoe_acl *acl, const asc_object *held, int n)
{
    for (int i = 0; i < n; i++) {
        void *o = held[i].object;
        switch (held[i].kind) {
        case A_TENSOR: acl->aclDestroyTensor(o); break;
        case A_LIST: acl->aclDestroyTensorList(o); break;
        case A_SCALAR: acl->aclDestroyScalar(o); break;
        default: acl->aclDestroyIntArray(o); break;
        }
    }
}

static void let_go(asc_call *c)
{
    destroy(c->acl, c->held, c->n_held);
    c->n_held = 0;
}

/* ---- Launching ---- */

bool asc_ready(asc_call *c, const char *name, bool exists)
{
    if (c->status == FMOE_OK && !exists)
        asc_fail(c, FMOE_ERR_BACKEND, "symbol %s not found in CANN's operator libraries", name);
    if (c->status == FMOE_OK) return true;
    let_go(c);
    return false;
}

/* A launch in the caller's queue: phase 2 and what must live until it ran. */
typedef struct later {
    const fmoe_acl *acl;
    asc_phase2 phase2; /* NULL: a memset */
    void *at;          /* workspace, or what becomes zero */
    uint64_t bytes;
    aclOpExecutor *executor;
    aclrtStream stream;
    int n_held;
    asc_object held[];
} later;

static int run_later(void *arg)
{
    later *l = arg;
    const int code = l->phase2 ? l->phase2(l->at, l->bytes, l->executor, l->stream)
                               : l->acl->aclrtMemsetAsync(l->at, l->bytes, 0, l->bytes, l->stream);
    destroy(l->acl, l->held, l->n_held);
    free(l);
    return code;
}

/* On success the queue owns executor and descriptors. */
static void hand_over(asc_call *c, const char *name, asc_phase2 phase2, void *at, uint64_t bytes)
{
    const int n = phase2 ? c->n_held : 0;
    later *l = malloc(sizeof *l + (size_t)n * sizeof *l->held);
    int code = -1;
    if (l) {
        *l = (later){c->acl, phase2, at, bytes, c->executor, c->stream, n};
        memcpy(l->held, c->held, (size_t)n * sizeof *l->held);
        code = c->submit(c->submit_ctx, name, run_later, l);
    }
    if (code == 0) {
        c->n_held -= n;
        return;
    }
    if (l) asc_fail(c, FMOE_ERR_DEVICE, "%s: the caller's queue did not take it (%d)", name, code);
    else asc_fail(c, FMOE_ERR_NOMEM, "%s: no memory to queue it", name);
    drop_executor(c->acl, c->executor);
    free(l);
}

void asc_launch(asc_call *c, const char *name, aclnnStatus phase1, asc_phase2 phase2)
{
    void *workspace = c->op_workspace ? c->base + c->used : NULL;
    if (phase1 != 0) {
        char what[96];
        snprintf(what, sizeof what, "%sGetWorkspaceSize", name);
        fail_vendor(c, what, phase1);
    } else if (c->measure) {
        drop_executor(c->acl, c->executor);
        if (c->op_workspace) room(c, (size_t)c->op_workspace + ROOM);
    } else if (c->op_workspace && !room(c, (size_t)c->op_workspace)) {
        drop_executor(c->acl, c->executor);
    } else if (c->submit) {
        hand_over(c, name, phase2, workspace, c->op_workspace);
    } else {
        const aclnnStatus code = phase2(workspace, c->op_workspace, c->executor, c->stream);
        if (code != 0) fail_vendor(c, name, code);
    }
    c->executor = NULL;
    let_go(c);
}

void asc_memset_zero(asc_call *c, void *at, size_t bytes)
{
    if (c->status != FMOE_OK || c->measure || bytes == 0) return;
    if (c->submit) {
        hand_over(c, "aclrtMemsetAsync", NULL, at, bytes);
        return;
    }
    const aclError code = c->acl->aclrtMemsetAsync(at, bytes, 0, bytes, c->stream);
    if (code != 0) fail_vendor(c, "aclrtMemsetAsync", code);
}

void asc_to_host(asc_call *c, void *to, const void *from, size_t bytes)
{
    if (c->status != FMOE_OK || c->measure) return;
    if (c->submit || !c->acl->aclrtSynchronizeStream || !c->acl->aclrtMemcpy) {
        asc_fail(c, FMOE_ERR_UNSUPPORTED,
                 "FMOE_ASCEND_CHECK reads a count back: no fmoe_run.submit, and a CANN with %s",
                 "aclrtSynchronizeStream and aclrtMemcpy");
        return;
    }
    const aclError wait = c->acl->aclrtSynchronizeStream(c->stream);
    if (wait != 0) fail_vendor(c, "aclrtSynchronizeStream", wait);
    if (c->status != FMOE_OK) return;
    const aclError code = c->acl->aclrtMemcpy(to, bytes, from, bytes, ACL_DEVICE_TO_HOST);
    if (code != 0) fail_vendor(c, "aclrtMemcpy", code);
}
