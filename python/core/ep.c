/* SPDX-License-Identifier: Apache-2.0
 *
 * ep.c - expert parallelism for Python: a layer over ranks whose engine is a Python object with the methods counts,
 * begin, wait and abort (fusedmoe/distributed/exchange.py), which get the library's buffers as memoryviews, or, of a
 * device, as (address, bytes). Memory of a device is torch's. The library runs without the GIL; its calls into the
 * engine take it. */
#include "core.h"
#include "fusedmoe_ep.h"

typedef struct {
    fmoe_ep *ep;
    PyObject *engine;
    int ranks, on_device; /* of the engine */
    int broken; /* the engine was given up: a transport may still write where it was told to, so that memory stays */
} layer;

typedef struct {
    fmoe_ep_call *call;
    PyObject *layer; /* its capsule */
} batch;

enum {
    WRITE = 0x200
}; /* PyBUF_WRITE, which the limited API has from 3.11 on. What is sent too: torch warns of buffers that are not */
static const char LAYER[] = "fusedmoe.ep", BATCH[] = "fusedmoe.ep_call";

/* ---- the engine, as the library calls it ---- */

/* The exception that is set, as an error of the library. */
static fmoe_status raised(void)
{
    PyObject *type, *value, *trace, *text = NULL;
    const char *words = NULL;
    PyErr_Fetch(&type, &value, &trace);
    if (value && (text = PyObject_Str(value))) words = PyUnicode_AsUTF8AndSize(text, NULL);
    const fmoe_status s = fmoe_ep_fail(FMOE_ERR_EXCHANGE, words ? words : "the exchange raised an exception");
    PyErr_Clear();
    Py_XDECREF(text), Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
    return s;
}

static PyObject *view(const void *data, int64_t bytes, int flags)
{
    static char none; /* a view of nothing has an address too */
    union {
        const void *in;
        char *out;
    } memory = {bytes ? data : &none};
    return PyMemoryView_FromMemory(memory.out, (Py_ssize_t)bytes, flags);
}

/* Rows of an exchange: memory of the host, or an address of a device. */
static PyObject *rows_view(const layer *l, const void *data, int64_t bytes)
{
    return l->on_device ? Py_BuildValue("(KL)", (unsigned long long)(uintptr_t)data, (long long)bytes)
                        : view(data, bytes, WRITE);
}

static PyObject *numbers(const int64_t *n, int count)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) PyList_SetItem(list, i, PyLong_FromLongLong(n[i]));
    return list;
}

static fmoe_status engine_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    layer *l = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    const int64_t bytes = l->ranks * n * 8;
    PyObject *done = PyObject_CallMethod(l->engine, "counts", "NNL", view(send, bytes, WRITE), view(recv, bytes, WRITE),
                                         (long long)timeout_ms);
    const fmoe_status s = done ? FMOE_OK : raised();
    Py_XDECREF(done);
    PyGILState_Release(gil);
    return s;
}

static fmoe_status engine_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                                const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    layer *l = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    const int ranks = l->ranks;
    int64_t out = 0, in = 0;
    for (int r = 0; r < ranks; r++) out += send_rows[r], in += recv_rows[r];
    PyObject *made =
        PyObject_CallMethod(l->engine, "begin", "NNNNL", rows_view(l, send, out * row_bytes), numbers(send_rows, ranks),
                            rows_view(l, recv, in * row_bytes), numbers(recv_rows, ranks), (long long)row_bytes);
    *request = made;
    const fmoe_status s = made ? FMOE_OK : raised();
    PyGILState_Release(gil);
    return s;
}

static fmoe_status engine_wait(void *ctx, void *request, int64_t timeout_ms)
{
    layer *l = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *done = PyObject_CallMethod(l->engine, "wait", "NL", (PyObject *)request, (long long)timeout_ms);
    const fmoe_status s = done ? FMOE_OK : raised();
    Py_XDECREF(done);
    PyGILState_Release(gil);
    return s;
}

static void engine_abort(void *ctx, const char *why)
{
    layer *l = ctx;
    l->broken = 1;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *done = PyObject_CallMethod(l->engine, "abort", "s", why);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyGILState_Release(gil);
}

static void *engine_alloc(void *ctx, size_t bytes)
{
    (void)ctx;
    return malloc(bytes);
}

static void engine_free(void *ctx, void *memory)
{
    if (!((layer *)ctx)->broken) free(memory);
}

static void *device_alloc(void *ctx, size_t bytes)
{
    layer *l = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *address = PyObject_CallMethod(l->engine, "device_alloc", "n", (Py_ssize_t)bytes);
    void *memory = address ? PyLong_AsVoidPtr(address) : NULL;
    if (PyErr_Occurred()) raised(), memory = NULL;
    Py_XDECREF(address);
    PyGILState_Release(gil);
    return memory;
}

static void device_free(void *ctx, void *memory)
{
    layer *l = ctx;
    if (l->broken) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *done = PyObject_CallMethod(l->engine, "device_free", "K", (unsigned long long)(uintptr_t)memory);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    PyGILState_Release(gil);
}

/* ---- layers ---- */

static void layer_free(PyObject *capsule)
{
    layer *l = PyCapsule_GetPointer(capsule, LAYER);
    if (!l) return;
    fmoe_ep_destroy(&l->ep);
    Py_DECREF(l->engine);
    free(l);
}

/* n numbers of a list, at `to`; -1: an exception is set. */
static int take_numbers(PyObject *list, int32_t *to, Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        if (!item) return -1;
        to[i] = (int32_t)PyLong_AsLong(item);
        Py_DECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

PyObject *core_ep_create(PyObject *self, PyObject *args)
{
    (void)self;
    fmoe_desc d = FMOE_DESC_INIT;
    fmoe_ep_desc e = FMOE_EP_DESC_INIT;
    PyObject *desc, *engine, *experts, *ranks_list;
    int rank, ranks, mode, chunks, on_device;
    long long capacity, timeout_ms;
    if (!PyArg_ParseTuple(args, "OOiiOOiiLLp", &desc, &engine, &rank, &ranks, &experts, &ranks_list, &mode, &chunks,
                          &capacity, &timeout_ms, &on_device))
        return NULL;
    if (core_desc(desc, &d)) return NULL;
    const Py_ssize_t n = experts == Py_None ? 0 : PySequence_Size(experts);
    if (n < 0 || (n && PySequence_Size(ranks_list) != n))
        return PyErr_Occurred()
                   ? NULL
                   : PyErr_Format(PyExc_ValueError, "ep_create: %zd experts are placed on another number of ranks", n);
    layer *l = calloc(1, sizeof *l);
    int32_t *map = calloc((size_t)(2 * n + 1), sizeof *map);
    if (!l || !map) return free(l), free(map), PyErr_NoMemory();
    if (take_numbers(experts, map, n) || take_numbers(ranks_list, map + n, n)) return free(l), free(map), NULL;
    fmoe_exchange x = {sizeof x,     rank,         ranks,       l,         engine_counts, engine_begin, engine_wait,
                       engine_abort, engine_alloc, engine_free, on_device, NULL,          NULL};
    if (d.device.type != 0 && d.device.type != FMOE_CPU) x.device_alloc = device_alloc, x.device_free = device_free;
    l->ranks = ranks, l->on_device = on_device;
    l->engine = engine; /* a reference of its own where the layer is made */
    e.layer = &d, e.exchange = &x, e.mode = mode, e.chunks = chunks, e.capacity = capacity, e.timeout_ms = timeout_ms;
    if (n) e.expert = map, e.rank = map + n, e.placements = n;
    const fmoe_status s = fmoe_ep_create(&l->ep, &e);
    free(map);
    if (s != FMOE_OK) return free(l), core_fail(s, fmoe_last_error());
    Py_INCREF(engine);
    return PyCapsule_New(l, LAYER, layer_free);
}

PyObject *core_ep_local(PyObject *self, PyObject *arg)
{
    (void)self;
    layer *l = PyCapsule_GetPointer(arg, LAYER);
    if (!l) return NULL;
    const int64_t n = fmoe_ep_local(l->ep, NULL, 0);
    int32_t *experts = malloc((size_t)(n + 1) * sizeof *experts);
    if (!experts) return PyErr_NoMemory();
    fmoe_ep_local(l->ep, experts, n);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list && i < n; i++) PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromLong(experts[i]));
    free(experts);
    return list;
}

/* ---- calls ---- */

static void batch_free(PyObject *capsule)
{
    batch *b = PyCapsule_GetPointer(capsule, BATCH);
    if (!b) return;
    fmoe_ep_call_free(&b->call);
    Py_DECREF(b->layer);
    free(b);
}

static Py_ssize_t tensors_in(PyObject *o) { return PyList_Check(o) || PyTuple_Check(o) ? PySequence_Size(o) : 1; }

static int take_or_none(call *c, PyObject *o, layout as, const char *name, const fmoe_tensor **out)
{
    c->argument = name;
    if (o == Py_None) return 0;
    return (*out = take(c, o, as)) ? 0 : -1;
}

/* Descriptors of quantised weights: W1, W2 and the gates of a list, each may be None; or None for all. */
static Py_ssize_t tensors_of(PyObject *quants)
{
    Py_ssize_t n = 0;
    for (int i = 0; PyTuple_Check(quants) && i < MAX_QUANTS && i < PyTuple_Size(quants); i++)
        n += quant_capacity(PyTuple_GetItem(quants, i));
    return n;
}

static int take_quants(call *c, PyObject *quants, fmoe_weights *w)
{
    const fmoe_quant **const to[MAX_QUANTS] = {&w->quant1, &w->quant2, &w->quant_gate};
    c->argument = "quants";
    if (quants == Py_None) return 0;
    if (!PyTuple_Check(quants) || PyTuple_Size(quants) != MAX_QUANTS)
        return PyErr_Format(PyExc_TypeError, "experts: quants is not a tuple of %d", MAX_QUANTS), -1;
    for (int i = 0; i < MAX_QUANTS; i++) {
        PyObject *one = PyTuple_GetItem(quants, i);
        if (one != Py_None && take_quant(c, one, to[i])) return -1;
    }
    return 0;
}

static int take_stream(const call *c, void **stream)
{
    return c->device.type == FMOE_ASCEND ? npu_drained_stream(c->device.id, stream) : torch_stream(c, stream);
}

/* ep_forward(layer, form, inference, x, ids, p, w, out, dropped, scale1, scale2, quants): the call that the backward
 * gets */
PyObject *core_ep_forward(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned form;
    int inference;
    float scale1, scale2;
    PyObject *capsule, *x, *ids, *p, *w, *out, *dropped, *quants;
    if (!PyArg_ParseTuple(args, "OIpOOOOOOffO", &capsule, &form, &inference, &x, &ids, &p, &w, &out, &dropped, &scale1,
                          &scale2, &quants))
        return NULL;
    layer *l = PyCapsule_GetPointer(capsule, LAYER);
    batch *b = l ? calloc(1, sizeof *b) : NULL;
    if (!b) return l ? PyErr_NoMemory() : NULL;
    fmoe_ep_args a = FMOE_EP_ARGS_INIT;
    call c;
    call_begin(&c, 6 + tensors_in(w) + tensors_of(quants));
    c.op = "experts";
    fmoe_status s = FMOE_OK;
    const bool taken = c.tensors && !take_or_none(&c, x, ROWS, "x", &a.x) &&
                       !take_or_none(&c, ids, IDS, "ids", &a.ids) && !take_or_none(&c, p, COMPACT, "p", &a.weights) &&
                       !take_or_none(&c, out, AS_IS, "out", &a.out) &&
                       !take_or_none(&c, dropped, AS_IS, "dropped", &a.dropped) &&
                       (w == Py_None || (!take_weights(&c, w, form, false, &a.w) && !take_quants(&c, quants, &a.w))) &&
                       !take_stream(&c, &a.stream);
    if (taken) {
        a.inference = inference, a.w.lora_scale1 = scale1, a.w.lora_scale2 = scale2;
        Py_BEGIN_ALLOW_THREADS
        s = fmoe_ep_forward(l->ep, &a, &b->call);
        Py_END_ALLOW_THREADS
    }
    call_end(&c);
    if (!taken || s != FMOE_OK) {
        free(b);
        if (!taken) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
        return core_fail(s, fmoe_last_error());
    }
    Py_INCREF(capsule);
    b->layer = capsule;
    return PyCapsule_New(b, BATCH, batch_free);
}

/* ep_backward(call, form, x, ids, p, w, dout, dx, dp, dw, scale1, scale2, quants) */
PyObject *core_ep_backward(PyObject *self, PyObject *args)
{
    (void)self;
    unsigned form;
    float scale1, scale2;
    PyObject *capsule, *x, *ids, *p, *w, *dout, *dx, *dp, *dw, *quants;
    if (!PyArg_ParseTuple(args, "OIOOOOOOOOffO", &capsule, &form, &x, &ids, &p, &w, &dout, &dx, &dp, &dw, &scale1,
                          &scale2, &quants))
        return NULL;
    batch *b = PyCapsule_GetPointer(capsule, BATCH);
    if (!b) return NULL;
    fmoe_ep_args a = FMOE_EP_ARGS_INIT;
    call c;
    call_begin(&c, 7 + tensors_in(w) + tensors_in(dw) + tensors_of(quants));
    c.op = "experts";
    fmoe_status s = FMOE_OK;
    const bool taken = c.tensors && !take_or_none(&c, x, ROWS, "x", &a.x) &&
                       !take_or_none(&c, ids, IDS, "ids", &a.ids) && !take_or_none(&c, p, COMPACT, "p", &a.weights) &&
                       !take_or_none(&c, dout, ROWS, "dout", &a.dout) && !take_or_none(&c, dx, AS_IS, "dx", &a.dx) &&
                       !take_or_none(&c, dp, AS_IS, "dp", &a.dweights) &&
                       (w == Py_None || (!take_weights(&c, w, form, false, &a.w) && !take_quants(&c, quants, &a.w))) &&
                       (dw == Py_None || !take_weights(&c, dw, form, true, &a.dw)) && !take_stream(&c, &a.stream);
    if (taken) {
        a.w.lora_scale1 = scale1, a.w.lora_scale2 = scale2;
        Py_BEGIN_ALLOW_THREADS
        s = fmoe_ep_backward(b->call, &a);
        Py_END_ALLOW_THREADS
    }
    call_end(&c);
    if (!taken) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    if (s != FMOE_OK) return core_fail(s, fmoe_last_error());
    Py_RETURN_NONE;
}

PyObject *core_ep_stats(PyObject *self, PyObject *arg)
{
    (void)self;
    batch *b = PyCapsule_GetPointer(arg, BATCH);
    fmoe_ep_stats t = {.size = sizeof t};
    if (!b) return NULL;
    const fmoe_status s = fmoe_ep_call_stats(b->call, &t);
    if (s != FMOE_OK) return core_fail(s, fmoe_last_error());
    return Py_BuildValue("{sLsLsLsLsLsLsLsLsL}", "rows_out", (long long)t.rows_out, "rows_in", (long long)t.rows_in,
                         "pairs_out", (long long)t.pairs_out, "pairs_in", (long long)t.pairs_in, "bytes_counts",
                         (long long)t.bytes_counts, "bytes_pairs", (long long)t.bytes_pairs, "bytes_out",
                         (long long)t.bytes_out, "bytes_back", (long long)t.bytes_back, "dropped",
                         (long long)t.dropped);
}
