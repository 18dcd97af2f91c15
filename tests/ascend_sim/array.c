/* SPDX-License-Identifier: Apache-2.0
 * array.c - how kernels read and write tensors: as packed row-major arrays of double, float or int64. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "util.h"

size_t sim_dtype_size(int dtype)
{
    switch (dtype) {
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32: return 4;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16: return 2;
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL: return 1;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE: return 8;
    default: return 0;
    }
}

int64_t sim_numel(const sim_tensor *t)
{
    int64_t n = t->present ? 1 : 0;
    for (int i = 0; i < t->ndim; i++) n *= t->dims[i];
    return n;
}

bool sim_contiguous(const sim_tensor *t)
{
    int64_t run = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->dims[i] != 1 && t->strides[i] != run) return false;
        run *= t->dims[i];
    }
    return true;
}

bool sim_same_shape(const sim_tensor *a, const sim_tensor *b)
{
    if (a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->dims[i] != b->dims[i]) return false;
    return true;
}

void *sim_buffer(sim_exec *e, size_t bytes)
{
    void **p = malloc(64 + bytes);
    if (!p) abort();
    *p = e->arena;
    e->arena = p;
    return (char *)p + 64;
}

void sim_release(sim_exec *e, void *mark)
{
    while (e->arena != mark) {
        void *next = *(void **)e->arena;
        free(e->arena);
        e->arena = next;
    }
}

void sim_abort(sim_exec *e, const char *format, ...)
{
    char text[256];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    sim_violation("aclnn%s: %s", e->name, text);
    sim_stream_error(ACL_E_AICORE);
    e->status = ACL_E_AICORE;
}

sim_around sim_split(const sim_tensor *t, int64_t dim)
{
    sim_around a = {1, 1, 1};
    if (dim < 0) dim += t->ndim;
    for (int i = 0; i < t->ndim; i++) *(i < dim ? &a.outer : i == dim ? &a.n : &a.inner) *= t->dims[i];
    return a;
}

static char *address(const sim_tensor *t)
{
    return (char *)sim_twin(t->data) + (size_t)t->offset * sim_dtype_size(t->dtype);
}

/* One inner row of n elements with a stride, to and from double. */
#define CASE(code, type, get, put)                                                                                     \
    case code:                                                                                                         \
        if (out)                                                                                                       \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                const type v = ((const type *)p)[i * s];                                                               \
                out[i] = get;                                                                                          \
            }                                                                                                          \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                const double d = in[i];                                                                                \
                ((type *)p)[i * s] = (type)(put);                                                                      \
            }                                                                                                          \
        break;

static void row(int dtype, void *p, int64_t s, int64_t n, double *out, const double *in)
{
    switch (dtype) {
        CASE(ACL_FLOAT, float, v, d)
        CASE(ACL_DOUBLE, double, v, d)
        CASE(ACL_FLOAT16, uint16_t, fmoe_f16_to_float(v), fmoe_float_to_f16((float)d))
        CASE(ACL_BF16, uint16_t, fmoe_bf16_to_float(v), fmoe_float_to_bf16((float)d))
        CASE(ACL_INT8, int8_t, v, d)
        CASE(ACL_UINT8, uint8_t, v, d)
        CASE(ACL_BOOL, uint8_t, v != 0, d != 0)
        CASE(ACL_INT16, int16_t, v, d)
        CASE(ACL_INT32, int32_t, v, d)
        CASE(ACL_INT64, int64_t, (double)v, d)
    default: break;
    }
}

static void walk(const sim_tensor *t, double *out, const double *in)
{
    const int64_t total = sim_numel(t);
    if (total == 0) return;
    const size_t size = sim_dtype_size(t->dtype);
    const int inner = t->ndim - 1;
    if (t->ndim == 0 || sim_contiguous(t)) {
        row(t->dtype, address(t), 1, total, out, in);
        return;
    }
    const int64_t n = t->dims[inner];
    int64_t index[SIM_MAX_DIMS] = {0};
    for (int64_t done = 0; done < total; done += n) {
        int64_t at = 0;
        for (int d = 0; d < inner; d++) at += index[d] * t->strides[d];
        row(t->dtype, address(t) + (size_t)at * size, t->strides[inner], n, out ? out + done : NULL,
            in ? in + done : NULL);
        for (int d = inner - 1; d >= 0 && ++index[d] == t->dims[d]; d--) index[d] = 0;
    }
}

double *sim_load(sim_exec *e, int tensor)
{
    const sim_tensor *t = &e->t[tensor];
    double *out = sim_buffer(e, (size_t)sim_numel(t) * sizeof *out);
    walk(t, out, NULL);
    return out;
}

double *sim_load_as(sim_exec *e, int tensor, const sim_tensor *like)
{
    sim_tensor t = e->t[tensor];
    const int more = like->ndim - t.ndim;
    for (int d = like->ndim - 1; d >= 0; d--) {
        const int own = d - more;
        const bool repeat = own < 0 || (t.dims[own] == 1 && like->dims[d] != 1);
        t.strides[d] = repeat ? 0 : t.strides[own];
        t.dims[d] = like->dims[d];
    }
    t.ndim = like->ndim;
    double *out = sim_buffer(e, (size_t)sim_numel(&t) * sizeof *out);
    walk(&t, out, NULL);
    return out;
}

void sim_store(sim_exec *e, int tensor, const double *values) { walk(&e->t[tensor], NULL, values); }

float *sim_to_float(sim_exec *e, const sim_tensor *t, int64_t index0, int64_t count0)
{
    sim_tensor part = *t;
    part.dims[0] = count0;
    part.offset += index0 * part.strides[0];
    const int64_t n = sim_numel(&part);
    float *out = sim_buffer(e, (size_t)n * sizeof *out);
    if (n > 0 && sim_contiguous(&part) && t->dtype != ACL_DOUBLE) {
        const void *p = address(&part);
        if (t->dtype == ACL_FLOAT) memcpy(out, p, (size_t)n * 4);
        else if (t->dtype == ACL_BF16)
            for (int64_t i = 0; i < n; i++) out[i] = fmoe_bf16_to_float(((const uint16_t *)p)[i]);
        else
            for (int64_t i = 0; i < n; i++) out[i] = fmoe_f16_to_float(((const uint16_t *)p)[i]);
        return out;
    }
    double *wide = malloc((size_t)(n ? n : 1) * sizeof *wide);
    if (!wide) abort();
    walk(&part, wide, NULL);
    for (int64_t i = 0; i < n; i++) out[i] = (float)wide[i];
    free(wide);
    return out;
}

float *sim_load_float(sim_exec *e, int tensor)
{
    const sim_tensor *t = &e->t[tensor];
    return sim_to_float(e, t, 0, t->ndim ? t->dims[0] : 1);
}

int64_t *sim_load_int(sim_exec *e, int tensor)
{
    const int64_t n = sim_numel(&e->t[tensor]);
    const double *wide = sim_load(e, tensor);
    int64_t *out = sim_buffer(e, (size_t)n * sizeof *out);
    for (int64_t i = 0; i < n; i++) out[i] = (int64_t)wide[i];
    return out;
}

void sim_store_part(sim_exec *e, int tensor, int64_t index0, int64_t count0, const float *values)
{
    sim_tensor t = e->t[tensor];
    if (t.ndim) {
        t.dims[0] = count0;
        t.offset += index0 * t.strides[0];
    }
    const int64_t n = sim_numel(&t);
    if (n == 0) return;
    if (sim_contiguous(&t) && (t.dtype == ACL_FLOAT || t.dtype == ACL_BF16)) {
        void *p = address(&t);
        if (t.dtype == ACL_FLOAT) memcpy(p, values, (size_t)n * 4);
        else
            for (int64_t i = 0; i < n; i++) ((uint16_t *)p)[i] = fmoe_float_to_bf16(values[i]);
        return;
    }
    double *wide = malloc((size_t)n * sizeof *wide);
    if (!wide) abort();
    for (int64_t i = 0; i < n; i++) wide[i] = values[i];
    walk(&t, NULL, wide);
    free(wide);
}

void sim_store_float(sim_exec *e, int tensor, const float *values)
{
    const sim_tensor *t = &e->t[tensor];
    sim_store_part(e, tensor, 0, t->ndim ? t->dims[0] : 1, values);
}

void sim_store_int(sim_exec *e, int tensor, const int64_t *values)
{
    const int64_t n = sim_numel(&e->t[tensor]);
    double *wide = sim_buffer(e, (size_t)n * sizeof *wide);
    for (int64_t i = 0; i < n; i++) wide[i] = (double)values[i];
    sim_store(e, tensor, wide);
}

/* A fault of the device, planted: FMOE_SIM_SPOIL names an operator whose results are wrong. Numbers come out
 * scaled, shifted and in the opposite order, truths inverted, indices and counts in reverse, so that they stay in
 * range. */
void sim_spoil(sim_exec *e)
{
    const char *name = getenv("FMOE_SIM_SPOIL");
    if (!name || strcmp(name, e->name) != 0) return;
    for (int i = 0; i < e->nt; i++) {
        const sim_tensor *t = &e->t[i];
        const int64_t n = sim_numel(t);
        if (!t->is_out || n == 0) continue;
        double *v = sim_load(e, i);
        for (int64_t j = 0; j < n; j++) {
            if (t->dtype == ACL_BOOL) v[j] = v[j] == 0;
            else if (t->dtype != ACL_INT32 && t->dtype != ACL_INT64) v[j] = 1.5 - 1.25 * v[j];
            else if (j < n / 2) {
                const double other = v[n - 1 - j];
                v[n - 1 - j] = v[j];
                v[j] = other;
            }
        }
        sim_store(e, i, v);
    }
}

/* ---- Matrix product. Plain loops that the compiler turns into vector code; one clone for each instruction set. ----
 */

#if defined(__x86_64__)
#define CLONES __attribute__((target_clones("avx512f", "avx2,fma", "default")))
#else
#define CLONES
#endif

CLONES static void axpy_rows(int64_t m, int64_t n, int64_t k, const float *a, int64_t si, int64_t sp, const float *b,
                             float *c)
{
    /* c[i,:] += a(i,p) * b[p,:], four p at a time */
    for (int64_t i = 0; i < m; i++) {
        float *restrict ci = c + i * n;
        int64_t p = 0;
        for (; p + 4 <= k; p += 4) {
            const float a0 = a[i * si + p * sp], a1 = a[i * si + (p + 1) * sp], a2 = a[i * si + (p + 2) * sp],
                        a3 = a[i * si + (p + 3) * sp];
            const float *restrict b0 = b + p * n, *restrict b1 = b0 + n, *restrict b2 = b1 + n, *restrict b3 = b2 + n;
            for (int64_t j = 0; j < n; j++) ci[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j];
        }
        for (; p < k; p++) {
            const float a0 = a[i * si + p * sp];
            const float *restrict b0 = b + p * n;
            for (int64_t j = 0; j < n; j++) ci[j] += a0 * b0[j];
        }
    }
}

void sim_sgemm(int64_t m, int64_t n, int64_t k, const float *a, bool ta, const float *b, bool tb, float *c)
{
    float *packed = NULL;
    if (tb) { /* b is [n,k]: turn it in blocks */
        packed = malloc((size_t)(n * k + 1) * sizeof *packed);
        if (!packed) abort();
        for (int64_t j0 = 0; j0 < n; j0 += 32)
            for (int64_t p = 0; p < k; p++)
                for (int64_t j = j0; j < n && j < j0 + 32; j++) packed[p * n + j] = b[j * k + p];
        b = packed;
    }
    axpy_rows(m, n, k, a, ta ? 1 : k, ta ? m : 1, b, c);
    free(packed);
}
