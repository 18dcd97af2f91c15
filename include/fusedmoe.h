/* SPDX-License-Identifier: Apache-2.0
 *
 * fusedmoe.h - the Mixture-of-Experts layer, forward and backward, as a plain C API.
 *
 * Letters, the same everywhere in this project:
 *   T tokens   H hidden size   I expert intermediate size   E experts   k experts per token
 *   R = T*k routed rows (skipped slots leave unused rows at the end)
 *
 *   up:       h[r]   = x[token(r)] . W1[e]^T + b1[e]      W1: [E, 2I, H], gate and up halves
 *   act:      a[r]   = silu(h_gate[r]) * h_up[r]          or another entry of fmoe_act
 *   down:     y[r]   = a[r] . W2[e]^T + b2[e]             W2: [E, H, I]
 *   combine:  out[t] = sum over j of p[t,j] * y[row(t,j)]
 *
 * Describe an operation (fmoe_desc), make a plan of it, ask how much workspace T tokens need, run it:
 *   fmoe_desc d = FMOE_DESC_INIT;              in C++: fmoe_desc d{}; d.size = sizeof d;
 *   d.op = FMOE_OP_EXPERTS; d.dtype = FMOE_BF16; d.H = 2048; d.I = 768; d.E = 128; d.k = 8;
 *   fmoe_plan plan;
 *   if (fmoe_plan_create(&plan, &d) != FMOE_OK) puts(fmoe_last_error());
 *
 * Rules that hold for every call
 *   - The caller owns all memory: tensors, workspace, saved state. Run calls do not allocate, print, abort, synchronise
 *     a device or change the floating point state. Plans and the CPU thread pool are the only things the library
 *     allocates. (Ascend also takes a little host memory in run calls, for each launch: docs/ascend.md.)
 *   - A call that returns an error has written no output byte, and fmoe_last_error() (per thread) names the argument
 *     and both values. (On a device, ids are checked there: see FMOE_ERR_INDEX.)
 *   - A call needs 64 KiB of its thread's stack, and 128 KiB in bf16 on a CPU with AMX (a Debug build: 512 KiB).
 *   - Plans are immutable: any number of threads may run one plan at the same time, each with its own workspace.
 *   - Same inputs, same bits, run to run. On the CPU also for any number of threads and any batch composition: a
 *     token's result does not depend on its neighbours.
 *   - Structs begin with their size; set every unused field to zero, which means "default" or "not given". What other
 *     versions may change, and what they may not: see "Version" below.
 *   - After fork() the child may go on using the library; the CPU pool is made anew there.
 */
#ifndef FUSEDMOE_H
#define FUSEDMOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define FMOE_API
#else
#define FMOE_API __attribute__((visibility("default")))
#endif

/* ---- Version -------------------------------------------------------------------------------------------- *
 *
 * Semantic versions, MAJOR.MINOR.PATCH. PATCH: repairs, the same header. MINOR: new functions, fields, flags and
 * values; programs go on working, built anew or not. MAJOR: programs may have to change. While MAJOR is 0, a new MINOR
 * may break them too. The soname is libfusedmoe.so.MAJOR and, while MAJOR is 0, libfusedmoe.so.0.MINOR (0.1:
 * libfusedmoe.so.0). Symbols have versions.
 *
 * Structs that begin with their size grow at their end only:
 *   - size is smaller than the library's (the program has an older header): the fields that are missing count as zero.
 *     Less than the struct ever had: FMOE_ERR_ABI.
 *   - size is larger (a newer header): accepted where all bytes beyond the library's struct are zero, which means that
 *     nothing new is asked for; else FMOE_ERR_ARG. More than 4096: FMOE_ERR_ABI.
 * Structs without a size are parts of others or of arrays, and keep their size: fmoe_tensor, fmoe_device, fmoe_datatype
 * (DLPack's), fmoe_route_rule, and fmoe_weights, which grows into its spare fields. Those came with 0.2; the structs of
 * 0.1 that hold fmoe_weights (pack, experts, block) are known by their size and still accepted.
 * Enums only grow, and no value changes its meaning. Values and flags that the library does not know are errors. */

#define FMOE_VERSION_MAJOR 0
#define FMOE_VERSION_MINOR 2
#define FMOE_VERSION_PATCH 0
#define FMOE_VERSION (FMOE_VERSION_MAJOR * 10000 + FMOE_VERSION_MINOR * 100 + FMOE_VERSION_PATCH)

FMOE_API int fmoe_version(void);                /* FMOE_VERSION of the library that was loaded */
FMOE_API const char *fmoe_version_string(void); /* "0.2.0" */

/* ---- Status: the values never change -------------------------------------------------------------------- */

typedef enum fmoe_status {
    FMOE_OK = 0,
    FMOE_ERR_NULL = 1,         /* a pointer that is needed is NULL */
    FMOE_ERR_ABI = 2,          /* a struct's size is not one this library knows: see Version */
    FMOE_ERR_ARG = 3,          /* a value is outside its range */
    FMOE_ERR_SHAPE = 4,        /* wrong rank, negative dimension, or two tensors disagree */
    FMOE_ERR_DTYPE = 5,        /* unsupported, or not the plan's */
    FMOE_ERR_STRIDE = 6,       /* a layout the operation cannot read or write */
    FMOE_ERR_ALIGN = 7,        /* data not aligned to its own element size */
    FMOE_ERR_ALIAS = 8,        /* an output overlaps an input or another output */
    FMOE_ERR_INDEX = 9,        /* expert id, group size or row map entry out of range */
    FMOE_ERR_OVERFLOW = 10,    /* a size does not fit 64 bits */
    FMOE_ERR_WORKSPACE = 11,   /* workspace or saved state missing or too small */
    FMOE_ERR_NOMEM = 12,       /* the library's own allocation failed */
    FMOE_ERR_HANDLE = 13,      /* no such plan (never made, or destroyed) */
    FMOE_ERR_PLAN = 14,        /* the plan is for another operation or other sizes */
    FMOE_ERR_BACKEND = 15,     /* the backend is not there: library, symbol or device missing */
    FMOE_ERR_DEVICE = 16,      /* the device's runtime reported an error */
    FMOE_ERR_UNSUPPORTED = 17, /* a combination this backend does not implement */
    FMOE_ERR_EXCHANGE = 18     /* between ranks (fusedmoe_ep.h): one died, lags, or sends what it did not announce */
} fmoe_status;

FMOE_API const char *fmoe_status_string(fmoe_status status); /* "FMOE_ERR_SHAPE"; never NULL */
FMOE_API const char *fmoe_last_error(void);                  /* of this thread; "" when there was none */

/* ---- Tensors: laid out as DLPack's DLTensor, so any framework's tensor passes without a copy ------------- */

typedef struct fmoe_device {
    int32_t type; /* DLPack: 1 CPU, 2 CUDA, 12 ext_dev (Ascend NPU) */
    int32_t id;
} fmoe_device;

typedef struct fmoe_datatype {
    uint8_t code; /* DLPack: 0 int, 2 float, 4 bfloat */
    uint8_t bits;
    uint16_t lanes; /* 1 */
} fmoe_datatype;

typedef struct fmoe_tensor {
    void *data;
    fmoe_device device;
    int32_t ndim;
    fmoe_datatype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: compact row-major */
    uint64_t byte_offset;
} fmoe_tensor;

enum { FMOE_CPU = 1, FMOE_CUDA = 2, FMOE_ASCEND = 12 };

/* ---- What to compute ------------------------------------------------------------------------------------ */

typedef enum fmoe_dtype {
    FMOE_F32 = 1,
    FMOE_BF16 = 2,
    FMOE_F16 = 3,
    FMOE_F64 = 4 /* CPU only: runs the reference itself, the specification in double */
} fmoe_dtype;

typedef enum fmoe_op {
    FMOE_OP_ROUTE = 1,
    FMOE_OP_PERMUTE = 2, /* both directions */
    FMOE_OP_GROUPED_MATMUL = 3,
    FMOE_OP_ACTIVATION = 4,
    FMOE_OP_EXPERTS = 5,
    FMOE_OP_BLOCK = 6
} fmoe_op;

/* g, u: the gate and up values of one element; L = act_limit, alpha = act_alpha. */
typedef enum fmoe_act {
    FMOE_ACT_SWIGLU = 0,           /* silu(g) * u */
    FMOE_ACT_GEGLU = 1,            /* gelu(g) * u, by erf */
    FMOE_ACT_GEGLU_TANH = 2,       /* gelu(g) * u, by tanh */
    FMOE_ACT_REGLU = 3,            /* relu(g) * u */
    FMOE_ACT_SWIGLU_CLAMP = 4,     /* g = min(g, L), u = clamp(u, -L, L): silu(g) * u          DeepSeek-V4 */
    FMOE_ACT_SWIGLU_OAI = 5,       /* same clamps: (u + 1) * g * sigmoid(alpha * g)   gpt-oss, MiniMax-M3 */
    FMOE_ACT_SWIGLU_CLAMP_OUT = 6, /* min(silu(g), L) * clamp(u, -L, L)                           Step-3.7 */
    FMOE_ACT_SILU = 16,            /* from 16 on ungated: h has I columns, W1 is [E, I, H] */
    FMOE_ACT_GELU = 17,
    FMOE_ACT_GELU_TANH = 18,
    FMOE_ACT_RELU = 19,
    FMOE_ACT_RELU2 = 20 /* relu(h)^2                                                 Nemotron-H */
} fmoe_act;

/* How logits become k ids and weights. Score every expert, select k, weigh them:
 *   s      = score(logits)
 *   select = the k largest of s + select_bias (of the logits for TOPK_SOFTMAX), in the chosen groups only;
 *            sorted from large to small, the lowest index first among equals
 *   weight = s of the selected (the bias is for selection only), normalised, times scale              */
typedef enum fmoe_score {
    FMOE_SCORE_SOFTMAX = 0,      /* over all E */
    FMOE_SCORE_TOPK_SOFTMAX = 1, /* over the k selected logits */
    FMOE_SCORE_SIGMOID = 2,
    FMOE_SCORE_SQRT_SOFTPLUS = 3
} fmoe_score;

typedef enum fmoe_group_score { FMOE_GROUP_TOP2_SUM = 0, FMOE_GROUP_MAX = 1 } fmoe_group_score;

typedef struct fmoe_route_rule {
    int32_t score;         /* fmoe_score */
    int32_t renormalize;   /* 1: divide by (sum of the k + eps) */
    int32_t group_score;   /* fmoe_group_score */
    int32_t groups;        /* E is split into that many groups; 0 or 1: no groups */
    int32_t topk_groups;   /* selection is limited to that many best groups */
    int32_t excluded_zero; /* 1: excluded experts compete with score 0 (DeepSeek before transformers 5.6) */
    double eps;
    double scale; /* 0 means 1 */
} fmoe_route_rule;

/* Run fn(arg, worker) once for each worker in [0, n), concurrently if you can, and return when all are done. */
typedef void (*fmoe_parallel_fn)(void *ctx, int n, void (*fn)(void *arg, int worker), void *arg);

/* fmoe_desc.flags */
enum {
    FMOE_INTERLEAVED = 1,  /* gate = even, up = odd rows of W1 (gpt-oss); default: all gates, then all ups */
    FMOE_BIAS = 2,         /* b1 and b2 are given */
    FMOE_RECOMPUTE = 4,    /* keep nothing but x for backward and compute h again */
    FMOE_SKIP_NEG1 = 8,    /* id -1 skips the slot: zero output, zero gradient */
    FMOE_SKIP_E = 16,      /* id E skips the slot (transformers' expert parallelism) */
    FMOE_SHARED_GATE = 32, /* block: the shared expert's output is scaled by sigmoid(x . shared_gate) */
    /* Forward of experts, block and activation, CPU only: the result of every operation is rounded to bf16 or f16, as
     * in a model that computes operation by operation in that type: h and y as products (an adapter's part inside) and
     * again with their bias, every operation of the activation, p * y where p is of that type. Sums over k, and over
     * the slots of a token, stay in f32. Farther from exact, nearer to such a model. f32, f64: no effect. */
    FMOE_ROUND_STEPS = 64,
    /* The backward of experts and block may write over the saved state, and needs less workspace for it: one backward
     * for each forward. Ascend: no effect. */
    FMOE_REUSE_SAVED = 128,
    /* The backward of experts and block may use the memory of dw.w1 as workspace until it writes the gradient there,
     * and needs less of its own: dw.w1 is given, without holes between its elements, and FMOE_ACCUMULATE is not. CPU,
     * Ascend: no effect. Plans that differ in these two alone read each other's saved state. */
    FMOE_BORROW_DW1 = 256,
    /* Experts, block and grouped matmul: weights may be quantised (fmoe_quant). CPU, Ascend; CUDA: not of the grouped
     * matmul, whose plan is refused. */
    FMOE_QUANT = 512,
    /* What the forward of experts and block keeps for the backward, of Ascend plans without FMOE_RECOMPUTE: everything,
     * so that the backward moves the fewest bytes, or h alone, a quarter of it. Neither: FMOE_ASCEND_KEEP, else all.
     * CPU, CUDA: no effect, they keep h. */
    FMOE_KEEP_ALL = 1024,
    FMOE_KEEP_LEAN = 2048,
    /* Experts and block: a token's out, dx and dp have the same bits in any batch (lists with adapters whose H or I is
     * not a multiple of 8: not out with and without saved state). CUDA: few tokens, as fmoe_plan_describe says, and
     * interleaved weights [in,out] take longer. CPU: no effect, it is always so. Ascend refuses it. */
    FMOE_SAME_BITS = 4096
};

typedef struct fmoe_desc {
    size_t size; /* sizeof(fmoe_desc) */
    int32_t op;  /* fmoe_op */
    int32_t dtype;
    fmoe_device device; /* zero: CPU */
    int64_t H, I, E, k; /* permute: H, E, k; route: E, k; activation: I; experts and block: all */
    int64_t K, N;       /* grouped matmul: columns of x and of y; E = number of groups. List form: 0, 0 */
    int64_t shared_I;   /* block: intermediate size of the shared expert; 0: none */
    int64_t rank1;      /* experts, block: rank of the adapters of W1 and of W2 (fmoe_weights); 0: none */
    int64_t rank2;
    int32_t act; /* fmoe_act */
    uint32_t flags;
    float act_alpha, act_limit; /* zero: 1.702 and 7 where the activation uses them */
    fmoe_route_rule route;
    int32_t threads;           /* CPU: 0 = every core this process may use */
    fmoe_parallel_fn parallel; /* CPU: your threads instead of ours; `threads` says how many workers */
    void *parallel_ctx;
} fmoe_desc;

#define FMOE_DESC_INIT ((fmoe_desc){.size = sizeof(fmoe_desc)}) /* C only; so are the other _INIT macros */

/* ---- Plans ---------------------------------------------------------------------------------------------- */

typedef uint64_t fmoe_plan; /* a handle, not a pointer: a stale or invented one is answered with FMOE_ERR_HANDLE */

typedef enum fmoe_pass { FMOE_FORWARD = 0, FMOE_BACKWARD = 1 } fmoe_pass;

/* Settle sizes, dtypes, backend and kernels. The only call besides the first run (thread pool) that allocates. */
FMOE_API fmoe_status fmoe_plan_create(fmoe_plan *plan, const fmoe_desc *desc);

/* Destroy and set to 0. 0 is allowed. Calls of other threads that are under way finish first. */
FMOE_API fmoe_status fmoe_plan_destroy(fmoe_plan *plan);

/* Bytes of workspace one run on T tokens needs (grouped matmul and activation: T = rows). Any alignment will do. */
FMOE_API fmoe_status fmoe_workspace_bytes(fmoe_plan plan, fmoe_pass pass, int64_t T, size_t *bytes);

/* Bytes that the forward of experts or block keeps for its backward: h, unless FMOE_RECOMPUTE (Ascend: and more,
 * docs/ascend.md). */
FMOE_API fmoe_status fmoe_saved_bytes(fmoe_plan plan, int64_t T, size_t *bytes);

/* Which kernels will run and why, as lines of text, cut to n bytes with the closing 0. Returns the full length (text
 * NULL: that alone). */
FMOE_API size_t fmoe_plan_describe(fmoe_plan plan, char *text, size_t n);

/* ---- Running: every run call takes the plan, the tensors of the operation, and this ---------------------- */

/* fmoe_run.flags */
enum {
    FMOE_ACCUMULATE = 1,  /* backward: every gradient in dw (dw, dbias, dw_router) is added to, not overwritten */
    FMOE_ADD_OUT = 2,     /* experts forward: out is added to */
    FMOE_ADD_DX = 4,      /* experts, block and grouped matmul backward: dx is added to */
    FMOE_REPLAY = 8,      /* route forward: ids are an input (recorded routing); weights are computed for them */
    FMOE_NEW_WEIGHTS = 16 /* experts backward, CPU and CUDA: weights the forward had not; saved may be written to */
};

/* Ascend: call launch(arg) once, in the order of these calls, now or later, on any thread, and answer 0; or answer
 * something else and do not call it. name is the operator's. launch answers 0 or CANN's error. */
typedef int (*fmoe_submit_fn)(void *ctx, const char *name, int (*launch)(void *arg), void *arg);

typedef struct fmoe_run {
    size_t size; /* sizeof(fmoe_run) */
    void *workspace;
    size_t workspace_bytes;
    void *stream;          /* CUDA: cudaStream_t, Ascend: aclrtStream; CPU: ignored */
    uint32_t flags;        /* above */
    fmoe_submit_fn submit; /* Ascend: a queue of the caller's that feeds the stream (torch_npu has one). Everything is
                              checked before the call returns, only the launches themselves (a small allocation each)
                              are left to it, and so are their errors. NULL: launch at once. Others: ignored */
    void *submit_ctx;
} fmoe_run;

#define FMOE_RUN_INIT ((fmoe_run){.size = sizeof(fmoe_run)})

/* Common to all tensors below: activations have unit stride in their last dimension; ids, maps, sizes and p are
 * compact. Ids, maps and sizes are int32 or int64; p (routing weights), gradients of weights and biases are f32 or the
 * plan's dtype. In a plan of dtype f64 every f32 here reads f64. Backward: an output that is NULL is not computed. */

/* -- route: logits [T,E] f32 or the plan's dtype -> ids [T,k], weights [T,k]. FMOE_OP_ROUTE.
 * A row with NaN or +Inf, or with nothing but -Inf, still gets k distinct ids in range (NaN ranks lowest); its weights
 * are what the formula gives, and it is counted in bad_rows. (On Ascend plain softmax rules without bad_rows are CANN's
 * own operator, with an order of equal scores and of NaN of its own.) */
typedef struct fmoe_route_args {
    size_t size;
    const fmoe_tensor *logits;      /* in  [T,E] */
    const fmoe_tensor *select_bias; /* in  [E] f32, or NULL */
    const fmoe_tensor *ids;         /* out [T,k]; in with FMOE_REPLAY and in backward */
    const fmoe_tensor *weights;     /* out [T,k]; forward only */
    const fmoe_tensor *bad_rows;    /* out [1] int64, or NULL; forward only */
    const fmoe_tensor *dweights;    /* in  [T,k]; backward only */
    const fmoe_tensor *dlogits;     /* out [T,E]; backward only */
} fmoe_route_args;

FMOE_API fmoe_status fmoe_route_forward(fmoe_plan, const fmoe_route_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_route_backward(fmoe_plan, const fmoe_route_args *, const fmoe_run *);

/* -- permute: xp[map[t*k+j]] = x[t], rows grouped by expert, in token order inside each (a stable sort).
 * FMOE_OP_PERMUTE. map has the meaning of Ascend's sortedIndices: every row below T*k at most once; -1 marks a skipped
 * slot. Rows past the last routed one become zero. Backward: dx[t] = sum_j dxp[map[t*k+j]]. */
typedef struct fmoe_permute_args {
    size_t size;
    const fmoe_tensor *x;      /* in  [T,H] (dx in backward: out) */
    const fmoe_tensor *ids;    /* in  [T,k]; forward only */
    const fmoe_tensor *xp;     /* out [R,H] (dxp in backward: in) */
    const fmoe_tensor *map;    /* out [T*k]; in in backward */
    const fmoe_tensor *counts; /* out [E], or NULL; forward only */
} fmoe_permute_args;

FMOE_API fmoe_status fmoe_permute_forward(fmoe_plan, const fmoe_permute_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_permute_backward(fmoe_plan, const fmoe_permute_args *, const fmoe_run *);

/* -- unpermute: out[t] = sum_j p[t,j] * y[map[t*k+j]], p = 1 where weights is NULL. FMOE_OP_PERMUTE.
 *
 * Backward (rows of dy that nobody maps to become zero):
 *   dy[map[t*k+j]] = p[t,j] * dout[t]
 *   dweights[t,j]  = <dout[t], y[map[t*k+j]]> */
typedef struct fmoe_unpermute_args {
    size_t size;
    const fmoe_tensor *y;        /* in  [R,H] (forward on the CPU: or f32); backward: needed for dweights only */
    const fmoe_tensor *map;      /* in  [T*k] */
    const fmoe_tensor *weights;  /* in  [T,k], or NULL */
    const fmoe_tensor *out;      /* out [T,H]; forward only */
    const fmoe_tensor *dout;     /* in  [T,H]; backward only */
    const fmoe_tensor *dy;       /* out [R,H], or NULL; backward only */
    const fmoe_tensor *dweights; /* out [T,k], or NULL; backward only */
} fmoe_unpermute_args;

FMOE_API fmoe_status fmoe_unpermute_forward(fmoe_plan, const fmoe_unpermute_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_unpermute_backward(fmoe_plan, const fmoe_unpermute_args *, const fmoe_run *);

/* -- grouped matmul: y[r] = x[r] . w[g(r)] + bias[g(r)], rows in order of their groups. FMOE_OP_GROUPED_MATMUL.
 * Any strides on w and dw: a transposed view costs no copy. sizes are counts or (cumulative = 1) running sums; rows
 * past the total are left alone in y and become zero in dx. sizes may be NULL when E is 1. y and dy are f32 or the
 * plan's dtype.
 *
 * Backward (an empty group's dw and dbias become zero, or are left alone with FMOE_ACCUMULATE):
 *   dx = dy . w^T,   dw[g] = x_g^T . dy_g (contraction over the group's rows),   dbias[g] = sum of dy_g
 *
 * List form, for groups in tensors of their own: list = 1, every tensor pointer is an array of E tensors, x[g]: [m,K],
 * w[g]: [K,N], y[g]: [m,N], bias[g]: [N]; sizes may differ from group to group; `sizes` is not used.
 *
 * Quantised (a plan with FMOE_QUANT; fmoe_quant below): w holds codes [E,N,K], as a linear layer has them, or, with
 * FMOE_QUANT_IN_OUT, [E,K,N]. dw must be NULL: they have no gradient. */
typedef struct fmoe_gmm_args {
    size_t size;
    const fmoe_tensor *x;     /* in  [R,K] */
    const fmoe_tensor *w;     /* in  [E,K,N] */
    const fmoe_tensor *bias;  /* in  [E,N], or NULL; forward only */
    const fmoe_tensor *sizes; /* in  [E] */
    const fmoe_tensor *y;     /* out [R,N]; forward only */
    const fmoe_tensor *dy;    /* in  [R,N]; backward only */
    const fmoe_tensor *dx;    /* out [R,K], or NULL; backward only */
    const fmoe_tensor *dw;    /* out [E,K,N], or NULL; backward only */
    const fmoe_tensor *dbias; /* out [E,N], or NULL; backward only */
    int32_t cumulative;
    int32_t list;
    const struct fmoe_quant *quant; /* w is quantised; NULL: it is not */
} fmoe_gmm_args;

FMOE_API fmoe_status fmoe_grouped_matmul_forward(fmoe_plan, const fmoe_gmm_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_grouped_matmul_backward(fmoe_plan, const fmoe_gmm_args *, const fmoe_run *);

/* -- activation: a[r] = act(h[r]); h [R,2I] (gate then up, or interleaved by the plan's flag), ungated [R,I].
 * FMOE_OP_ACTIVATION. */
typedef struct fmoe_activation_args {
    size_t size;
    const fmoe_tensor *h;  /* in  [R,2I] or [R,I] */
    const fmoe_tensor *a;  /* out [R,I]; forward only */
    const fmoe_tensor *da; /* in  [R,I]; backward only */
    const fmoe_tensor *dh; /* out, as h; backward only */
} fmoe_activation_args;

FMOE_API fmoe_status fmoe_activation_forward(fmoe_plan, const fmoe_activation_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_activation_backward(fmoe_plan, const fmoe_activation_args *, const fmoe_run *);

/* -- Quantised weights. The tensor of a weight then holds bytes (any 8-bit dtype), K contiguous: codes of 8 bits,
 * [E,N,K], or two of 4 bits a byte, [E,N,ceil(K/2)]; N = out, K = in. fmoe_quant says what they mean:
 *
 *   W[e,n,k] = (code - zero) * scale * scale2      in f32, from left to right, rounded once to the plan's dtype
 *
 * and the layer is exactly the one on such weights, bit for bit; no copy of them is ever made but of a few columns. A
 * scale belongs to group_rows x group_cols codes of an expert (the last ones may be fewer). A zero scale gives zeros, a
 * NaN NaN. Quantised weights have gradients of x, p, biases and adapters, and none of their own. docs/quantized.md */
typedef enum fmoe_code {
    FMOE_CODE_E4M3 = 1, /* 8 bits: float8_e4m3fn */
    FMOE_CODE_S8 = 2,   /* 8 bits: -128 to 127 */
    FMOE_CODE_E2M1 = 3, /* 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives (MXFP4, NVFP4) */
    FMOE_CODE_NF4 = 4,  /* 4 bits: bitsandbytes' NF4 */
    FMOE_CODE_FP4 = 5,  /* 4 bits: bitsandbytes' FP4 */
    FMOE_CODE_U4 = 6,   /* 4 bits: 0 to 15 */
    FMOE_CODE_LUT4 = 7  /* 4 bits: fmoe_quant.lut */
} fmoe_code;

/* What the bytes of a scale tensor of 8 bits are: E8M0 is 2^(byte - 127), and NaN for 255. */
typedef enum fmoe_scale_type { FMOE_SCALE_E8M0 = 1, FMOE_SCALE_E4M3 = 2 } fmoe_scale_type;

/* fmoe_quant.flags */
enum {
    FMOE_QUANT_HIGH_FIRST = 1, /* the even k is in the high nibble (bitsandbytes); default: in the low one */
    FMOE_QUANT_HALVES = 2,     /* W1 with all gates, then all ups: rows of groups begin anew at the first up, so that
                                  there are 2 * ceil(I / group_rows) of them */
    FMOE_QUANT_IN_OUT = 4      /* grouped matmul: a row of codes is one k and runs along N */
};

typedef struct fmoe_quant {
    size_t size;  /* sizeof(fmoe_quant) */
    int32_t code; /* fmoe_code */
    uint32_t flags;
    int32_t group_rows, group_cols; /* codes that share a scale: 128 x 128, 1 x 64; 0: all rows, all columns */
    int32_t scale_type;             /* fmoe_scale_type; 0: scale is f32, bf16 or f16 */
    float zero;                     /* subtracted from U4 and S8 */
    const fmoe_tensor *scale;       /* [E, rows of groups, columns of groups] */
    const fmoe_tensor *zeros;  /* U4, S8: in the place of `zero`, shaped as scale; uint8, f32, bf16, f16; or NULL */
    const fmoe_tensor *scale2; /* [E] or [1] f32, or NULL: 1 */
    const float *lut;          /* LUT4: 16 values; else NULL */
} fmoe_quant;                  /* beside a list: scale, zeros, scale2 are arrays of E, [rows, columns] and [1] each */
#define FMOE_QUANT_INIT ((fmoe_quant){.size = sizeof(fmoe_quant)})

/* Between weights [E,N,K] of f32, bf16 or f16 and codes: on all cores of the CPU, or on a CUDA device, without waiting.
 * fmoe_quantize writes codes and quant->scale (in f32, bf16, f16 or E8M0; U4: quant->zeros of uint8, too, if given).
 * scale = the largest magnitude of a group over the code's largest (over scale2, which is read); E8M0: the power of two
 * of MXFP4; S8 with scale2 = 1/127: the magnitude. So NF4, FP4 and such S8 are bitsandbytes', of whole groups. */
typedef struct fmoe_quant_args {
    size_t size;
    const fmoe_tensor *w;     /* in; out of fmoe_dequantize */
    const fmoe_tensor *codes; /* out; in of fmoe_dequantize */
    const fmoe_quant *quant;  /* the tensors of scales and zeros: out; in of fmoe_dequantize */
    void *stream;             /* CUDA: the cudaStream_t; the CPU: not read */
} fmoe_quant_args;
FMOE_API fmoe_status fmoe_quantize(const fmoe_quant_args *);
FMOE_API fmoe_status fmoe_dequantize(const fmoe_quant_args *);
/* Foreign packings of a matrix, to codes in our order and back, without loss */
typedef enum fmoe_repack {
    FMOE_REPACK_CT_INT4 = 1, /* compressed-tensors: int32 [N, K/8], lowest bits first            <-> U4, low first */
    FMOE_REPACK_GPTQ = 2,    /* int32 [K/8, N], bit 4j of word i: k = 8i + j */
    FMOE_REPACK_AWQ = 3,     /* int32 [K, N/8], nibble i of word c: n = 8c + {0,2,4,6,1,3,5,7}[i] */
    FMOE_REPACK_BNB_4BIT = 4 /* uint8 [N*K/2, 1], high first                                     <-> low first */
} fmoe_repack;
typedef struct fmoe_repack_args {
    size_t size;
    int32_t form, back; /* fmoe_repack; 1: from codes to the foreign form */
    int64_t N, K;
    const fmoe_tensor *foreign; /* compact */
    const fmoe_tensor *codes;   /* bytes [N, ceil(K/2)], rows may be apart */
} fmoe_repack_args;
FMOE_API fmoe_status fmoe_quant_repack(const fmoe_repack_args *);

/* -- Weights of a layer, or their gradients. Either stacked, in any orientation by strides (stored [E,in,out]: pass
 * shape [E,2I,H] with strides {2I*H, 1, 2I}), or one matrix an expert. With FMOE_INTERLEAVED, gradients come the way
 * the weights do.
 *
 * Low-rank adapters (LoRA), in a plan with rank1 or rank2: lora_scale1 * B1[e] . A1[e] is added to W1[e], and the like
 * to W2[e], without either sum being made:
 *   h = x . W1^T + lora_scale1 * (x . A1^T) . B1^T
 * Adapters are stacks beside lists too; rows of lora_b1 come in the order of W1's rows (beside lists: gates, then ups).
 * Their factors are of the plan's dtype or f32, and are rounded to it then. W is frozen where its gradient is NULL, and
 * then costs nothing in the backward but dx. */
typedef struct fmoe_weights {
    const fmoe_tensor *w1;      /* [E,2I,H] (ungated: [E,I,H]) */
    const fmoe_tensor *b1;      /* [E,2I] */
    const fmoe_tensor *w2;      /* [E,H,I] */
    const fmoe_tensor *b2;      /* [E,H] */
    const fmoe_tensor *gate;    /* array of E: [I,H]; NULL when ungated.  The list form: w1, b1, w2, b2 are NULL then */
    const fmoe_tensor *up;      /* array of E: [I,H] */
    const fmoe_tensor *down;    /* array of E: [H,I] */
    const fmoe_tensor *lora_a1; /* [E,rank1,H] */
    const fmoe_tensor *lora_b1; /* [E,2I,rank1] (ungated: [E,I,rank1]) */
    const fmoe_tensor *lora_a2; /* [E,rank2,I] */
    const fmoe_tensor *lora_b2; /* [E,H,rank2] */
    float lora_scale1;          /* of b1 a1 and b2 a2 (alpha / rank); 0 means 1. Not read in gradients */
    float lora_scale2;
    const void *packed; /* forward: W1 and W2 as fmoe_pack_weights made them; they themselves may be NULL then */
    size_t packed_bytes;
    const fmoe_quant *quant1;     /* W1 (of a list: up) is quantised; NULL: it is not. In gradients: NULL */
    const fmoe_quant *quant2;     /* W2 (of a list: down) */
    const fmoe_quant *quant_gate; /* of a list: gate */
    const void *reserved[5];      /* of later versions: NULL */
} fmoe_weights;

/* -- Packed weights: W1 and W2 of experts or a block in the order and form in which the CPU's kernels read them, made
 * once, for weights that do not change (inference, frozen weights). The same bits come out as without. The buffer is
 * the caller's, aligned to 64 (in huge pages it is read faster: madvise with MADV_HUGEPAGE before it is filled); it
 * holds no pointers and may be moved, saved and mapped. It serves every plan of the same level, dtype, E, H, I and form
 * of h; another one answers with an error that names both values. The backward reads the weights as they are stored.
 *
 * Bytes of a plan's packed weights: about those of W1 and W2, twice that where a 16-bit type has no unit and is widened
 * (levels c, avx2, avx512, neon). 0: this plan reads weights as they are stored, and there is nothing to pack (AMX in
 * bf16, f64, CUDA, Ascend). A shared expert's are those of an experts plan with E = 1, k = 1, I = shared_I. */
FMOE_API fmoe_status fmoe_packed_bytes(fmoe_plan, size_t *bytes);

typedef struct fmoe_pack_args {
    size_t size;
    fmoe_weights w; /* in: w1 and w2, or gate, up and down; the rest is not read */
    void *packed;   /* out */
    size_t packed_bytes;
} fmoe_pack_args;

FMOE_API fmoe_status fmoe_pack_weights(fmoe_plan, const fmoe_pack_args *, const fmoe_run *); /* needs no workspace */

/* -- experts: the layer with ids and weights given. FMOE_OP_EXPERTS.
 * Duplicate ids of one token add, so k may exceed E here (route and block choose k of E, and need k <= E). An id that
 * is neither in [0,E) nor a declared skip mark is FMOE_ERR_INDEX: on the CPU at once; on CUDA the slot is skipped and
 * the error reported by the next call on that plan; on Ascend it is CANN's to refuse, or yours with FMOE_ASCEND_CHECK=1
 * (docs/ascend.md). The backward gets the same x, ids, weights and w that the forward had, and the saved state it
 * wrote. */
typedef struct fmoe_experts_args {
    size_t size;
    const fmoe_tensor *x;       /* in  [T,H] */
    const fmoe_tensor *ids;     /* in  [T,k] */
    const fmoe_tensor *weights; /* in  [T,k], p */
    fmoe_weights w;             /* in */
    const fmoe_tensor *out;     /* out [T,H] (CPU: or f32, sums that are not rounded); forward only */
    void *saved;                /* forward: out, or NULL for inference. backward: in (FMOE_REUSE_SAVED: used
                                   up). Aligned to 16 (devices: 256) */
    size_t saved_bytes;
    const fmoe_tensor *dout;     /* in  [T,H]; backward only */
    const fmoe_tensor *dx;       /* out [T,H], or NULL (CPU: or f32) */
    const fmoe_tensor *dweights; /* out [T,k], or NULL */
    fmoe_weights dw;             /* out, each or NULL */
} fmoe_experts_args;

FMOE_API fmoe_status fmoe_experts_forward(fmoe_plan, const fmoe_experts_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_experts_backward(fmoe_plan, const fmoe_experts_args *, const fmoe_run *);

/* -- block: logits = x . w_router^T + b_router; route; experts; plus the shared expert. FMOE_OP_BLOCK.
 * logits, ids and weights are outputs of the forward and inputs of the backward.
 * shared: w1 [1,2*shared_I,H], w2 [1,H,shared_I]. */
typedef struct fmoe_block_args {
    size_t size;
    const fmoe_tensor *x;           /* in  [T,H] */
    const fmoe_tensor *w_router;    /* in  [E,H] */
    const fmoe_tensor *b_router;    /* in  [E], or NULL */
    const fmoe_tensor *select_bias; /* in  [E] f32, or NULL */
    fmoe_weights w;                 /* in */
    fmoe_weights shared;            /* in, where the plan has shared_I */
    const fmoe_tensor *shared_gate; /* in  [1,H], with FMOE_SHARED_GATE */
    const fmoe_tensor *logits;      /* [T,E] f32 or the plan's dtype */
    const fmoe_tensor *ids;         /* [T,k] */
    const fmoe_tensor *weights;     /* [T,k] */
    const fmoe_tensor *out;         /* out [T,H]; forward only */
    void *saved;                    /* as in experts */
    size_t saved_bytes;
    const fmoe_tensor *dout;         /* in  [T,H]; backward only */
    const fmoe_tensor *dlogits;      /* in  [T,E], or NULL: what reaches the logits from elsewhere (auxiliary loss) */
    const fmoe_tensor *dx;           /* out [T,H], or NULL */
    const fmoe_tensor *dw_router;    /* out [E,H], or NULL */
    const fmoe_tensor *db_router;    /* out [E], or NULL */
    fmoe_weights dw;                 /* out, each or NULL */
    fmoe_weights dshared;            /* out, each or NULL */
    const fmoe_tensor *dshared_gate; /* out [1,H], or NULL */
} fmoe_block_args;

FMOE_API fmoe_status fmoe_block_forward(fmoe_plan, const fmoe_block_args *, const fmoe_run *);
FMOE_API fmoe_status fmoe_block_backward(fmoe_plan, const fmoe_block_args *, const fmoe_run *);

/* ---- The machine ---------------------------------------------------------------------------------------- */

/* CPU kernel levels, from low to high: "c", "avx2", "avx512", "avx512_bf16", "amx_bf16" on x86-64; "c", "neon",
 * "neon_bf16" on arm64. The level of new plans is the highest one the CPU and the operating system offer, capped by the
 * environment variable FMOE_MAX_ISA (read once) and by this call (NULL: no cap). An unknown name is FMOE_ERR_ARG. */
FMOE_API fmoe_status fmoe_cpu_set_max_isa(const char *name);
FMOE_API const char *fmoe_cpu_isa(void); /* the level a plan made now would get */

/* What this machine and this library have: text, n and the result as in fmoe_plan_describe. */
FMOE_API size_t fmoe_info(char *text, size_t n);

#ifdef FMOE_EXPERIMENTAL
/* Not covered by the promise of stability. Rate of a register-only loop of multiply-adds on the level of new plans, in
 * GFLOP/s over all threads at once, and of a read-only sweep over memory in GB/s, the best of five over memory of its
 * own or one over the caller's: the ceilings benchmarks are held against. */
FMOE_API double fmoe_cpu_ceiling_gflops(fmoe_dtype dtype, int threads);
FMOE_API double fmoe_cpu_stream_gbytes(int threads);
FMOE_API double fmoe_cpu_read_gbytes(const void *data, size_t bytes, int threads);
#endif

#ifdef __cplusplus
}
#endif
#endif
