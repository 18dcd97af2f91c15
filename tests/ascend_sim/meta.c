/* SPDX-License-Identifier: Apache-2.0
 * meta.c - descriptors, lists, scalars and executors, each with a life that is watched, and the two-phase call. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

typedef enum { TENSOR = 1, LIST, SCALAR, ARRAY, EXECUTOR } kind;

typedef struct object {
    kind what;
    struct object *next;
} object; /* every object begins with one */

struct aclTensor {
    object o;
    sim_tensor t;
    int format;
    int pins;
    bool in_list;
};
struct aclTensorList {
    object o;
    aclTensor **member;
    uint64_t size;
};
struct aclScalar {
    object o;
    double value;
    int dtype;
};
struct aclIntArray {
    object o;
    int64_t *value;
    uint64_t size;
};
struct aclOpExecutor {
    object o;
    sim_exec e;
};

static const char *const live_name[] = {
    "", "live_tensors", "live_lists", "live_scalars", "live_arrays", "live_executors"};

#define BUCKETS 4096
static object *table[BUCKETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static object **bucket(const void *p) { return &table[((uintptr_t)p >> 4) % BUCKETS]; }

static void *make(size_t bytes, kind what)
{
    object *o = calloc(1, bytes);
    if (!o) abort();
    o->what = what;
    pthread_mutex_lock(&lock);
    o->next = *bucket(o);
    *bucket(o) = o;
    pthread_mutex_unlock(&lock);
    sim_add(live_name[what], 1);
    return o;
}

static bool is(const void *p, kind what)
{
    pthread_mutex_lock(&lock);
    const object *o = *bucket(p);
    while (o && o != p) o = o->next;
    const bool yes = o && o->what == what;
    pthread_mutex_unlock(&lock);
    return yes;
}

static bool drop(const void *p, kind what) /* takes it out of the table; the caller frees */
{
    if (!is(p, what)) {
        sim_violation("%s: %p is not alive (freed twice, or not of this kind)", live_name[what], p);
        return false;
    }
    pthread_mutex_lock(&lock);
    object **at = bucket(p);
    while (*at != p) at = &(*at)->next;
    *at = (*at)->next;
    pthread_mutex_unlock(&lock);
    sim_add(live_name[what], -1);
    return true;
}

/* ---- Creation and destruction ---- */

aclTensor *aclCreateTensor(const int64_t *dims, uint64_t ndim, aclDataType dtype, const int64_t *stride, int64_t offset,
                           aclFormat format, const int64_t *storage, uint64_t storage_ndim, void *data)
{
    if (sim_enter(__func__)) return NULL;
    if (ndim > SIM_MAX_DIMS || (ndim && !dims) || sim_dtype_size(dtype) == 0) {
        sim_message("aclCreateTensor: %d dimensions, dtype %d", (int)ndim, dtype);
        return NULL;
    }
    aclTensor *x = make(sizeof *x, TENSOR);
    sim_tensor *t = &x->t;
    *t = (sim_tensor){.ndim = (int)ndim, .dtype = dtype, .offset = offset, .storage = 1, .data = data, .present = true};
    x->format = format;
    int64_t run = 1;
    for (int i = (int)ndim - 1; i >= 0; i--) {
        t->dims[i] = dims[i];
        t->strides[i] = stride ? stride[i] : run;
        run *= dims[i];
    }
    for (uint64_t i = 0; i < storage_ndim; i++) t->storage *= storage[i];
    return x;
}

aclnnStatus aclDestroyTensor(const aclTensor *x)
{
    sim_enter(__func__);
    if (!x) return ACL_OK;
    if (!drop(x, TENSOR)) return ACLNN_E_INNER;
    if (x->in_list) sim_violation("aclDestroyTensor of a member of a list: its list destroys it too");
    if (x->pins) sim_violation("aclDestroyTensor between the two phases of a call");
    free((void *)x);
    return ACL_OK;
}

aclTensorList *aclCreateTensorList(const aclTensor *const *value, uint64_t size)
{
    if (sim_enter(__func__)) return NULL;
    aclTensorList *l = make(sizeof *l, LIST);
    l->member = calloc(size ? size : 1, sizeof *l->member);
    l->size = size;
    for (uint64_t i = 0; i < size; i++) {
        l->member[i] = (aclTensor *)value[i];
        if (!is(value[i], TENSOR)) sim_violation("aclCreateTensorList: member %d is not a live tensor", (int)i);
        else l->member[i]->in_list = true;
    }
    return l;
}

aclnnStatus aclDestroyTensorList(const aclTensorList *l)
{
    sim_enter(__func__);
    if (!l) return ACL_OK;
    if (!drop(l, LIST)) return ACLNN_E_INNER;
    for (uint64_t i = 0; i < l->size; i++) {
        if (!drop(l->member[i], TENSOR)) continue;
        if (l->member[i]->pins) sim_violation("aclDestroyTensorList between the two phases of a call");
        free(l->member[i]);
    }
    free(l->member);
    free((void *)l);
    return ACL_OK;
}

static double read_value(const void *value, int dtype)
{
    switch (dtype) {
    case ACL_FLOAT: return *(const float *)value;
    case ACL_DOUBLE: return *(const double *)value;
    case ACL_INT64: return (double)*(const int64_t *)value;
    case ACL_INT32: return *(const int32_t *)value;
    case ACL_BOOL: return *(const bool *)value;
    default: sim_violation("aclCreateScalar: dtype %d is not known to the simulator", dtype); return 0;
    }
}

aclScalar *aclCreateScalar(void *value, aclDataType dtype)
{
    if (sim_enter(__func__)) return NULL;
    aclScalar *s = make(sizeof *s, SCALAR);
    s->value = read_value(value, dtype);
    s->dtype = dtype;
    return s;
}

aclnnStatus aclDestroyScalar(const aclScalar *s)
{
    sim_enter(__func__);
    if (!s) return ACL_OK;
    if (!drop(s, SCALAR)) return ACLNN_E_INNER;
    free((void *)s);
    return ACL_OK;
}

aclIntArray *aclCreateIntArray(const int64_t *value, uint64_t size)
{
    if (sim_enter(__func__)) return NULL;
    aclIntArray *a = make(sizeof *a, ARRAY);
    a->value = calloc(size ? size : 1, sizeof *a->value);
    if (size) memcpy(a->value, value, size * sizeof *value);
    a->size = size;
    return a;
}

aclnnStatus aclDestroyIntArray(const aclIntArray *a)
{
    sim_enter(__func__);
    if (!a) return ACL_OK;
    if (!drop(a, ARRAY)) return ACLNN_E_INNER;
    free(a->value);
    free((void *)a);
    return ACL_OK;
}

double sim_scalar(const aclScalar *s)
{
    if (s && is(s, SCALAR)) return s->value;
    sim_violation("a scalar that is not alive");
    return 0;
}

int64_t sim_int_array(const aclIntArray *a, int64_t *values, int64_t max)
{
    if (!a) return -1;
    if (!is(a, ARRAY)) {
        sim_violation("an int array that is not alive");
        return -1;
    }
    for (int64_t i = 0; i < (int64_t)a->size && i < max; i++) values[i] = a->value[i];
    return (int64_t)a->size;
}

void sim_set_rows(const aclTensor *t, int64_t rows)
{
    if (is(t, TENSOR)) ((aclTensor *)t)->t.dims[0] = rows;
}

aclnnStatus aclGetViewShape(const aclTensor *x, int64_t **dims, uint64_t *ndim)
{
    const int code = sim_enter(__func__);
    if (code) return code;
    if (!x || !dims || !ndim || !is(x, TENSOR)) return ACLNN_E_NULL;
    *ndim = (uint64_t)x->t.ndim;
    *dims = calloc(SIM_MAX_DIMS, sizeof **dims); /* the caller's to free */
    if (!*dims) abort();
    memcpy(*dims, x->t.dims, (size_t)x->t.ndim * sizeof **dims);
    return ACL_OK;
}

/* ---- Executors ---- */

static aclOpExecutor *owner(sim_exec *e) { return (aclOpExecutor *)((char *)e - offsetof(aclOpExecutor, e)); }

static void unpin(sim_exec *e)
{
    for (int i = 0; i < e->nt; i++) {
        if (!e->pinned[i] || !is(e->pinned[i], TENSOR)) continue;
        pthread_mutex_lock(&lock);
        ((aclTensor *)e->pinned[i])->pins--;
        pthread_mutex_unlock(&lock);
        e->pinned[i] = NULL;
    }
}

static void free_executor(aclOpExecutor *x)
{
    free(x->e.t);
    free(x->e.pinned);
    free(x);
}

static void destroy_executor(aclOpExecutor *x)
{
    sim_cache_close(&x->e, false);
    unpin(&x->e);
    if (drop(x, EXECUTOR)) free_executor(x);
}

sim_exec *sim_begin(const char *name, sim_kernel kernel)
{
    char function[128];
    snprintf(function, sizeof function, "aclnn%sGetWorkspaceSize", name);
    aclOpExecutor *x = make(sizeof *x, EXECUTOR);
    x->e.name = name;
    x->e.kernel = kernel;
    x->e.status = sim_enter(function);
    return &x->e;
}

void sim_check(sim_exec *e, bool good, const char *format, ...)
{
    if (good || e->status) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_message("aclnn%s: %s", e->name, text);
    e->status = ACLNN_E_PARAM;
}

void sim_check_late(sim_exec *e, bool good, const char *format, ...)
{
    if (good || e->status || e->late) return;
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_message("aclnn%s: %s", e->name, text);
    e->late = ACLNN_E_TILING;
}

bool sim_is_950(void)
{
    const char *name = getenv("FMOE_SIM_SOC");
    return name && strncmp(name, "Ascend950", 9) == 0;
}

void sim_on_aicpu(sim_exec *e, bool yes)
{
    if (yes && !sim_is_950()) e->aicpu = e->uncached = true;
}

uint64_t sim_in_rounds(sim_exec *e, int members, int64_t elements, int dtype, int each)
{
    if (members <= 32 || sim_is_950()) return 0;
    const int64_t bytes = elements * (int64_t)sim_dtype_size(dtype);
    e->rounds = (members + 31) / 32 * each + (each == 1);
    e->read += bytes;
    e->written += bytes;
    return (uint64_t)bytes;
}

static int add(sim_exec *e, const aclTensor *x, bool optional, bool in, bool out)
{
    if (e->nt == e->capacity) {
        e->capacity = e->capacity ? 2 * e->capacity : 8;
        e->t = realloc(e->t, (size_t)e->capacity * sizeof *e->t);
        e->pinned = realloc(e->pinned, (size_t)e->capacity * sizeof *e->pinned);
        if (!e->t || !e->pinned) abort();
    }
    const int n = e->nt++;
    e->t[n] = (sim_tensor){.present = false};
    e->pinned[n] = NULL;
    if (!x) {
        if (!optional && !e->status) {
            e->status = ACLNN_E_NULL;
            sim_message("aclnn%s: tensor %d is NULL", e->name, n);
        }
        return n;
    }
    if (!is(x, TENSOR)) {
        sim_violation("aclnn%s: tensor %d is not alive", e->name, n);
        if (!e->status) e->status = ACLNN_E_PARAM;
        return n;
    }
    sim_tensor *t = &e->t[n];
    *t = x->t;
    t->is_out = out;
    pthread_mutex_lock(&lock);
    ((aclTensor *)x)->pins++;
    pthread_mutex_unlock(&lock);
    e->pinned[n] = x;
    const int64_t count = sim_numel(t);
    int64_t last = t->offset;
    for (int i = 0; i < t->ndim; i++) {
        sim_check(e, t->dims[i] >= 0 && t->strides[i] >= 0, "tensor %d: negative dimension or stride", n);
        last += (t->dims[i] - 1) * t->strides[i];
    }
    const int f = x->format;
    sim_check(e,
              f == ACL_FORMAT_ND || f == ACL_FORMAT_NCL || f == ACL_FORMAT_NCHW || f == ACL_FORMAT_NCDHW ||
                  f == ACL_FORMAT_NHWC,
              "tensor %d: format %d", n, f);
    if (count > 0) {
        sim_check(e, t->offset >= 0 && last < t->storage,
                  "tensor %d: the view ends at element %lld of a storage of %lld", n, (long long)last,
                  (long long)t->storage);
        sim_check(e, t->data != NULL, "tensor %d: no data", n);
        if ((uintptr_t)t->data % 32 != 0)
            sim_violation("aclnn%s: tensor %d: address %p is not aligned to 32", e->name, n, (void *)t->data);
        const int64_t bytes = count * (int64_t)sim_dtype_size(t->dtype);
        if (in) e->read += bytes;
        if (out) e->written += bytes;
    }
    return n;
}

int sim_in(sim_exec *e, const aclTensor *t) { return add(e, t, false, true, false); }
int sim_in_optional(sim_exec *e, const aclTensor *t) { return add(e, t, true, true, false); }
int sim_out(sim_exec *e, const aclTensor *t) { return add(e, t, false, false, true); }
int sim_inout(sim_exec *e, const aclTensor *t) { return add(e, t, false, true, true); }

int sim_list(sim_exec *e, const aclTensorList *l, bool is_out, int *count)
{
    const int first = e->nt;
    *count = 0;
    if (!l) return first;
    if (!is(l, LIST)) {
        sim_violation("aclnn%s: a list that is not alive", e->name);
        sim_check(e, false, "a list that is not alive");
        return first;
    }
    for (uint64_t i = 0; i < l->size; i++) add(e, l->member[i], false, !is_out, is_out);
    *count = (int)l->size;
    return first;
}

aclnnStatus sim_end(sim_exec *e, uint64_t workspace, uint64_t *workspaceSize, aclOpExecutor **executor)
{
    sim_check(e, workspaceSize && executor, "workspaceSize or executor is NULL");
    const int status = e->status;
    if (status) {
        destroy_executor(owner(e));
        return status;
    }
    sim_cache_open(e);
    e->workspace = workspace;
    *workspaceSize = workspace;
    *executor = owner(e);
    return ACL_OK;
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor *x)
{
    const int code = sim_enter(__func__);
    if (code) return code;
    if (!is(x, EXECUTOR)) return ACLNN_E_INNER_NULL;
    if (x->e.uncached) { /* it copies onto itself, or from the host */
        sim_message("%s: %s cannot be repeated", __func__, x->e.name);
        return ACLNN_E_PARAM;
    }
    x->e.repeatable = true;
    sim_cache_remove(&x->e);
    return ACL_OK;
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor *x)
{
    sim_enter(__func__);
    if (!x) return ACL_OK;
    if (!is(x, EXECUTOR)) {
        sim_violation("aclDestroyAclOpExecutor: %p is not alive", (void *)x);
        return ACLNN_E_INNER_NULL;
    }
    destroy_executor(x);
    return ACL_OK;
}

typedef struct {
    aclOpExecutor *x;
    void *workspace;
    uint64_t bytes;
} job;

static void run_task(void *arg)
{
    job *j = arg;
    sim_exec *e = &j->x->e;
    for (int i = 0; i < e->nt && !e->status; i++) {
        const sim_tensor *t = &e->t[i];
        if (!t->present || sim_numel(t) == 0) continue;
        int64_t last = t->offset;
        for (int d = 0; d < t->ndim; d++) last += (t->dims[d] - 1) * t->strides[d];
        const size_t size = sim_dtype_size(t->dtype);
        if (!sim_is_live(t->data + (size_t)t->offset * size, (size_t)(last - t->offset + 1) * size)) {
            sim_violation("aclnn%s: tensor %d (%p) is not in allocated device memory when it runs", e->name, i,
                          (void *)t->data);
            sim_stream_error(ACL_E_AICORE);
            e->status = ACL_E_AICORE;
        }
    }
    const bool count_only = fmoe_sim_option("count_only") != 0;
    if (j->bytes && !count_only && !e->status) {
        /* The operator may use all of its workspace: whoever keeps something there loses it. */
        const size_t edge = j->bytes < 65536 ? j->bytes : 65536;
        if (sim_is_live(j->workspace, j->bytes)) {
            memset(sim_twin(j->workspace), 0xFF, edge);
            memset((char *)sim_twin(j->workspace) + j->bytes - edge, 0xFF, edge);
        } else {
            sim_violation("aclnn%s: its workspace is not in allocated device memory when it runs", e->name);
        }
    }
    if (!e->status && !count_only) {
        e->kernel(e);
        sim_spoil(e);
    }
    while (e->arena) {
        void *next = *(void **)e->arena;
        free(e->arena);
        e->arena = next;
    }
    free_executor(j->x);
    free(j);
}

aclnnStatus sim_run(const char *name, void *workspace, uint64_t bytes, aclOpExecutor *x, aclrtStream stream)
{
    char function[128];
    snprintf(function, sizeof function, "aclnn%s", name);
    const int64_t delay = fmoe_sim_option("phase2_delay_us");
    if (delay > 0 && gettid() != getpid()) usleep((useconds_t)delay);
    const int code = sim_enter(function);
    if (gettid() != getpid()) sim_add("launches_elsewhere", 1);
    if (!is(x, EXECUTOR)) {
        sim_violation("%s: its executor was used before or never made", function);
        return ACLNN_E_INNER_NULL;
    }
    sim_exec *e = &x->e;
    if (code || e->late) { /* a failed phase 2 consumes the executor as a good one does, and leaves no entry */
        const int answer = code ? code : e->late;
        sim_cache_remove(e);
        if (!e->repeatable) destroy_executor(x);
        return answer;
    }
    if (strcmp(e->name, name) != 0) {
        sim_violation("%s was given the executor of aclnn%s", function, e->name);
        return ACLNN_E_INNER_NULL;
    }
    if (bytes < e->workspace || (e->workspace && !workspace)) {
        sim_message("%s: workspace of %llu bytes, %llu are needed", function, (unsigned long long)bytes,
                    (unsigned long long)e->workspace);
        sim_violation("%s: workspace of %llu bytes, %llu are needed", function, (unsigned long long)bytes,
                      (unsigned long long)e->workspace);
        if (!e->repeatable) destroy_executor(x);
        return ACLNN_E_PARAM;
    }
    if (e->workspace && (uintptr_t)workspace % 32 != 0)
        sim_violation("%s: workspace %p is not aligned to 32", function, workspace);
    for (int i = 0; i < e->nt; i++) {
        const sim_tensor *t = &e->t[i];
        if (t->present && sim_numel(t) > 0 && !sim_is_device(t->data)) {
            sim_violation("%s: tensor %d (%p) is not device memory", function, i, (void *)t->data);
            if (!e->repeatable) destroy_executor(x);
            return ACLNN_E_RUNTIME;
        }
    }
    if (e->hollow) { /* nothing is launched, and nobody is told */
        sim_add("hollow_launches", 1);
        if (!e->repeatable) destroy_executor(x);
        return ACL_OK;
    }
    job *j = malloc(sizeof *j);
    if (!j) abort();
    *j = (job){x, workspace, e->workspace};
    if (e->repeatable) {
        aclOpExecutor *copy = malloc(sizeof *copy);
        if (!copy) abort();
        *copy = *x;
        copy->e.t = malloc((size_t)(e->nt ? e->nt : 1) * sizeof *e->t);
        memcpy(copy->e.t, e->t, (size_t)e->nt * sizeof *e->t);
        copy->e.pinned = NULL;
        j->x = copy;
    } else {
        sim_cache_close(e, true);
        unpin(e);
        if (!drop(x, EXECUTOR)) abort();
    }
    sim_add("launches", e->rounds ? e->rounds : 1);
    if (e->rounds) sim_add("hidden_rounds", e->rounds - 1);
    if (e->aicpu) sim_add("aicpu", 1);
    sim_add("bytes_read", e->read);
    sim_add("bytes_written", e->written);
    char line[256];
    snprintf(line, sizeof line, "%s read %lld written %lld", name, (long long)e->read, (long long)e->written);
    sim_trace(line);
    const aclError error = sim_submit(stream, run_task, j);
    if (error) {
        free_executor(j->x);
        free(j);
        return ACLNN_E_RUNTIME;
    }
    return ACL_OK;
}
