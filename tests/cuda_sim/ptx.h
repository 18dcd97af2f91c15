/* SPDX-License-Identifier: Apache-2.0
 * ptx.h - a CUDA device in software: kernels as lists of PTX instructions, and the warps, blocks and clusters that
 * execute them. parse.c makes the lists from the text that nvcc embeds, block.c executes them, op_*.c are the
 * instructions, runtime.c is the CUDA runtime in front of it.
 *
 * A warp executes an instruction for all its lanes at once. A register is 32 values, one a lane, at an offset of the
 * warp's register file; so is a constant and a special register, so that every operand is an offset. */
#ifndef CUDA_SIM_PTX_H
#define CUDA_SIM_PTX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a block's shared memory: the launch's own, and the kernel's variables. */
enum { DYNAMIC_SHARED = 1024, STATIC_SHARED = 256 << 10, CLUSTER_SHIFT = 20 };
enum { LANES = 32, MOST_WARPS = 32, MOST_CLUSTER = 16 };

typedef struct warp warp;
typedef struct block block;
typedef struct races races;
typedef struct instruction instruction;
typedef void exec_fn(warp *w, const instruction *i, uint32_t lanes);

typedef enum space { GENERIC, GLOBAL, SHARED, PARAM, SHARED_CLUSTER, LOCAL } space;
typedef enum type {
    NO_TYPE,
    PRED,
    B8,
    U8,
    S8,
    B16,
    U16,
    S16,
    F16,
    BF16,
    B32,
    U32,
    S32,
    F32,
    BF16X2,
    F16X2,
    B64,
    U64,
    S64,
    F64,
    E4M3X2
} type;
enum { INTEGER_ZERO = 1 << 16, INTEGER_NEAREST, INTEGER_DOWN, INTEGER_UP }; /* cvt.rzi, rni, rmi, rpi */
enum {
    EQ,
    NE,
    LT,
    LE,
    GT,
    GE,
    LO,
    LS,
    HI,
    HS,
    EQU,
    NEU,
    LTU,
    LEU,
    GTU,
    GEU,
    NUM,
    NAN_,
    AND,
    OR,
    XOR,
    ADD,
    EXCH,
    CAS,
    MIN,
    MAX,
    INC,
    DEC
};

/* What the scheduler has to know of an instruction before it is executed. */
typedef enum flow {
    PLAIN,
    BRANCH, /* to `target` */
    CALL,   /* the same; the lanes keep where they came from in operand 0 */
    RETURN, /* of a function, to where operand 0 says; of a kernel, the end of these lanes */
    EXIT,
    TOGETHER, /* for the lanes of a mask at once, which must all be here */
    BARRIER,  /* of the block */
    CLUSTER_WAIT
} flow;

struct instruction {
    exec_fn *fn;
    flow flow;
    int guard; /* a predicate, or -1 */
    bool guard_not;
    int target;   /* of a branch */
    space space;  /* of an access to memory */
    type type[4]; /* that the name has, in order */
    int rounding; /* FE_*, or INTEGER_* */
    bool saturate;
    int compare;    /* setp, and what atom does */
    int combine;    /* setp with another predicate */
    int kind;       /* of the table, or what the instruction's own file makes of it */
    int64_t imm[3]; /* added to the addresses, in order */
    int mask;       /* TOGETHER: the operand that says which lanes, -1: all */
    int *at;        /* operands: offsets in the register file */
    uint8_t *width; /* and bytes of a lane */
    int operands;
    const char *text; /* the statement, for messages; ends with ';' */
};

typedef struct constant {
    int at, width;
    uint64_t bits;
} constant;

typedef struct kernel {
    char *name;
    instruction *code;
    int length;
    size_t registers; /* bytes of a warp's register file */
    constant *constants;
    int constant_count;
    size_t params; /* bytes */
    size_t *param_at, *param_size;
    int param_count;
    size_t local;    /* bytes of a lane's own memory, at the end of the register file */
    size_t shared;   /* static; a launch's dynamic memory comes after */
    int special[24]; /* offsets of what special_names has, 0: not used */
} kernel;

extern const char *const special_names[]; /* ends with NULL */
enum special {
    TID_X,
    TID_Y,
    TID_Z,
    NTID_X,
    NTID_Y,
    NTID_Z,
    CTAID_X,
    CTAID_Y,
    CTAID_Z,
    NCTAID_X,
    NCTAID_Y,
    NCTAID_Z,
    LANEID,
    CLUSTER_CTARANK,
    CLUSTER_NCTARANK,
    SMID,
    NSMID,
    WARPID,
    LANEMASK_LT,
    LANEMASK_LE,
    LANEMASK_GT,
    LANEMASK_GE,
    PARAMS
};

/* The kernel `name` of a module; NULL, and why. */
kernel *ptx_parse(const char *module, const char *name, char *error, size_t size);

/* ---- Execution ---- */

typedef struct lane_group { /* lanes of a warp that are at the same instruction */
    int pc;
    uint32_t lanes;
    bool waits;  /* for lanes of its warp */
    bool tired;  /* it had its turn, perhaps in a loop that waits for the others */
    int barrier; /* that it has arrived at, or -1 */
} lane_group;

/* Copies that a lane has begun and not waited for (cp.async): made at the wait, so that a kernel that reads too early
 * finds what is not there. */
typedef struct copy {
    void *to;
    const void *from;
    int bytes, there; /* there: of `bytes`; the others are 0 */
    int group;        /* -1: not committed yet */
} copy;

struct warp {
    block *b;
    int index;
    uint8_t *file;
    lane_group group[LANES];
    int groups;
    uint32_t live;
    struct {
        copy *list;
        int count, room, committed, done;
    } copies[LANES];
    bool yields;         /* it found a barrier closed: others first */
    int cluster_arrived; /* threads of the cluster that must have come when this warp goes on */
};

struct block {
    kernel *k;
    const uint8_t *params;
    uint32_t id[3], rank; /* rank: in its cluster */
    uint8_t *shared;
    size_t shared_bytes;
    warp *warps;
    int warp_count;
    uint32_t threads, live;
    struct {
        int arrived, expected; /* threads; expected 0: all that live */
        int votes;
        bool result;
    } barrier[16];
    block **cluster; /* MOST_CLUSTER, of cluster_size */
    int cluster_size;
    int *cluster_waits; /* shared: warps that have arrived, ever */
    bool ended;
    races *races; /* of the cluster, or NULL */
};

typedef struct launch {
    kernel *k;
    const uint8_t *params;
    uint32_t grid[3], threads[3];
    size_t shared; /* dynamic */
    int cluster;
} launch;

/* False: the kernel did what the device does not allow, and the message is in sim_message. */
bool sim_run(const launch *l);
extern char sim_message[1024];

/* Ends the launch with a message about an instruction. */
_Noreturn void sim_fault(const warp *w, const instruction *i, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Where `bytes` bytes at an address lie on the host; a fault where nothing was allocated. */
void *sim_address(warp *w, const instruction *i, space s, uint64_t address, size_t bytes, int lane);
void *sim_shared(const warp *w, const instruction *i, const block *b, uint64_t at, size_t bytes, int lane);
/* Whether memory of the device, or of the host that the device sees, lies there (runtime.c). */
bool sim_allocated(uint64_t address, size_t bytes);

/* An instruction. name: all of it, or, if it ends with '*', its first words. operands, a letter each: p predicate,
 * h, w, d of 16, 32, 64 bits, t of the first type of the name, s of the second, m an address in brackets, v one or
 * several in braces, b a result|predicate, l a label, x none that matters; after '?' come those that need not be there.
 */
typedef struct op {
    const char *name, *operands;
    exec_fn *fn;
    flow flow;
    int kind;
} op;
extern const op integer_ops[], float_ops[], warp_ops[], memory_ops[], matrix_ops[], async_ops[]; /* end with NULL */

/* An operand's 32 values. */
#define REG(T, n) ((T *)(void *)(w->file + i->at[n]))
/* A statement for every lane l. */
#define EACH(...)                                                                                                      \
    do {                                                                                                               \
        if (lanes == ~0u)                                                                                              \
            for (int l = 0; l < LANES; l++) { __VA_ARGS__; }                                                           \
        else                                                                                                           \
            for (int l = 0; l < LANES; l++)                                                                            \
                if (lanes >> l & 1) { __VA_ARGS__; }                                                                   \
    } while (0)

static inline uint8_t *local_memory(const warp *w, int lane)
{
    return w->file + w->b->k->registers + w->b->k->local * (size_t)lane;
}
static inline uint64_t lane_value(const warp *w, const instruction *i, int n, int l)
{
    const uint8_t *const p = w->file + i->at[n];
    switch (i->width[n]) {
    case 1: return p[l];
    case 2: return ((const uint16_t *)(const void *)p)[l];
    case 4: return ((const uint32_t *)(const void *)p)[l];
    default: return ((const uint64_t *)(const void *)p)[l];
    }
}
static inline void set_lane(warp *w, const instruction *i, int n, int l, uint64_t v)
{
    uint8_t *const p = w->file + i->at[n];
    switch (i->width[n]) {
    case 1: p[l] = (uint8_t)v; break;
    case 2: ((uint16_t *)(void *)p)[l] = (uint16_t)v; break;
    case 4: ((uint32_t *)(void *)p)[l] = (uint32_t)v; break;
    default: ((uint64_t *)(void *)p)[l] = v;
    }
}

#endif
