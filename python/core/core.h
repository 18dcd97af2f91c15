/* SPDX-License-Identifier: Apache-2.0
 *
 * core.h - the extension module fusedmoe._core: the C API for Python, in the limited API (one binary from CPython 3.10
 * on).
 *
 *   module.c   plans, sizes, descriptions, the pool: the small functions of the module
 *   run.c      one table of all run functions, and `run`, which fills their argument structs
 *   tensors.c  tensors of Python as fmoe_tensor, copied where the library cannot read their strides
 *   quant.c    descriptors of quantised weights, weights to codes and back
 *   torch.c    torch's threads, and the stream of torch_npu
 *   ep.c       expert parallelism
 *   pool.c, pages.c   memory that is used again; weights in huge pages */
#pragma once
#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
/* A free-threaded Python has no limited API: a binary of its own. */
#if !defined Py_LIMITED_API && !defined Py_GIL_DISABLED
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define FMOE_EXPERIMENTAL /* the ceilings that benchmarks are held against */
#include "fusedmoe.h"
#include "pool.h"

/* Raises; text: fmoe_last_error(), or the same in Python's words. */
PyObject *core_fail(fmoe_status s, const char *text);
/* The arguments of plan(...); -1: an exception is set. */
int core_desc(PyObject *args, fmoe_desc *d);

/* ---- tensors.c ---- */

/* How the library reads an argument. What has other strides (slices, expanded, transposed, overlapping) is copied by
 * t.contiguous(), integers of other widths by t.long(). */
typedef enum {
    AS_IS,   /* allocated by us: no copy may stand in for it */
    ROWS,    /* unit stride in the last dimension */
    MATRIX,  /* unit stride in one of the last two; on an NPU without holes */
    COMPACT, /* compact */
    IDS      /* compact, int32 or int64 */
} layout;

/* DLPack's exchange table (DLPack 1.3): our own declaration of its public layout. */
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
    int (*tensor_from_py)(void *object, fmoe_tensor *out);    /* borrowed view; fmoe_tensor is laid out as DLTensor */
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} exchange_api;

enum { ON_STACK = 48, MAX_RANK = 8, MAX_QUANTS = 3 };

/* One call's tensors. */
typedef struct {
    fmoe_tensor on_stack[ON_STACK], *tensors;
    int64_t (*dims)[2 * MAX_RANK]; /* shape and strides of each, where they are not those of the exchange table */
    int64_t transposed[4][6];      /* shape and strides of weights that are passed transposed */
    Py_ssize_t n, capacity;
    int n_transposed;
    fmoe_device device; /* of the first tensor */
    const exchange_api *api;
    PyObject *copies;              /* of what had another layout */
    const char *op, *argument;     /* what is taken now, for messages; NULL: nothing to say */
    Py_ssize_t item;               /* of a list; -1: none */
    fmoe_quant quants[MAX_QUANTS]; /* descriptors of quantised weights */
    int n_quants;
} call;

void call_begin(call *c, Py_ssize_t capacity); /* c->tensors is NULL afterwards where there is no memory */
void call_end(call *c);
bool is_turned(const fmoe_tensor *t);               /* a matrix that take() let pass and that does not lie row by row */
fmoe_tensor *take(call *c, PyObject *o, layout as); /* NULL: an exception is set */
/* [E,K,N] as [E,N,K], without touching what torch's tensor says of itself. */
void take_transposed(call *c, const fmoe_tensor *t);
size_t tensor_bytes(const fmoe_tensor *t);
extern int use_exchange;

/* ---- torch.c ---- */

extern int use_queue;
int npu_stream(int index, fmoe_run *run);
int npu_drained_stream(int index, void **stream); /* after the queue has submitted everything */
const char *npu_problem(void);                    /* of the last call that went through the queue; "": none */
bool npu_has_queue(void);
void torch_parallel(void *parallel_for, int n, void (*fn)(void *, int), void *arg);
/* NULL when torch is older, or not there: it is found only where it has been loaded already. */
void *find_torch_parallel_for(void);

/* ---- quant.c ---- */

int take_quant(call *c, PyObject *o, const fmoe_quant **out);
Py_ssize_t quant_capacity(PyObject *o); /* tensors of a descriptor */
PyObject *core_quantize(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *core_repack(PyObject *self, PyObject *const *args, Py_ssize_t n);

/* ---- run.c ---- */

/* The stream that torch uses now, where the tensors are on a CUDA device; -1: an exception is set. */
int torch_stream(const call *c, void **stream);

PyObject *core_run(PyObject *self, PyObject *const *args, Py_ssize_t n_args);
int core_add_ops(PyObject *module); /* a constant for each operation, and `passes`: 0 forward, 1 backward */
/* Weights of a layer (grads: their gradients, which are written) out of a list; form: LIST and the like, run.c. */
int take_weights(call *c, PyObject *list, unsigned form, bool grads, fmoe_weights *w);

/* ---- ep.c ---- */

PyObject *core_ep_create(PyObject *self, PyObject *args);
PyObject *core_ep_local(PyObject *self, PyObject *arg);
PyObject *core_ep_forward(PyObject *self, PyObject *args);
PyObject *core_ep_backward(PyObject *self, PyObject *args);
PyObject *core_ep_stats(PyObject *self, PyObject *arg);
