/* SPDX-License-Identifier: Apache-2.0
 *
 * ref.c - the specification: every operation, forward and backward, in double, by the shortest loops that are right.
 *
 * Every other kernel of this library is tested against these functions, and a plan of dtype FMOE_F64 runs them. They
 * are written to be read: the formula stands above the function, the corner cases are branches with a reason, and
 * nothing is fast. Sums are taken from the lowest index to the highest, so that a row's result never depends on other
 * rows.
 *
 * Here: permute, unpermute, grouped matmul, activation, and the backend's table. ref_route.c: routing. ref_experts.c:
 * the layer.
 */
#include <math.h>
#include <stdio.h>

#include "ref.h"

/* ---- What the data must obey. Each function looks at all of it before the caller writes anything. ---------------- */

fmoe_status fmoe_ref_check_ids(const fmoe_plan_impl *p, const fmoe_tensor *ids)
{
    for (int64_t t = 0; t < ids->shape[0]; t++) {
        for (int64_t j = 0; j < ids->shape[1]; j++) {
            const int64_t id = ref_int2(ids, t, j);
            if ((id >= 0 && id < p->d.E) || ref_skipped(p, id)) continue;
            return fmoe_fail(FMOE_ERR_INDEX, "ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", E is %" PRId64, t, j, id,
                             p->d.E);
        }
    }
    return FMOE_OK;
}

/* A map is an injection of the slots that are not skipped into the rows [0, min(R, T*k)): two slots on one row would
 * make dy[map[s]] = ... ambiguous, and no permutation of T*k slots has a row past T*k. owner [T*k] remembers who took a
 * row. */
static fmoe_status ref_check_map(const fmoe_tensor *map, int64_t R, int64_t *owner)
{
    const int64_t slots = map->shape[0], rows = fmoe_min(R, slots);
    for (int64_t r = 0; r < slots; r++) owner[r] = -1;
    for (int64_t s = 0; s < slots; s++) {
        const int64_t r = ref_int1(map, s);
        if (r == -1) continue;
        if (r < -1 || r >= rows)
            return fmoe_fail(FMOE_ERR_INDEX, "map[%" PRId64 "] is %" PRId64 ", must be -1 or a row below %" PRId64, s,
                             r, rows);
        if (owner[r] >= 0)
            return fmoe_fail(FMOE_ERR_INDEX, "map[%" PRId64 "] and map[%" PRId64 "] are both %" PRId64, owner[r], s, r);
        owner[r] = s;
    }
    return FMOE_OK;
}

/* ---- permute: T tokens -> R rows --------------------------------------------------------------------------------- */

void fmoe_ref_sort(const fmoe_plan_impl *p, const fmoe_tensor *ids, int64_t *start, int64_t *map)
{
    const int64_t T = ids->shape[0], k = p->d.k, E = p->d.E;
    for (int64_t e = 0; e <= E; e++) start[e] = 0;
    for (int64_t s = 0; s < T * k; s++) {
        const int64_t e = ref_int2(ids, s / k, s % k);
        if (!ref_skipped(p, e)) start[e + 1]++;
    }
    for (int64_t e = 0; e < E; e++) start[e + 1] += start[e];
    /* Slots in order of tokens take the next row of their expert: inside an expert the order of tokens stays. */
    for (int64_t s = 0; s < T * k; s++) {
        const int64_t e = ref_int2(ids, s / k, s % k);
        map[s] = ref_skipped(p, e) ? -1 : start[e]++;
    }
    /* start[e] has run to the end of expert e, which is where e + 1 began. */
    for (int64_t e = E; e > 0; e--) start[e] = start[e - 1];
    start[0] = 0;
}

typedef struct permute_scratch {
    int64_t *start, *map; /* forward of permute: [E+1], [T*k] */
    int64_t *owner;       /* all others: [T*k] */
} permute_scratch;

static permute_scratch carve_permute(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c)
{
    permute_scratch s;
    s.start = fmoe_carve_take(c, p->d.E + 1, sizeof *s.start);
    s.map = fmoe_carve_take(c, T * p->d.k, sizeof *s.map);
    s.owner = s.map; /* never both in one call */
    return s;
}

/* xp[map[t*k+j], :] = x[t, :]        x [T,H], xp [R,H], map [T*k], counts [E]
 * map is the stable sort of the slots by expert; a skipped slot has -1 and no row, so with s of them the last s rows
 * (and those of a longer xp) belong to nobody. They become zero: whoever multiplies the whole of xp must not meet what
 * was in memory before. */
static fmoe_status permute_forward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    FMOE_TRY(fmoe_ref_check_ids(p, a->ids));
    const int64_t T = a->ids->shape[0], k = p->d.k, E = p->d.E, H = p->d.H;
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const permute_scratch s = carve_permute(p, T, &c);
    fmoe_ref_sort(p, a->ids, s.start, s.map);

    const ref_mat x = ref_matrix(a->x), xp = ref_matrix(a->xp);
    void *map = fmoe_data(a->map);
    for (int64_t i = 0; i < T * k; i++) {
        fmoe_set_int(map, fmoe_tensor_dtype(a->map), i * fmoe_stride(a->map, 0), s.map[i]);
        if (s.map[i] < 0) continue;
        const ref_vec from = ref_row(x, i / k), to = ref_row(xp, s.map[i]);
        for (int64_t h = 0; h < H; h++) ref_set(to, h, ref_get(from, h));
    }
    for (int64_t r = s.start[E]; r < a->xp->shape[0]; r++) {
        for (int64_t h = 0; h < H; h++) ref_set(ref_row(xp, r), h, 0);
    }
    for (int64_t e = 0; a->counts && e < E; e++) {
        const int64_t at = e * fmoe_stride(a->counts, 0);
        fmoe_set_int(fmoe_data(a->counts), fmoe_tensor_dtype(a->counts), at, s.start[e + 1] - s.start[e]);
    }
    return FMOE_OK;
}

/* out[t, :] = sum_j p[t,j] * y[map[t*k+j], :]     p = 1 without weights; a skipped slot gives nothing */
static void gather_sum(const fmoe_plan_impl *p, const fmoe_tensor *y, const fmoe_tensor *map,
                       const fmoe_tensor *weights, const fmoe_tensor *out)
{
    const int64_t k = p->d.k;
    for (int64_t t = 0; t < out->shape[0]; t++) {
        for (int64_t h = 0; h < p->d.H; h++) {
            double sum = 0;
            for (int64_t j = 0; j < k; j++) {
                const int64_t r = ref_int1(map, t * k + j);
                if (r < 0) continue;
                const double w = weights ? ref_get(ref_row(ref_matrix(weights), t), j) : 1;
                sum += w * ref_get(ref_row(ref_matrix(y), r), h);
            }
            ref_set(ref_row(ref_matrix(out), t), h, sum);
        }
    }
}

/* dx[t, :] = sum_j dxp[map[t*k+j], :]     the transpose of a copy is a sum: unpermute with p = 1. */
static fmoe_status permute_backward(const fmoe_plan_impl *p, const fmoe_permute_args *a, const fmoe_run *run)
{
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const permute_scratch s = carve_permute(p, a->x->shape[0], &c);
    FMOE_TRY(ref_check_map(a->map, a->xp->shape[0], s.owner));
    gather_sum(p, a->xp, a->map, NULL, a->x);
    return FMOE_OK;
}

/* ---- unpermute: R rows -> T tokens ------------------------------------------------------------------------------- */

static fmoe_status unpermute_forward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const permute_scratch s = carve_permute(p, a->out->shape[0], &c);
    FMOE_TRY(ref_check_map(a->map, a->y->shape[0], s.owner));
    gather_sum(p, a->y, a->map, a->weights, a->out);
    return FMOE_OK;
}

/* dy[map[t*k+j], :] = p[t,j] * dout[t, :]            zero in rows nobody maps to
 * dweights[t,j]     = <dout[t, :], y[map[t*k+j], :]>  exactly 0 in skipped slots */
static fmoe_status unpermute_backward(const fmoe_plan_impl *p, const fmoe_unpermute_args *a, const fmoe_run *run)
{
    const fmoe_tensor *rows = a->dy ? a->dy : a->y;
    if (!rows) return FMOE_OK; /* neither gradient was asked for */
    const int64_t T = a->dout->shape[0], k = p->d.k, H = p->d.H, R = rows->shape[0];
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    FMOE_TRY(ref_check_map(a->map, R, carve_permute(p, T, &c).owner));
    for (int64_t r = 0; a->dy && r < R; r++) {
        for (int64_t h = 0; h < H; h++) ref_set(ref_row(ref_matrix(a->dy), r), h, 0);
    }
    for (int64_t i = 0; i < T * k; i++) {
        const int64_t t = i / k, j = i % k, r = ref_int1(a->map, i);
        const ref_vec dout = ref_row(ref_matrix(a->dout), t);
        if (a->dy && r >= 0) {
            const double w = a->weights ? ref_get(ref_row(ref_matrix(a->weights), t), j) : 1;
            for (int64_t h = 0; h < H; h++) ref_set(ref_row(ref_matrix(a->dy), r), h, w * ref_get(dout, h));
        }
        if (a->dweights) {
            const double dp = r < 0 ? 0 : ref_dot(dout, ref_row(ref_matrix(a->y), r), H);
            ref_set(ref_row(ref_matrix(a->dweights), t), j, dp);
        }
    }
    return FMOE_OK;
}

/* ---- grouped matmul ---------------------------------------------------------------------------------------------- */

/* Tensor or matrix of group g: an element of the list, or (a slice of) the one tensor all groups share. */
static ref_mat gmm_rows(const fmoe_gmm_args *a, const fmoe_tensor *t, int64_t g)
{
    return ref_matrix(a->list ? &t[g] : t);
}

static ref_mat gmm_weight(const fmoe_gmm_args *a, const fmoe_tensor *t, int64_t g)
{
    return a->list ? ref_matrix(&t[g]) : ref_slice(t, g);
}

/* w[g][k, n]. Quantised, a row of codes is a column of w, or with FMOE_QUANT_IN_OUT a row of it. */
static double gmm_w_at(const fmoe_gmm_args *a, int64_t g, int64_t k, int64_t n)
{
    const fmoe_quant *q = a->quant;
    if (!q) return ref_get(ref_row(gmm_weight(a, a->w, g), k), n);
    const bool in_out = q->flags & FMOE_QUANT_IN_OUT;
    const int64_t row = in_out ? k : n;
    ref_vec codes = ref_row(gmm_weight(a, a->w, g), row);
    codes.quant = q, codes.e = g, codes.n = row, codes.list = a->list;
    codes.N = a->list ? a->w[g].shape[0] : a->w->shape[1];
    return ref_get(codes, in_out ? n : k);
}

static ref_vec gmm_bias(const fmoe_gmm_args *a, const fmoe_tensor *t, int64_t g)
{
    return a->list ? ref_vector(&t[g]) : ref_row(ref_matrix(t), g);
}

/* Rows [*begin, *end) of group g: sizes as counts add up, as running sums they are the ends. Without sizes there is one
 * group of all rows; in the list form each group has all rows of its own tensor. rows is y or dy, the tensor
 * that every call of its pass has; *end comes from the group before. */
static void gmm_group(const fmoe_gmm_args *a, const fmoe_tensor *rows, int64_t g, int64_t *begin, int64_t *end)
{
    if (a->list) {
        *begin = 0;
        *end = rows[g].shape[0];
        return;
    }
    *begin = *end;
    if (!a->sizes) *end = rows->shape[0];
    else *end = a->cumulative ? ref_int1(a->sizes, g) : *begin + ref_int1(a->sizes, g);
}

/* Groups must not overlap, go backwards or leave the tensor. Written so that no sum of sizes can overflow. */
static fmoe_status check_sizes(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_tensor *rows)
{
    if (a->list || !a->sizes) return FMOE_OK;
    const int64_t R = rows->shape[0];
    int64_t total = 0;
    for (int64_t g = 0; g < p->d.E; g++) {
        const int64_t n = ref_int1(a->sizes, g);
        if (a->cumulative && n < total) {
            return fmoe_fail(FMOE_ERR_INDEX,
                             "sizes[%" PRId64 "] is %" PRId64 ", less than the running sum %" PRId64 " before it", g, n,
                             total);
        }
        if (!a->cumulative && n < 0) {
            return fmoe_fail(FMOE_ERR_INDEX, "sizes[%" PRId64 "] is %" PRId64 ", less than 0", g, n);
        }
        const int64_t size = a->cumulative ? n - total : n;
        if (size > R - total) {
            return fmoe_fail(FMOE_ERR_INDEX,
                             "sizes[%" PRId64 "] is %" PRId64 ", %" PRId64 " rows come before it, R is %" PRId64, g, n,
                             total, R);
        }
        total += size;
    }
    return FMOE_OK;
}

/* y[r, n] = sum_k x[r, k] * w[g(r)][k, n] + bias[g(r)][n]      x [R,K], w [E,K,N], bias [E,N], y [R,N]
 * Rows past the total belong to no group: nothing is defined for them, so they are left alone. */
static fmoe_status gmm_forward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    (void)run;
    FMOE_TRY(check_sizes(p, a, a->y));
    for (int64_t g = 0, begin = 0, end = 0; g < p->d.E; g++) {
        gmm_group(a, a->y, g, &begin, &end);
        const ref_mat x = gmm_rows(a, a->x, g), y = gmm_rows(a, a->y, g);
        const int64_t K = (a->list ? &a->x[g] : a->x)->shape[1], N = (a->list ? &a->y[g] : a->y)->shape[1];
        for (int64_t r = begin; r < end; r++) {
            for (int64_t n = 0; n < N; n++) {
                double sum = 0;
                for (int64_t k = 0; k < K; k++) sum += ref_get(ref_row(x, r), k) * gmm_w_at(a, g, k, n);
                ref_set(ref_row(y, r), n, sum + (a->bias ? ref_get(gmm_bias(a, a->bias, g), n) : 0));
            }
        }
    }
    return FMOE_OK;
}

/* dx[r, k]    = sum_n dy[r, n] * w[g(r)][k, n]           zero in rows past the total; added to with FMOE_ADD_DX
 * dw[g][k, n] = sum over the rows r of g of x[r, k] * dy[r, n]
 * dbias[g][n] = sum over the rows r of g of dy[r, n]
 * Only dx needs w, only dw needs x: the other may be NULL. An empty sum is 0: that is what an empty group's dw becomes.
 * FMOE_ACCUMULATE adds nothing to it, which means not touching it (old + 0 would turn -0 into 0). */
static fmoe_status gmm_backward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    FMOE_TRY(check_sizes(p, a, a->dy));
    const bool accumulate = run->flags & FMOE_ACCUMULATE, add_dx = run->flags & FMOE_ADD_DX;
    int64_t begin = 0, end = 0;
    for (int64_t g = 0; g < p->d.E; g++) {
        gmm_group(a, a->dy, g, &begin, &end);
        const ref_mat dy = gmm_rows(a, a->dy, g);
        const int64_t N = (a->list ? &a->dy[g] : a->dy)->shape[1];
        for (int64_t r = begin; a->dx && r < end; r++) {
            const ref_vec dx = ref_row(gmm_rows(a, a->dx, g), r);
            for (int64_t k = 0; k < (a->list ? &a->dx[g] : a->dx)->shape[1]; k++) {
                double sum = 0;
                for (int64_t n = 0; n < N; n++) sum += ref_get(ref_row(dy, r), n) * gmm_w_at(a, g, k, n);
                ref_set(dx, k, sum + (add_dx ? ref_get(dx, k) : 0));
            }
        }
        if (accumulate && begin == end) continue;
        for (int64_t k = 0; a->dw && k < (a->list ? &a->x[g] : a->x)->shape[1]; k++) {
            const ref_mat x = gmm_rows(a, a->x, g);
            const ref_vec dw = ref_row(gmm_weight(a, a->dw, g), k);
            for (int64_t n = 0; n < N; n++) {
                double sum = accumulate ? ref_get(dw, n) : 0;
                for (int64_t r = begin; r < end; r++) sum += ref_get(ref_row(x, r), k) * ref_get(ref_row(dy, r), n);
                ref_set(dw, n, sum);
            }
        }
        for (int64_t n = 0; a->dbias && n < N; n++) {
            const ref_vec dbias = gmm_bias(a, a->dbias, g);
            double sum = accumulate ? ref_get(dbias, n) : 0;
            for (int64_t r = begin; r < end; r++) sum += ref_get(ref_row(dy, r), n);
            ref_set(dbias, n, sum);
        }
    }
    /* dx is a whole gradient: a row that took part in nothing has gradient 0, and adding 0 changes nothing. */
    for (int64_t r = end; a->dx && !a->list && !add_dx && r < a->dx->shape[0]; r++) {
        for (int64_t k = 0; k < a->dx->shape[1]; k++) ref_set(ref_row(ref_matrix(a->dx), r), k, 0);
    }
    return FMOE_OK;
}

/* ---- activation -------------------------------------------------------------------------------------------------- */

/* Every entry of fmoe_act is a product F(g) * V(u), ungated F(h). So two functions of one variable, each with its
 * slope, are the whole table. At a corner the slope is that of the side where the formula is constant for relu
 * (relu'(0) = 0) and that of the other side for a clamp (the limit itself still passes), as PyTorch has them.
 * Comparisons are written so that a NaN falls through to the arithmetic: a NaN in is a NaN out, never a quiet 0. */
typedef struct factor {
    double value, slope;
} factor;

/* g * sigmoid(alpha * g); alpha = 1 is silu. */
static factor ref_silu(double g, double alpha)
{
    const double s = ref_sigmoid(alpha * g);
    return (factor){g * s, s + alpha * g * s * ref_sigmoid(-alpha * g)};
}

/* g * Phi(g); erfc keeps the digits of the left tail that 1 + erf would cancel. */
static factor gelu_erf(double g)
{
    const double phi = 0.5 * erfc(-g * M_SQRT1_2), density = exp(-0.5 * g * g) * (0.5 * M_SQRT1_2 * M_2_SQRTPI);
    return (factor){g * phi, phi + g * density};
}

/* 0.5 * g * (1 + tanh(z)), z = sqrt(2/pi) * (g + 0.044715 g^3); and 0.5 * (1 + tanh(z)) is sigmoid(2z). */
static factor ref_gelu_tanh(double g)
{
    const double c = M_2_SQRTPI * M_SQRT1_2, z = c * (g + 0.044715 * g * g * g), dz = c * (1 + 3 * 0.044715 * g * g);
    const double s = ref_sigmoid(2 * z);
    return (factor){g * s, s + g * s * ref_sigmoid(-2 * z) * 2 * dz};
}

static factor ref_relu(double g) { return g <= 0 ? (factor){0, 0} : (factor){g, 1}; }

static factor ref_at_most(factor f, double limit) { return f.value > limit ? (factor){limit, 0} : f; }

static factor gate_factor(const fmoe_desc *d, double g)
{
    const double L = d->act_limit;
    const factor clamped = ref_at_most((factor){g, 1}, L);
    factor f;
    switch (d->act) {
    case FMOE_ACT_GEGLU:
    case FMOE_ACT_GELU: return gelu_erf(g);
    case FMOE_ACT_GEGLU_TANH:
    case FMOE_ACT_GELU_TANH: return ref_gelu_tanh(g);
    case FMOE_ACT_REGLU:
    case FMOE_ACT_RELU: return ref_relu(g);
    case FMOE_ACT_RELU2: f = ref_relu(g); return (factor){f.value * f.value, 2 * f.value};
    case FMOE_ACT_SWIGLU_CLAMP: f = ref_silu(clamped.value, 1); return (factor){f.value, f.slope * clamped.slope};
    case FMOE_ACT_SWIGLU_OAI:
        f = ref_silu(clamped.value, d->act_alpha);
        return (factor){f.value, f.slope * clamped.slope};
    case FMOE_ACT_SWIGLU_CLAMP_OUT: return ref_at_most(ref_silu(g, 1), L);
    default: return ref_silu(g, 1); /* FMOE_ACT_SWIGLU, FMOE_ACT_SILU; the core lets no other value through */
    }
}

static factor up_factor(const fmoe_desc *d, double u)
{
    const double L = d->act_limit;
    const factor clamped = u < -L ? (factor){-L, 0} : ref_at_most((factor){u, 1}, L);
    switch (d->act) {
    case FMOE_ACT_SWIGLU_CLAMP:
    case FMOE_ACT_SWIGLU_CLAMP_OUT: return clamped;
    case FMOE_ACT_SWIGLU_OAI: return (factor){clamped.value + 1, clamped.slope};
    default: return (factor){u, 1};
    }
}

/* a[i] = F(h[gate(i)]) * V(h[up(i)]); ungated a[i] = F(h[i]). */
void fmoe_ref_activate(const fmoe_plan_impl *p, ref_vec h, ref_vec a)
{
    for (int64_t i = 0; i < p->d.I; i++) {
        const double f = gate_factor(&p->d, ref_get(h, ref_gate_col(p, i))).value;
        ref_set(a, i, p->gated ? f * up_factor(&p->d, ref_get(h, ref_up_col(p, i))).value : f);
    }
}

/* dh[gate(i)] = da[i] * F' * V,  dh[up(i)] = da[i] * F * V'; ungated dh[i] = da[i] * F'. */
void fmoe_ref_activate_backward(const fmoe_plan_impl *p, ref_vec h, ref_vec da, ref_vec dh)
{
    for (int64_t i = 0; i < p->d.I; i++) {
        const factor f = gate_factor(&p->d, ref_get(h, ref_gate_col(p, i)));
        const factor v = p->gated ? up_factor(&p->d, ref_get(h, ref_up_col(p, i))) : (factor){1, 0};
        ref_set(dh, ref_gate_col(p, i), ref_get(da, i) * f.slope * v.value);
        if (p->gated) ref_set(dh, ref_up_col(p, i), ref_get(da, i) * f.value * v.slope);
    }
}

static fmoe_status activation_forward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    (void)run;
    for (int64_t r = 0; r < a->h->shape[0]; r++) {
        fmoe_ref_activate(p, ref_row(ref_matrix(a->h), r), ref_row(ref_matrix(a->a), r));
    }
    return FMOE_OK;
}

static fmoe_status activation_backward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    (void)run;
    for (int64_t r = 0; r < a->h->shape[0]; r++) {
        const ref_vec h = ref_row(ref_matrix(a->h), r), da = ref_row(ref_matrix(a->da), r);
        fmoe_ref_activate_backward(p, h, da, ref_row(ref_matrix(a->dh), r));
    }
    return FMOE_OK;
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

static fmoe_status ref_plan_init(fmoe_plan_impl *p)
{
    p->priv = NULL;
    return FMOE_OK;
}

static void ref_plan_fini(fmoe_plan_impl *p) { (void)p; }

static fmoe_status ref_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    const fmoe_desc *d = &p->d;
    fmoe_carve c = fmoe_carve_begin(NULL, sizeof(int64_t));
    int64_t R = T;
    size_t kept = 0;
    const bool slots = d->op == FMOE_OP_PERMUTE || d->op == FMOE_OP_EXPERTS;
    bool overflow = slots && __builtin_mul_overflow(T, d->k, &R);
    if (!overflow) {
        if (d->op == FMOE_OP_ROUTE) fmoe_ref_route_carve(p, &c);
        if (d->op == FMOE_OP_PERMUTE) carve_permute(p, T, &c);
        if (d->op == FMOE_OP_EXPERTS) {
            fmoe_ref_experts_carve(p, pass, T, &c);
            overflow = __builtin_mul_overflow(R, p->h_cols, &R) || fmoe_mul_overflow((size_t)R, sizeof(double), &kept);
        }
    }
    if (overflow || c.overflow) {
        return fmoe_fail(FMOE_ERR_OVERFLOW, "T is %" PRId64 ", k is %" PRId64 ": the workspace does not fit 64 bits", T,
                         d->k);
    }
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    *saved = d->op == FMOE_OP_EXPERTS && !(d->flags & FMOE_RECOMPUTE) ? kept : 0;
    return FMOE_OK;
}

static size_t ref_describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    (void)p;
    return (size_t)snprintf(text, n, "reference: plain loops in double on one thread (f64 runs the specification)\n");
}

const fmoe_backend fmoe_backend_reference = {
    .version = FMOE_BACKEND_VERSION,
    .name = "reference",
    .plan_init = ref_plan_init,
    .plan_fini = ref_plan_fini,
    .bytes = ref_bytes,
    .describe = ref_describe,
    .route = {fmoe_ref_route_forward, fmoe_ref_route_backward},
    .permute = {permute_forward, permute_backward},
    .unpermute = {unpermute_forward, unpermute_backward},
    .gmm = {gmm_forward, gmm_backward},
    .activation = {activation_forward, activation_backward},
    .experts = {fmoe_ref_experts_forward, fmoe_ref_experts_backward},
    .quant = true,
    .quant_gmm = true,
};
