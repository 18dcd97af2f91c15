/* SPDX-License-Identifier: Apache-2.0
 *
 * fusedmoe._core: the C API for Python, in the limited API (one binary for CPython >= 3.10).
 *
 * Tensors come in through DLPack's C exchange table (torch >= 2.10: no capsule, no reference count, no synchronisation),
 * or, from types without one, through data_ptr(), shape, stride(), dtype and device. Every run function has the same
 * shape, so one table (OPS) describes them all: run(op, plan, flags, stream, workspace, *slots), a slot being a tensor,
 * a list of tensors, or None; workspace a tensor, or (CPU only) the number of rows it is for, and it is allocated here.
 * What the library reads in one layout only (rows with neighbours side by side, ids of 32 or 64 bits) is copied where it has
 * another. A status other than FMOE_OK becomes a Python exception with fmoe_last_error() as its text.
 */
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined Py_LIMITED_API && !defined Py_GIL_DISABLED /* a free-threaded Python has no limited API: a binary of its own */
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define FMOE_EXPERIMENTAL /* the ceilings that benchmarks are held against */
#include "pages.h"
#include "pool.h"
#include "fusedmoe.h"
#pragma weak fmoe_cpu_ceiling_gflops /* experimental: a library without them will do */
#pragma weak fmoe_cpu_stream_gbytes

/* ---- The operations: which field of which struct each Python argument fills ------------------------------ */

/* TENSOR: a tensor, or a list of them, of which an empty one is none. ROWS: the same, its last dimension with unit stride.
 * IDS: the same, int32 or int64, compact. BYTES: void * followed by size_t. INT32, FLOAT: a number. WEIGHTS: fmoe_weights, see
 * take_weights; PLAIN: those of the shared expert, which have no other form. */
enum { TENSOR, ROWS, IDS, BYTES, INT32, FLOAT, WEIGHTS, PLAIN, MAX_SLOTS = 32, MAX_RANK = 8 };

/* Flags beside those of the run: how weights are given. Also in ops.py. */
enum { LIST = 1 << 16, TRANSPOSED = 1 << 17, LORA1 = 1 << 18, LORA2 = 1 << 19, UNGATED = 1 << 20 };

typedef struct {
    size_t offset;
    int kind;
} slot;

typedef fmoe_status (*run_fn)(fmoe_plan, const void *, const fmoe_run *);

typedef struct {
    const char *name;
    run_fn run;
    size_t size;
    int n;
    slot slots[MAX_SLOTS];
} op_entry;

#define T(type, field) {offsetof(fmoe_##type##_args, field), TENSOR}
#define R(type, field) {offsetof(fmoe_##type##_args, field), ROWS}
#define I(type, field) {offsetof(fmoe_##type##_args, field), IDS}
#define B(type, field) {offsetof(fmoe_##type##_args, field), BYTES}
#define N(type, field) {offsetof(fmoe_##type##_args, field), INT32}
#define F(type, field) {offsetof(fmoe_##type##_args, field), FLOAT}
#define W(type, field) {offsetof(fmoe_##type##_args, field), WEIGHTS}
#define P(type, field) {offsetof(fmoe_##type##_args, field), PLAIN}

/* One adapter a function: calling through a pointer of another type would be undefined. */
#define ADAPT(op, pass, type)                                                                                             \
    static fmoe_status run_##op##_##pass(fmoe_plan p, const void *a, const fmoe_run *r) {                                \
        return fmoe_##op##_##pass(p, (const fmoe_##type##_args *)a, r);                                                  \
    }
#define BOTH(op, type) ADAPT(op, forward, type) ADAPT(op, backward, type)
BOTH(route, route)
BOTH(permute, permute)
BOTH(unpermute, unpermute)
BOTH(grouped_matmul, gmm)
BOTH(activation, activation)
BOTH(experts, experts)
BOTH(block, block)

#define OP(NAME, fn, type, ...)                                                                                           \
    {#NAME, run_##fn, sizeof(fmoe_##type##_args), (int)(sizeof((slot[]){__VA_ARGS__}) / sizeof(slot)), {__VA_ARGS__}}

static const op_entry OPS[] = {
    OP(ROUTE_FORWARD, route_forward, route, R(route, logits), T(route, select_bias), I(route, ids), T(route, weights),
       T(route, bad_rows)),
    OP(ROUTE_BACKWARD, route_backward, route, R(route, logits), T(route, select_bias), I(route, ids), R(route, dweights),
       T(route, dlogits)),
    OP(PERMUTE_FORWARD, permute_forward, permute, R(permute, x), I(permute, ids), T(permute, xp), T(permute, map),
       T(permute, counts)),
    OP(PERMUTE_BACKWARD, permute_backward, permute, T(permute, x), R(permute, xp), T(permute, map)),
    OP(UNPERMUTE_FORWARD, unpermute_forward, unpermute, R(unpermute, y), T(unpermute, map), R(unpermute, weights),
       T(unpermute, out)),
    OP(UNPERMUTE_BACKWARD, unpermute_backward, unpermute, R(unpermute, y), T(unpermute, map), R(unpermute, weights),
       R(unpermute, dout), T(unpermute, dy), T(unpermute, dweights)),
    OP(GROUPED_MATMUL_FORWARD, grouped_matmul_forward, gmm, R(gmm, x), T(gmm, w), T(gmm, bias), I(gmm, sizes), T(gmm, y),
       N(gmm, cumulative), N(gmm, list)),
    OP(GROUPED_MATMUL_BACKWARD, grouped_matmul_backward, gmm, R(gmm, x), T(gmm, w), I(gmm, sizes), R(gmm, dy), T(gmm, dx), T(gmm, dw),
       T(gmm, dbias), N(gmm, cumulative), N(gmm, list)),
    OP(ACTIVATION_FORWARD, activation_forward, activation, R(activation, h), T(activation, a)),
    OP(ACTIVATION_BACKWARD, activation_backward, activation, R(activation, h), R(activation, da), T(activation, dh)),
    OP(EXPERTS_FORWARD, experts_forward, experts, R(experts, x), I(experts, ids), R(experts, weights), W(experts, w),
       T(experts, out), B(experts, saved), F(experts, w.lora_scale1), F(experts, w.lora_scale2)),
    OP(EXPERTS_BACKWARD, experts_backward, experts, R(experts, x), I(experts, ids), R(experts, weights), W(experts, w),
       B(experts, saved), R(experts, dout), T(experts, dx), T(experts, dweights), W(experts, dw), F(experts, w.lora_scale1),
       F(experts, w.lora_scale2)),
    OP(BLOCK_FORWARD, block_forward, block, R(block, x), T(block, w_router), T(block, b_router), T(block, select_bias),
       W(block, w), P(block, shared), T(block, shared_gate), T(block, logits), T(block, ids), T(block, weights), T(block, out),
       B(block, saved)),
    OP(BLOCK_BACKWARD, block_backward, block, R(block, x), T(block, w_router), T(block, select_bias), W(block, w),
       P(block, shared), T(block, shared_gate), T(block, logits), T(block, ids), T(block, weights), B(block, saved),
       R(block, dout), R(block, dlogits), T(block, dx), T(block, dw_router), T(block, db_router), W(block, dw),
       P(block, dshared), T(block, dshared_gate)),
};
enum { N_OPS = sizeof OPS / sizeof *OPS };

/* ---- DLPack's exchange table: our own declaration of its public layout (DLPack 1.3) ---------------------- */

typedef struct exchange_header {
    struct {
        uint32_t major, minor;
    } version;
    struct exchange_header *prev;
} exchange_header;

typedef struct {
    exchange_header header;
    void (*managed_allocate)(void);
    void (*managed_from_py)(void);
    int (*managed_to_py)(managed_tensor *tensor, void **out); /* takes the tensor over */
    int (*tensor_from_py)(void *object, fmoe_tensor *out); /* borrowed view; fmoe_tensor is laid out as DLTensor */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} exchange_api;

static struct {
    PyTypeObject *type;
    const exchange_api *api; /* NULL: the type has none */
} cache[8];
static unsigned cache_next;
static int use_exchange = 1;

static const exchange_api *look_up_api(PyTypeObject *type) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (!capsule) {
        PyErr_Clear();
        return NULL;
    }
    const exchange_header *h = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the table is static: it lives as long as its type */
    if (!h) PyErr_Clear();
    while (h && h->version.major > 1) h = h->prev;
    const exchange_api *api = (const exchange_api *)(const void *)h;
    return api && h->version.major == 1 && api->tensor_from_py ? api : NULL;
}

static const exchange_api *api_of(PyObject *o) {
    PyTypeObject *type = Py_TYPE(o);
    for (int i = 0; i < 8; i++)
        if (cache[i].type == type) return cache[i].api;
    const exchange_api *api = look_up_api(type);
    unsigned i = cache_next++ % 8;
    Py_INCREF(type);
    Py_XDECREF((PyObject *)cache[i].type);
    cache[i].type = type;
    cache[i].api = api;
    return api;
}

/* ---- The fall-back: ask the Python object ---------------------------------------------------------------- */

static int read_ints(PyObject *seq, int64_t *out) {
    Py_ssize_t n = seq ? PySequence_Size(seq) : -1;
    if (n > MAX_RANK) PyErr_SetString(PyExc_ValueError, "fusedmoe: a tensor of more than 8 dimensions");
    if (n < 0 || n > MAX_RANK) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *v = PySequence_GetItem(seq, i);
        out[i] = v ? PyLong_AsLongLong(v) : -1;
        Py_XDECREF(v);
        if (PyErr_Occurred()) return -1;
    }
    return (int)n;
}

static int read_dtype(PyObject *o, fmoe_datatype *out) {
    static const struct {
        const char *name;
        fmoe_datatype type;
    } known[] = {{"float32", {2, 32, 1}}, {"bfloat16", {4, 16, 1}}, {"float16", {2, 16, 1}}, {"float64", {2, 64, 1}},
                 {"int32", {0, 32, 1}},   {"int64", {0, 64, 1}},    {"uint8", {1, 8, 1}},    {"int16", {0, 16, 1}},
                 {"int8", {0, 8, 1}},     {"bool", {6, 8, 1}}};
    PyObject *dtype = PyObject_GetAttrString(o, "dtype"), *text = dtype ? PyObject_Str(dtype) : NULL;
    const char *s = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    int rc = -1;
    if (s) {
        const char *dot = strrchr(s, '.'); /* "torch.float32" */
        const char *name = dot ? dot + 1 : s;
        for (size_t i = 0; i < sizeof known / sizeof *known && rc; i++)
            if (!strcmp(name, known[i].name)) *out = known[i].type, rc = 0;
        if (rc) PyErr_Format(PyExc_TypeError, "fusedmoe: dtype %s is not supported", s);
    }
    Py_XDECREF(text);
    Py_XDECREF(dtype);
    return rc;
}

static int read_device(PyObject *o, fmoe_device *out) {
    PyObject *device = PyObject_GetAttrString(o, "device");
    PyObject *type = device ? PyObject_GetAttrString(device, "type") : NULL;
    PyObject *index = type ? PyObject_GetAttrString(device, "index") : NULL;
    const char *s = index ? PyUnicode_AsUTF8AndSize(type, NULL) : NULL;
    if (s) {
        out->type = !strcmp(s, "cpu") ? FMOE_CPU : !strcmp(s, "cuda") ? FMOE_CUDA : FMOE_ASCEND;
        out->id = index == Py_None ? 0 : (int32_t)PyLong_AsLong(index);
    }
    Py_XDECREF(index);
    Py_XDECREF(type);
    Py_XDECREF(device);
    return s && !PyErr_Occurred() ? 0 : -1;
}

static int from_attributes(PyObject *o, fmoe_tensor *out, int64_t *dims) {
    PyObject *ptr = PyObject_CallMethod(o, "data_ptr", NULL);
    if (!ptr) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "fusedmoe: expected a tensor, a list of tensors or None, got %R", (PyObject *)Py_TYPE(o));
        return -1;
    }
    out->data = PyLong_AsVoidPtr(ptr);
    Py_DECREF(ptr);
    PyObject *shape = PyObject_GetAttrString(o, "shape"), *strides = shape ? PyObject_CallMethod(o, "stride", NULL) : NULL;
    out->ndim = strides ? read_ints(shape, dims) : -1;
    out->shape = dims;
    out->strides = dims + MAX_RANK;
    out->byte_offset = 0;
    int rc = out->ndim < 0 || read_ints(strides, dims + MAX_RANK) < 0 ? -1 : 0;
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    return rc ? rc : read_dtype(o, &out->dtype) || read_device(o, &out->device) ? -1 : 0;
}

/* ---- One call's tensors ---------------------------------------------------------------------------------- */

enum { ON_STACK = 48, ASIDE = 64 }; /* ASIDE: a workspace at the same place of a page as gradients costs 1 % */

typedef struct {
    fmoe_tensor on_stack[ON_STACK], *tensors;
    int64_t (*dims)[2 * MAX_RANK]; /* only in the fall-back */
    int64_t turned[4][6];          /* shape and strides of transposed weights and their gradients */
    Py_ssize_t n, capacity, list; /* list: the length of every list of tensors, for the library reads all to the same */
    int n_turned;
    fmoe_device device;
    const exchange_api *api;
    PyObject *copies; /* of what had another layout */
} call;

static void start(call *c, Py_ssize_t capacity) {
    c->dims = NULL, c->n = 0, c->n_turned = 0, c->capacity = capacity, c->list = 0, c->api = NULL, c->copies = NULL;
    c->device = (fmoe_device){FMOE_CPU, 0};
    c->tensors = capacity <= ON_STACK ? c->on_stack : malloc((size_t)capacity * sizeof *c->tensors);
}

static void release(call *c) {
    free(c->dims);
    if (c->tensors != c->on_stack) free(c->tensors);
    Py_XDECREF(c->copies);
}

static fmoe_tensor *take(call *c, PyObject *o) {
    fmoe_tensor *t = &c->tensors[c->n];
    const exchange_api *api = use_exchange ? api_of(o) : NULL;
    if (api) {
        if (api->tensor_from_py(o, t) != 0) return NULL;
    } else {
        if (!c->dims && !(c->dims = calloc((size_t)c->capacity, sizeof *c->dims))) {
            PyErr_NoMemory();
            return NULL;
        }
        if (from_attributes(o, t, c->dims[c->n]) != 0) return NULL;
    }
    if (!c->n) c->device = t->device, c->api = api;
    c->n++;
    return t;
}

static bool is_compact(const fmoe_tensor *t) {
    int64_t run = 1;
    for (int i = t->ndim - 1; t->strides && i >= 0; run *= t->shape[i--])
        if (t->shape[i] != 1 && t->strides[i] != run) return false;
    return true;
}

/* take, with the layout that the kind of slot asks for: t.long(), t.contiguous() where it has another. */
static fmoe_tensor *take_as(call *c, PyObject *o, int kind) {
    fmoe_tensor *t = take(c, o);
    if (!t || kind == TENSOR || !t->ndim) return t;
    const int last = t->ndim - 1;
    const char *fix = NULL;
    if (kind == IDS && t->dtype.code > 1) { /* DLPack: 0 is int, 1 uint */
        PyObject *dtype = PyObject_GetAttrString(o, "dtype");
        if (dtype) PyErr_Format(PyExc_TypeError, "fusedmoe: numbers of experts and rows are integers, got %S", dtype);
        Py_XDECREF(dtype);
        return NULL;
    }
    if (kind == IDS && !(t->dtype.code == 0 && t->dtype.bits >= 32)) fix = "long";
    else if (kind == IDS ? !is_compact(t) : t->strides && t->strides[last] != 1 && t->shape[last] != 1) fix = "contiguous";
    if (!fix) return t;
    PyObject *copy = PyObject_CallMethod(o, fix, NULL);
    if (!copy || (!c->copies && !(c->copies = PyList_New(0))) || PyList_Append(c->copies, copy)) {
        Py_XDECREF(copy);
        return NULL;
    }
    Py_DECREF(copy); /* the list has it */
    c->n--;
    return take_as(c, copy, *fix == 'l' ? kind : TENSOR);
}

static Py_ssize_t list_size(PyObject *o) { /* -1: not a list */
    return PyList_Check(o) ? PyList_Size(o) : PyTuple_Check(o) ? PyTuple_Size(o) : -1;
}

static PyObject *list_item(PyObject *o, Py_ssize_t i) { return PyList_Check(o) ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i); }

/* Entries [from, to) of a list, as an array; NULL in *out where there is none, or the first is None. */
static int take_part(call *c, PyObject *list, Py_ssize_t from, Py_ssize_t to, int kind, const fmoe_tensor **out) {
    *out = NULL;
    if (from == to || list_item(list, from) == Py_None) return 0;
    *out = &c->tensors[c->n];
    for (Py_ssize_t i = from; i < to; i++)
        if (!take_as(c, list_item(list, i), kind)) return -1;
    return 0;
}

static int take_slot(call *c, PyObject *o, int kind, const fmoe_tensor **out) {
    const Py_ssize_t n = list_size(o);
    if (n > 0 && c->list && n != c->list)
        return PyErr_Format(PyExc_ValueError, "fusedmoe: a list of %zd tensors beside one of %zd", n, c->list), -1;
    if (n > 0) c->list = n;
    if (n >= 0) return take_part(c, o, 0, n, kind, out);
    return (*out = take_as(c, o, kind)) ? 0 : -1;
}

/* [E,K,N] as [E,N,K], without touching what torch's tensor says of itself. */
static void turn(call *c, const fmoe_tensor *given) {
    if (!given || given->ndim != 3) return; /* the library names it */
    fmoe_tensor *t = (fmoe_tensor *)given;
    int64_t *d = c->turned[c->n_turned++];
    const int64_t s[3] = {t->strides ? t->strides[0] : t->shape[1] * t->shape[2], t->strides ? t->strides[1] : t->shape[2],
                          t->strides ? t->strides[2] : 1};
    memcpy(d, (int64_t[]){t->shape[0], t->shape[2], t->shape[1], s[0], s[2], s[1]}, 6 * sizeof *d);
    t->shape = d, t->strides = d + 3;
}

/* w is [w1, w2] or [w1, w2, b1, b2]; with LIST, the gates (unless UNGATED), ups and downs of all experts one after the other; then
 * a1, b1 with LORA1 and a2, b2 with LORA2. None in the place of a gradient (of a part of the list) that nobody wants. */
static int take_weights(call *c, PyObject *list, unsigned form, fmoe_weights *w) {
    Py_ssize_t n = list_size(list);
    if (n < 0) return PyErr_Format(PyExc_TypeError, "fusedmoe: weights are a list of tensors"), -1;
    const fmoe_tensor **lora[4] = {&w->lora_a1, &w->lora_b1, &w->lora_a2, &w->lora_b2};
    for (int i = 3; i >= 0; i--)
        if (form & (i > 1 ? LORA2 : LORA1) && (--n < 0 || take_part(c, list, n, n + 1, TENSOR, lora[i]))) goto error;
    const fmoe_tensor **stacked[4] = {&w->w1, &w->w2, &w->b1, &w->b2}, **parts[3] = {&w->gate, &w->up, &w->down};
    if (form & LIST) {
        const int first = form & UNGATED ? 1 : 0;
        const Py_ssize_t E = n / (3 - first);
        for (int i = first; i < 3; i++)
            if (take_part(c, list, (i - first) * E, (i - first + 1) * E, TENSOR, parts[i])) goto error;
        return 0;
    }
    for (int i = 0; i < n && i < 4; i++)
        if (take_part(c, list, i, i + 1, TENSOR, stacked[i])) goto error;
    if (form & TRANSPOSED) turn(c, w->w1), turn(c, w->w2);
    return 0;
error:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fusedmoe: fewer weights than the flags say");
    return -1;
}

static size_t tensor_bytes(const fmoe_tensor *t) {
    size_t n = t->dtype.bits / 8;
    for (int i = 0; i < t->ndim; i++) n *= (size_t)t->shape[i];
    return n;
}

/* ---- Status -> exception --------------------------------------------------------------------------------- */

static PyObject *fail(fmoe_status s) {
    PyObject *type = PyExc_RuntimeError;
    switch (s) {
    case FMOE_ERR_ARG: case FMOE_ERR_SHAPE: case FMOE_ERR_STRIDE: case FMOE_ERR_ALIGN: case FMOE_ERR_ALIAS: case FMOE_ERR_PLAN:
        type = PyExc_ValueError; break;
    case FMOE_ERR_DTYPE: type = PyExc_TypeError; break;
    case FMOE_ERR_INDEX: type = PyExc_IndexError; break;
    case FMOE_ERR_OVERFLOW: type = PyExc_OverflowError; break;
    case FMOE_ERR_NOMEM: type = PyExc_MemoryError; break;
    case FMOE_ERR_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    default: break;
    }
    return PyErr_Format(type, "%s: %s", fmoe_status_string(s), fmoe_last_error());
}

/* ---- torch_npu's stream ---------------------------------------------------------------------------------- */

/* torch_npu puts its operators into a queue that another thread submits to the stream. Our launches go through that queue where
 * it can be found (npu_queue.cpp) and is on; else the stream is asked for in the way that waits until the queue is empty. Either
 * way everything is in order. The queue belongs to the current device, so tensors of another one take the second way. */
#ifdef FMOE_NPU_QUEUE
void *fmoe_npu_queue(void);
const char *fmoe_npu_problem(void);
int fmoe_npu_submit(void *queue, const char *name, int (*launch)(void *), void *arg);
#else
static void *fmoe_npu_queue(void) { return NULL; }
static const char *fmoe_npu_problem(void) { return ""; }
#define fmoe_npu_submit NULL
#endif
static int use_queue = 1;

static long long ask_npu(PyObject *torch_npu, const char *question, int index) { /* -1: an error, or no such question */
    PyObject *answer = index < 0 ? PyObject_CallMethod(torch_npu, question, NULL) : PyObject_CallMethod(torch_npu, question, "i", index);
    long long n = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return n;
}

static int npu_stream(int index, fmoe_run *run) {
    PyObject *torch_npu = PyImport_ImportModule("torch_npu._C");
    if (!torch_npu) return -1;
    void *queue = use_queue ? fmoe_npu_queue() : NULL;
    long long stream = -1;
    if (queue && ask_npu(torch_npu, "_npu_get_task_queue_enable", -1) > 0 && ask_npu(torch_npu, "_npu_getDevice", -1) == index)
        stream = ask_npu(torch_npu, "_npu_getCurrentRawStreamNoWait", index);
    if (stream != -1) {
        run->submit = fmoe_npu_submit;
        run->submit_ctx = queue;
    } else {
        PyErr_Clear(); /* a torch_npu that has no such functions */
        stream = ask_npu(torch_npu, "_npu_getCurrentRawStream", index);
    }
    Py_DECREF(torch_npu);
    run->stream = (void *)(uintptr_t)stream;
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- The functions of the module ------------------------------------------------------------------------- */

static PyObject *core_run(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    (void)self;
    if (n_args < 5) return PyErr_Format(PyExc_TypeError, "run(op, plan, flags, stream, workspace, *slots)");
    long index = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (index < 0 || index >= N_OPS) return PyErr_Format(PyExc_ValueError, "run: no operation %ld", index);
    const op_entry *op = &OPS[index];
    PyObject *const *slots = args + 5;
    if (n_args - 5 != op->n)
        return PyErr_Format(PyExc_TypeError, "run: %s takes %d slots, got %zd", op->name, op->n, n_args - 5);
    fmoe_plan plan = PyLong_AsUnsignedLongLong(args[1]);
    fmoe_run run = FMOE_RUN_INIT;
    const unsigned form = (unsigned)PyLong_AsUnsignedLong(args[2]);
    run.flags = form & (LIST - 1);
    if (PyErr_Occurred()) return NULL;

    void *owned = NULL; /* a workspace of ours, */
    pool_block *pooled = NULL; /* or a large one */
    call c;
    Py_ssize_t capacity = 1;
    for (int i = 0; i < op->n; i++) {
        const Py_ssize_t n = slots[i] == Py_None ? 0 : list_size(slots[i]);
        capacity += n < 0 ? 1 : n;
    }
    start(&c, capacity);
    if (!c.tensors) return PyErr_NoMemory();

    union { /* every args struct begins with its size */
        size_t size;
        char bytes[sizeof(fmoe_block_args)];
        fmoe_block_args align;
    } a;
    memset(&a, 0, sizeof a);
    a.size = op->size;
    const fmoe_weights *weights = NULL;
    for (int i = 0; i < op->n; i++) {
        char *field = a.bytes + op->slots[i].offset;
        const int kind = op->slots[i].kind;
        if (slots[i] == Py_None) continue;
        if (kind == INT32 || kind == FLOAT) {
            if (kind == INT32) *(int32_t *)(void *)field = (int32_t)PyLong_AsLong(slots[i]);
            else *(float *)(void *)field = (float)PyFloat_AsDouble(slots[i]);
            if (PyErr_Occurred()) goto error;
            continue;
        }
        if (kind == WEIGHTS || kind == PLAIN) {
            if (kind == WEIGHTS && !weights) weights = (const fmoe_weights *)(const void *)field; /* the next are gradients */
            if (take_weights(&c, slots[i], kind == PLAIN ? 0 : form, (fmoe_weights *)(void *)field)) goto error;
            continue;
        }
        const fmoe_tensor *t;
        if (take_slot(&c, slots[i], kind == BYTES ? TENSOR : kind, &t)) goto error;
        const size_t n = kind == BYTES && t ? tensor_bytes(t) : 0;
        if (kind != BYTES) memcpy(field, &t, sizeof t);
        else if (n) memcpy(field, &t->data, sizeof t->data), memcpy(field + sizeof(void *), &n, sizeof n);
        if (n && c.device.type == FMOE_CPU) pages_prefer(t->data, n);
    }
    fmoe_device device = c.device;
    const exchange_api *api = c.api;
    if (PyLong_Check(args[4])) {
        const long long rows = PyLong_AsLongLong(args[4]);
        const fmoe_status s = fmoe_workspace_bytes(plan, (fmoe_pass)(strstr(op->name, "BACKWARD") != NULL), rows, &run.workspace_bytes);
        if (s != FMOE_OK || PyErr_Occurred()) {
            if (!PyErr_Occurred()) fail(s);
            goto error;
        }
        if (run.workspace_bytes < pool_from) run.workspace = owned = malloc(run.workspace_bytes);
        else if ((pooled = pool_take(run.workspace_bytes + ASIDE, false))) run.workspace = (char *)pooled->data + ASIDE;
        if (run.workspace_bytes && !run.workspace) {
            PyErr_NoMemory();
            goto error;
        }
    } else if (args[4] != Py_None) {
        const fmoe_tensor *t = take(&c, args[4]);
        if (!t) goto error;
        run.workspace = t->data;
        run.workspace_bytes = tensor_bytes(t);
    }
    if (args[3] != Py_None) {
        run.stream = PyLong_AsVoidPtr(args[3]);
        if (PyErr_Occurred()) goto error;
    } else if (device.type == FMOE_CUDA) {
        if (!api || !api->current_stream) {
            PyErr_SetString(PyExc_RuntimeError, "fusedmoe: this torch does not tell its CUDA stream; pass it");
            goto error;
        }
        if (api->current_stream(device.type, device.id, &run.stream) != 0) goto error;
    } else if (device.type == FMOE_ASCEND) {
        if (npu_stream(device.id, &run) != 0) goto error;
    }
    fmoe_status s;
    if (device.type == FMOE_CPU) {
        Py_BEGIN_ALLOW_THREADS
        if (weights) pages_look_at(weights->w1), pages_look_at(weights->w2);
        const int64_t then = pages_now();
        s = op->run(plan, a.bytes, &run);
        pages_ran_since(then);
        Py_END_ALLOW_THREADS
    } else { /* a device only takes the work into its queue */
        s = op->run(plan, a.bytes, &run);
    }
    free(owned);
    if (pooled) pool_give(pooled);
    release(&c);
    const char *problem = run.submit ? fmoe_npu_problem() : "";
    if (*problem) return PyErr_Format(PyExc_RuntimeError, "fusedmoe: %s", problem);
    if (s != FMOE_OK) return fail(s);
    Py_RETURN_NONE;
error:
    free(owned);
    if (pooled) pool_give(pooled);
    release(&c);
    return NULL;
}

/* ---- torch's threads ------------------------------------------------------------------------------------- */

/* torch's OpenMP workers spin for a while after each of its operators. Threads of our own beside them would share the cores with
 * that (a fifth of a training step's time on two cores), so CPU plans run on torch's: its C shim has the function from 2.10 on.
 * Below that the library uses its own pool. */
typedef int32_t (*torch_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain, void (*fn)(int64_t, int64_t, void *), void *ctx);

typedef struct {
    void (*fn)(void *arg, int worker);
    void *arg;
} workers;

static void run_workers(int64_t begin, int64_t end, void *ctx) {
    const workers *w = ctx;
    for (int64_t i = begin; i < end; i++) w->fn(w->arg, (int)i);
}

static void torch_parallel(void *parallel_for, int n, void (*fn)(void *, int), void *arg) {
    workers w = {fn, arg};
    torch_parallel_for_fn run;
    memcpy(&run, &parallel_for, sizeof run); /* ctx is the function itself */
    if (n == 1 || run(0, n, 1, run_workers, &w) != 0) run_workers(0, n, &w);
}

/* NULL when torch is older, or not there: it is found only where it has been loaded already. */
static void *find_torch_parallel_for(void) {
    void *torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    return torch ? dlsym(torch, "torch_parallel_for") : NULL;
}

static PyObject *core_plan(PyObject *self, PyObject *args) {
    (void)self;
    fmoe_desc d = FMOE_DESC_INIT;
    int op, dtype, device, id, act, threads;
    unsigned int flags;
    long long H, I, E, k, K, n, shared_I, rank1, rank2;
    double alpha, limit;
    PyObject *rule = Py_None;
    if (!PyArg_ParseTuple(args, "iiiiLLLLLLLLLiIddOi", &op, &dtype, &device, &id, &H, &I, &E, &k, &K, &n, &shared_I, &rank1, &rank2,
                          &act, &flags, &alpha, &limit, &rule, &threads))
        return NULL;
    d.op = op, d.dtype = dtype, d.device = (fmoe_device){device, id};
    d.H = H, d.I = I, d.E = E, d.k = k, d.K = K, d.N = n, d.shared_I = shared_I, d.rank1 = rank1, d.rank2 = rank2;
    d.act = act, d.flags = flags, d.act_alpha = (float)alpha, d.act_limit = (float)limit, d.threads = threads;
    if (device == FMOE_CPU && (d.parallel_ctx = find_torch_parallel_for())) d.parallel = torch_parallel;
    if (rule != Py_None) {
        fmoe_route_rule *r = &d.route;
        if (!PyArg_ParseTuple(rule, "iiiiiidd", &r->score, &r->renormalize, &r->group_score, &r->groups, &r->topk_groups,
                              &r->excluded_zero, &r->eps, &r->scale))
            return NULL;
    }
    fmoe_plan plan = 0;
    fmoe_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fmoe_plan_create(&plan, &d);
    Py_END_ALLOW_THREADS
    return s == FMOE_OK ? PyLong_FromUnsignedLongLong(plan) : fail(s);
}

static PyObject *core_plan_destroy(PyObject *self, PyObject *arg) {
    (void)self;
    fmoe_plan plan = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_plan_destroy(&plan);
    if (s != FMOE_OK) return fail(s);
    Py_RETURN_NONE;
}

static PyObject *core_workspace_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 3) return PyErr_Format(PyExc_TypeError, "workspace_bytes(plan, pass, T)");
    fmoe_plan plan = PyLong_AsUnsignedLongLong(args[0]);
    long pass = PyLong_AsLong(args[1]);
    long long tokens = PyLong_AsLongLong(args[2]);
    size_t bytes = 0;
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_workspace_bytes(plan, (fmoe_pass)pass, tokens, &bytes);
    return s == FMOE_OK ? PyLong_FromSize_t(bytes) : fail(s);
}

/* With a tensor (on the CPU): clear what the run will not write, so that equal calls save equal bytes. */
static PyObject *core_saved_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 2 && n != 3) return PyErr_Format(PyExc_TypeError, "saved_bytes(plan, T, tensor=None)");
    fmoe_plan plan = PyLong_AsUnsignedLongLong(args[0]);
    long long tokens = PyLong_AsLongLong(args[1]);
    size_t bytes = 0;
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_saved_bytes(plan, tokens, &bytes);
    if (s != FMOE_OK) return fail(s);
    if (n == 3) {
        call c;
        start(&c, 1);
        const fmoe_tensor *t = take(&c, args[2]);
        if (t && t->device.type == FMOE_CPU && tensor_bytes(t) > bytes) memset((char *)t->data + bytes, 0, tensor_bytes(t) - bytes);
        release(&c);
        if (!t) return NULL;
    }
    return PyLong_FromSize_t(bytes);
}

static PyObject *core_describe(PyObject *self, PyObject *arg) {
    (void)self;
    char text[4096] = "";
    fmoe_plan plan = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    if (!fmoe_plan_describe(plan, text, sizeof text)) return fail(FMOE_ERR_HANDLE);
    return PyUnicode_FromString(text);
}

static PyObject *core_info(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    char text[8192] = "";
    fmoe_info(text, sizeof text);
    return PyUnicode_FromString(text);
}

static PyObject *core_cpu_isa(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyUnicode_FromString(fmoe_cpu_isa());
}

static PyObject *core_set_max_isa(PyObject *self, PyObject *arg) {
    (void)self;
    const char *name = arg == Py_None ? NULL : PyUnicode_AsUTF8AndSize(arg, NULL);
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_cpu_set_max_isa(name);
    if (s != FMOE_OK) return fail(s);
    Py_RETURN_NONE;
}

static PyObject *core_ceiling(PyObject *self, PyObject *args) {
    (void)self;
    int dtype, threads;
    double gflops = 0, gbytes = 0;
    if (!PyArg_ParseTuple(args, "ii", &dtype, &threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (fmoe_cpu_ceiling_gflops) gflops = fmoe_cpu_ceiling_gflops((fmoe_dtype)dtype, threads);
    if (fmoe_cpu_stream_gbytes) gbytes = fmoe_cpu_stream_gbytes(threads);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("dd", gflops, gbytes);
}

/* None where the pool is not for it: small, on a device, or of a torch without the exchange table. With a number: that many bytes. */
static PyObject *core_empty_like(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    (void)self;
    if (n != 1 && n != 2) return PyErr_Format(PyExc_TypeError, "empty_like(tensor, bytes=None)");
    int64_t bytes = n == 2 ? PyLong_AsLongLong(args[1]) : 0;
    if (bytes < 0 && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "empty_like: %lld bytes", (long long)bytes);
    if (PyErr_Occurred()) return NULL;
    call c;
    start(&c, 1);
    const fmoe_tensor *t = take(&c, args[0]);
    const fmoe_tensor plain = {.ndim = 1, .dtype = {1, 8, 1}, .device = {FMOE_CPU, 0}, .shape = &bytes};
    void *out = NULL;
    if (t && t->device.type == FMOE_CPU && n == 2) t = &plain;
    if (t && t->device.type == FMOE_CPU && c.api && c.api->managed_to_py && tensor_bytes(t) >= pool_from) {
        pool_block *b = pool_tensor(t);
        if (b && c.api->managed_to_py(&b->managed, &out) != 0) pool_give(b);
    }
    release(&c);
    if (out || PyErr_Occurred()) return out;
    Py_RETURN_NONE;
}

static PyObject *core_empty_cache(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromSize_t(pool_empty());
}

static PyObject *core_pool(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    const pool_counts now = pool_count();
    return Py_BuildValue("nnn", (Py_ssize_t)now.live, (Py_ssize_t)now.free, (Py_ssize_t)now.peak);
}

static PyObject *core_huge_pages(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyLong_FromSize_t(pages_moved());
}

static PyObject *core_pool_from(PyObject *self, PyObject *arg) {
    (void)self;
    const size_t was = pool_from, now = PyLong_AsSize_t(arg);
    if (PyErr_Occurred()) return NULL;
    pool_from = now;
    return PyLong_FromSize_t(was);
}

static PyObject *core_use_exchange(PyObject *self, PyObject *arg) {
    (void)self;
    int was = use_exchange, now = PyObject_IsTrue(arg);
    if (now < 0) return NULL;
    use_exchange = now;
    return PyBool_FromLong(was);
}

static PyObject *core_use_queue(PyObject *self, PyObject *arg) {
    (void)self;
    int was = use_queue && fmoe_npu_queue(), now = PyObject_IsTrue(arg);
    if (now < 0) return NULL;
    use_queue = now;
    return PyBool_FromLong(was);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))core_run, METH_FASTCALL, "run(op, plan, flags, stream, workspace, *slots)"},
    {"plan", core_plan, METH_VARARGS, "plan(op, dtype, device, id, H, I, E, k, K, N, shared_I, rank1, rank2, act, flags, alpha, limit, rule, threads)"},
    {"plan_destroy", core_plan_destroy, METH_O, "plan_destroy(plan)"},
    {"workspace_bytes", (PyCFunction)(void (*)(void))core_workspace_bytes, METH_FASTCALL, "workspace_bytes(plan, pass, T)"},
    {"saved_bytes", (PyCFunction)(void (*)(void))core_saved_bytes, METH_FASTCALL, "saved_bytes(plan, T, tensor=None)"},
    {"describe", core_describe, METH_O, "describe(plan): which kernels will run and why"},
    {"info", core_info, METH_NOARGS, "What this machine and this library have"},
    {"cpu_isa", core_cpu_isa, METH_NOARGS, "The CPU kernel level of new plans"},
    {"set_max_isa", core_set_max_isa, METH_O, "Cap the CPU kernel level of new plans; None: no cap"},
    {"empty_like", (PyCFunction)(void (*)(void))core_empty_like, METH_FASTCALL, "empty_like(tensor, bytes=None): in memory that is used again; None: too small for that, or not on a CPU"},
    {"empty_cache", core_empty_cache, METH_NOARGS, "Give the memory that was kept for the next gradients back to the system; returns how many bytes"},
    {"pool", core_pool, METH_NOARGS, "Bytes in use, free, and the largest amount that was in use at once"},
    {"pool_from", core_pool_from, METH_O, "Tensors of that many bytes come from the pool; returns what was"},
    {"huge_pages", core_huge_pages, METH_NOARGS, "Bytes of weights that were moved into huge pages"},
    {"ceiling", core_ceiling, METH_VARARGS, "ceiling(dtype, threads): GFLOP/s of a register-only loop and GB/s of a read of memory on this CPU, measured; 0: not known"},
    {"use_exchange", core_use_exchange, METH_O, "Use DLPack's exchange table (True) or data_ptr (False); returns what was"},
    {"use_queue", core_use_queue, METH_O, "Launch through torch_npu's task queue (True) or drain it (False); returns what was, False where there is none"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fusedmoe._core", "The C library of fusedmoe", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *m = PyModule_Create(&module);
    if (!m || pool_init()) return m ? PyErr_NoMemory() : NULL;
    pages_init();
    const char *check = getenv("FMOE_ASCEND_CHECK"); /* reads counts back, which a queue cannot do */
    use_queue = !check || !*check || !strcmp(check, "0");
    for (long i = 0; i < N_OPS; i++)
        if (PyModule_AddIntConstant(m, OPS[i].name, i)) return NULL;
    if (PyModule_AddStringConstant(m, "version", fmoe_version_string())) return NULL;
    if (fmoe_version() / 100 != FMOE_VERSION / 100)
        return PyErr_Format(PyExc_ImportError, "fusedmoe: the extension is of %d.%d, the library it found of %s",
                            FMOE_VERSION_MAJOR, FMOE_VERSION_MINOR, fmoe_version_string());
    return m;
}
