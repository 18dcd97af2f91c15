/* SPDX-License-Identifier: Apache-2.0
 *
 * quant.c - quantised weights. A descriptor is a tuple in Python: (code, flags, group_rows, group_cols, scale_type,
 * zero, scale, zeros, scale2). The last three are tensors or, beside weights in a list, lists of them; the last two may
 * be None. */
#include "core.h"

enum { CODE, FLAGS, GROUP_ROWS, GROUP_COLS, SCALE_TYPE, ZERO, SCALE, ZEROS, SCALE2, FIELDS };

int take_quant(call *c, PyObject *o, const fmoe_quant **out)
{
    if (!PyTuple_Check(o) || PyTuple_Size(o) != FIELDS || c->n_quants == MAX_QUANTS)
        return PyErr_Format(PyExc_TypeError, "%s: %s is not a tuple of %d", c->op, c->argument, FIELDS), -1;
    fmoe_quant *q = &c->quants[c->n_quants++];
    long n[ZERO];
    for (int i = 0; i < ZERO; i++) n[i] = PyLong_AsLong(PyTuple_GetItem(o, i));
    *q = FMOE_QUANT_INIT;
    q->code = (int32_t)n[CODE], q->flags = (uint32_t)n[FLAGS], q->group_rows = (int32_t)n[GROUP_ROWS];
    q->group_cols = (int32_t)n[GROUP_COLS], q->scale_type = (int32_t)n[SCALE_TYPE];
    q->zero = (float)PyFloat_AsDouble(PyTuple_GetItem(o, ZERO));
    if (PyErr_Occurred()) return -1;
    const fmoe_tensor **tensors[3] = {&q->scale, &q->zeros, &q->scale2};
    for (int i = 0; i < 3; i++) {
        PyObject *t = PyTuple_GetItem(o, SCALE + i);
        const Py_ssize_t n_items = PyList_Check(t) ? PyList_Size(t) : 0;
        for (Py_ssize_t item = 0; item < n_items; item++) {
            const fmoe_tensor *taken = take(c, PyList_GetItem(t, item), AS_IS);
            if (!taken) return -1;
            if (!item) *tensors[i] = taken;
        }
        if (t != Py_None && !PyList_Check(t) && !(*tensors[i] = take(c, t, AS_IS))) return -1;
    }
    *out = q;
    return 0;
}

Py_ssize_t quant_capacity(PyObject *o)
{
    Py_ssize_t n = 0;
    for (int i = SCALE; PyTuple_Check(o) && PyTuple_Size(o) == FIELDS && i < FIELDS; i++) {
        PyObject *t = PyTuple_GetItem(o, i);
        n += PyList_Check(t) ? PyList_Size(t) : 1;
    }
    return n;
}

PyObject *core_quantize(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    if (n != 4) return PyErr_Format(PyExc_TypeError, "quantize(back, w, codes, quant)");
    const int back = PyObject_IsTrue(args[0]);
    if (back < 0) return NULL;
    call c;
    call_begin(&c, 8);
    c.op = "quantize", c.argument = "w";
    fmoe_quant_args a = {.size = sizeof a};
    fmoe_status s = FMOE_OK;
    const bool taken = (a.w = take(&c, args[1], AS_IS)) && (a.codes = take(&c, args[2], AS_IS)) &&
                       !take_quant(&c, args[3], &a.quant) && !torch_stream(&c, &a.stream);
    if (taken) {
        Py_BEGIN_ALLOW_THREADS
        s = back ? fmoe_dequantize(&a) : fmoe_quantize(&a);
        Py_END_ALLOW_THREADS
    }
    call_end(&c);
    if (!taken) return NULL;
    if (s != FMOE_OK) return core_fail(s, fmoe_last_error());
    Py_RETURN_NONE;
}

PyObject *core_repack(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "repack(form, back, N, K, foreign, codes)");
    fmoe_repack_args a = {.size = sizeof a};
    a.form = (int32_t)PyLong_AsLong(args[0]), a.back = PyObject_IsTrue(args[1]);
    a.N = PyLong_AsLongLong(args[2]), a.K = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    call c;
    call_begin(&c, 2);
    c.op = "repack", c.argument = "foreign";
    fmoe_status s = FMOE_OK;
    const bool taken = (a.foreign = take(&c, args[4], AS_IS)) && (a.codes = take(&c, args[5], AS_IS));
    if (taken) {
        Py_BEGIN_ALLOW_THREADS
        s = fmoe_quant_repack(&a);
        Py_END_ALLOW_THREADS
    }
    call_end(&c);
    if (!taken) return NULL;
    if (s != FMOE_OK) return core_fail(s, fmoe_last_error());
    Py_RETURN_NONE;
}
