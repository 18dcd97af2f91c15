/* SPDX-License-Identifier: Apache-2.0
 *
 * ref_experts.c - the specification of the layer. For slot (t,j) with expert e = ids[t,j] and weight p = weights[t,j]:
 *
 *   h = W1[e] x[t] + b1[e]     [2I]     a = act(h)  [I]     y = W2[e] a + b2[e]  [H]     out[t] = sum_j p * y
 *
 * and, with g = dout[t] and v = W2[e]^T g:
 *
 *   dp   = <v, a> + <g, b2[e]>                  = <g, y>, without keeping or making y
 *   dh   = act'(h) applied to p * v
 *   dx[t]      = sum_j   W1[e]^T dh
 *   dW2[e]     = sum over the slots of e of p * g a^T          db2[e] = sum of p * g
 *   dW1[e]     = sum over the slots of e of dh x[t]^T          db1[e] = sum of dh
 *
 * Low-rank adapters: W1[e] + B1[e] A1[e] in the place of W1[e] and W2[e] + B2[e] A2[e] in the place of W2[e], each
 * applied factor by factor, and, with their rank-sized rows l1 = A1 x[t], l2 = A2 a, m2 = B2^T g, m1 = B1^T dh:
 *
 *   dB2[e] = sum of p * g l2^T    dA2[e] = sum of p * m2 a^T    dB1[e] = sum of dh l1^T    dA1[e] = sum of m1 x[t]^T
 *
 * The biases are inside the expert, so the routing weight scales them too. A token that names an expert twice has two
 * slots, each with its own p: contributions add, and nothing special is done. A skipped slot has no row: it adds
 * nothing to any sum, and its dp is 0 without looking at its p, which may be NaN.
 */
#include "ref.h"

typedef struct experts_scratch {
    int64_t *start;  /* [E+1] first row of each expert */
    int64_t *map;    /* [R] slot -> row or -1 */
    int64_t *slot;   /* [R] row -> slot */
    double *h;       /* [h_cols] of one row */
    double *sum;     /* [max(H, I)] one row of whatever is being summed */
    double *v;       /* [I] */
    double *a, *dh;  /* backward: [R,I], [R,h_cols]; forward: one row */
    double *l1, *m1; /* [., rank1] and, below, [., rank2]: what passes between the factors of an adapter, as a and dh */
    double *l2, *m2;
} experts_scratch;

static experts_scratch experts_carve(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, fmoe_carve *c)
{
    const int64_t R = T * p->d.k, rows = pass == FMOE_BACKWARD ? R : 1;
    experts_scratch s;
    s.start = fmoe_carve_take(c, p->d.E + 1, sizeof(int64_t));
    s.map = fmoe_carve_take(c, R, sizeof(int64_t));
    s.slot = fmoe_carve_take(c, R, sizeof(int64_t));
    s.h = fmoe_carve_take(c, p->h_cols, sizeof(double));
    s.sum = fmoe_carve_take(c, fmoe_max(fmoe_max(p->d.H, p->d.I), fmoe_max(p->d.rank1, p->d.rank2)), sizeof(double));
    s.v = fmoe_carve_take(c, p->d.I, sizeof(double));
    s.a = fmoe_carve_take(c, rows, (size_t)p->d.I * sizeof(double));
    s.dh = fmoe_carve_take(c, rows, (size_t)p->h_cols * sizeof(double));
    s.l1 = fmoe_carve_take(c, rows, (size_t)p->d.rank1 * sizeof(double));
    s.m1 = fmoe_carve_take(c, rows, (size_t)p->d.rank1 * sizeof(double));
    s.l2 = fmoe_carve_take(c, rows, (size_t)p->d.rank2 * sizeof(double));
    s.m2 = fmoe_carve_take(c, rows, (size_t)p->d.rank2 * sizeof(double));
    return s;
}

void fmoe_ref_experts_carve(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, fmoe_carve *c)
{
    experts_carve(p, pass, T, c);
}

static void sort_slots(const fmoe_plan_impl *p, const fmoe_tensor *ids, const experts_scratch *s)
{
    fmoe_ref_sort(p, ids, s->start, s->map);
    for (int64_t i = 0; i < ids->shape[0] * p->d.k; i++) {
        if (s->map[i] >= 0) s->slot[s->map[i]] = i;
    }
}

/* Row n of W1[e] and row c of W2[e], for weights and for their gradients. Row n of W1 makes column n of h. In the stack
 * that is row n as stored (FMOE_INTERLEAVED says which of them are gates, which only the activation needs to know). In
 * the list form, column n is row i of gate[e] or of up[e]. Returns p = NULL for a gradient nobody asked for. */
static ref_vec coded(ref_vec row, const fmoe_quant *q, int64_t e, int64_t n, int64_t N, bool list)
{
    row.quant = q;
    row.e = e;
    row.n = n;
    row.N = N;
    row.list = list;
    return row;
}

static ref_vec w1_row(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t e, int64_t n)
{
    if (w->w1) return coded(ref_row(ref_slice(w->w1, e), n), w->quant1, e, n, p->h_cols, false);
    const bool interleaved = p->d.flags & FMOE_INTERLEAVED;
    const int64_t i = !p->gated ? n : interleaved ? n / 2 : n % p->d.I;
    const bool gate = p->gated && n == ref_gate_col(p, i);
    const fmoe_tensor *list = gate ? w->gate : w->up;
    if (!list) return (ref_vec){.p = NULL};
    return coded(ref_row(ref_matrix(&list[e]), i), gate ? w->quant_gate : w->quant1, e, i, p->d.I, true);
}

static ref_vec w2_row(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t e, int64_t c)
{
    if (w->w2) return coded(ref_row(ref_slice(w->w2, e), c), w->quant2, e, c, p->d.H, false);
    if (!w->down) return (ref_vec){.p = NULL};
    return coded(ref_row(ref_matrix(&w->down[e]), c), w->quant2, e, c, p->d.H, true);
}

/* Row of B1 that makes column n of h: beside lists, B1 has gates, then ups, whatever the order of h. */
static int64_t b1_row(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t n)
{
    return !w->w1 && p->gated && (p->d.flags & FMOE_INTERLEAVED) ? n % 2 * p->d.I + n / 2 : n;
}

/* l = scale A[e] v over n elements of v, A [E,rank,n]; and m = scale B[e]^T v, B [E,n,rank]: the ways into an adapter,
 * which every term of it and of its gradients goes through once. */
static void project_a(const fmoe_tensor *A, float scale, int64_t e, int64_t rank, ref_vec v, int64_t n, double *l)
{
    for (int64_t i = 0; i < rank; i++) l[i] = fmoe_lora_scale(scale) * ref_dot(ref_row(ref_slice(A, e), i), v, n);
}

static void project_b1(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t e, const double *dh, double *m)
{
    for (int64_t i = 0; i < p->d.rank1; i++) m[i] = 0;
    for (int64_t n = 0; p->d.rank1 && n < p->h_cols; n++)
        ref_axpy(m, fmoe_lora_scale(w->lora_scale1) * dh[n], ref_row(ref_slice(w->lora_b1, e), b1_row(p, w, n)),
                 p->d.rank1);
}

static void project_b2(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t e, ref_vec g, double *m)
{
    for (int64_t i = 0; i < p->d.rank2; i++) m[i] = 0;
    for (int64_t c = 0; p->d.rank2 && c < p->d.H; c++)
        ref_axpy(m, fmoe_lora_scale(w->lora_scale2) * ref_get(g, c), ref_row(ref_slice(w->lora_b2, e), c), p->d.rank2);
}

static double bias_at(const fmoe_plan_impl *p, const fmoe_tensor *b, int64_t e, int64_t n)
{
    return (p->d.flags & FMOE_BIAS) && b ? ref_get(ref_row(ref_matrix(b), e), n) : 0;
}

/* h[n] = <x[t], W1[e][n, :]> + b1[e][n] + <l1, B1[e][n, :]>, with l1 = scale1 A1[e] x[t] */
static void up(const fmoe_plan_impl *p, const fmoe_experts_args *a, int64_t t, int64_t e, double *l1, double *h)
{
    const ref_vec x = ref_row(ref_matrix(a->x), t);
    const int64_t rank = p->d.rank1;
    project_a(a->w.lora_a1, a->w.lora_scale1, e, rank, x, p->d.H, l1);
    for (int64_t n = 0; n < p->h_cols; n++) {
        h[n] = ref_dot(x, w1_row(p, &a->w, e, n), p->d.H) + bias_at(p, a->w.b1, e, n);
        if (rank) h[n] += ref_dot(ref_buffer(l1), ref_row(ref_slice(a->w.lora_b1, e), b1_row(p, &a->w, n)), rank);
    }
}

/* y[c] = <a, W2[e][c, :]> + b2[e][c] + <l2, B2[e][c, :]>, with l2 = scale2 A2[e] a */
static double down(const fmoe_plan_impl *p, const fmoe_weights *w, int64_t e, ref_vec a, double *l2, int64_t c)
{
    const double y = ref_dot(a, w2_row(p, w, e, c), p->d.I) + bias_at(p, w->b2, e, c);
    return p->d.rank2 ? y + ref_dot(ref_buffer(l2), ref_row(ref_slice(w->lora_b2, e), c), p->d.rank2) : y;
}

/* out[t, :] = sum_j p[t,j] * y(t,j), in the order of j; with FMOE_ADD_OUT the sum begins with what is there.
 * saved [R,h_cols]: h in the order of the sorted rows, for the backward; rows of skipped slots are not written. */
fmoe_status fmoe_ref_experts_forward(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run)
{
    FMOE_TRY(fmoe_ref_check_ids(p, a->ids));
    const int64_t T = a->x->shape[0], k = p->d.k, H = p->d.H, I = p->d.I;
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const experts_scratch s = experts_carve(p, FMOE_FORWARD, T, &c);
    sort_slots(p, a->ids, &s);
    double *const saved = p->d.flags & FMOE_RECOMPUTE ? NULL : a->saved;

    for (int64_t t = 0; t < T; t++) {
        const ref_vec out = ref_row(ref_matrix(a->out), t);
        for (int64_t i = 0; i < H; i++) s.sum[i] = run->flags & FMOE_ADD_OUT ? ref_get(out, i) : 0;
        for (int64_t j = 0; j < k; j++) {
            const int64_t r = s.map[t * k + j];
            if (r < 0) continue;
            const int64_t e = ref_int2(a->ids, t, j);
            const double weight = ref_get(ref_row(ref_matrix(a->weights), t), j);
            double *const h = saved ? saved + r * p->h_cols : s.h;
            up(p, a, t, e, s.l1, h);
            fmoe_ref_activate(p, ref_buffer(h), ref_buffer(s.a));
            project_a(a->w.lora_a2, a->w.lora_scale2, e, p->d.rank2, ref_buffer(s.a), I, s.l2);
            for (int64_t i = 0; i < H; i++) s.sum[i] += weight * down(p, &a->w, e, ref_buffer(s.a), s.l2, i);
        }
        for (int64_t i = 0; i < H; i++) ref_set(out, i, s.sum[i]);
    }
    return FMOE_OK;
}

/* to[i] = sum, or to[i] += sum. */
static void store(ref_vec to, int64_t i, double sum, bool add) { ref_set(to, i, add ? ref_get(to, i) + sum : sum); }

/* dp, a and dh of every routed row; a and dh are kept, because the sums below go by expert and by token. */
static void backward_rows(const fmoe_plan_impl *p, const fmoe_experts_args *a, const experts_scratch *s)
{
    const int64_t k = p->d.k, H = p->d.H, I = p->d.I;
    const double *const saved = p->d.flags & FMOE_RECOMPUTE ? NULL : a->saved;
    for (int64_t i = 0; i < a->x->shape[0] * k; i++) {
        const int64_t t = i / k, j = i % k, r = s->map[i];
        double dp = 0;
        if (r >= 0) {
            const int64_t e = ref_int2(a->ids, t, j);
            const double weight = ref_get(ref_row(ref_matrix(a->weights), t), j);
            const ref_vec g = ref_row(ref_matrix(a->dout), t), act = ref_buffer(s->a + r * I);
            double *const l1 = s->l1 + r * p->d.rank1, *const m2 = s->m2 + r * p->d.rank2;
            /* the same sums in the same order: the same bits as the saved ones */
            if (!saved || p->d.rank1) up(p, a, t, e, l1, s->h);
            if (saved) memcpy(s->h, saved + r * p->h_cols, (size_t)p->h_cols * sizeof(double));
            fmoe_ref_activate(p, ref_buffer(s->h), act);
            for (int64_t c = 0; c < I; c++) s->v[c] = 0;
            for (int64_t c = 0; c < H; c++) {
                ref_axpy(s->v, ref_get(g, c), w2_row(p, &a->w, e, c), I);
                dp += ref_get(g, c) * bias_at(p, a->w.b2, e, c);
            }
            project_b2(p, &a->w, e, g, m2);
            for (int64_t c = 0; c < p->d.rank2; c++) ref_axpy(s->v, m2[c], ref_row(ref_slice(a->w.lora_a2, e), c), I);
            project_a(a->w.lora_a2, a->w.lora_scale2, e, p->d.rank2, act, I, s->l2 + r * p->d.rank2);
            dp += ref_dot(ref_buffer(s->v), act, I);
            for (int64_t c = 0; c < I; c++) s->v[c] *= weight;
            fmoe_ref_activate_backward(p, ref_buffer(s->h), ref_buffer(s->v), ref_buffer(s->dh + r * p->h_cols));
            project_b1(p, &a->w, e, s->dh + r * p->h_cols, s->m1 + r * p->d.rank1);
        }
        if (a->dweights) ref_set(ref_row(ref_matrix(a->dweights), t), j, dp);
    }
}

/* dW1[e], db1[e], dW2[e], db2[e]: sums over the rows of expert e, in the order of tokens. */
static void backward_expert(const fmoe_plan_impl *p, const fmoe_experts_args *a, const experts_scratch *s, int64_t e,
                            bool add)
{
    const int64_t k = p->d.k, H = p->d.H, I = p->d.I;
    for (int64_t n = 0; n < p->h_cols; n++) {
        const ref_vec dw = w1_row(p, &a->dw, e, n);
        if (!dw.p && !a->dw.b1) continue;
        double bias = 0;
        for (int64_t c = 0; c < H; c++) s->sum[c] = 0;
        for (int64_t r = s->start[e]; r < s->start[e + 1]; r++) {
            const double dh = s->dh[r * p->h_cols + n];
            ref_axpy(s->sum, dh, ref_row(ref_matrix(a->x), s->slot[r] / k), H);
            bias += dh;
        }
        for (int64_t c = 0; dw.p && c < H; c++) store(dw, c, s->sum[c], add);
        if (a->dw.b1) store(ref_row(ref_matrix(a->dw.b1), e), n, bias, add);
    }
    for (int64_t c = 0; c < H; c++) {
        const ref_vec dw = w2_row(p, &a->dw, e, c);
        if (!dw.p && !a->dw.b2) continue;
        double bias = 0;
        for (int64_t i = 0; i < I; i++) s->sum[i] = 0;
        for (int64_t r = s->start[e]; r < s->start[e + 1]; r++) {
            const int64_t t = s->slot[r] / k, j = s->slot[r] % k;
            const double weight = ref_get(ref_row(ref_matrix(a->weights), t), j);
            const double pg = weight * ref_get(ref_row(ref_matrix(a->dout), t), c);
            ref_axpy(s->sum, pg, ref_buffer(s->a + r * I), I);
            bias += pg;
        }
        for (int64_t i = 0; dw.p && i < I; i++) store(dw, i, s->sum[i], add);
        if (a->dw.b2) store(ref_row(ref_matrix(a->dw.b2), e), c, bias, add);
    }
}

/* The same for the adapters: each row of a factor's gradient is a sum over the rows of expert e. */
static void backward_adapters(const fmoe_plan_impl *p, const fmoe_experts_args *a, const experts_scratch *s, int64_t e,
                              bool add)
{
    const struct {
        const fmoe_tensor *grad;
        int64_t rows, columns;
    } factor[4] = {{a->dw.lora_a1, p->d.rank1, p->d.H},
                   {a->dw.lora_b1, p->h_cols, p->d.rank1},
                   {a->dw.lora_a2, p->d.rank2, p->d.I},
                   {a->dw.lora_b2, p->d.H, p->d.rank2}};
    const int64_t k = p->d.k;
    for (int f = 0; f < 4; f++) {
        for (int64_t i = 0; factor[f].grad && i < factor[f].rows; i++) {
            const int64_t n = factor[f].columns;
            for (int64_t c = 0; c < n; c++) s->sum[c] = 0;
            for (int64_t r = s->start[e]; r < s->start[e + 1]; r++) {
                const int64_t t = s->slot[r] / k;
                const double weight = ref_get(ref_row(ref_matrix(a->weights), t), s->slot[r] % k);
                switch (f) {
                case 0: ref_axpy(s->sum, s->m1[r * p->d.rank1 + i], ref_row(ref_matrix(a->x), t), n); break;
                case 1: ref_axpy(s->sum, s->dh[r * p->h_cols + i], ref_buffer(s->l1 + r * n), n); break;
                case 2: ref_axpy(s->sum, weight * s->m2[r * p->d.rank2 + i], ref_buffer(s->a + r * n), n); break;
                default:
                    ref_axpy(s->sum, weight * ref_get(ref_row(ref_matrix(a->dout), t), i), ref_buffer(s->l2 + r * n),
                             n);
                }
            }
            const ref_vec to = ref_row(ref_slice(factor[f].grad, e), f == 1 ? b1_row(p, &a->w, i) : i);
            for (int64_t c = 0; c < n; c++) store(to, c, s->sum[c], add);
        }
    }
}

/* FMOE_ADD_DX: dx is added to. FMOE_ACCUMULATE: the gradients of weights and biases are added to. An expert without
 * rows has gradient 0: that overwrites what is there, or leaves it alone. */
fmoe_status fmoe_ref_experts_backward(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run)
{
    FMOE_TRY(fmoe_ref_check_ids(p, a->ids));
    const int64_t T = a->x->shape[0], k = p->d.k, H = p->d.H;
    const bool accumulate = run->flags & FMOE_ACCUMULATE;
    fmoe_carve c = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const experts_scratch s = experts_carve(p, FMOE_BACKWARD, T, &c);
    sort_slots(p, a->ids, &s);
    backward_rows(p, a, &s);

    for (int64_t t = 0; a->dx && t < T; t++) {
        const ref_vec dx = ref_row(ref_matrix(a->dx), t);
        for (int64_t i = 0; i < H; i++) s.sum[i] = run->flags & FMOE_ADD_DX ? ref_get(dx, i) : 0;
        for (int64_t j = 0; j < k; j++) {
            const int64_t r = s.map[t * k + j];
            if (r < 0) continue;
            for (int64_t n = 0; n < p->h_cols; n++) {
                ref_axpy(s.sum, s.dh[r * p->h_cols + n], w1_row(p, &a->w, ref_int2(a->ids, t, j), n), H);
            }
            for (int64_t i = 0; i < p->d.rank1; i++) {
                const ref_mat a1 = ref_slice(a->w.lora_a1, ref_int2(a->ids, t, j));
                ref_axpy(s.sum, s.m1[r * p->d.rank1 + i], ref_row(a1, i), H);
            }
        }
        for (int64_t i = 0; i < H; i++) ref_set(dx, i, s.sum[i]);
    }
    for (int64_t e = 0; e < p->d.E; e++) {
        if (accumulate && s.start[e] == s.start[e + 1]) continue;
        backward_expert(p, a, &s, e, accumulate);
        backward_adapters(p, a, &s, e, accumulate);
    }
    return FMOE_OK;
}
