/* SPDX-License-Identifier: Apache-2.0
 *
 * test_versions.c - structs of older and newer versions of the header: what is taken, what is refused, and that no byte
 * beyond a struct is read. */
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"
#include "calls.h"
#include "golden/structs_0_1.h"

enum { GUARDED = 8192 };
static char *guarded; /* so many bytes, and then memory that may not be read */

/* n bytes (a size is always there) that end where reading on would end the process; up to 7 more, for the struct's
 * alignment, are not zero. */
static void *at_the_edge(const void *bytes, size_t n)
{
    if (!guarded) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (GUARDED + page - 1) / page * page;
        char *map = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(map != MAP_FAILED && mprotect(map + whole, page, PROT_NONE) == 0);
        guarded = map + whole - GUARDED;
    }
    memset(guarded, 0xff, GUARDED);
    const size_t room = ((n < sizeof(size_t) ? sizeof(size_t) : n) + 7) / 8 * 8;
    return memcpy(guarded + GUARDED - room, bytes, n);
}

/* Every run call, and packing, with arguments from elsewhere. */
enum { CALL_PACK = CALL_KINDS, WITH_PACK };

typedef struct version_call {
    api_call c;
    fmoe_pack_args pack; /* CALL_PACK: of c's plan */
    int kind;
} version_call;

static void version_begin(version_call *v, int kind, fmoe_pass pass)
{
    v->kind = kind;
    call_begin(&v->c, kind == CALL_PACK ? CALL_EXPERTS : (call_kind)kind, pass, FMOE_F32);
    if (kind != CALL_PACK) return;
    v->pack = (fmoe_pack_args){.size = sizeof v->pack, .w = v->c.a.experts.w};
    REQUIRE(fmoe_packed_bytes(v->c.plan, &v->pack.packed_bytes) == FMOE_OK);
    char *memory = test_alloc(v->pack.packed_bytes + 64);
    v->pack.packed = memory + (64 - (uintptr_t)memory % 64) % 64;
}

static const void *version_args(const version_call *v)
{
    return v->kind == CALL_PACK ? (const void *)&v->pack : &v->c.a;
}

static const fmoe_struct_form *version_form(const version_call *v)
{
    static const fmoe_struct_form *const forms[WITH_PACK] = {
        &fmoe_route_args_form, &fmoe_permute_args_form,    &fmoe_unpermute_args_form, &fmoe_gmm_args_form,
        &fmoe_gmm_args_form,   &fmoe_activation_args_form, &fmoe_experts_args_form,   &fmoe_experts_args_form,
        &fmoe_block_args_form, &fmoe_pack_args_form};
    return forms[v->kind];
}

static fmoe_status version_make(const version_call *v, const void *args, const void *run)
{
    const fmoe_plan plan = v->c.plan;
    const bool back = v->c.pass == FMOE_BACKWARD;
    switch (v->kind) {
    case CALL_ROUTE: return (back ? fmoe_route_backward : fmoe_route_forward)(plan, args, run);
    case CALL_PERMUTE: return (back ? fmoe_permute_backward : fmoe_permute_forward)(plan, args, run);
    case CALL_UNPERMUTE: return (back ? fmoe_unpermute_backward : fmoe_unpermute_forward)(plan, args, run);
    case CALL_GMM:
    case CALL_GMM_LIST: return (back ? fmoe_grouped_matmul_backward : fmoe_grouped_matmul_forward)(plan, args, run);
    case CALL_ACTIVATION: return (back ? fmoe_activation_backward : fmoe_activation_forward)(plan, args, run);
    case CALL_EXPERTS:
    case CALL_EXPERTS_LIST: return (back ? fmoe_experts_backward : fmoe_experts_forward)(plan, args, run);
    case CALL_BLOCK: return (back ? fmoe_block_backward : fmoe_block_forward)(plan, args, run);
    default: return fmoe_pack_weights(plan, args, run);
    }
}

static uint64_t mix(uint64_t hash, void *data, size_t n, bool poison)
{
    unsigned char *p = data;
    for (size_t i = 0; i < n; i++) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
    if (poison) memset(p, 0xa5, n);
    return hash;
}

/* A number that stands for all that was written, which is then made as if nothing were. */
static uint64_t version_outputs(version_call *v)
{
    api_call *c = &v->c;
    uint64_t hash = 1;
    if (v->kind == CALL_PACK) return mix(hash, v->pack.packed, v->pack.packed_bytes, true);
    for (int i = 0; i < c->n_slots; i++) {
        const fmoe_tensor *t = *c->slots[i].at;
        if (!(c->slots[i].role & SLOT_OUT)) continue;
        hash = mix(hash, fmoe_data(t),
                   (size_t)tensor_count(t) * fmoe_dtype_size(fmoe_tensor_dtype(t)) *
                       (size_t)(c->slots[i].list ? c->slots[i].list : 1),
                   true);
    }
    if (c->pass == FMOE_BACKWARD) return hash;
    if (c->d.op == FMOE_OP_EXPERTS) hash = mix(hash, c->a.experts.saved, c->a.experts.saved_bytes, true);
    if (c->d.op == FMOE_OP_BLOCK) hash = mix(hash, c->a.block.saved, c->a.block.saved_bytes, true);
    return hash;
}

static v01_weights old_weights(const fmoe_weights *w)
{
    return (v01_weights){.w1 = w->w1,
                         .b1 = w->b1,
                         .w2 = w->w2,
                         .b2 = w->b2,
                         .gate = w->gate,
                         .up = w->up,
                         .down = w->down,
                         .lora_a1 = w->lora_a1,
                         .lora_b1 = w->lora_b1,
                         .lora_a2 = w->lora_a2,
                         .lora_b2 = w->lora_b2,
                         .lora_scale1 = w->lora_scale1,
                         .lora_scale2 = w->lora_scale2,
                         .packed = w->packed,
                         .packed_bytes = w->packed_bytes};
}

static v01_experts_args old_experts(const fmoe_experts_args *a)
{
    return (v01_experts_args){.size = sizeof(v01_experts_args),
                              .x = a->x,
                              .ids = a->ids,
                              .weights = a->weights,
                              .w = old_weights(&a->w),
                              .out = a->out,
                              .saved = a->saved,
                              .saved_bytes = a->saved_bytes,
                              .dout = a->dout,
                              .dx = a->dx,
                              .dweights = a->dweights,
                              .dw = old_weights(&a->dw)};
}

static v01_block_args old_block(const fmoe_block_args *a)
{
    return (v01_block_args){.size = sizeof(v01_block_args),
                            .x = a->x,
                            .w_router = a->w_router,
                            .b_router = a->b_router,
                            .select_bias = a->select_bias,
                            .w = old_weights(&a->w),
                            .shared = old_weights(&a->shared),
                            .shared_gate = a->shared_gate,
                            .logits = a->logits,
                            .ids = a->ids,
                            .weights = a->weights,
                            .out = a->out,
                            .saved = a->saved,
                            .saved_bytes = a->saved_bytes,
                            .dout = a->dout,
                            .dlogits = a->dlogits,
                            .dx = a->dx,
                            .dw_router = a->dw_router,
                            .db_router = a->db_router,
                            .dw = old_weights(&a->dw),
                            .dshared = old_weights(&a->dshared),
                            .dshared_gate = a->dshared_gate};
}

/* The arguments as a program of 0.1.0 would pass them; the others' structs have the same fields at the same places. */
static size_t old_args(const version_call *v, void *out)
{
    static const size_t same[] = {sizeof(v01_route_args), sizeof(v01_permute_args), sizeof(v01_unpermute_args),
                                  sizeof(v01_gmm_args),   sizeof(v01_gmm_args),     sizeof(v01_activation_args)};
    if (v->kind <= CALL_ACTIVATION) {
        memcpy(out, version_args(v), same[v->kind]);
        memcpy(out, &same[v->kind], sizeof(size_t));
        return same[v->kind];
    }
    if (v->kind == CALL_PACK) {
        const v01_pack_args a = {sizeof a, old_weights(&v->pack.w), v->pack.packed, v->pack.packed_bytes};
        return memcpy(out, &a, sizeof a), sizeof a;
    }
    if (v->kind == CALL_BLOCK) {
        const v01_block_args a = old_block(&v->c.a.block);
        return memcpy(out, &a, sizeof a), sizeof a;
    }
    const v01_experts_args a = old_experts(&v->c.a.experts);
    return memcpy(out, &a, sizeof a), sizeof a;
}

#define EACH_VERSION_CALL(v)                                                                                           \
    for (int kind_ = 0; kind_ < WITH_PACK; kind_++)                                                                    \
        for (int pass_ = 0; pass_ < (kind_ == CALL_PACK ? 1 : 2); pass_++)                                             \
            for (version_call v, *once_ = (version_begin(&v, kind_, (fmoe_pass)pass_), &v); once_;                     \
                 call_end(&v.c), once_ = NULL)

/* A program of 0.1.0: plans, runs and arguments in its structs give the same bits. */
TEST(structs_of_0_1)
{
    EACH_VERSION_CALL(v)
    {
        char bytes[GUARDED];
        version_outputs(&v);
        REQUIRE(version_make(&v, version_args(&v), &v.c.run) == FMOE_OK);
        const uint64_t want = version_outputs(&v);
        const v01_run run = {
            .size = sizeof run, .workspace = v.c.run.workspace, .workspace_bytes = v.c.run.workspace_bytes};
        CHECK_STATUS(version_make(&v, at_the_edge(bytes, old_args(&v, bytes)), &run), FMOE_OK);
        if (version_outputs(&v) != want) TEST_FAIL("%s %d: other results", version_form(&v)->name, v.c.pass);

        const fmoe_desc *d = &v.c.d;
        const v01_desc old = {.size = sizeof old,
                              .op = d->op,
                              .dtype = d->dtype,
                              .H = d->H,
                              .I = d->I,
                              .E = d->E,
                              .k = d->k,
                              .K = d->K,
                              .N = d->N,
                              .shared_I = d->shared_I,
                              .rank1 = d->rank1,
                              .rank2 = d->rank2,
                              .flags = d->flags,
                              .threads = d->threads};
        const fmoe_plan plan = v.c.plan;
        CHECK_STATUS(fmoe_plan_create(&v.c.plan, at_the_edge(&old, sizeof old)), FMOE_OK);
        CHECK_STATUS(version_make(&v, at_the_edge(bytes, old_args(&v, bytes)), &run), FMOE_OK);
        if (version_outputs(&v) != want) TEST_FAIL("%s %d: another plan", version_form(&v)->name, v.c.pass);
        CHECK_STATUS(fmoe_plan_destroy(&v.c.plan), FMOE_OK);
        v.c.plan = plan;
    }
}

/* What is to become of a size, in words that do not use the library's own. first: of 0.1.0. */
static fmoe_status verdict(size_t size, size_t first, size_t least, size_t now, bool set)
{
    if (size == first || size == now) return FMOE_OK;
    if (size < least || size > 4096) return FMOE_ERR_ABI;
    return size > now && set ? FMOE_ERR_ARG : FMOE_OK;
}

static const size_t far_sizes[] = {1000, 4095, 4096, 4097, 5000, SIZE_MAX / 2, SIZE_MAX};

/* The i-th size to try for a struct: all up to 64 more than it has, then some that are far from it; 0: no more. */
static bool size_to_try(size_t i, size_t now, size_t *size)
{
    const size_t near = now + 65;
    if (i < near) *size = i;
    else if (i < near + sizeof far_sizes / sizeof *far_sizes) *size = far_sizes[i - near];
    else return false;
    return true;
}

static bool says(size_t number)
{
    char text[32];
    snprintf(text, sizeof text, "%zu", number);
    return strstr(fmoe_last_error(), text) != NULL;
}

/* One call with a struct of `size` at the edge; `set`: its last byte is not zero. */
static void try_size(const fmoe_struct_form *form, size_t first, size_t least, size_t size, bool set, const void *whole,
                     const void *old, fmoe_status (*make)(void *, const void *), void *ctx)
{
    char bytes[GUARDED] = {0};
    if (size == first) memcpy(bytes, old, first);
    else memcpy(bytes, whole, form->size);
    memcpy(bytes, &size, sizeof size);
    if (set && size > form->size && size <= 4096) bytes[size - 1] = 1;
    const fmoe_status got = make(ctx, at_the_edge(bytes, size < 8 ? 8 : size > 4100 ? 4100 : size));
    const fmoe_status want = verdict(size, first, least, form->size, set);
    if (got != want)
        TEST_FAIL("%s of size %zu (%zu), %s: %s (%s)", form->name, size, form->size, set ? "set" : "zero",
                  fmoe_status_string(got), got ? fmoe_last_error() : "");
    else if (got && !(strstr(fmoe_last_error(), form->name) && says(size) && says(form->size)))
        TEST_FAIL("\"%s\" does not name %s, %zu and %zu", fmoe_last_error(), form->name, size, form->size);
}

typedef struct size_try {
    version_call *v;
    const void *args, *run; /* of which one is under test: NULL */
} size_try;

static fmoe_status make_with(void *ctx, const void *given)
{
    const size_try *t = ctx;
    return version_make(t->v, t->args ? t->args : given, t->run ? t->run : given);
}

static fmoe_status make_plan(void *ctx, const void *given)
{
    fmoe_plan *plan = ctx;
    const fmoe_status status = fmoe_plan_create(plan, given);
    CHECK((status == FMOE_OK) == (*plan != 0));
    CHECK_STATUS(fmoe_plan_destroy(plan), FMOE_OK);
    return status;
}

/* Every size of every struct in every call: taken or refused by the rule in fusedmoe.h, no byte read beyond it (the
 * process would end), the same results or none. */
TEST(every_size_of_every_struct)
{
    size_t size;
    EACH_VERSION_CALL(v)
    {
        const fmoe_struct_form *form = version_form(&v);
        char old[GUARDED];
        const int weights = v.kind == CALL_BLOCK ? 4 : v.kind == CALL_PACK ? 1 : v.kind >= CALL_EXPERTS ? 2 : 0;
        const size_t first = old_args(&v, old), least = first + (size_t)weights * 64;
        version_outputs(&v);
        const uint64_t nothing = version_outputs(&v);
        REQUIRE(version_make(&v, version_args(&v), &v.c.run) == FMOE_OK);
        const uint64_t want = version_outputs(&v);
        REQUIRE(want != nothing);
        for (size_t i = 0; size_to_try(i, form->size, &size); i++)
            for (int set = 0; set < (size > form->size ? 2 : 1); set++) {
                size_try t = {&v, NULL, &v.c.run};
                try_size(form, first, least, size, set, version_args(&v), old, make_with, &t);
                const uint64_t expected = verdict(size, first, least, form->size, set) ? nothing : want;
                if (version_outputs(&v) != expected) TEST_FAIL("%s of size %zu: other results", form->name, size);
            }
        for (size_t i = 0; size_to_try(i, sizeof v.c.run, &size); i++)
            for (int set = 0; set < (size > sizeof v.c.run ? 2 : 1); set++) {
                size_try t = {&v, version_args(&v), NULL};
                try_size(&fmoe_run_form, sizeof(v01_run), sizeof(v01_run), size, set, &v.c.run, &v.c.run, make_with,
                         &t);
                const uint64_t expected =
                    verdict(size, sizeof(v01_run), sizeof(v01_run), sizeof v.c.run, set) ? nothing : want;
                if (version_outputs(&v) != expected) TEST_FAIL("fmoe_run of size %zu: other results", size);
            }
        fmoe_plan plan = 0;
        for (size_t i = 0; v.c.pass == FMOE_FORWARD && size_to_try(i, sizeof v.c.d, &size); i++)
            for (int set = 0; set < (size > sizeof v.c.d ? 2 : 1); set++)
                try_size(&fmoe_desc_form, sizeof(v01_desc), sizeof(v01_desc), size, set, &v.c.d, &v.c.d, make_plan,
                         &plan);
    }
}

/* Structs that have grown since: as experts' will look with three more fields, and one that had none of 0.1.0's. */
TEST(structs_that_have_grown)
{
    fmoe_struct_form forms[] = {fmoe_experts_args_form, fmoe_route_args_form};
    for (int f = 0; f < 2; f++) {
        const size_t was = forms[f].size, first = f ? was : sizeof(v01_experts_args), now = was + 24;
        forms[f].size = now;
        for (size_t size = 0; size <= now + 64; size++) {
            unsigned char bytes[GUARDED];
            _Alignas(max_align_t) unsigned char copy[GUARDED];
            for (size_t i = 0; i < size; i++) bytes[i] = i < now ? (unsigned char)(1 + test_below(255)) : 0;
            memcpy(bytes, &size, sizeof size);
            memset(copy, 0xee, sizeof copy);
            const void *read = NULL, *given = at_the_edge(bytes, size < 8 ? 8 : size);
            const fmoe_status got = fmoe_struct_read(&forms[f], given, copy, &read);
            CHECK_EQ(got, verdict(size, first, was, now, false));
            if (got != FMOE_OK || size >= now) {
                CHECK(got != FMOE_OK || read == given);
                continue;
            }
            REQUIRE(read == copy);
            CHECK_EQ(*(const size_t *)read, now);
            CHECK_EQ(copy[now], 0xee);
            size_t from = sizeof size; /* what was given comes in its order, the rest is zero */
            for (size_t i = from; i < now; i++) {
                const bool spare =
                    size == first && first < was &&
                    (i - offsetof(fmoe_experts_args, w.quant1) < 64 || i - offsetof(fmoe_experts_args, dw.quant1) < 64);
                const int want = spare || from >= size ? 0 : bytes[from++];
                if (copy[i] != want) TEST_FAIL("size %zu: byte %zu is %d, not %d", size, i, copy[i], want);
            }
            CHECK_EQ(from, size);
        }
    }
}

/* Spare fields are for later versions: whoever sets one now is told so. */
TEST(spare_fields_are_null)
{
    EACH_VERSION_CALL(v)
    {
        fmoe_experts_args *e = &v.c.a.experts;
        fmoe_block_args *b = &v.c.a.block;
        const bool back = v.c.pass == FMOE_BACKWARD;
        fmoe_weights *all[4] = {NULL}; /* those that the call reads: w, shared, dw, dshared */
        if (v.kind == CALL_PACK) {
            all[0] = &v.pack.w;
        } else if (v.kind == CALL_BLOCK) {
            all[0] = &b->w, all[1] = &b->shared;
            if (back) all[2] = &b->dw, all[3] = &b->dshared;
        } else if (v.kind >= CALL_EXPERTS) {
            all[0] = &e->w;
            if (back) all[2] = &e->dw;
        }
        version_outputs(&v);
        const uint64_t nothing = version_outputs(&v);
        for (int w = 0; w < 4; w++)
            for (int i = 0; all[w] && i < (int)(sizeof all[w]->reserved / sizeof *all[w]->reserved); i++) {
                char name[32];
                snprintf(name, sizeof name, "%sreserved[%d]", (const char *[]){"", "shared ", "d", "dshared "}[w], i);
                all[w]->reserved[i] = name;
                CHECK_STATUS(version_make(&v, version_args(&v), &v.c.run), FMOE_ERR_ARG);
                CHECK(strncmp(fmoe_last_error(), name, strlen(name)) == 0);
                all[w]->reserved[i] = NULL;
                CHECK(version_outputs(&v) == nothing);
            }
        CHECK_STATUS(version_make(&v, version_args(&v), &v.c.run), FMOE_OK);
    }
}
