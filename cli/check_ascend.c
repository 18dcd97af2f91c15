/* SPDX-License-Identifier: Apache-2.0
 *
 * check_ascend.c - fusedmoe check --backend ascend: every operation on the NPU against the reference in double, one
 * line each, then what the lines mean.
 *
 * A wrong operator of CANN shows in the checks that use it and in no other. So the operators of the checks that fail,
 * less those of the checks that pass, are the ones to look at; they are named. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "check_device.h"

enum { T = 48, H = 64, I = 40, E = 6, K = 2, MAX_CASES = 160 };

#define SHAPE2(a, b)                                                                                                   \
    2, (const int64_t[]) { a, b }
#define SHAPE3(a, b, c)                                                                                                \
    3, (const int64_t[]) { a, b, c }

static probe_device dev;
static probe_case cases[MAX_CASES];
static int n_cases;
static const char *filter = "";
static FILE *report;

static void say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    if (!report) return;
    va_start(args, format);
    vfprintf(report, format, args);
    va_end(args);
}

/* ---- Wrappers of one type ---- */

#define CALL(name, type)                                                                                               \
    static fmoe_status name(fmoe_plan plan, const void *args, const fmoe_run *run)                                     \
    {                                                                                                                  \
        return fmoe_##name(plan, (const type *)args, run);                                                             \
    }
CALL(route_forward, fmoe_route_args)
CALL(route_backward, fmoe_route_args)
CALL(permute_forward, fmoe_permute_args)
CALL(permute_backward, fmoe_permute_args)
CALL(unpermute_forward, fmoe_unpermute_args)
CALL(unpermute_backward, fmoe_unpermute_args)
CALL(grouped_matmul_forward, fmoe_gmm_args)
CALL(grouped_matmul_backward, fmoe_gmm_args)
CALL(activation_forward, fmoe_activation_args)
CALL(activation_backward, fmoe_activation_args)
CALL(experts_forward, fmoe_experts_args)
CALL(experts_backward, fmoe_experts_args)
CALL(block_forward, fmoe_block_args)
CALL(block_backward, fmoe_block_args)

/* ---- Cases ---- */

static const char *const dtype_name[] = {"", "f32", "bf16", "f16"};

/* Roundings on the way, in quadrature (docs/numerics.md): u sqrt(8) covers the longest chain, h (gain 2.64), dY, dA,
 * dH, dXp, dx. In f32 2^-17: functions of CANN are not correctly rounded, and HF32 (2^-11) must not pass. */
static double bound_of(int dtype)
{
    return dtype == FMOE_BF16 ? 0x1p-8 * 2.83 : dtype == FMOE_F16 ? 0x1p-11 * 2.83 : 0x1p-17;
}

static bool begin(const char *name, int dtype)
{
    if (!strstr(name, filter) || n_cases == MAX_CASES) return false;
    probe_case *c = &cases[n_cases++];
    *c = (probe_case){.name = name, .dtype = dtype, .bound = bound_of(dtype), .where = ""};
    dev.now = c;
    return true;
}

static void end(void)
{
    const probe_case *c = dev.now;
    probe_end_case(&dev);
    say("%-6s %-34s %-4s", c->failed ? "FAILED" : "ok", c->name, dtype_name[c->dtype]);
    if (c->problem[0]) say("  %s\n", c->problem);
    else say("  error %.1e (%s), bound %.1e, %.3f ms, %d launches\n", c->worst, c->where, c->bound, c->ms, c->launches);
}

/* Both sides of a struct of arguments. */
#define SET(field, t)                                                                                                  \
    do {                                                                                                               \
        twin *const t_ = (t);                                                                                          \
        a.field = &t_->dev;                                                                                            \
        r.field = &t_->ref;                                                                                            \
    } while (0)

static void activation(const char *name, int dtype, int act, uint32_t flags)
{
    if (!begin(name, dtype)) return;
    const fmoe_desc d = {
        .op = FMOE_OP_ACTIVATION, .dtype = dtype, .I = I, .act = act, .flags = flags, .act_limit = 0.5f};
    const int64_t columns = act < FMOE_ACT_SILU ? 2 * I : I;
    fmoe_activation_args a = {.size = sizeof a}, r = a;
    SET(h, probe_tensor(&dev, "h", dtype, SHAPE2(T, columns), 1.5));
    SET(a, probe_out(probe_tensor(&dev, "a", dtype, SHAPE2(T, I), 0)));
    probe_run(&dev, d, FMOE_FORWARD, T, 0, activation_forward, &a, &r);
    a.a = r.a = NULL;
    SET(da, probe_tensor(&dev, "da", dtype, SHAPE2(T, I), 1));
    SET(dh, probe_out(probe_tensor(&dev, "dh", dtype, SHAPE2(T, columns), 0)));
    probe_run(&dev, d, FMOE_BACKWARD, T, 0, activation_backward, &a, &r);
    end();
}

static void route(const char *name, int dtype, fmoe_route_rule rule, bool bias, bool bad_rows)
{
    enum { EXPERTS = 16, CHOSEN = 3 };
    if (!begin(name, dtype)) return;
    const fmoe_desc d = {.op = FMOE_OP_ROUTE, .dtype = dtype, .E = EXPERTS, .k = CHOSEN, .route = rule};
    fmoe_route_args a = {.size = sizeof a}, r = a;
    SET(logits, probe_tensor(&dev, "logits", FMOE_F32, SHAPE2(T, EXPERTS), 3));
    if (bias) SET(select_bias, probe_tensor(&dev, "select_bias", FMOE_F32, 1, (const int64_t[]){EXPERTS}, 0.5));
    SET(ids, probe_out(probe_tensor(&dev, "ids", I64, SHAPE2(T, CHOSEN), 0)));
    SET(weights, probe_out(probe_tensor(&dev, "weights", FMOE_F32, SHAPE2(T, CHOSEN), 0)));
    if (bad_rows) SET(bad_rows, probe_out(probe_tensor(&dev, "bad_rows", I64, 1, (const int64_t[]){1}, 0)));
    probe_run(&dev, d, FMOE_FORWARD, T, 0, route_forward, &a, &r);
    a.weights = r.weights = a.bad_rows = r.bad_rows = a.select_bias = r.select_bias = NULL;
    SET(dweights, probe_tensor(&dev, "dweights", FMOE_F32, SHAPE2(T, CHOSEN), 1));
    SET(dlogits, probe_out(probe_tensor(&dev, "dlogits", FMOE_F32, SHAPE2(T, EXPERTS), 0)));
    probe_run(&dev, d, FMOE_BACKWARD, T, 0, route_backward, &a, &r);
    end();
}

static void permute(const char *const *name, int dtype, uint32_t flags) /* four of them, each with a check of its own */
{
    const fmoe_desc d = {.op = FMOE_OP_PERMUTE, .dtype = dtype, .H = H, .E = E, .k = K, .flags = flags};
    if (begin(name[0], dtype)) {
        fmoe_permute_args a = {.size = sizeof a}, r = a;
        SET(x, probe_tensor(&dev, "x", dtype, SHAPE2(T, H), 1));
        SET(ids, probe_ids(&dev, T, K, E, flags != 0));
        SET(xp, probe_out(probe_tensor(&dev, "xp", dtype, SHAPE2(T * K, H), 0)));
        SET(map, probe_out(probe_tensor(&dev, "map", I32, 1, (const int64_t[]){T * K}, 0)));
        SET(counts, probe_out(probe_tensor(&dev, "counts", I64, 1, (const int64_t[]){E}, 0)));
        probe_run(&dev, d, FMOE_FORWARD, T, 0, permute_forward, &a, &r);
        end();
    }
    if (begin(name[1], dtype)) {
        fmoe_permute_args a = {.size = sizeof a}, r = a;
        SET(map, probe_map(&dev, probe_ids(&dev, T, K, E, flags != 0), E));
        SET(xp, probe_tensor(&dev, "dxp", dtype, SHAPE2(T * K, H), 1));
        SET(x, probe_out(probe_tensor(&dev, "dx", dtype, SHAPE2(T, H), 0)));
        probe_run(&dev, d, FMOE_BACKWARD, T, 0, permute_backward, &a, &r);
        end();
    }
    for (int back = 0; back < 2; back++) {
        if (!begin(name[2 + back], dtype)) continue;
        fmoe_unpermute_args a = {.size = sizeof a}, r = a;
        SET(map, probe_map(&dev, probe_ids(&dev, T, K, E, flags != 0), E));
        SET(y, probe_tensor(&dev, "y", dtype, SHAPE2(T * K, H), 1));
        SET(weights, probe_tensor(&dev, "p", FMOE_F32, SHAPE2(T, K), 1));
        if (back) {
            SET(dout, probe_tensor(&dev, "dout", dtype, SHAPE2(T, H), 1));
            SET(dy, probe_out(probe_tensor(&dev, "dy", dtype, SHAPE2(T * K, H), 0)));
            SET(dweights, probe_out(probe_tensor(&dev, "dp", FMOE_F32, SHAPE2(T, K), 0)));
            probe_run(&dev, d, FMOE_BACKWARD, T, 0, unpermute_backward, &a, &r);
        } else {
            SET(out, probe_out(probe_tensor(&dev, "out", dtype, SHAPE2(T, H), 0)));
            probe_run(&dev, d, FMOE_FORWARD, T, 0, unpermute_forward, &a, &r);
        }
        end();
    }
}

static void product(const char *name, int dtype, int64_t groups, bool cumulative, bool bias, int grad)
{
    if (!begin(name, dtype)) return;
    const fmoe_desc d = {.op = FMOE_OP_GROUPED_MATMUL, .dtype = dtype, .E = groups, .K = H, .N = I};
    fmoe_gmm_args a = {.size = sizeof a, .cumulative = cumulative}, r = a;
    SET(x, probe_tensor(&dev, "x", dtype, SHAPE2(T, H), 1));
    SET(w, probe_turned(&dev, "w", dtype, groups, H, I, 0.2));
    if (groups > 1) SET(sizes, probe_sizes(&dev, groups, T, cumulative));
    if (bias) SET(bias, probe_tensor(&dev, "bias", dtype, SHAPE2(groups, I), 1));
    SET(y, probe_out(probe_tensor(&dev, "y", dtype, SHAPE2(T, I), 0)));
    probe_run(&dev, d, FMOE_FORWARD, T, 0, grouped_matmul_forward, &a, &r);
    a.y = r.y = a.bias = r.bias = NULL;
    SET(dy, probe_tensor(&dev, "dy", dtype, SHAPE2(T, I), 1));
    SET(dx, probe_out(probe_tensor(&dev, "dx", dtype, SHAPE2(T, H), 0)));
    SET(dw, probe_out(probe_turned(&dev, "dw", grad, groups, H, I, 0)));
    if (bias) SET(dbias, probe_out(probe_tensor(&dev, "dbias", grad, SHAPE2(groups, I), 0)));
    probe_run(&dev, d, FMOE_BACKWARD, T, 0, grouped_matmul_backward, &a, &r);
    end();
}

typedef struct layer {
    int act;
    uint32_t flags;
    int64_t experts, rank;
    int p, grad;
    bool lists, apart, turned, accumulate;
} layer;

static void experts(const char *name, int dtype, layer l)
{
    if (!begin(name, dtype)) return;
    const int64_t n = l.experts ? l.experts : E, k = n == 1 ? 1 : K, hc = l.act < FMOE_ACT_SILU ? 2 * I : I;
    const int grad = l.grad ? l.grad : dtype, p = l.p ? l.p : dtype;
    const fmoe_desc d = {.op = FMOE_OP_EXPERTS,
                         .dtype = dtype,
                         .H = H,
                         .I = I,
                         .E = n,
                         .k = k,
                         .act = l.act,
                         .flags = l.flags,
                         .rank1 = l.rank,
                         .rank2 = l.rank};
    fmoe_experts_args a = {.size = sizeof a}, r = a;
    fmoe_tensor list[12][16];
    twin *w1 = l.turned ? probe_turned(&dev, "w1", dtype, n, hc, H, 0.2)
                        : probe_tensor(&dev, "w1", dtype, SHAPE3(n, hc, H), 0.2),
         *w2 = l.turned ? probe_turned(&dev, "w2", dtype, n, H, I, 0.25)
                        : probe_tensor(&dev, "w2", dtype, SHAPE3(n, H, I), 0.25);
    SET(x, probe_tensor(&dev, "x", dtype, SHAPE2(T, H), 1));
    SET(ids, probe_ids(&dev, T, k, n, l.flags & FMOE_SKIP_NEG1));
    SET(weights, probe_tensor(&dev, "p", p, SHAPE2(T, k), 1));
    SET(out, probe_out(probe_tensor(&dev, "out", dtype, SHAPE2(T, H), 0)));
    if (l.lists) { /* ups and downs; every matrix of an ungated layer by itself */
        probe_list(w1, list[0], list[1]);
        probe_list(w2, list[2], list[3]);
        a.w.up = list[0], r.w.up = list[1];
        a.w.down = list[2], r.w.down = list[3];
        if (l.act < FMOE_ACT_SILU) {
            twin *gate = probe_tensor(&dev, "gate", dtype, SHAPE3(n, I, H), 0.2),
                 *up = probe_tensor(&dev, "up", dtype, SHAPE3(n, I, H), 0.2);
            probe_list(gate, list[0], list[1]);
            probe_list(up, list[4], list[5]);
            a.w.gate = list[0], r.w.gate = list[1];
            a.w.up = list[4], r.w.up = list[5];
        }
    } else {
        SET(w.w1, w1);
        SET(w.w2, w2);
    }
    if (l.flags & FMOE_BIAS) {
        SET(w.b1, probe_tensor(&dev, "b1", dtype, SHAPE2(n, hc), 0.5));
        SET(w.b2, probe_tensor(&dev, "b2", dtype, SHAPE2(n, H), 0.5));
    }
    if (l.rank) {
        SET(w.lora_a1, probe_tensor(&dev, "a1", dtype, SHAPE3(n, l.rank, H), 0.2));
        SET(w.lora_b1, probe_tensor(&dev, "b1", dtype, SHAPE3(n, hc, l.rank), 0.3));
        SET(w.lora_a2, probe_tensor(&dev, "a2", dtype, SHAPE3(n, l.rank, I), 0.2));
        SET(w.lora_b2, probe_tensor(&dev, "b2", dtype, SHAPE3(n, H, l.rank), 0.3));
        a.w.lora_scale1 = r.w.lora_scale1 = 0.5f;
    }
    void *ref_saved = NULL;
    if (probe_saved(&dev, d, T, &a.saved, &a.saved_bytes, &ref_saved, &r.saved_bytes)) {
        r.saved = ref_saved;
        probe_run(&dev, d, FMOE_FORWARD, T, 0, experts_forward, &a, &r);
        a.out = r.out = NULL;
        SET(dout, probe_tensor(&dev, "dout", dtype, SHAPE2(T, H), 1));
        SET(dx, probe_out(probe_tensor(&dev, "dx", dtype, SHAPE2(T, H), 0)));
        SET(dweights, probe_out(probe_tensor(&dev, "dp", p, SHAPE2(T, k), 0)));
        if (l.rank) {
            SET(dw.lora_a1, probe_out(probe_tensor(&dev, "da1", dtype, SHAPE3(n, l.rank, H), 0)));
            SET(dw.lora_b1, probe_out(probe_tensor(&dev, "db1", dtype, SHAPE3(n, hc, l.rank), 0)));
            SET(dw.lora_a2, probe_out(probe_tensor(&dev, "da2", dtype, SHAPE3(n, l.rank, I), 0)));
            SET(dw.lora_b2, probe_out(probe_tensor(&dev, "db2", dtype, SHAPE3(n, H, l.rank), 0)));
        } else if (l.lists) {
            twin *up = probe_out(probe_tensor(&dev, "dup", grad, SHAPE3(n, I, H), 0)),
                 *down = probe_out(probe_tensor(&dev, "ddown", grad, SHAPE3(n, H, I), 0));
            probe_list(up, list[6], list[7]);
            probe_list(down, list[8], list[9]);
            if (l.apart) { /* downs one place further: gradients that are no stack go through scratch */
                fmoe_tensor last = list[8][n - 1], last_ref = list[9][n - 1];
                memmove(&list[8][1], list[8], (size_t)(n - 1) * sizeof last);
                memmove(&list[9][1], list[9], (size_t)(n - 1) * sizeof last);
                list[8][0] = last, list[9][0] = last_ref;
            }
            a.dw.up = list[6], r.dw.up = list[7];
            a.dw.down = list[8], r.dw.down = list[9];
            if (a.w.gate) {
                twin *gate = probe_out(probe_tensor(&dev, "dgate", grad, SHAPE3(n, I, H), 0));
                probe_list(gate, list[10], list[11]);
                a.dw.gate = list[10], r.dw.gate = list[11];
            }
        } else {
            const double was = l.accumulate ? 1 : 0;
            SET(dw.w1, probe_out(l.turned ? probe_turned(&dev, "dw1", grad, n, hc, H, was)
                                          : probe_tensor(&dev, "dw1", grad, SHAPE3(n, hc, H), was)));
            SET(dw.w2, probe_out(l.turned ? probe_turned(&dev, "dw2", grad, n, H, I, was)
                                          : probe_tensor(&dev, "dw2", grad, SHAPE3(n, H, I), was)));
            if (l.flags & FMOE_BIAS) {
                SET(dw.b1, probe_out(probe_tensor(&dev, "db1", grad, SHAPE2(n, hc), was)));
                SET(dw.b2, probe_out(probe_tensor(&dev, "db2", grad, SHAPE2(n, H), was)));
            }
        }
        probe_run(&dev, d, FMOE_BACKWARD, T, l.accumulate ? FMOE_ACCUMULATE : 0, experts_backward, &a, &r);
    }
    free(ref_saved);
    end();
}

/* Router, routing, experts, and a shared expert behind a gate. */
static void block(const char *name, int dtype)
{
    if (!begin(name, dtype)) return;
    const fmoe_desc d = {.op = FMOE_OP_BLOCK,
                         .dtype = dtype,
                         .H = H,
                         .I = I,
                         .E = E,
                         .k = K,
                         .shared_I = I,
                         .flags = FMOE_SHARED_GATE,
                         .route = {.score = FMOE_SCORE_SOFTMAX, .renormalize = 1}};
    fmoe_block_args a = {.size = sizeof a}, r = a;
    SET(x, probe_tensor(&dev, "x", dtype, SHAPE2(T, H), 1));
    SET(w_router, probe_tensor(&dev, "w_router", dtype, SHAPE2(E, H), 0.5));
    SET(w.w1, probe_tensor(&dev, "w1", dtype, SHAPE3(E, 2 * I, H), 0.2));
    SET(w.w2, probe_tensor(&dev, "w2", dtype, SHAPE3(E, H, I), 0.25));
    SET(shared.w1, probe_tensor(&dev, "shared w1", dtype, SHAPE3(1, 2 * I, H), 0.2));
    SET(shared.w2, probe_tensor(&dev, "shared w2", dtype, SHAPE3(1, H, I), 0.25));
    SET(shared_gate, probe_tensor(&dev, "shared gate", dtype, SHAPE2(1, H), 0.3));
    SET(logits, probe_out(probe_tensor(&dev, "logits", FMOE_F32, SHAPE2(T, E), 0)));
    SET(ids, probe_out(probe_tensor(&dev, "ids", I64, SHAPE2(T, K), 0)));
    SET(weights, probe_out(probe_tensor(&dev, "p", FMOE_F32, SHAPE2(T, K), 0)));
    SET(out, probe_out(probe_tensor(&dev, "out", dtype, SHAPE2(T, H), 0)));
    void *ref_saved = NULL;
    if (probe_saved(&dev, d, T, &a.saved, &a.saved_bytes, &ref_saved, &r.saved_bytes)) {
        r.saved = ref_saved;
        probe_run(&dev, d, FMOE_FORWARD, T, 0, block_forward, &a, &r);
        a.out = r.out = NULL;
        SET(dout, probe_tensor(&dev, "dout", dtype, SHAPE2(T, H), 1));
        SET(dx, probe_out(probe_tensor(&dev, "dx", dtype, SHAPE2(T, H), 0)));
        SET(dw_router, probe_out(probe_tensor(&dev, "dw_router", dtype, SHAPE2(E, H), 0)));
        SET(dw.w1, probe_out(probe_tensor(&dev, "dw1", dtype, SHAPE3(E, 2 * I, H), 0)));
        SET(dw.w2, probe_out(probe_tensor(&dev, "dw2", dtype, SHAPE3(E, H, I), 0)));
        SET(dshared.w1, probe_out(probe_tensor(&dev, "dshared w1", dtype, SHAPE3(1, 2 * I, H), 0)));
        SET(dshared.w2, probe_out(probe_tensor(&dev, "dshared w2", dtype, SHAPE3(1, H, I), 0)));
        SET(dshared_gate, probe_out(probe_tensor(&dev, "dshared gate", dtype, SHAPE2(1, H), 0)));
        probe_run(&dev, d, FMOE_BACKWARD, T, 0, block_backward, &a, &r);
    }
    free(ref_saved);
    end();
}

static void all_cases(void)
{
    static const struct {
        const char *name;
        int act;
        uint32_t flags;
    } acts[] = {{"activation swiglu", FMOE_ACT_SWIGLU, 0},
                {"activation swiglu, interleaved", FMOE_ACT_SWIGLU, FMOE_INTERLEAVED},
                {"activation geglu", FMOE_ACT_GEGLU, 0},
                {"activation geglu, tanh", FMOE_ACT_GEGLU_TANH, 0},
                {"activation reglu", FMOE_ACT_REGLU, 0},
                {"activation swiglu, clamped", FMOE_ACT_SWIGLU_CLAMP, 0},
                {"activation of gpt-oss", FMOE_ACT_SWIGLU_OAI, FMOE_INTERLEAVED},
                {"activation swiglu, clamped out", FMOE_ACT_SWIGLU_CLAMP_OUT, 0},
                {"activation silu", FMOE_ACT_SILU, 0},
                {"activation gelu", FMOE_ACT_GELU, 0},
                {"activation relu", FMOE_ACT_RELU, 0},
                {"activation relu^2", FMOE_ACT_RELU2, 0}};
    for (size_t i = 0; i < sizeof acts / sizeof *acts; i++)
        activation(acts[i].name, FMOE_F32, acts[i].act, acts[i].flags);
    activation("activation swiglu", FMOE_BF16, FMOE_ACT_SWIGLU, 0);
    activation("activation of gpt-oss", FMOE_BF16, FMOE_ACT_SWIGLU_OAI, FMOE_INTERLEAVED);
    activation("activation swiglu", FMOE_F16, FMOE_ACT_SWIGLU, 0);

    route("route softmax", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_SOFTMAX, .renormalize = 1}, false, false);
    route("route softmax, bad rows counted", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_SOFTMAX}, false, true);
    route("route softmax of the chosen", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_TOPK_SOFTMAX}, true, false);
    route("route sigmoid", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_SIGMOID}, true, false);
    route("route sigmoid, normalised", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_SIGMOID, .renormalize = 1}, true,
          false);
    route("route sigmoid, groups (DeepSeek-V3)", FMOE_F32,
          (fmoe_route_rule){
              .score = FMOE_SCORE_SIGMOID, .renormalize = 1, .groups = 4, .topk_groups = 2, .eps = 1e-20, .scale = 2.5},
          true, false);
    route("route softmax, best of groups", FMOE_F32,
          (fmoe_route_rule){.score = FMOE_SCORE_SOFTMAX, .group_score = FMOE_GROUP_MAX, .groups = 4, .topk_groups = 2},
          false, false);
    route("route sqrt softplus", FMOE_F32, (fmoe_route_rule){.score = FMOE_SCORE_SQRT_SOFTPLUS, .renormalize = 1},
          false, false);

    static const char *const rows[] = {"permute", "permute, backward", "unpermute", "unpermute, backward"},
                             *const skipped[] = {"permute, skipped slots", "permute, skipped, backward",
                                                 "unpermute, skipped slots", "unpermute, skipped, backward"};
    for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
        permute(rows, dtype, 0);
        product("grouped matmul", dtype, E, false, false, dtype);
        product("grouped matmul, running sums, bias", dtype, E, true, true, dtype);
        product("matmul of one group", dtype, 1, false, false, dtype);
        experts("experts", dtype, (layer){.act = FMOE_ACT_SWIGLU});
    }
    permute(skipped, FMOE_F32, FMOE_SKIP_NEG1);
    product("grouped matmul, f32 gradients", FMOE_BF16, E, false, true, FMOE_F32);
    experts("experts, f32 routing weights", FMOE_BF16, (layer){.p = FMOE_F32});
    experts("experts, f32 gradients", FMOE_BF16, (layer){.grad = FMOE_F32});
    experts("experts, gradients added to", FMOE_BF16, (layer){.accumulate = true});
    experts("experts, weights [E,in,out]", FMOE_BF16, (layer){.turned = true});
    experts("experts, nothing kept", FMOE_BF16, (layer){.flags = FMOE_RECOMPUTE});
    experts("experts, skipped slots", FMOE_BF16, (layer){.flags = FMOE_SKIP_NEG1});
    experts("experts of gpt-oss", FMOE_BF16,
            (layer){.act = FMOE_ACT_SWIGLU_OAI, .flags = FMOE_BIAS | FMOE_INTERLEAVED});
    experts("experts, one matrix each", FMOE_BF16, (layer){.lists = true, .apart = true});
    experts("experts, one matrix each", FMOE_F32, (layer){.lists = true});
    experts("experts, one matrix each, ungated", FMOE_BF16, (layer){.lists = true, .act = FMOE_ACT_RELU2});
    experts("experts with adapters", FMOE_BF16, (layer){.rank = 4});
    block("block with a shared expert", FMOE_F32);
    experts("one expert", FMOE_BF16, (layer){.experts = 1, .flags = FMOE_BIAS});
}

/* ---- The verdict ---- */

static bool uses(const probe_case *c, int op) { return c->used[op / 64] >> op % 64 & 1; }

/* The operator that explains the most failed checks, less twice the passed ones that use it too (where its results did
 * not matter); what it does not explain, by the next. Equals are named together. */
static void name_suspects(void)
{
    bool explained[MAX_CASES] = {false};
    for (;;) {
        int best = 0, hits[MAX_OPERATORS] = {0}, passes[MAX_OPERATORS] = {0};
        for (int op = 0; op < dev.n_operators; op++) {
            for (int i = 0; i < n_cases; i++) {
                passes[op] += uses(&cases[i], op) && !cases[i].failed;
                hits[op] += uses(&cases[i], op) && cases[i].failed && !explained[i];
            }
            if (hits[op] - 2 * passes[op] > best) best = hits[op] - 2 * passes[op];
        }
        if (best == 0) return;
        say("suspect:");
        for (int op = 0; op < dev.n_operators; op++) {
            if (hits[op] - 2 * passes[op] != best) continue;
            say(" %s (used in %d failed and %d passed checks)", dev.operators[op], hits[op], passes[op]);
            for (int i = 0; i < n_cases; i++) explained[i] = explained[i] || uses(&cases[i], op);
        }
        say("\n");
    }
}

static void describe_machine(void)
{
    char text[8192];
    if (fmoe_info(text, sizeof text) >= sizeof text) text[sizeof text - 1] = 0;
    const char *line = strstr(text, "\nascend:");
    say("fusedmoe %s\n%s", fmoe_version_string(), line ? line + 1 : "ascend: not in this build\n");
    static const char *const names[] = {"ASCEND_HOME_PATH", "FMOE_ASCEND_PATH", "FMOE_ASCEND_KEEP", "FMOE_ASCEND_MIXED",
                                        "FMOE_ASCEND_ROUTING"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i])) say("%s=%s\n", names[i], getenv(names[i]));
}

static int usage(FILE *to, int code)
{
    fputs("usage: fusedmoe check --backend ascend [options]\n"
          "Every operation on an Ascend NPU against a computation in double: one line each with the relative error,\n"
          "the bound, the time of one pass of each direction (the best of three) and the launches. Then the operators\n"
          "that were used, the verdict, and where checks fail the operators to suspect. Takes seconds, and less than\n"
          "100 MB of the device.\n"
          "\n"
          "  --device N     which NPU; default 0\n"
          "  --report FILE  where the same text goes, to be sent; default fusedmoe-ascend.txt, - for nowhere\n"
          "  -f TEXT        only checks with TEXT in their name\n"
          "  --seed N       other numbers\n"
          "\n"
          "Exit status: 0; 1 when a check fails or there is no NPU; 2 for a command line that cannot be read.\n",
          to);
    return code;
}

int fmoe_check_ascend_main(int argc, char **argv)
{
    const char *file = "fusedmoe-ascend.txt";
    int32_t id = 0;
    dev.random = 88172645463325252u;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) return usage(stdout, 0);
        if (!value) return usage(stderr, 2);
        if (!strcmp(argv[i], "--backend")) i++;
        else if (!strcmp(argv[i], "--device")) id = (int32_t)strtol(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--report")) file = argv[++i];
        else if (!strcmp(argv[i], "-f")) filter = argv[++i];
        else if (!strcmp(argv[i], "--seed")) dev.random ^= strtoull(argv[++i], NULL, 0) * UINT64_C(0x9E3779B97F4A7C15);
        else return usage(stderr, 2);
    }
    report = strcmp(file, "-") ? fopen(file, "w") : NULL;
    if (!report && strcmp(file, "-")) {
        fprintf(stderr, "fusedmoe check: %s cannot be written\n", file);
        return 1;
    }
    describe_machine();
    const char *missing = probe_open(&dev, id);
    if (missing) {
        say("verdict: no NPU can be used: %s\n0 passed, 1 failed, 0 skipped\n", missing);
        if (report) fclose(report);
        return 1;
    }
    all_cases();
    probe_close(&dev);
    int failed = 0;
    for (int i = 0; i < n_cases; i++) failed += cases[i].failed;
    say("operators used:");
    for (int i = 0; i < dev.n_operators; i++) say(" %s", dev.operators[i]);
    say("\n");
    if (failed) name_suspects();
    if (n_cases == 0) say("verdict: no check has '%s' in its name\n", filter);
    else if (failed)
        say("verdict: %d of %d checks failed: do not train on this machine; send this report\n", failed, n_cases);
    else say("verdict: all %d checks passed\n", n_cases);
    say("%d passed, %d failed, 0 skipped\n", n_cases - failed, failed);
    if (report && fclose(report) == 0) printf("report: %s\n", file);
    return failed > 0 || n_cases == 0;
}
