/* SPDX-License-Identifier: Apache-2.0
 *
 * module.c - the functions of fusedmoe._core beside `run`: plans, sizes, what the machine has, memory that is used
 * again. A status other than FMOE_OK becomes a Python exception with fmoe_last_error() as its text. */
#include "core.h"
#include "pages.h"
#pragma weak fmoe_cpu_ceiling_gflops /* experimental: a library without them will do */
#pragma weak fmoe_cpu_stream_gbytes

PyObject *core_fail(fmoe_status s, const char *text)
{
    PyObject *type = PyExc_RuntimeError;
    switch (s) {
    case FMOE_ERR_ARG:
    case FMOE_ERR_NULL:
    case FMOE_ERR_SHAPE:
    case FMOE_ERR_STRIDE:
    case FMOE_ERR_ALIGN:
    case FMOE_ERR_ALIAS:
    case FMOE_ERR_PLAN: type = PyExc_ValueError; break;
    case FMOE_ERR_DTYPE: type = PyExc_TypeError; break;
    case FMOE_ERR_INDEX: type = PyExc_IndexError; break;
    case FMOE_ERR_OVERFLOW: type = PyExc_OverflowError; break;
    case FMOE_ERR_NOMEM: type = PyExc_MemoryError; break;
    case FMOE_ERR_UNSUPPORTED: type = PyExc_NotImplementedError; break;
    default: break;
    }
    return PyErr_Format(type, "%s: %s", fmoe_status_string(s), text);
}

static PyObject *fail(fmoe_status s) { return core_fail(s, fmoe_last_error()); }

int core_desc(PyObject *args, fmoe_desc *out)
{
    fmoe_desc d = FMOE_DESC_INIT;
    int op, dtype, device, id, act, threads;
    unsigned int flags;
    long long H, I, E, k, K, n, shared_I, rank1, rank2;
    double alpha, limit;
    PyObject *rule = Py_None;
    if (!PyArg_ParseTuple(args, "iiiiLLLLLLLLLiIddOi", &op, &dtype, &device, &id, &H, &I, &E, &k, &K, &n, &shared_I,
                          &rank1, &rank2, &act, &flags, &alpha, &limit, &rule, &threads))
        return -1;
    d.op = op, d.dtype = dtype, d.device = (fmoe_device){device, id};
    d.H = H, d.I = I, d.E = E, d.k = k, d.K = K, d.N = n, d.shared_I = shared_I, d.rank1 = rank1, d.rank2 = rank2;
    d.act = act, d.flags = flags, d.act_alpha = (float)alpha, d.act_limit = (float)limit, d.threads = threads;
    if (device == FMOE_CPU && (d.parallel_ctx = find_torch_parallel_for())) d.parallel = torch_parallel;
    if (rule != Py_None) {
        fmoe_route_rule *r = &d.route;
        if (!PyArg_ParseTuple(rule, "iiiiiidd", &r->score, &r->renormalize, &r->group_score, &r->groups,
                              &r->topk_groups, &r->excluded_zero, &r->eps, &r->scale))
            return -1;
    }
    *out = d;
    return 0;
}

static PyObject *core_plan(PyObject *self, PyObject *args)
{
    (void)self;
    fmoe_desc d;
    if (core_desc(args, &d)) return NULL;
    fmoe_plan plan = 0;
    fmoe_status s;
    Py_BEGIN_ALLOW_THREADS
    s = fmoe_plan_create(&plan, &d);
    Py_END_ALLOW_THREADS
    return s == FMOE_OK ? PyLong_FromUnsignedLongLong(plan) : fail(s);
}

static PyObject *core_plan_destroy(PyObject *self, PyObject *arg)
{
    (void)self;
    fmoe_plan plan = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_plan_destroy(&plan);
    if (s != FMOE_OK) return fail(s);
    Py_RETURN_NONE;
}

static PyObject *core_workspace_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
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
static PyObject *core_saved_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
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
        call_begin(&c, 1);
        const fmoe_tensor *t = take(&c, args[2], AS_IS);
        if (t && t->device.type == FMOE_CPU && tensor_bytes(t) > bytes)
            memset((char *)t->data + bytes, 0, tensor_bytes(t) - bytes);
        call_end(&c);
        if (!t) return NULL;
    }
    return PyLong_FromSize_t(bytes);
}

static PyObject *core_describe(PyObject *self, PyObject *arg)
{
    (void)self;
    fmoe_plan plan = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) return NULL;
    const size_t n = fmoe_plan_describe(plan, NULL, 0);
    if (!n) return fail(FMOE_ERR_HANDLE);
    char *text = malloc(n + 1);
    if (!text) return PyErr_NoMemory();
    fmoe_plan_describe(plan, text, n + 1);
    PyObject *result = PyUnicode_FromString(text);
    free(text);
    return result;
}

static PyObject *core_info(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    const size_t n = fmoe_info(NULL, 0);
    char *text = malloc(n + 1);
    if (!text) return PyErr_NoMemory();
    fmoe_info(text, n + 1);
    PyObject *result = PyUnicode_FromString(text);
    free(text);
    return result;
}

static PyObject *core_cpu_isa(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyUnicode_FromString(fmoe_cpu_isa());
}

static PyObject *core_set_max_isa(PyObject *self, PyObject *arg)
{
    (void)self;
    const char *name = arg == Py_None ? NULL : PyUnicode_AsUTF8AndSize(arg, NULL);
    if (PyErr_Occurred()) return NULL;
    fmoe_status s = fmoe_cpu_set_max_isa(name);
    if (s != FMOE_OK) return fail(s);
    Py_RETURN_NONE;
}

static PyObject *core_ceiling(PyObject *self, PyObject *args)
{
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

/* None where the pool is not for it: small, on a device, or of a torch without the exchange table. With a number: that
 * many bytes. */
static PyObject *core_empty_like(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    (void)self;
    if (n != 1 && n != 2) return PyErr_Format(PyExc_TypeError, "empty_like(tensor, bytes=None)");
    int64_t bytes = n == 2 ? PyLong_AsLongLong(args[1]) : 0;
    if (bytes < 0 && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "empty_like: %lld bytes", (long long)bytes);
    if (PyErr_Occurred()) return NULL;
    call c;
    call_begin(&c, 1);
    const fmoe_tensor *t = take(&c, args[0], AS_IS);
    const fmoe_tensor plain = {.ndim = 1, .dtype = {1, 8, 1}, .device = {FMOE_CPU, 0}, .shape = &bytes};
    void *out = NULL;
    if (t && t->device.type == FMOE_CPU && n == 2) t = &plain;
    if (t && t->device.type == FMOE_CPU && c.api && c.api->managed_to_py && tensor_bytes(t) >= pool_from) {
        pool_block *b = pool_tensor(t);
        if (b && c.api->managed_to_py(&b->managed, &out) != 0) pool_give(b);
    }
    call_end(&c);
    if (out || PyErr_Occurred()) return out;
    Py_RETURN_NONE;
}

static PyObject *core_empty_cache(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyLong_FromSize_t(pool_empty());
}

static PyObject *core_pool(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    const pool_counts now = pool_count();
    return Py_BuildValue("nnn", (Py_ssize_t)now.live, (Py_ssize_t)now.free, (Py_ssize_t)now.peak);
}

static PyObject *core_huge_pages(PyObject *self, PyObject *none)
{
    (void)self, (void)none;
    return PyLong_FromSize_t(pages_moved());
}

static PyObject *core_pool_from(PyObject *self, PyObject *arg)
{
    (void)self;
    const size_t was = pool_from, now = PyLong_AsSize_t(arg);
    if (PyErr_Occurred()) return NULL;
    pool_from = now;
    return PyLong_FromSize_t(was);
}

static PyObject *core_use_exchange(PyObject *self, PyObject *arg)
{
    (void)self;
    int was = use_exchange, now = PyObject_IsTrue(arg);
    if (now < 0) return NULL;
    use_exchange = now;
    return PyBool_FromLong(was);
}

static PyObject *core_use_queue(PyObject *self, PyObject *arg)
{
    (void)self;
    int was = use_queue && npu_has_queue(), now = PyObject_IsTrue(arg);
    if (now < 0) return NULL;
    use_queue = now;
    return PyBool_FromLong(was);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))core_run, METH_FASTCALL, "run(op, plan, flags, stream, workspace, *slots)"},
    {"plan", core_plan, METH_VARARGS,
     "plan(op, dtype, device, id, H, I, E, k, K, N, shared_I, rank1, rank2, act, flags, alpha, limit, rule, threads)"},
    {"quantize", (PyCFunction)(void (*)(void))core_quantize, METH_FASTCALL,
     "quantize(back, w, codes, quant): weights to codes, or back"},
    {"repack", (PyCFunction)(void (*)(void))core_repack, METH_FASTCALL,
     "repack(form, back, N, K, foreign, codes): a foreign packing to codes, or back"},
    {"plan_destroy", core_plan_destroy, METH_O, "plan_destroy(plan)"},
    {"workspace_bytes", (PyCFunction)(void (*)(void))core_workspace_bytes, METH_FASTCALL,
     "workspace_bytes(plan, pass, T)"},
    {"saved_bytes", (PyCFunction)(void (*)(void))core_saved_bytes, METH_FASTCALL, "saved_bytes(plan, T, tensor=None)"},
    {"describe", core_describe, METH_O, "describe(plan): which kernels will run and why"},
    {"info", core_info, METH_NOARGS, "What this machine and this library have"},
    {"cpu_isa", core_cpu_isa, METH_NOARGS, "The CPU kernel level of new plans"},
    {"set_max_isa", core_set_max_isa, METH_O, "Cap the CPU kernel level of new plans; None: no cap"},
    {"empty_like", (PyCFunction)(void (*)(void))core_empty_like, METH_FASTCALL,
     "empty_like(tensor, bytes=None): in memory that is used again; None: too small for that, or not on a CPU"},
    {"empty_cache", core_empty_cache, METH_NOARGS,
     "Give the memory that was kept for the next gradients back to the system; returns how many bytes"},
    {"pool", core_pool, METH_NOARGS, "Bytes in use, free, and the largest amount that was in use at once"},
    {"pool_from", core_pool_from, METH_O, "Tensors of that many bytes come from the pool; returns what was"},
    {"huge_pages", core_huge_pages, METH_NOARGS, "Bytes of weights that were moved into huge pages"},
    {"ceiling", core_ceiling, METH_VARARGS,
     "ceiling(dtype, threads): GFLOP/s of a register-only loop and GB/s of a read of memory on this CPU, measured; 0: "
     "not known"},
    {"use_exchange", core_use_exchange, METH_O,
     "Use DLPack's exchange table (True) or data_ptr (False); returns what was"},
    {"use_queue", core_use_queue, METH_O,
     "Launch through torch_npu's task queue (True) or drain it (False); returns what was, False where there is none"},
    {"ep_create", core_ep_create, METH_VARARGS,
     "ep_create(desc, engine, rank, ranks, experts, on_ranks, mode, chunks, capacity, timeout_ms, on_device): a layer "
     "over "
     "ranks"},
    {"ep_local", core_ep_local, METH_O, "ep_local(layer): the experts of this rank, in the order of its weights"},
    {"ep_forward", core_ep_forward, METH_VARARGS,
     "ep_forward(layer, form, inference, x, ids, p, w, out, dropped, scale1, scale2, quants): the call that "
     "ep_backward "
     "takes"},
    {"ep_backward", core_ep_backward, METH_VARARGS,
     "ep_backward(call, form, x, ids, p, w, dout, dx, dp, dw, scale1, scale2, quants)"},
    {"ep_stats", core_ep_stats, METH_O, "ep_stats(call): what it moved to and from other ranks"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "fusedmoe._core", "The C library of fusedmoe", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *m = PyModule_Create(&module);
    if (!m || pool_init()) return m ? PyErr_NoMemory() : NULL;
    pages_init();
    const char *check = getenv("FMOE_ASCEND_CHECK"); /* reads counts back, which a queue cannot do */
    use_queue = !check || !*check || !strcmp(check, "0");
    if (core_add_ops(m)) return NULL;
    if (PyModule_AddStringConstant(m, "version", fmoe_version_string())) return NULL;
    if (fmoe_version() / 100 != FMOE_VERSION / 100)
        return PyErr_Format(PyExc_ImportError, "fusedmoe: the extension is of %d.%d, the library it found of %s",
                            FMOE_VERSION_MAJOR, FMOE_VERSION_MINOR, fmoe_version_string());
    return m;
}
