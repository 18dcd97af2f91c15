/* SPDX-License-Identifier: Apache-2.0
 * runtime.c - acl* and aclrt*: initialisation, devices, memory, copies, streams, events. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "stream.h"

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        const int code_ = sim_enter(__func__);                                                                         \
        if (code_) return code_;                                                                                       \
    } while (0)

enum { DEVICES = 2 };

static atomic_int initialised;
static __thread int device = -1;
static int contexts[DEVICES];

/* ---- Initialisation and the machine ---- */

aclError aclInit(const char *path)
{
    (void)path;
    ENTER();
    return atomic_exchange(&initialised, 1) ? ACL_E_REPEAT_INIT : ACL_OK;
}

aclError aclFinalize(void)
{
    ENTER();
    atomic_store(&initialised, 0);
    return ACL_OK;
}

const char *aclGetRecentErrMsg(void)
{
    sim_enter(__func__);
    return sim_take_message();
}

aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)
{
    ENTER();
    *major = 1;
    *minor = 15;
    *patch = 0;
    return ACL_OK;
}

const char *aclrtGetSocName(void)
{
    sim_enter(__func__);
    const char *name = getenv("FMOE_SIM_SOC");
    return name ? name : "Ascend910B2";
}

aclError aclrtGetDeviceCount(uint32_t *count)
{
    ENTER();
    *count = DEVICES;
    return ACL_OK;
}

aclError aclrtSetDevice(int32_t id)
{
    ENTER();
    if (id < 0 || id >= DEVICES) return ACL_E_RT_PARAM;
    device = id;
    return ACL_OK;
}

aclError aclrtGetDevice(int32_t *id)
{
    ENTER();
    if (device < 0) return ACL_E_NO_CONTEXT;
    *id = device;
    return ACL_OK;
}

aclError aclrtResetDevice(int32_t id)
{
    ENTER();
    (void)id;
    return ACL_OK;
}

aclError aclrtGetCurrentContext(aclrtContext *context)
{
    ENTER();
    if (device < 0) return ACL_E_NO_CONTEXT;
    *context = &contexts[device];
    return ACL_OK;
}

aclError aclrtSetCurrentContext(aclrtContext context)
{
    ENTER();
    for (int i = 0; i < DEVICES; i++)
        if (context == &contexts[i]) device = i;
    return ACL_OK;
}

aclError aclrtGetMemInfo(int attr, size_t *free_bytes, size_t *total)
{
    (void)attr;
    ENTER();
    *free_bytes = sim_memory_free();
    *total = sim_memory_total();
    return ACL_OK;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b)
{
    ENTER();
    *can = a != b;
    return ACL_OK;
}

/* ---- Memory ---- */

static aclError allocate(void **p, size_t bytes)
{
    const aclError e = sim_malloc(p, bytes);
    if (e) sim_message("device memory: %zu bytes were asked for, %zu are free", bytes, sim_memory_free());
    return e;
}

aclError aclrtMalloc(void **p, size_t bytes, int policy)
{
    (void)policy;
    ENTER();
    return allocate(p, bytes);
}
aclError aclrtMallocAlign32(void **p, size_t bytes, int policy)
{
    (void)policy;
    ENTER();
    return allocate(p, bytes);
}
aclError aclrtFree(void *p)
{
    sim_enter(__func__);
    return sim_free(p);
}

typedef struct pinned {
    char *p;
    size_t bytes;
    struct pinned *next;
} pinned;
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
static pinned *pinned_list;

aclError aclrtMallocHost(void **p, size_t bytes)
{
    ENTER();
    if (bytes == 0) return ACL_E_PARAM;
    pinned *n = malloc(sizeof *n);
    *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!n || !*p) return ACL_E_MEMORY;
    pthread_mutex_lock(&pinned_lock);
    *n = (pinned){*p, bytes, pinned_list};
    pinned_list = n;
    pthread_mutex_unlock(&pinned_lock);
    sim_add("live_pinned", 1);
    return ACL_OK;
}

aclError aclrtFreeHost(void *p)
{
    sim_enter(__func__);
    pthread_mutex_lock(&pinned_lock);
    pinned **at = &pinned_list;
    while (*at && (*at)->p != p) at = &(*at)->next;
    pinned *n = *at;
    if (n) *at = n->next;
    pthread_mutex_unlock(&pinned_lock);
    if (!n) {
        sim_violation("aclrtFreeHost of %p, which was not allocated there", p);
        return ACL_E_PARAM;
    }
    free(n);
    free(p);
    sim_add("live_pinned", -1);
    return ACL_OK;
}

static bool is_pinned(const void *p)
{
    bool found = false;
    pthread_mutex_lock(&pinned_lock);
    for (const pinned *n = pinned_list; n && !found; n = n->next)
        found = (const char *)p >= n->p && (const char *)p < n->p + n->bytes;
    pthread_mutex_unlock(&pinned_lock);
    return found;
}

typedef struct {
    void *dst;
    const void *src;
    size_t bytes;
} copy_job;

/* Host addresses of both sides, and the count; 0 when the kind does not fit the addresses. */
static aclError resolve(copy_job *j, void *dst, size_t max, const void *src, size_t bytes, int kind)
{
    const bool to = sim_is_device(dst), from = sim_is_device(src);
    const int real = to     ? (from ? ACL_DEVICE_TO_DEVICE : ACL_HOST_TO_DEVICE)
                     : from ? ACL_DEVICE_TO_HOST
                            : ACL_HOST_TO_HOST;
    if (bytes > max) return ACL_E_PARAM;
    if (kind != ACL_DEFAULT && kind != real) {
        sim_violation("copy of kind %d between addresses of kind %d", kind, real);
        return ACL_E_PARAM;
    }
    if ((to && !sim_is_live(dst, bytes)) || (from && !sim_is_live(src, bytes))) {
        sim_violation("copy of %zu bytes touches device memory that is not allocated", bytes);
        return ACL_E_PARAM;
    }
    sim_add(real == ACL_HOST_TO_DEVICE ? "copies_h2d" : real == ACL_DEVICE_TO_HOST ? "copies_d2h" : "copies_d2d", 1);
    sim_add(real == ACL_HOST_TO_DEVICE   ? "bytes_h2d"
            : real == ACL_DEVICE_TO_HOST ? "bytes_d2h"
                                         : "bytes_d2d",
            (int64_t)bytes);
    *j = (copy_job){to ? sim_twin(dst) : dst, from ? sim_twin(src) : src, bytes};
    return ACL_OK;
}

aclError aclrtMemcpy(void *dst, size_t max, const void *src, size_t bytes, int kind)
{
    ENTER();
    if (bytes == 0) return ACL_OK;
    copy_job j;
    const aclError e = resolve(&j, dst, max, src, bytes, kind);
    if (!e) memcpy(j.dst, j.src, bytes); /* at once: it waits for no stream */
    return e;
}

static void copy_task(void *arg)
{
    const copy_job *j = arg;
    memcpy(j->dst, j->src, j->bytes);
    free(arg);
}

aclError aclrtMemcpyAsync(void *dst, size_t max, const void *src, size_t bytes, int kind, aclrtStream stream)
{
    ENTER();
    if (bytes == 0) return ACL_OK;
    copy_job *j = malloc(sizeof *j);
    aclError e = resolve(j, dst, max, src, bytes, kind);
    if (!e) e = sim_submit(stream, copy_task, j);
    if (e) {
        free(j);
        return e;
    }
    const bool pageable = (!sim_is_device(dst) && !is_pinned(dst)) || (!sim_is_device(src) && !is_pinned(src));
    return pageable ? sim_stream_wait(stream) : ACL_OK;
}

typedef struct {
    void *dst;
    int value;
    size_t bytes;
} fill_job;

aclError aclrtMemset(void *dst, size_t max, int32_t value, size_t bytes)
{
    ENTER();
    if (bytes > max || !sim_is_live(dst, bytes)) return ACL_E_PARAM;
    memset(sim_twin(dst), value, bytes);
    return ACL_OK;
}

static void fill_task(void *arg)
{
    const fill_job *j = arg;
    memset(j->dst, j->value, j->bytes);
    free(arg);
}

aclError aclrtMemsetAsync(void *dst, size_t max, int32_t value, size_t bytes, aclrtStream stream)
{
    ENTER();
    if (bytes > max || !sim_is_live(dst, bytes)) {
        sim_violation("aclrtMemsetAsync of %zu bytes past the end of an allocation", bytes);
        return ACL_E_PARAM;
    }
    fill_job *j = malloc(sizeof *j);
    *j = (fill_job){sim_twin(dst), value, bytes};
    sim_add("launches", 1);
    sim_add("bytes_written", (int64_t)bytes);
    sim_trace("MemsetAsync");
    const aclError e = sim_submit(stream, fill_task, j);
    if (e) free(j);
    return e;
}

/* ---- Streams ---- */

aclError aclrtCreateStream(aclrtStream *s)
{
    ENTER();
    *s = sim_stream_new();
    return ACL_OK;
}

aclError aclrtCreateStreamWithConfig(aclrtStream *s, uint32_t priority, uint32_t flag)
{
    (void)priority, (void)flag;
    ENTER();
    *s = sim_stream_new();
    return ACL_OK;
}

aclError aclrtDestroyStream(aclrtStream s)
{
    sim_enter(__func__);
    return sim_stream_delete(s);
}
aclError aclrtDestroyStreamForce(aclrtStream s)
{
    sim_enter(__func__);
    return sim_stream_delete(s);
}
aclError aclrtSetStreamFailureMode(aclrtStream s, uint64_t mode)
{
    (void)s, (void)mode;
    ENTER();
    return ACL_OK;
}

aclError aclrtStreamQuery(aclrtStream s, int *status)
{
    ENTER();
    if (!sim_stream_exists(s)) return ACL_E_NO_STREAM;
    *status = !sim_stream_idle(s);
    return ACL_OK;
}

#define SYNC()                                                                                                         \
    do {                                                                                                               \
        ENTER();                                                                                                       \
        sim_add("syncs", 1);                                                                                           \
    } while (0)

aclError aclrtSynchronizeStream(aclrtStream s)
{
    SYNC();
    return sim_stream_wait(s);
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream s, int32_t ms)
{
    (void)ms;
    SYNC();
    return sim_stream_wait(s);
}
aclError aclrtSynchronizeDevice(void)
{
    SYNC();
    return sim_device_wait(-1);
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t ms)
{
    SYNC();
    return sim_device_wait(ms);
}

/* ---- Events ---- */

static aclError new_event(aclrtEvent *e)
{
    *e = sim_event_new();
    return ACL_OK;
}
aclError aclrtCreateEvent(aclrtEvent *e)
{
    ENTER();
    return new_event(e);
}
aclError aclrtCreateEventWithFlag(aclrtEvent *e, uint32_t flag)
{
    (void)flag;
    ENTER();
    return new_event(e);
}
aclError aclrtCreateEventExWithFlag(aclrtEvent *e, uint32_t flag)
{
    (void)flag;
    ENTER();
    return new_event(e);
}
aclError aclrtDestroyEvent(aclrtEvent e)
{
    sim_enter(__func__);
    sim_event_release(e);
    return ACL_OK;
}
aclError aclrtRecordEvent(aclrtEvent e, aclrtStream s)
{
    ENTER();
    return sim_event_record(e, s);
}
aclError aclrtResetEvent(aclrtEvent e, aclrtStream s)
{
    (void)e, (void)s;
    ENTER();
    return ACL_OK;
}
aclError aclrtStreamWaitEvent(aclrtStream s, aclrtEvent e)
{
    ENTER();
    return sim_event_make_wait(e, s);
}
aclError aclrtSynchronizeEvent(aclrtEvent e)
{
    SYNC();
    sim_event_wait(e);
    return ACL_OK;
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent e, int32_t ms)
{
    (void)ms;
    SYNC();
    sim_event_wait(e);
    return ACL_OK;
}
aclError aclrtQueryEventStatus(aclrtEvent e, int *status)
{
    ENTER();
    *status = sim_event_done(e);
    return ACL_OK;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent e, int *status)
{
    ENTER();
    *status = !sim_event_done(e);
    return ACL_OK;
}

aclError aclrtEventElapsedTime(float *ms, aclrtEvent a, aclrtEvent b)
{
    ENTER();
    *ms = (float)sim_event_ms(a, b);
    return ACL_OK;
}

/* ---- Versions, attributes, options ---- */

static const char *version(void) /* of the folder in use, unless it is said */
{
    const char *v = getenv("FMOE_SIM_VERSION"), *folder = getenv("FMOE_ASCEND_PATH");
    if (v) return v;
    return folder && strstr(folder, "cann81") ? "8.1.RC1" : folder && strstr(folder, "cann85") ? "8.5.0" : "9.1.0";
}

bool sim_before_85(void)
{
    int major = 0, minor = 0;
    return sscanf(version(), "%d.%d", &major, &minor) == 2 && major * 100 + minor < 805;
}

typedef struct {
    char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
} cann_version;

aclError aclsysGetCANNVersion(int package, cann_version *v)
{
    (void)package;
    ENTER();
    memset(v, 0, sizeof *v);
    snprintf(v->version, sizeof v->version, "%s", version());
    const char *text = version();
    snprintf(v->major, sizeof v->major, "%.*s", (int)strcspn(text, "."), text);
    text += strcspn(text, ".") + (strchr(text, '.') != NULL);
    snprintf(v->minor, sizeof v->minor, "%.*s", (int)strcspn(text, "."), text);
    return ACL_OK;
}

aclError aclsysGetVersionStr(char *package, char *out)
{
    ENTER();
    const char *of_operators = getenv("FMOE_SIM_OPS_VERSION");
    strcpy(out, strcmp(package, "ops_transformer") == 0 && of_operators ? of_operators : version());
    return ACL_OK;
}

static int64_t sys_options[16];

aclError aclrtGetSysParamOpt(int opt, int64_t *value)
{
    ENTER();
    *value = sys_options[opt & 15];
    return ACL_OK;
}
aclError aclrtSetSysParamOpt(int opt, int64_t value)
{
    ENTER();
    sys_options[opt & 15] = value;
    return ACL_OK;
}
aclError aclrtCtxSetSysParamOpt(int opt, int64_t value)
{
    ENTER();
    sys_options[opt & 15] = value;
    return ACL_OK;
}
aclError aclrtSetDeviceSatMode(int mode)
{
    (void)mode;
    ENTER();
    return ACL_OK;
}
aclError aclrtPeekAtLastError(int level)
{
    (void)level;
    ENTER();
    return ACL_OK;
}
aclError aclrtGetLastError(int level)
{
    (void)level;
    ENTER();
    return ACL_OK;
}
size_t aclGetCompileoptSize(int opt)
{
    (void)opt;
    sim_enter(__func__);
    return 16;
}

aclError aclGetCompileopt(int opt, char *value, size_t n)
{
    ENTER();
    snprintf(value, n, opt == 14 ? "0" : "disable");
    return ACL_OK;
}

aclError aclSetCompileopt(int opt, const char *value)
{
    (void)opt, (void)value;
    ENTER();
    return ACL_OK;
}
aclError aclGetCannAttribute(int attr, int32_t *value)
{
    (void)attr;
    ENTER();
    *value = 1;
    return ACL_OK;
}

aclError aclGetDeviceCapability(uint32_t id, int info, int64_t *value)
{
    (void)id;
    ENTER();
    *value = info == 2 ? 192 << 20 : info == 1 ? 48 : 24;
    return ACL_OK;
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t us, uint64_t *actual)
{
    ENTER();
    if (actual) *actual = us;
    return ACL_OK;
}

aclError aclmdlRICaptureGetInfo(aclrtStream s, int *status, void **model)
{
    (void)s;
    ENTER();
    *status = 0;
    if (model) *model = NULL;
    return ACL_OK;
}
