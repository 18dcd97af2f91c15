/* SPDX-License-Identifier: Apache-2.0
 *
 * call.h - one run (or one measurement) of an operation: views, scratch memory, launches.
 *
 * An operation is written once, as a walk that takes scratch and launches operators. The walk runs in two modes.
 * Running, scratch comes from the caller's workspace and operators go to the caller's stream. Measuring, addresses are
 * invented, only phase 1 of each operator is asked, and what remains is the size the workspace must have. So the two
 * cannot disagree.
 *
 * Scratch is a stack: an operator's own workspace lies right behind the scratch that is live when it is called.
 * Everything is on one stream, so bytes that are dead in stream order may be used again at once.
 *
 * Errors stick: after the first one, everything else in the walk does nothing, and fmoe_asc_end answers with it. */
#ifndef FMOE_ASCEND_CALL_H
#define FMOE_ASCEND_CALL_H

#include "cann/acl.h"
#include "util.h"

/* What the forward keeps for the backward. */
typedef enum asc_keep { KEEP_ALL, KEEP_LEAN, KEEP_NOTHING } asc_keep;

typedef struct asc_plan asc_plan;

enum { ASC_MAX_OBJECTS = 416 }; /* three lists of 128, and the rest */

typedef struct asc_object { /* of CANN, to be destroyed */
    int kind;
    void *object;
} asc_object;

typedef struct asc_call {
    const fmoe_acl *acl;
    const fmoe_plan_impl *p;
    const asc_plan *plan;
    aclrtStream stream;
    fmoe_submit_fn submit; /* NULL: launch at once */
    void *submit_ctx;
    bool measure;
    fmoe_status status;
    char *base; /* scratch */
    size_t used, peak, limit;
    int32_t device_before;            /* -1: nothing to restore */
    asc_object held[ASC_MAX_OBJECTS]; /* of the operator being launched */
    int n_held;
    uint64_t op_workspace;
    aclOpExecutor *executor;
} asc_call;

/* A tensor as CANN sees it. Views are values: turning one costs nothing. */
typedef struct asc_view {
    void *data;
    aclDataType dtype;
    int ndim;
    int64_t dims[3], strides[3];
} asc_view;

fmoe_status asc_begin(asc_call *c, const fmoe_plan_impl *p, const fmoe_run *run); /* to run */
fmoe_status asc_begin_measure(asc_call *c, const fmoe_plan_impl *p);              /* to measure */
fmoe_status asc_end(asc_call *c);
fmoe_status asc_fail(asc_call *c, fmoe_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

void asc_vendor_text(const fmoe_acl *acl, char *text, size_t n); /* of the last failure, on one line */

/* Scratch. mark = c->used; later asc_release(c, mark). */
void *asc_scratch(asc_call *c, int64_t count, aclDataType dtype);
void asc_release(asc_call *c, size_t mark);

size_t asc_size(aclDataType dtype);
aclDataType asc_dtype(int dtype); /* of fmoe_tensor_dtype */
aclDataType asc_plan_dtype(const fmoe_plan_impl *p);

asc_view asc_1d(void *data, aclDataType dtype, int64_t n);
asc_view asc_2d(void *data, aclDataType dtype, int64_t rows, int64_t cols);
asc_view asc_3d(void *data, aclDataType dtype, int64_t a, int64_t b, int64_t c);
asc_view asc_of(const fmoe_tensor *t);
asc_view asc_turn(asc_view v); /* the last two dimensions exchanged */
asc_view asc_part(asc_view v, int dim, int64_t first, int64_t step, int64_t count); /* every step-th of a dimension */
asc_view asc_at(asc_view v, int64_t index);                                         /* v[index]: one dimension less */
asc_view asc_shape(asc_view v, int ndim, int64_t a, int64_t b, int64_t c);          /* a packed view in another shape */
bool asc_is_packed(const asc_view *v);
int64_t asc_count(const asc_view *v);

/* Scratch of a shape. */
asc_view asc_new1(asc_call *c, aclDataType dtype, int64_t n);
asc_view asc_new2(asc_call *c, aclDataType dtype, int64_t rows, int64_t cols);
asc_view asc_new3(asc_call *c, aclDataType dtype, int64_t a, int64_t b, int64_t d);

/* Objects of the operator about to be launched; released by ASC_LAUNCH, whatever happens. NULL after an error. */
const aclTensor *asc_t(asc_call *c, asc_view v);
const aclTensorList *asc_list(asc_call *c, const asc_view *v, int64_t n);
const aclScalar *asc_s(asc_call *c, double value);
const aclScalar *asc_si(asc_call *c, int64_t value);
const aclIntArray *asc_ints(asc_call *c, const int64_t *values, int64_t n);

/* Both phases: ASC_LAUNCH(c, SwiGlu, h, -1, a). */
typedef aclnnStatus (*asc_phase2)(void *workspace, uint64_t bytes, aclOpExecutor *executor, aclrtStream stream);
bool asc_ready(asc_call *c, const char *name, bool exists);
void asc_launch(asc_call *c, const char *name, aclnnStatus phase1, asc_phase2 phase2);
void asc_to_host(asc_call *c, void *to, const void *from, size_t bytes); /* waits for the stream */
void asc_memset_zero(asc_call *c, void *at, size_t bytes);

#define ASC_LAUNCH(c, Name, ...)                                                                                       \
    (asc_ready((c), "aclnn" #Name, (c)->acl->aclnn##Name != NULL)                                                      \
         ? asc_launch((c), "aclnn" #Name,                                                                              \
                      (c)->acl->aclnn##Name##GetWorkspaceSize(__VA_ARGS__, &(c)->op_workspace, &(c)->executor),        \
                      (c)->acl->aclnn##Name)                                                                           \
         : (void)0)

#endif
