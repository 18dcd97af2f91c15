/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ep_cuda.c - expert parallelism on a CUDA device: ranks are threads with a stream each, on one card. Their rows
 * pass through the host (the engine of threads as it is), or stay on the device (the same engine on memory that both
 * sides see, behind a stream that is waited for). Tensors lie in managed memory too. SKIP without a card.
 *
 * FMOE_EP_DRAWS: layers of each test. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/managed.h" /* before test.h */
#include "unit/ep_layer.h"

typedef struct rank_thread {
    ep_rank *share;
    fmoe_exchange real, x;
    cudaStream_t stream;
} rank_thread;

/* ---- an engine on the device ---- */

static fmoe_status counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    rank_thread *t = ctx;
    return t->real.counts(t->real.ctx, send, recv, n, timeout_ms);
}

static fmoe_status begin(void *ctx, const void *send, const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                         int64_t row_bytes, void **request)
{
    rank_thread *t = ctx;
    if (cudaStreamSynchronize(t->stream) != cudaSuccess) return fmoe_ep_fail(FMOE_ERR_DEVICE, "the stream broke");
    return t->real.begin(t->real.ctx, send, send_rows, recv, recv_rows, row_bytes, request);
}

static fmoe_status wait_for(void *ctx, void *request, int64_t timeout_ms)
{
    rank_thread *t = ctx;
    return t->real.wait(t->real.ctx, request, timeout_ms);
}

static void give_up(void *ctx, const char *why)
{
    ((rank_thread *)ctx)->real.abort(((rank_thread *)ctx)->real.ctx, why);
}

static void *managed(void *ctx, size_t bytes)
{
    void *p = NULL;
    (void)ctx;
    return cudaMallocManaged(&p, bytes, cudaMemAttachGlobal) == cudaSuccess ? p : NULL;
}

static void managed_free(void *ctx, void *p)
{
    (void)ctx;
    cudaFree(p);
}

/* ---- ranks ---- */

static void *run_rank(void *arg)
{
    rank_thread *t = arg;
    t->share->args.stream = t->stream;
    ep_run_rank(t->share);
    if (cudaStreamSynchronize(t->stream) != cudaSuccess) t->share->status = FMOE_ERR_DEVICE;
    return NULL;
}

/* dropped: where they are counted, for each rank, or NULL. */
static void run_layer(const ep_layer *l, ep_rank **s, int on_device, int64_t capacity, fmoe_tensor **dropped)
{
    fmoe_ep_threads *group;
    rank_thread t[EP_RANKS] = {0};
    pthread_t threads[EP_RANKS];
    CHECK_STATUS(fmoe_ep_threads_create(&group, l->ranks), FMOE_OK);
    for (int r = 0; r < l->ranks; r++) {
        CHECK_STATUS(fmoe_ep_threads_exchange(group, r, &t[r].real), FMOE_OK);
        REQUIRE(cudaStreamCreateWithFlags(&t[r].stream, cudaStreamNonBlocking) == cudaSuccess);
        t[r].x = t[r].real;
        if (on_device) {
            t[r].x.ctx = &t[r];
            t[r].x.counts = counts, t[r].x.begin = begin, t[r].x.wait = wait_for, t[r].x.abort = give_up;
            t[r].x.on_device = 1;
            t[r].x.device_alloc = managed, t[r].x.device_free = managed_free;
        }
        t[r].share = s[r] = ep_share(l, r, &t[r].x);
        s[r]->desc.capacity = capacity;
        if (capacity) s[r]->desc.chunks = 1;
        if (dropped) s[r]->args.dropped = dropped[r];
    }
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (int r = 0; r < l->ranks; r++) REQUIRE(!pthread_create(&threads[r], NULL, run_rank, &t[r]));
    for (int r = 0; r < l->ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < l->ranks; r++) cudaStreamDestroy(t[r].stream);
    fmoe_ep_threads_destroy(&group);
}

static int draws = 24;

static void describe(const ep_layer *l, int i)
{
    printf("  draw %d: ranks %d T %d H %d I %d E %d k %d act %d flags %u chunks %d list %d lora %d %d\n", i, l->ranks,
           (int)l->at[l->ranks], (int)l->d.H, (int)l->d.I, (int)l->d.E, (int)l->d.k, l->d.act, l->d.flags, l->chunks,
           l->list, (int)l->d.rank1, (int)l->d.rank2);
}

/* Some draws of each kind; multiples of 64 and 8: the products of Hopper. */
static void same_bits(int dtype, int mode, int multiple_h, int multiple_i)
{
    ep_rank *s[EP_RANKS];
    need_card();
    ep_multiple_h = multiple_h;
    ep_multiple_i = multiple_i;
    for (int i = 0; i < draws && !test_failures; i++) {
        ep_layer *l = ep_draw(1 + i % EP_RANKS, dtype, mode);
        ep_one_process(l);
        run_layer(l, s, i % 2, 0, NULL);
        for (int r = 0; r < l->ranks; r++) ep_compare(l, s[r], r);
        if (test_failures) describe(l, i);
    }
}

TEST(exact_f32) { same_bits(FMOE_F32, FMOE_EP_EXACT, 1, 1); }
TEST(exact_bf16) { same_bits(FMOE_BF16, FMOE_EP_EXACT, 1, 1); }
TEST(exact_bf16_hopper) { same_bits(FMOE_BF16, FMOE_EP_EXACT, 64, 8); }
TEST(exact_f16_hopper) { same_bits(FMOE_F16, FMOE_EP_EXACT, 64, 8); }
TEST(lean_f32) { same_bits(FMOE_F32, FMOE_EP_LEAN, 1, 1); } /* dp and weight gradients */
TEST(lean_bf16_hopper) { same_bits(FMOE_BF16, FMOE_EP_LEAN, 64, 8); }

/* Out of the lean mode against the exact one: an order of magnitude above its bound would be a wrong row. */
TEST(lean_is_near)
{
    ep_rank *s[EP_RANKS];
    need_card();
    ep_multiple_h = ep_multiple_i = 1;
    for (int i = 0; i < draws && !test_failures; i++) {
        ep_layer *l = ep_draw(2 + i % 3, FMOE_F32, FMOE_EP_LEAN);
        ep_one_process(l);
        run_layer(l, s, i % 2, i % 3 ? 0 : 64, NULL);
        for (int r = 0; r < l->ranks; r++) {
            if (s[r]->status) TEST_FAIL("rank %d: %s", r, s[r]->error);
            for (int64_t j = 0; j < l->T[r] * l->d.H && !s[r]->status; j++) {
                const double out = tensor_get(l->out, l->at[r] * l->d.H + j),
                             dx = tensor_get(l->dx, l->at[r] * l->d.H + j);
                if (fabs(tensor_get(s[r]->out, j) - out) > 1e-4 * (1 + fabs(out)) ||
                    fabs(tensor_get(s[r]->dx, j) - dx) > 1e-4 * (1 + fabs(dx))) {
                    TEST_FAIL("rank %d, element %d: %g and %g, not %g and %g", r, (int)j, tensor_get(s[r]->out, j),
                              tensor_get(s[r]->dx, j), out, dx);
                    break;
                }
            }
        }
        if (test_failures) describe(l, i);
    }
}

/* Capacity: the first rows to a rank go, later ones skip it, as if their slots were marked; buffers are of its size. */
static void capacity(int mode)
{
    need_card();
    ep_multiple_h = ep_multiple_i = 1;
    for (int i = 0; i < draws && !test_failures; i++) {
        ep_rank *s[EP_RANKS];
        ep_layer *l = ep_draw(1 + i % 4, FMOE_F32, mode);
        const int64_t most = 1 + test_below(12), k = l->d.k;
        int64_t dropped[EP_RANKS] = {0};
        fmoe_tensor *given = tensor_copy(l->ids, fmoe_tensor_dtype(l->ids)), *count[EP_RANKS];
        for (int r = 0; r < l->ranks; r++) {
            int64_t sent[EP_RANKS] = {0};
            for (int64_t t = l->at[r]; t < l->at[r + 1]; t++) {
                int to[EP_RANKS] = {0};
                for (int64_t j = 0; j < k; j++) {
                    const int64_t e = (int64_t)tensor_get(given, t * k + j);
                    if (e < 0) continue;
                    const int32_t d = ep_owner(l, e);
                    if (!to[d]) to[d] = sent[d] < most ? (sent[d]++, 1) : 2;
                    if (to[d] == 2) tensor_set(l->ids, t * k + j, -1), dropped[r]++;
                }
            }
        }
        ep_one_process(l);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        fmoe_tensor *const marked = l->ids;
        l->ids = given;
        for (int r = 0; r < l->ranks; r++) count[r] = tensor_fill(tensor_new(I64, SHAPE(1, 1)), -7);
        run_layer(l, s, i % 2, most, count);
        l->ids = marked;
        for (int r = 0; r < l->ranks; r++) {
            ep_compare(l, s[r], r);
            if (!s[r]->status) CHECK_EQ((int64_t)tensor_get(count[r], 0), dropped[r]);
        }
        if (test_failures) describe(l, i);
    }
}

TEST(capacity_exact) { capacity(FMOE_EP_EXACT); }
TEST(capacity_lean) { capacity(FMOE_EP_LEAN); }

/* A wrong id of one rank is told to all, and the next call works. */
TEST(wrong_ids_are_told)
{
    ep_rank *s[EP_RANKS];
    need_card();
    ep_multiple_h = ep_multiple_i = 1;
    ep_layer *l = ep_draw(3, FMOE_F32, FMOE_EP_EXACT);
    while (!l->T[1]) l = ep_draw(3, FMOE_F32, FMOE_EP_EXACT);
    const double was = tensor_get(l->ids, l->at[1] * l->d.k);
    tensor_set(l->ids, l->at[1] * l->d.k, 77);
    run_layer(l, s, 0, 0, NULL);
    for (int r = 0; r < 3; r++) {
        CHECK(s[r]->status != FMOE_OK);
        if (!strstr(s[r]->error, r == 1 ? "ids[0,0] is 77" : "rank 1 could not begin: FMOE_ERR_INDEX"))
            TEST_FAIL("rank %d: %s", r, s[r]->error);
    }
    tensor_set(l->ids, l->at[1] * l->d.k, was);
    ep_one_process(l);
    run_layer(l, s, 0, 0, NULL);
    for (int r = 0; r < 3; r++) ep_compare(l, s[r], r);
}

/* ---- NCCL itself, with the one rank that a card may have ---- */

typedef struct nccl_line {
    void *comm;
    int (*destroy)(void *comm);
    cudaStream_t stream, side;
    fmoe_ep_nccl *engine;
    fmoe_exchange x;
} nccl_line;

static void open_nccl(nccl_line *n)
{
    need_card();
    void *library = dlopen("libnccl.so.2", RTLD_NOW);
    int (*all)(void **, int, const int *) = NULL;
    if (!library) SKIP("no libnccl.so.2");
    *(void **)&all = dlsym(library, "ncclCommInitAll");
    *(void **)&n->destroy = dlsym(library, "ncclCommDestroy");
    REQUIRE(all && n->destroy && all(&n->comm, 1, (const int[]){0}) == 0);
    REQUIRE(cudaStreamCreateWithFlags(&n->stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&n->side, cudaStreamNonBlocking) == cudaSuccess);
    CHECK_STATUS(fmoe_ep_nccl_create(&n->engine, n->comm, (fmoe_device){FMOE_CUDA, 0}, n->stream, n->side), FMOE_OK);
    REQUIRE(n->engine);
    CHECK_STATUS(fmoe_ep_nccl_exchange(n->engine, &n->x), FMOE_OK);
}

static void close_nccl(nccl_line *n)
{
    cudaDeviceSynchronize();
    fmoe_ep_nccl_destroy(&n->engine);
    n->destroy(n->comm);
    cudaStreamDestroy(n->stream);
    cudaStreamDestroy(n->side);
}

/* Experts in another order than the layer's: rows are packed, exchanged and summed, with one rank too. */
static ep_layer *turned_layer(int dtype, int mode)
{
    ep_layer *l = ep_draw(1, dtype, mode);
    while (l->d.E < 2 || !l->placements || l->T[0] < 4) l = ep_draw(1, dtype, mode);
    return l;
}

TEST(nccl_one_rank)
{
    nccl_line n = {0};
    ep_rank *s;
    open_nccl(&n);
    ep_multiple_h = 64;
    ep_multiple_i = 8;
    for (int i = 0; i < draws && !test_failures; i++) {
        ep_layer *l = turned_layer(i % 2 ? FMOE_BF16 : FMOE_F32, i % 4 < 3 ? FMOE_EP_EXACT : FMOE_EP_LEAN);
        ep_one_process(l);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        s = ep_share(l, 0, &n.x);
        s->args.stream = n.stream;
        ep_run_rank(s);
        REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
        ep_compare(l, s, 0);
        if (test_failures) describe(l, i);
    }
    close_nccl(&n);
}

static fmoe_status both_passes(fmoe_ep *ep, ep_rank *s)
{
    fmoe_ep_call *call = NULL;
    fmoe_status status = fmoe_ep_forward(ep, &s->args, &call);
    if (!status) status = fmoe_ep_backward(call, &s->args);
    fmoe_ep_call_free(&call);
    return status;
}

/* Forward and backward with a capacity, in a graph; replayed with other tokens. */
TEST(nccl_captured_in_a_graph)
{
    nccl_line n = {0};
    open_nccl(&n);
    ep_multiple_h = 64;
    ep_multiple_i = 8;
    for (int mode = 0; mode < 2 && !test_failures; mode++) {
        ep_layer *l = turned_layer(FMOE_F32, mode);
        l->d.flags |= FMOE_SKIP_NEG1;
        ep_rank *s = ep_share(l, 0, &n.x);
        fmoe_ep *ep = NULL;
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        s->args.stream = n.stream;
        s->desc.chunks = 1;
        s->desc.capacity = l->T[0] - 2;
        s->args.dropped = tensor_new(I64, SHAPE(1, 1));
        CHECK_STATUS(fmoe_ep_create(&ep, &s->desc), FMOE_OK);
        REQUIRE(ep);
        CHECK_STATUS(both_passes(ep, s), FMOE_OK); /* ranks agree on the layer, once */
        REQUIRE(cudaStreamSynchronize(n.stream) == cudaSuccess);
        REQUIRE(cudaStreamBeginCapture(n.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        CHECK_STATUS(both_passes(ep, s), FMOE_OK);
        REQUIRE(cudaStreamEndCapture(n.stream, &graph) == cudaSuccess);
        REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
        for (int again = 0; again < 3; again++) {
            tensor_random(l->x, 1);
            tensor_random(l->dout, 1);
            tensor_random_int(l->ids, l->d.E);
            REQUIRE(cudaGraphLaunch(exec, n.stream) == cudaSuccess && cudaStreamSynchronize(n.stream) == cudaSuccess);
            CHECK_EQ((int64_t)tensor_get(s->args.dropped, 0), 2 * l->d.k);
            fmoe_tensor *const given = l->ids;
            l->ids = tensor_copy(given, fmoe_tensor_dtype(given));
            for (int64_t i = (l->T[0] - 2) * l->d.k; i < l->T[0] * l->d.k; i++) tensor_set(l->ids, i, -1);
            ep_one_process(l);
            REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
            if (mode == FMOE_EP_EXACT) ep_compare(l, s, 0);
            for (int64_t i = 0; i < l->T[0] * l->d.H; i++) {
                const double want = tensor_get(l->out, i), got = tensor_get(s->out, i);
                if (fabs(got - want) > 1e-4 * (1 + fabs(want))) TEST_FAIL("out[%d] is %g, not %g", (int)i, got, want);
                if (test_failures) break;
            }
            l->ids = given;
        }
        cudaGraphExecDestroy(exec);
        cudaGraphDestroy(graph);
        fmoe_ep_destroy(&ep);
    }
    close_nccl(&n);
}

__attribute__((constructor)) static void read_draws(void)
{
    const char *more = getenv("FMOE_EP_DRAWS");
    if (more) draws = atoi(more);
}
