/* SPDX-License-Identifier: Apache-2.0
 *
 * device.c - what expert parallelism asks of a device (device.h): memory, copies, events, and rows that move by
 * IndexSelect. Where they go the host computes: CANN has no operator that would, and a chain of sorts costs more than
 * copying a few bytes a token. Nothing here waits for a stream but copies that are told to. */
#include <stdio.h>
#include <string.h>

#include "ascend.h"
#include "ops.h"

/* ---- the device of this thread ---- */

typedef struct scope {
    const fmoe_acl *acl;
    int32_t before; /* -1: nothing to restore */
} scope;

static fmoe_status answer(const fmoe_acl *acl, int code, const char *what)
{
    char text[320];
    if (code == 0) return FMOE_OK;
    asc_vendor_text(acl, text, sizeof text);
    return fmoe_fail(FMOE_ERR_DEVICE, "Ascend: %s answered %d: %s", what, code, text);
}

static fmoe_status find_all(const fmoe_acl *acl)
{
    const struct {
        bool there;
        const char *name;
    } needed[] = {
        {acl->aclrtMalloc != NULL, "aclrtMalloc"},
        {acl->aclrtFree != NULL, "aclrtFree"},
        {acl->aclrtMallocHost != NULL, "aclrtMallocHost"},
        {acl->aclrtFreeHost != NULL, "aclrtFreeHost"},
        {acl->aclrtMemcpy != NULL, "aclrtMemcpy"},
        {acl->aclrtMemcpyAsync != NULL, "aclrtMemcpyAsync"},
        {acl->aclrtSynchronizeStream != NULL, "aclrtSynchronizeStream"},
        {acl->aclrtSynchronizeDeviceWithTimeout != NULL, "aclrtSynchronizeDeviceWithTimeout"},
        {acl->aclrtCreateEventExWithFlag != NULL, "aclrtCreateEventExWithFlag"},
        {acl->aclrtDestroyEvent != NULL, "aclrtDestroyEvent"},
        {acl->aclrtRecordEvent != NULL, "aclrtRecordEvent"},
        {acl->aclrtStreamWaitEvent != NULL, "aclrtStreamWaitEvent"},
        {acl->aclrtQueryEventStatus != NULL, "aclrtQueryEventStatus"},
        {acl->aclnnIndexSelect != NULL, "aclnnIndexSelect"},
    };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!needed[i].there)
            return fmoe_fail(FMOE_ERR_BACKEND, "Ascend: symbol %s, which expert parallelism needs, not found in CANN",
                             needed[i].name);
    return FMOE_OK;
}

static fmoe_status enter(scope *s, int32_t device)
{
    int32_t now = -1;
    s->before = -1;
    FMOE_TRY(fmoe_acl_get(&s->acl));
    FMOE_TRY(find_all(s->acl));
    if (s->acl->aclrtGetDevice(&now) == 0) {
        if (now == device) return FMOE_OK;
        s->before = now;
    }
    const fmoe_status status = answer(s->acl, s->acl->aclrtSetDevice(device), "aclrtSetDevice");
    if (status) s->before = -1;
    return status;
}

static fmoe_status leave(const scope *s, fmoe_status status)
{
    if (s->before < 0) return status;
    const aclError code = s->acl->aclrtSetDevice(s->before);
    return status ? status : answer(s->acl, code, "aclrtSetDevice");
}

/* ---- memory ---- */

static void *take_memory(int32_t device, size_t bytes, bool host)
{
    scope s;
    void *p = NULL;
    if (enter(&s, device)) return NULL;
    const aclError code =
        host ? s.acl->aclrtMallocHost(&p, bytes) : s.acl->aclrtMalloc(&p, bytes, ACL_MEM_MALLOC_HUGE_FIRST);
    const fmoe_status status = answer(s.acl, code, host ? "aclrtMallocHost" : "aclrtMalloc");
    leave(&s, status);
    return status ? NULL : p;
}

static void give_memory(int32_t device, void *memory, bool host)
{
    scope s;
    if (!memory || enter(&s, device)) return;
    if (host) s.acl->aclrtFreeHost(memory);
    else s.acl->aclrtFree(memory);
    leave(&s, FMOE_OK);
}

static fmoe_status move_bytes_of(int32_t device, int kind, void *to, const void *from, size_t bytes, void *stream,
                                 bool wait)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    fmoe_status status = FMOE_OK;
    if (bytes)
        status = answer(s.acl, s.acl->aclrtMemcpyAsync(to, bytes, from, bytes, kind, stream), "aclrtMemcpyAsync");
    if (!status && wait) status = answer(s.acl, s.acl->aclrtSynchronizeStream(stream), "aclrtSynchronizeStream");
    return leave(&s, status);
}

static fmoe_status copy(int32_t device, void *to, const void *from, size_t bytes, void *stream, bool wait)
{
    return move_bytes_of(device, ACL_DEVICE_TO_DEVICE, to, from, bytes, stream, wait);
}

/* Where the host waits anyway its memory may be of any kind: aclrtMemcpyAsync is documented for aclrtMallocHost's. */
static fmoe_status cross(int32_t device, bool to_host, void *to, const void *from, size_t bytes, void *stream,
                         bool wait)
{
    const int kind = to_host ? ACL_DEVICE_TO_HOST : ACL_HOST_TO_DEVICE;
    scope s;
    if (!wait) return move_bytes_of(device, kind, to, from, bytes, stream, false);
    FMOE_TRY(move_bytes_of(device, kind, NULL, NULL, 0, stream, true));
    FMOE_TRY(enter(&s, device));
    fmoe_status status = FMOE_OK;
    if (bytes) status = answer(s.acl, s.acl->aclrtMemcpy(to, bytes, from, bytes, kind), "aclrtMemcpy");
    return leave(&s, status);
}

static fmoe_status zero(int32_t device, void *at, size_t bytes, void *stream)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    return leave(&s, answer(s.acl, s.acl->aclrtMemsetAsync(at, bytes, 0, bytes, stream), "aclrtMemsetAsync"));
}

/* aclrtFree does not wait for what is under way. */
static bool idle(int32_t device, int64_t timeout_ms)
{
    scope s;
    if (enter(&s, device)) return false;
    const aclError code = s.acl->aclrtSynchronizeDeviceWithTimeout((int32_t)fmoe_min(timeout_ms, INT32_MAX));
    if (code) s.acl->aclGetRecentErrMsg();
    leave(&s, FMOE_OK);
    return code == 0;
}

/* ---- events: of the kind that may be recorded again without a reset ---- */

static fmoe_status event(int32_t device, void **out)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    const aclError code = s.acl->aclrtCreateEventExWithFlag(out, ACL_EVENT_SYNC | ACL_EVENT_CAPTURE_STREAM_PROGRESS);
    if (code) *out = NULL;
    return leave(&s, answer(s.acl, code, "aclrtCreateEventExWithFlag"));
}

static void event_free(int32_t device, void *e)
{
    scope s;
    if (!e || enter(&s, device)) return;
    s.acl->aclrtDestroyEvent(e);
    leave(&s, FMOE_OK);
}

static fmoe_status record(int32_t device, void *e, void *stream)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    return leave(&s, answer(s.acl, s.acl->aclrtRecordEvent(e, stream), "aclrtRecordEvent"));
}

static fmoe_status after(int32_t device, void *e, void *stream)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    return leave(&s, answer(s.acl, s.acl->aclrtStreamWaitEvent(stream, e), "aclrtStreamWaitEvent"));
}

static fmoe_status passed(int32_t device, void *e, bool *yes)
{
    scope s;
    int state = 0;
    FMOE_TRY(enter(&s, device));
    const fmoe_status status = answer(s.acl, s.acl->aclrtQueryEventStatus(e, &state), "aclrtQueryEventStatus");
    *yes = !status && state == ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return leave(&s, status);
}

/* The host makes indices, so nothing of this can be captured. */
static bool capturing(int32_t device, void *stream)
{
    (void)device, (void)stream;
    return false;
}

/* ---- rows ---- */

static void select_rows(asc_call *c, const fmoe_move_args *a)
{
    void *const from = (void *)(uintptr_t)a->from, *const map = (void *)(uintptr_t)a->map;
    const bool rows = a->columns > 1;
    const aclDataType type = asc_dtype(a->from_type);
    asc_view v = rows ? asc_2d(from, type, a->rows, a->columns) : asc_1d(from, type, a->rows);
    v.strides[0] = a->stride;
    v = asc_packed_as(c, v, type); /* rows with gaps: CANN would copy them too, unasked */
    asc_view to = v;
    to.data = a->to;
    to.dims[0] = a->n;
    const bool cast = a->type != a->from_type;
    const asc_view got = cast ? asc_like(c, to) : to;
    const aclTensor *ts = asc_t(c, v), *ti = asc_t(c, asc_1d(map, ACL_INT64, a->n)), *tg = asc_t(c, got);
    ASC_LAUNCH(c, IndexSelect, ts, 0, ti, tg);
    to.dtype = asc_dtype(a->type);
    if (cast) asc_cast(c, to, got);
}

/* A walk (call.h) without a plan. */
static fmoe_status walk(int32_t device, const fmoe_move_args *a, size_t *measured)
{
    scope s;
    FMOE_TRY(enter(&s, device));
    asc_plan plan = {.acl = s.acl};
    const fmoe_plan_impl p = {.d = {.device = {FMOE_ASCEND, device}}, .priv = &plan};
    const fmoe_run run = {
        .size = sizeof run, .workspace = a->work, .workspace_bytes = a->work_bytes, .stream = a->stream};
    asc_call c;
    fmoe_status status = measured ? asc_begin_measure(&c, &p) : asc_begin(&c, &p, &run);
    if (!status) {
        select_rows(&c, a);
        status = asc_end(&c);
        if (measured) *measured = c.peak ? c.peak + 512 : 0;
    }
    return leave(&s, status);
}

static fmoe_status move_bytes(int32_t device, const fmoe_move_args *a, size_t *work) { return walk(device, a, work); }
static fmoe_status move(int32_t device, const fmoe_move_args *a) { return walk(device, a, NULL); }

const fmoe_device_ops asc_device = {
    .alloc = take_memory,
    .free = give_memory,
    .copy = copy,
    .event = event,
    .event_free = event_free,
    .record = record,
    .after = after,
    .passed = passed,
    .capturing = capturing,
    .move_bytes = move_bytes,
    .move = move,
    .zero = zero,
    .cross = cross,
    .idle = idle,
};
