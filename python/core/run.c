/* SPDX-License-Identifier: Apache-2.0
 *
 * run.c - every run function of the library as one call: run(op, plan, flags, stream, workspace, *slots).
 *
 * A slot is a tensor, a list of tensors, a number or None; OPS says which field of which struct it fills. workspace is
 * a tensor, or (CPU only) the number of rows it is for, and it is allocated here. */
#include "core.h"
#include "pages.h"

/* ---- The operations -------------------------------------------------------------------------------------- */

/* Kinds of slots beside layouts (core.h). BYTES: void * followed by size_t. WEIGHTS: fmoe_weights, see take_weights;
 * PLAIN: those of the shared expert, which have no other form; GRADS and PLAIN_GRADS: their gradients, which are
 * written. QUANT: fmoe_quant. */
enum { BYTES = IDS + 1, INT32, FLOAT, QUANT, WEIGHTS, PLAIN, GRADS, PLAIN_GRADS, MAX_SLOTS = 32 };

/* Flags beside those of the run: how weights are given. Also in ops.py. */
enum { LIST = 1 << 16, TRANSPOSED = 1 << 17, LORA1 = 1 << 18, LORA2 = 1 << 19, UNGATED = 1 << 20 };

typedef struct {
    size_t offset;
    int kind;
    const char *name; /* in Python; the field's, where that is not said */
} slot;

typedef fmoe_status (*run_fn)(fmoe_plan, const void *, const fmoe_run *);

typedef struct {
    const char *constant, *name;
    fmoe_pass pass;
    run_fn run;
    size_t size;
    int n;
    slot slots[MAX_SLOTS];
} op_entry;

/* One adapter a function: calling through a pointer of another type would be undefined. */
#define ADAPT(op, pass, type)                                                                                          \
    static fmoe_status run_##op##_##pass(fmoe_plan p, const void *a, const fmoe_run *r)                                \
    {                                                                                                                  \
        return fmoe_##op##_##pass(p, (const fmoe_##type##_args *)a, r);                                                \
    }
#define BOTH(op, type) ADAPT(op, forward, type) ADAPT(op, backward, type)
BOTH(route, route)
BOTH(permute, permute)
BOTH(unpermute, unpermute)
BOTH(grouped_matmul, gmm)
BOTH(activation, activation)
BOTH(experts, experts)
BOTH(block, block)

#define FORWARD(NAME, op, type, ...) ENTRY(NAME "_FORWARD", op, FMOE_FORWARD, forward, type, __VA_ARGS__)
#define BACKWARD(NAME, op, type, ...) ENTRY(NAME "_BACKWARD", op, FMOE_BACKWARD, backward, type, __VA_ARGS__)
#define ENTRY(NAME, op, PASS, pass, type, ...)                                                                         \
    {                                                                                                                  \
        NAME, #op, PASS, run_##op##_##pass, sizeof(fmoe_##type##_args),                                                \
            (int)(sizeof((slot[]){__VA_ARGS__}) / sizeof(slot)),                                                       \
        {                                                                                                              \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    }
#define NAMED(type, field, kind, name) {offsetof(fmoe_##type##_args, field), kind, name}
#define ROUTE(field, kind) NAMED(route, field, kind, #field)
#define PERMUTE(field, kind) NAMED(permute, field, kind, #field)
#define UNPERMUTE(field, kind) NAMED(unpermute, field, kind, #field)
#define GMM(field, kind) NAMED(gmm, field, kind, #field)
#define ACT(field, kind) NAMED(activation, field, kind, #field)
#define EXPERTS(field, kind) NAMED(experts, field, kind, #field)
#define BLOCK(field, kind) NAMED(block, field, kind, #field)

static const op_entry OPS[] = {
    FORWARD("ROUTE", route, route, ROUTE(logits, ROWS), ROUTE(select_bias, COMPACT), ROUTE(ids, IDS),
            ROUTE(weights, AS_IS), ROUTE(bad_rows, AS_IS)),
    BACKWARD("ROUTE", route, route, ROUTE(logits, ROWS), ROUTE(select_bias, COMPACT), ROUTE(ids, IDS),
             ROUTE(dweights, COMPACT), ROUTE(dlogits, AS_IS)),
    FORWARD("PERMUTE", permute, permute, PERMUTE(x, ROWS), PERMUTE(ids, IDS), PERMUTE(xp, AS_IS), PERMUTE(map, AS_IS),
            PERMUTE(counts, AS_IS)),
    BACKWARD("PERMUTE", permute, permute, PERMUTE(x, AS_IS), PERMUTE(xp, ROWS), NAMED(permute, map, IDS, "row_map")),
    FORWARD("UNPERMUTE", unpermute, unpermute, UNPERMUTE(y, ROWS), NAMED(unpermute, map, IDS, "row_map"),
            NAMED(unpermute, weights, COMPACT, "p"), UNPERMUTE(out, AS_IS)),
    BACKWARD("UNPERMUTE", unpermute, unpermute, UNPERMUTE(y, ROWS), NAMED(unpermute, map, IDS, "row_map"),
             NAMED(unpermute, weights, COMPACT, "p"), UNPERMUTE(dout, ROWS), UNPERMUTE(dy, AS_IS),
             UNPERMUTE(dweights, AS_IS)),
    FORWARD("GROUPED_MATMUL", grouped_matmul, gmm, GMM(x, ROWS), GMM(w, MATRIX), GMM(bias, ROWS), GMM(sizes, IDS),
            GMM(y, AS_IS), GMM(cumulative, INT32), GMM(list, INT32)),
    BACKWARD("GROUPED_MATMUL", grouped_matmul, gmm, GMM(x, ROWS), GMM(w, MATRIX), GMM(sizes, IDS), GMM(dy, ROWS),
             GMM(dx, AS_IS), GMM(dw, AS_IS), GMM(dbias, AS_IS), GMM(cumulative, INT32), GMM(list, INT32)),
    FORWARD("GROUPED_MATMUL_QUANT", grouped_matmul, gmm, GMM(x, ROWS), GMM(w, ROWS), GMM(bias, ROWS), GMM(sizes, IDS),
            GMM(y, AS_IS), GMM(cumulative, INT32), GMM(list, INT32), GMM(quant, QUANT)),
    BACKWARD("GROUPED_MATMUL_QUANT", grouped_matmul, gmm, GMM(w, ROWS), GMM(sizes, IDS), GMM(dy, ROWS), GMM(dx, AS_IS),
             GMM(dbias, AS_IS), GMM(cumulative, INT32), GMM(list, INT32), GMM(quant, QUANT)),
    FORWARD("ACTIVATION", activation, activation, ACT(h, ROWS), ACT(a, AS_IS)),
    BACKWARD("ACTIVATION", activation, activation, ACT(h, ROWS), ACT(da, ROWS), ACT(dh, AS_IS)),
    FORWARD("EXPERTS", experts, experts, EXPERTS(x, ROWS), EXPERTS(ids, IDS), NAMED(experts, weights, COMPACT, "p"),
            EXPERTS(w, WEIGHTS), EXPERTS(out, AS_IS), EXPERTS(saved, BYTES), EXPERTS(w.lora_scale1, FLOAT),
            EXPERTS(w.lora_scale2, FLOAT)),
    BACKWARD("EXPERTS", experts, experts, EXPERTS(x, ROWS), EXPERTS(ids, IDS), NAMED(experts, weights, COMPACT, "p"),
             EXPERTS(w, WEIGHTS), EXPERTS(saved, BYTES), EXPERTS(dout, ROWS), EXPERTS(dx, AS_IS),
             EXPERTS(dweights, AS_IS), EXPERTS(dw, GRADS), EXPERTS(w.lora_scale1, FLOAT),
             EXPERTS(w.lora_scale2, FLOAT)),
    FORWARD("EXPERTS_QUANT", experts, experts, EXPERTS(x, ROWS), EXPERTS(ids, IDS),
            NAMED(experts, weights, COMPACT, "p"), EXPERTS(w, WEIGHTS), EXPERTS(out, AS_IS), EXPERTS(saved, BYTES),
            EXPERTS(w.lora_scale1, FLOAT), EXPERTS(w.lora_scale2, FLOAT), EXPERTS(w.quant1, QUANT),
            EXPERTS(w.quant2, QUANT), EXPERTS(w.quant_gate, QUANT)),
    BACKWARD("EXPERTS_QUANT", experts, experts, EXPERTS(x, ROWS), EXPERTS(ids, IDS),
             NAMED(experts, weights, COMPACT, "p"), EXPERTS(w, WEIGHTS), EXPERTS(saved, BYTES), EXPERTS(dout, ROWS),
             EXPERTS(dx, AS_IS), EXPERTS(dweights, AS_IS), EXPERTS(dw, GRADS), EXPERTS(w.lora_scale1, FLOAT),
             EXPERTS(w.lora_scale2, FLOAT), EXPERTS(w.quant1, QUANT), EXPERTS(w.quant2, QUANT),
             EXPERTS(w.quant_gate, QUANT)),
    FORWARD("BLOCK", block, block, BLOCK(x, ROWS), BLOCK(w_router, MATRIX), BLOCK(b_router, COMPACT),
            BLOCK(select_bias, COMPACT), BLOCK(w, WEIGHTS), BLOCK(shared, PLAIN), BLOCK(shared_gate, MATRIX),
            BLOCK(logits, AS_IS), BLOCK(ids, AS_IS), BLOCK(weights, AS_IS), BLOCK(out, AS_IS), BLOCK(saved, BYTES)),
    BACKWARD("BLOCK", block, block, BLOCK(x, ROWS), BLOCK(w_router, MATRIX), BLOCK(select_bias, COMPACT),
             BLOCK(w, WEIGHTS), BLOCK(shared, PLAIN), BLOCK(shared_gate, MATRIX), BLOCK(logits, ROWS), BLOCK(ids, IDS),
             BLOCK(weights, COMPACT), BLOCK(saved, BYTES), BLOCK(dout, ROWS), BLOCK(dlogits, ROWS), BLOCK(dx, AS_IS),
             BLOCK(dw_router, AS_IS), BLOCK(db_router, AS_IS), BLOCK(dw, GRADS), BLOCK(dshared, PLAIN_GRADS),
             BLOCK(dshared_gate, AS_IS)),
};
enum { N_OPS = sizeof OPS / sizeof *OPS };

int core_add_ops(PyObject *module)
{
    PyObject *passes = PyTuple_New(N_OPS);
    for (long i = 0; passes && i < N_OPS; i++)
        if (PyModule_AddIntConstant(module, OPS[i].constant, i) ||
            PyTuple_SetItem(passes, i, PyLong_FromLong(OPS[i].pass))) {
            Py_DECREF(passes);
            return -1;
        }
    return passes ? PyModule_AddObject(module, "passes", passes) : -1;
}

/* ---- Slots ----------------------------------------------------------------------------------------------- */

/* -1: not a list. */
static Py_ssize_t list_size(PyObject *o)
{
    return PyList_Check(o) ? PyList_Size(o) : PyTuple_Check(o) ? PyTuple_Size(o) : -1;
}

static PyObject *list_item(PyObject *o, Py_ssize_t i)
{
    return PyList_Check(o) ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i);
}

/* Entries [from, to) of a list, as an array; NULL in *out where there is none, or the first is None. */
static int take_part(call *c, PyObject *list, Py_ssize_t from, Py_ssize_t to, layout as, const fmoe_tensor **out)
{
    *out = NULL;
    if (from == to || list_item(list, from) == Py_None) return 0;
    const int first = (int)c->n;
    *out = &c->tensors[first];
    bool differ = false;
    for (Py_ssize_t i = from; i < to; i++) {
        c->item = i;
        if (!take(c, list_item(list, i), as)) return -1;
        differ = differ || is_turned(&c->tensors[c->n - 1]) != is_turned(*out);
    }
    c->item = -1;
    if (as != MATRIX || !differ || (*out)->device.type != FMOE_ASCEND) return 0;
    c->n = first; /* CANN reads the matrices of a list in one orientation */
    return take_part(c, list, from, to, COMPACT, out);
}

/* length: of every list of tensors so far, for the library reads all to the same; 0: none yet. */
static int take_slot(call *c, PyObject *o, layout as, Py_ssize_t *length, const fmoe_tensor **out)
{
    const Py_ssize_t n = list_size(o);
    if (n > 0 && *length && n != *length)
        return PyErr_Format(PyExc_ValueError, "%s: %s is a list of %zd tensors beside one of %zd", c->op, c->argument,
                            n, *length),
               -1;
    if (n > 0) *length = n;
    if (n >= 0) return take_part(c, o, 0, n, as, out);
    return (*out = take(c, o, as)) ? 0 : -1;
}

/* w is [w1, w2] or [w1, w2, b1, b2]; with LIST, the gates (unless UNGATED), ups and downs of all experts one after the
 * other; then a1, b1 with LORA1 and a2, b2 with LORA2. None in the place of a gradient (of a part of the list) that
 * nobody wants. */
int take_weights(call *c, PyObject *list, unsigned form, bool grads, fmoe_weights *w)
{
    const layout matrix = grads ? AS_IS : MATRIX, bias = grads ? AS_IS : ROWS;
    Py_ssize_t n = list_size(list);
    if (n < 0) return PyErr_Format(PyExc_TypeError, "%s: %s is not a list of tensors", c->op, c->argument), -1;
    const fmoe_tensor **lora[4] = {&w->lora_a1, &w->lora_b1, &w->lora_a2, &w->lora_b2};
    for (int i = 3; i >= 0; i--)
        if (form & (i > 1 ? LORA2 : LORA1) && (--n < 0 || take_part(c, list, n, n + 1, matrix, lora[i]))) goto error;
    const fmoe_tensor **stacked[4] = {&w->w1, &w->w2, &w->b1, &w->b2}, **parts[3] = {&w->gate, &w->up, &w->down};
    if (form & LIST) {
        const int first = form & UNGATED ? 1 : 0;
        const Py_ssize_t E = n / (3 - first);
        for (int i = first; i < 3; i++)
            if (take_part(c, list, (i - first) * E, (i - first + 1) * E, matrix, parts[i])) goto error;
        return 0;
    }
    for (int i = 0; i < n && i < 4; i++)
        if (take_part(c, list, i, i + 1, i < 2 ? matrix : bias, stacked[i])) goto error;
    if (form & TRANSPOSED) take_transposed(c, w->w1), take_transposed(c, w->w2);
    return 0;
error:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "fusedmoe: fewer weights than the flags say");
    return -1;
}

/* All slots into the struct of the call. *weights: the layer's own, NULL for an operation without. */
static int take_slots(call *c, const op_entry *op, PyObject *const *slots, unsigned form, char *args,
                      const fmoe_weights **weights)
{
    Py_ssize_t length = 0;
    c->op = op->name;
    for (int i = 0; i < op->n; i++) {
        char *field = args + op->slots[i].offset;
        const int kind = op->slots[i].kind;
        if (slots[i] == Py_None) continue;
        c->argument = op->slots[i].name;
        if (kind == INT32 || kind == FLOAT) {
            if (kind == INT32) *(int32_t *)(void *)field = (int32_t)PyLong_AsLong(slots[i]);
            else *(float *)(void *)field = (float)PyFloat_AsDouble(slots[i]);
            if (PyErr_Occurred()) return -1;
        } else if (kind == QUANT) {
            if (take_quant(c, slots[i], (const fmoe_quant **)(void *)field)) return -1;
        } else if (kind >= WEIGHTS) {
            const bool grads = kind == GRADS || kind == PLAIN_GRADS, plain = kind == PLAIN || kind == PLAIN_GRADS;
            if (kind == WEIGHTS) *weights = (const fmoe_weights *)(const void *)field;
            if (take_weights(c, slots[i], plain ? 0 : form, grads, (fmoe_weights *)(void *)field)) return -1;
        } else {
            const fmoe_tensor *t;
            if (take_slot(c, slots[i], kind == BYTES ? AS_IS : (layout)kind, &length, &t)) return -1;
            const size_t n = kind == BYTES && t ? tensor_bytes(t) : 0;
            if (kind != BYTES) memcpy(field, &t, sizeof t);
            else if (n) memcpy(field, &t->data, sizeof t->data), memcpy(field + sizeof(void *), &n, sizeof n);
            if (n && c->device.type == FMOE_CPU) pages_prefer(t->data, n);
        }
    }
    return 0;
}

/* ---- Workspace and stream -------------------------------------------------------------------------------- */

enum { OFFSET = 64 }; /* a workspace at the same place of a page as gradients costs 1 % */

typedef struct {
    void *small;       /* a workspace of ours, */
    pool_block *large; /* or a large one */
} workspace;

static int take_workspace(call *c, const op_entry *op, fmoe_plan plan, PyObject *given, fmoe_run *run, workspace *own)
{
    if (given == Py_None) return 0;
    if (!PyLong_Check(given)) {
        const fmoe_tensor *t = take(c, given, AS_IS);
        if (!t) return -1;
        run->workspace = t->data;
        run->workspace_bytes = tensor_bytes(t);
        return 0;
    }
    const long long rows = PyLong_AsLongLong(given);
    if (PyErr_Occurred()) return -1;
    const fmoe_status s = fmoe_workspace_bytes(plan, op->pass, rows, &run->workspace_bytes);
    if (s != FMOE_OK) return core_fail(s, fmoe_last_error()), -1;
    if (run->workspace_bytes < pool_from) run->workspace = own->small = malloc(run->workspace_bytes);
    else if ((own->large = pool_take(run->workspace_bytes + OFFSET, false)))
        run->workspace = (char *)own->large->data + OFFSET;
    if (run->workspace_bytes && !run->workspace) return PyErr_NoMemory(), -1;
    return 0;
}

int torch_stream(const call *c, void **stream)
{
    if (c->device.type != FMOE_CUDA) return 0;
    if (c->api && c->api->current_stream) return c->api->current_stream(c->device.type, c->device.id, stream) ? -1 : 0;
    PyErr_Format(PyExc_RuntimeError, "fusedmoe: %s: this torch does not tell its CUDA stream; torch 2.10 does", c->op);
    return -1;
}

static int take_stream(const call *c, PyObject *given, fmoe_run *run)
{
    if (given != Py_None) {
        run->stream = PyLong_AsVoidPtr(given);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (c->device.type == FMOE_ASCEND) return npu_stream(c->device.id, run);
    return torch_stream(c, &run->stream);
}

/* What the library says, in Python's words: routing weights are p there. */
static PyObject *fail_as(const op_entry *op, fmoe_status s)
{
    const char *said = fmoe_last_error();
    char text[1024];
    for (int i = 0; i < op->n; i++) {
        const size_t n = strlen("weights");
        if (strcmp(op->slots[i].name, "p") || strncmp(said, "weights", n) || (said[n] != ' ' && said[n] != ':'))
            continue;
        snprintf(text, sizeof text, "p%s", said + n);
        said = text;
        break;
    }
    return core_fail(s, said);
}

PyObject *core_run(PyObject *self, PyObject *const *args, Py_ssize_t n_args)
{
    (void)self;
    if (n_args < 5) return PyErr_Format(PyExc_TypeError, "run(op, plan, flags, stream, workspace, *slots)");
    long index = PyLong_AsLong(args[0]);
    if (PyErr_Occurred()) return NULL;
    if (index < 0 || index >= N_OPS) return PyErr_Format(PyExc_ValueError, "run: no operation %ld", index);
    const op_entry *op = &OPS[index];
    PyObject *const *slots = args + 5;
    if (n_args - 5 != op->n)
        return PyErr_Format(PyExc_TypeError, "run: %s takes %d slots, got %zd", op->constant, op->n, n_args - 5);
    fmoe_plan plan = PyLong_AsUnsignedLongLong(args[1]);
    fmoe_run run = FMOE_RUN_INIT;
    const unsigned form = (unsigned)PyLong_AsUnsignedLong(args[2]);
    run.flags = form & (LIST - 1);
    if (PyErr_Occurred()) return NULL;

    call c;
    Py_ssize_t capacity = 1;
    for (int i = 0; i < op->n; i++) {
        const Py_ssize_t n = slots[i] == Py_None          ? 0
                             : op->slots[i].kind == QUANT ? quant_capacity(slots[i])
                                                          : list_size(slots[i]);
        capacity += n < 0 ? 1 : n;
    }
    call_begin(&c, capacity);
    if (!c.tensors) return PyErr_NoMemory();
    union { /* every args struct begins with its size */
        size_t size;
        char bytes[sizeof(fmoe_block_args)];
        fmoe_block_args align;
    } a;
    memset(&a, 0, sizeof a);
    a.size = op->size;
    const fmoe_weights *weights = NULL;
    workspace own = {NULL, NULL};
    fmoe_status s = FMOE_OK;
    const bool taken = !take_slots(&c, op, slots, form, a.bytes, &weights) &&
                       !take_workspace(&c, op, plan, args[4], &run, &own) && !take_stream(&c, args[3], &run);
    if (taken && c.device.type == FMOE_CPU) {
        Py_BEGIN_ALLOW_THREADS
        if (weights) pages_look_at(weights->w1), pages_look_at(weights->w2);
        const int64_t then = pages_now();
        s = op->run(plan, a.bytes, &run);
        pages_ran_since(then);
        Py_END_ALLOW_THREADS
    } else if (taken) { /* a device only takes the work into its queue */
        s = op->run(plan, a.bytes, &run);
    }
    free(own.small);
    if (own.large) pool_give(own.large);
    call_end(&c);
    if (!taken) return NULL;
    const char *problem = run.submit ? npu_problem() : "";
    if (*problem) return PyErr_Format(PyExc_RuntimeError, "fusedmoe: %s", problem);
    if (s != FMOE_OK) return fail_as(op, s);
    Py_RETURN_NONE;
}
