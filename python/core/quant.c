/* SPDX-License-Identifier: Apache-2.0
 *
 * quant.c - quantised weights. A descriptor is a tuple in Python: (code, flags, group_rows, group_cols, scale_type,
 * zero, scale, zeros, scale2), the last two tensors or None. */
#include "core.h"

enum { CODE, FLAGS, GROUP_ROWS, GROUP_COLS, SCALE_TYPE, ZERO, SCALE, ZEROS, SCALE2, FIELDS };

int take_quant(call *c, PyObject *o, const fmoe_quant **out)
{
    if (!PyTuple_Check(o) || PyTuple_Size(o) != FIELDS || c->n_quants == 2)
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
        if (t != Py_None && !(*tensors[i] = take(c, t, AS_IS))) return -1;
    }
    *out = q;
    return 0;
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
    const bool taken =
        (a.w = take(&c, args[1], AS_IS)) && (a.codes = take(&c, args[2], AS_IS)) && !take_quant(&c, args[3], &a.quant);
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
