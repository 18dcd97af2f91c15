/* SPDX-License-Identifier: Apache-2.0
 *
 * tensors.c - tensors of Python, as the library takes them.
 *
 * They come in through DLPack's C exchange table (torch >= 2.10: no capsule, no reference count, no synchronisation)
 * or, from types without one, through data_ptr(), shape, stride(), dtype and device. */
#include "core.h"

static struct {
    PyTypeObject *type;
    const exchange_api *api; /* NULL: the type has none */
} cache[8];
static unsigned cache_next;
int use_exchange = 1;

static const exchange_api *look_up_api(PyTypeObject *type)
{
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

static const exchange_api *api_of(PyObject *o)
{
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

/* ---- Without the table: ask the Python object ------------------------------------------------------------ */

static int read_ints(PyObject *seq, int64_t *out)
{
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

static int read_dtype(PyObject *o, fmoe_datatype *out)
{
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

static int read_device(PyObject *o, fmoe_device *out)
{
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

static int from_attributes(PyObject *o, fmoe_tensor *out, int64_t *dims)
{
    PyObject *ptr = PyObject_CallMethod(o, "data_ptr", NULL);
    if (!ptr) return -1;
    out->data = PyLong_AsVoidPtr(ptr);
    Py_DECREF(ptr);
    PyObject *shape = PyObject_GetAttrString(o, "shape"),
             *strides = shape ? PyObject_CallMethod(o, "stride", NULL) : NULL;
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

void call_begin(call *c, Py_ssize_t capacity)
{
    c->dims = NULL, c->n = 0, c->n_transposed = 0, c->capacity = capacity, c->api = NULL, c->copies = NULL;
    c->op = c->argument = NULL, c->item = -1, c->n_quants = 0;
    c->device = (fmoe_device){FMOE_CPU, 0};
    c->tensors = capacity <= ON_STACK ? c->on_stack : malloc((size_t)capacity * sizeof *c->tensors);
}

void call_end(call *c)
{
    free(c->dims);
    if (c->tensors != c->on_stack) free(c->tensors);
    Py_XDECREF(c->copies);
}

/* "experts: w[3]", in buffer. */
static const char *argument_name(const call *c, char buffer[80])
{
    if (!c->op) return "fusedmoe: it";
    if (c->item < 0) snprintf(buffer, 80, "%s: %s", c->op, c->argument);
    else snprintf(buffer, 80, "%s: %s[%zd]", c->op, c->argument, c->item);
    return buffer;
}

/* The exception that is set, of torch or of an attribute that is not there, in words about the argument. */
static void not_taken(const call *c, PyObject *o)
{
    char name[80];
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *device = PyObject_HasAttrString(o, "data_ptr") ? PyObject_GetAttrString(o, "device") : NULL;
    PyObject *text = device ? PyObject_Str(device) : NULL;
    const char *on = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    PyErr_Restore(type, value, trace);
    if (!device) {
        PyErr_Format(PyExc_TypeError, "%s is %R, expected a tensor", argument_name(c, name), (PyObject *)Py_TYPE(o));
    } else if (on && !strcmp(on, "meta")) {
        PyErr_Format(PyExc_ValueError, "%s is on the device meta, which has no data; %s", argument_name(c, name),
                     c->n ? "the tensors before it have" : "expected a CPU, a CUDA device or an NPU");
    }
    Py_XDECREF(text);
    Py_XDECREF(device);
}

static fmoe_tensor *view(call *c, PyObject *o)
{
    fmoe_tensor *t = &c->tensors[c->n];
    const exchange_api *api = use_exchange ? api_of(o) : NULL;
    if (!api && !c->dims && !(c->dims = calloc((size_t)c->capacity, sizeof *c->dims))) {
        PyErr_NoMemory();
        return NULL;
    }
    if (api ? api->tensor_from_py(o, t) != 0 : from_attributes(o, t, c->dims[c->n]) != 0) {
        not_taken(c, o);
        return NULL;
    }
    if (!c->n) c->device = t->device, c->api = api;
    c->n++;
    return t;
}

/* Whether the last dimensions, exchanged or not, lie one after the other without holes: all that CANN's products read.
 */
static bool packed(const fmoe_tensor *t, bool turned)
{
    int64_t run = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        const int d = turned && i >= t->ndim - 2 ? 2 * t->ndim - 3 - i : i;
        if (t->shape[d] != 1 && t->strides[d] != run) return false;
        run *= t->shape[d];
    }
    return true;
}

bool is_turned(const fmoe_tensor *t) { return t->strides && t->ndim >= 2 && !packed(t, false); }

/* Whether the library takes these strides: no two elements share memory, and the layout's own rule (src/tensor.c, which
 * stays the judge: what this lets pass by mistake is an error there). */
static bool readable(const fmoe_tensor *t, layout as)
{
    if (!t->strides || t->ndim < 1 || t->ndim > 3) return true;
    int order[3] = {0, 1, 2};
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return true;
    for (int i = 1; i < t->ndim; i++)
        for (int j = i; j > 0 && t->strides[order[j]] < t->strides[order[j - 1]]; j--) {
            const int swap = order[j];
            order[j] = order[j - 1], order[j - 1] = swap;
        }
    int64_t extent = 1, compact = 1;
    for (int i = 0; i < t->ndim; i++) {
        const int a = order[i];
        if (t->shape[a] == 1) continue;
        if (t->strides[a] < extent || __builtin_mul_overflow(t->strides[a], t->shape[a], &extent)) return false;
    }
    const int last = t->ndim - 1;
    if (as == ROWS) return t->shape[last] == 1 || t->strides[last] == 1;
    if (as == MATRIX && t->device.type == FMOE_ASCEND && t->ndim >= 2) return packed(t, false) || packed(t, true);
    if (as == MATRIX) { /* by a dimension that has entries: a matrix of one row or column is read as a compact one is */
        bool unit = false, one = true;
        for (int i = last; i >= 0 && i >= last - 1; i--)
            if (t->shape[i] != 1) one = false, unit = unit || t->strides[i] == 1;
        return unit || one;
    }
    for (int i = last; i >= 0; compact *= t->shape[i--])
        if (t->shape[i] != 1 && t->strides[i] != compact) return false;
    return true;
}

/* The strides of dimensions that have one entry mean nothing, and may be anything: as a compact tensor has them. */
static int regularise(call *c, fmoe_tensor *t)
{
    int64_t compact = 1;
    bool odd = false;
    for (int i = t->ndim - 1; t->strides && i >= 0; compact *= t->shape[i--])
        odd = odd || (t->shape[i] == 1 && t->strides[i] != compact);
    if (!odd || t->ndim > MAX_RANK) return 0;
    if (!c->dims && !(c->dims = calloc((size_t)c->capacity, sizeof *c->dims))) return PyErr_NoMemory(), -1;
    int64_t *strides = c->dims[t - c->tensors] + MAX_RANK;
    compact = 1;
    for (int i = t->ndim - 1; i >= 0; compact *= t->shape[i--]) strides[i] = t->shape[i] == 1 ? compact : t->strides[i];
    t->strides = strides;
    return 0;
}

fmoe_tensor *take(call *c, PyObject *o, layout as)
{
    fmoe_tensor *t = view(c, o);
    if (!t || as == AS_IS) return t;
    if (regularise(c, t)) return NULL;
    if (as == IDS && t->dtype.code > 1) { /* DLPack: 0 is int, 1 uint */
        char name[80];
        PyObject *dtype = PyObject_GetAttrString(o, "dtype");
        if (dtype) PyErr_Format(PyExc_TypeError, "%s is %S, expected integers", argument_name(c, name), dtype);
        Py_XDECREF(dtype);
        return NULL;
    }
    const bool other_width = as == IDS && !(t->dtype.code == 0 && t->dtype.bits >= 32);
    if (!other_width && readable(t, as)) return t;
    PyObject *copy = PyObject_CallMethod(o, other_width ? "long" : "contiguous", NULL);
    if (!copy || (!c->copies && !(c->copies = PyList_New(0))) || PyList_Append(c->copies, copy)) {
        Py_XDECREF(copy);
        return NULL;
    }
    Py_DECREF(copy); /* the list has it */
    c->n--;
    return take(c, copy, other_width ? as : AS_IS);
}

void take_transposed(call *c, const fmoe_tensor *given)
{
    if (!given || given->ndim != 3) return; /* the library names it */
    fmoe_tensor *t = (fmoe_tensor *)given;
    int64_t *d = c->transposed[c->n_transposed++];
    const int64_t s[3] = {t->strides ? t->strides[0] : t->shape[1] * t->shape[2],
                          t->strides ? t->strides[1] : t->shape[2], t->strides ? t->strides[2] : 1};
    memcpy(d, (int64_t[]){t->shape[0], t->shape[2], t->shape[1], s[0], s[2], s[1]}, 6 * sizeof *d);
    t->shape = d, t->strides = d + 3;
}

size_t tensor_bytes(const fmoe_tensor *t)
{
    size_t n = t->dtype.bits / 8;
    for (int i = 0; i < t->ndim; i++) n *= (size_t)t->shape[i];
    return n;
}
