/* SPDX-License-Identifier: Apache-2.0
 *
 * torch.c - what is torch's own: its threads on the CPU, and the stream of torch_npu. */
#include "core.h"

#include <dlfcn.h>

/* ---- torch_npu's stream ---------------------------------------------------------------------------------- */

/* torch_npu puts its operators into a queue that another thread submits to the stream. Our launches go through that
 * queue where it can be found (npu_queue.cpp) and is on; else the stream is asked for in the way that waits until the
 * queue is empty. Either way everything is in order. The queue belongs to the current device, so tensors of another one
 * take the second way. */
#ifdef FMOE_NPU_QUEUE
void *fmoe_npu_queue(void);
const char *fmoe_npu_problem(void);
int fmoe_npu_submit(void *queue, const char *name, int (*launch)(void *), void *arg);
#else
static void *fmoe_npu_queue(void) { return NULL; }
static const char *fmoe_npu_problem(void) { return ""; }
#define fmoe_npu_submit NULL
#endif
int use_queue = 1;

bool npu_has_queue(void) { return fmoe_npu_queue() != NULL; }
const char *npu_problem(void) { return fmoe_npu_problem(); }

/* -1: an error, or no such question. */
static long long ask_npu(PyObject *torch_npu, const char *question, int index)
{
    PyObject *answer = index < 0 ? PyObject_CallMethod(torch_npu, question, NULL)
                                 : PyObject_CallMethod(torch_npu, question, "i", index);
    long long n = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return n;
}

int npu_stream(int index, fmoe_run *run)
{
    PyObject *torch_npu = PyImport_ImportModule("torch_npu._C");
    if (!torch_npu) return -1;
    void *queue = use_queue ? fmoe_npu_queue() : NULL;
    long long stream = -1;
    if (queue && ask_npu(torch_npu, "_npu_get_task_queue_enable", -1) > 0 &&
        ask_npu(torch_npu, "_npu_getDevice", -1) == index)
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

int npu_drained_stream(int index, void **stream)
{
    PyObject *torch_npu = PyImport_ImportModule("torch_npu._C");
    if (!torch_npu) return -1;
    *stream = (void *)(uintptr_t)ask_npu(torch_npu, "_npu_getCurrentRawStream", index);
    Py_DECREF(torch_npu);
    return PyErr_Occurred() ? -1 : 0;
}
/* ---- torch's threads ------------------------------------------------------------------------------------- */

/* torch's OpenMP workers spin for a while after each of its operators. Threads of our own beside them would share the
 * cores with that (a fifth of a training step's time on two cores), so CPU plans run on torch's: its C shim has the
 * function from 2.10 on. Below that the library uses its own pool. */
typedef int32_t (*torch_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain,
                                         void (*fn)(int64_t, int64_t, void *), void *ctx);

typedef struct {
    void (*fn)(void *arg, int worker);
    void *arg;
} workers;

static void run_workers(int64_t begin, int64_t end, void *ctx)
{
    const workers *w = ctx;
    for (int64_t i = begin; i < end; i++) w->fn(w->arg, (int)i);
}

void torch_parallel(void *parallel_for, int n, void (*fn)(void *, int), void *arg)
{
    workers w = {fn, arg};
    torch_parallel_for_fn run;
    memcpy(&run, &parallel_for, sizeof run); /* ctx is the function itself */
    if (n == 1 || run(0, n, 1, run_workers, &w) != 0) run_workers(0, n, &w);
}

void *find_torch_parallel_for(void)
{
    void *torch = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    return torch ? dlsym(torch, "torch_parallel_for") : NULL;
}
