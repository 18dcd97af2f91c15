/* SPDX-License-Identifier: Apache-2.0
 *
 * sim.h - inside the simulated CANN. Its parts:
 *   count.c    counters, violations, injected failures, the text of the last error
 *   memory.c   device memory the host cannot touch
 *   stream.c   streams and events: a worker thread each, tasks in order
 *   runtime.c  acl*, aclrt*
 *   meta.c     descriptors, lists, scalars, executors and the two-phase call
 *   cache.c    the operator cache of each thread
 *   array.c    what a kernel uses to read and write tensors
 *   op_*.c     the operators
 *
 * A "violation" is something a real device would not notice at once but must never see: a descriptor freed between the
 * two phases, an executor run twice, an unaligned base address, memory that is no longer allocated. Tests want none. */
#ifndef FMOE_SIM_H
#define FMOE_SIM_H

#include "cann.h"

#define SIM_MAX_DIMS 8

/* ---- count.c: also the interface of the tests, through dlsym or ctypes ---- */

/* Count a call of a vendor function; the code to answer with when a failure was asked for here, else 0. */
int sim_enter(const char *function);
void sim_violation(const char *format, ...) __attribute__((format(printf, 1, 2)));
void sim_message(const char *format, ...) __attribute__((format(printf, 1, 2))); /* for aclGetRecentErrMsg */
const char *sim_take_message(void);
void sim_add(const char *counter, int64_t amount);
void sim_trace(const char *line);

void fmoe_sim_reset(void);                 /* counters but live_* and violations, and the trace */
void fmoe_sim_forgive(void);               /* the violations so far */
int64_t fmoe_sim_get(const char *counter); /* a counter, or calls of a vendor function */
void fmoe_sim_fail(const char *function, int64_t nth,
                   int code); /* "*": any, "aclnn*": any of those; the nth call from now; nth 0: none */
void fmoe_sim_set(const char *what, int64_t value); /* delays and switches, see count.c */
int64_t fmoe_sim_option(const char *what);
size_t fmoe_sim_trace(char *text, size_t n); /* one line a launch */
const char *fmoe_sim_violation_text(void);   /* the first one */

/* ---- memory.c ---- */

aclError sim_malloc(void **device, size_t bytes);
aclError sim_free(void *device);
bool sim_is_device(const void *p);
bool sim_is_live(const void *p, size_t bytes); /* all of it inside one allocation */
void *sim_twin(const void *device);            /* where kernels find it */
size_t sim_memory_free(void), sim_memory_total(void);

/* ---- stream.c ---- */

typedef struct sim_stream sim_stream;

sim_stream *sim_stream_new(void);
aclError sim_stream_delete(sim_stream *s);
bool sim_stream_exists(const sim_stream *s);
/* Run fn(arg) after everything that is on the stream already. */
aclError sim_submit(sim_stream *s, void (*fn)(void *arg), void *arg);
aclError sim_stream_wait(sim_stream *s);
aclError sim_device_wait(int32_t ms); /* -1: as long as it takes */
bool sim_stream_idle(sim_stream *s);
void sim_stream_error(int code); /* from a task: the stream reports it at the next synchronisation */

/* ---- meta.c ---- */

typedef struct sim_tensor { /* a copy of a descriptor, and what it is to the operator */
    int64_t dims[SIM_MAX_DIMS], strides[SIM_MAX_DIMS];
    int ndim;
    int dtype;
    int64_t offset, storage; /* in elements */
    char *data;              /* device address of the storage */
    bool present;
    bool is_out;
} sim_tensor;

/* A tensor seen as [outer, n, inner] around dimension dim, which may be negative. */
typedef struct {
    int64_t outer, n, inner;
} sim_around;

typedef struct sim_exec sim_exec;
typedef void (*sim_kernel)(sim_exec *e);

struct sim_exec {
    const char *name;
    sim_kernel kernel;
    sim_tensor *t; /* in the order the operator named them; a missing optional one is not present */
    int nt, capacity;
    const aclTensor **pinned;
    int64_t i[24];
    double d[8];
    double (*element)(double a, double b, const double *scalars); /* op_math.c */
    int status;
    uint64_t workspace;
    bool repeatable;
    bool uncached; /* never in the operator cache: AI CPU operators, and those that copy onto themselves */
    bool aicpu;    /* runs on the AI CPU, which is slow and counted apart */
    bool hollow;   /* from a cache entry without tasks: phase 2 answers 0 and runs nothing */
    int rounds;    /* launches that one call is; 0: one */
    int late;      /* what phase 2 answers: checks in a tiling whose result phase 1 ignores */
    uint64_t key;  /* in the operator cache */
    int64_t read, written;
    void *arena; /* freed after the kernel */
};

#define SIM_WS uint64_t *workspaceSize, aclOpExecutor **executor

/* Phase 1: begin, name the tensors, check, end. Errors are remembered; end answers with the first. */
sim_exec *sim_begin(const char *name, sim_kernel kernel);
int sim_in(sim_exec *e, const aclTensor *t); /* index into e->t */
int sim_in_optional(sim_exec *e, const aclTensor *t);
int sim_out(sim_exec *e, const aclTensor *t);
int sim_inout(sim_exec *e, const aclTensor *t);                             /* read and written */
int sim_list(sim_exec *e, const aclTensorList *l, bool is_out, int *count); /* index of the first */
void sim_check(sim_exec *e, bool good, const char *format, ...) __attribute__((format(printf, 3, 4)));
aclnnStatus sim_end(sim_exec *e, uint64_t workspace, uint64_t *workspaceSize, aclOpExecutor **executor);
aclnnStatus sim_run(const char *name, void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream);

void sim_check_late(sim_exec *e, bool good, const char *format, ...) __attribute__((format(printf, 3, 4)));
void sim_on_aicpu(sim_exec *e, bool yes); /* on 910B and 910_93; 950 has AI Core kernels for more types */
bool sim_is_950(void), sim_before_85(void);
/* More than 32 members of Cat or SplitTensor: rounds, with the whole tensor copied once more. Answers the workspace. */
uint64_t sim_in_rounds(sim_exec *e, int members, int64_t elements, int dtype, int each);

/* ---- cache.c ---- */

void sim_cache_open(sim_exec *e);
void sim_cache_close(sim_exec *e, bool ran);
void sim_cache_remove(sim_exec *e);

double sim_scalar(const aclScalar *s);
int64_t sim_int_array(const aclIntArray *a, int64_t *values, int64_t max); /* length; -1: NULL */
void sim_set_rows(const aclTensor *t, int64_t rows); /* of an output whose size only the kernel knows */
int64_t sim_numel(const sim_tensor *t);
size_t sim_dtype_size(int dtype);
bool sim_contiguous(const sim_tensor *t);
bool sim_same_shape(const sim_tensor *a, const sim_tensor *b);

#define SIM_PHASE2(Name)                                                                                               \
    aclnnStatus aclnn##Name(void *workspace, uint64_t workspaceSize, aclOpExecutor *executor, aclrtStream stream)      \
    {                                                                                                                  \
        return sim_run(#Name, workspace, workspaceSize, executor, stream);                                             \
    }

/* ---- array.c: inside a kernel. Buffers live until the kernel is done. ---- */

void *sim_buffer(sim_exec *e, size_t bytes);
double *sim_load(sim_exec *e, int tensor);                            /* the view, row-major */
double *sim_load_as(sim_exec *e, int tensor, const sim_tensor *like); /* broadcast to the shape of another */
float *sim_load_float(sim_exec *e, int tensor);
int64_t *sim_load_int(sim_exec *e, int tensor);
void sim_store(sim_exec *e, int tensor, const double *values);
void sim_store_float(sim_exec *e, int tensor, const float *values);
void sim_store_int(sim_exec *e, int tensor, const int64_t *values);
void sim_store_part(sim_exec *e, int tensor, int64_t index0, int64_t count0, const float *values); /* of dimension 0 */
void sim_release(sim_exec *e, void *mark); /* buffers made since mark = e->arena */
void sim_spoil(sim_exec *e);               /* make the outputs of the operator in FMOE_SIM_SPOIL wrong */
sim_around sim_split(const sim_tensor *t, int64_t dim);
void sim_abort(sim_exec *e, const char *format, ...) __attribute__((format(printf, 2, 3))); /* AI Core exception */
float *sim_to_float(sim_exec *e, const sim_tensor *t, int64_t index0, int64_t count0); /* sub-range of dimension 0 */

/* C[m,n] += A * B in f32; ta: A is stored [k,m]; tb: B is stored [n,k]. Row-major, packed. */
void sim_sgemm(int64_t m, int64_t n, int64_t k, const float *a, bool ta, const float *b, bool tb, float *c);

#endif
