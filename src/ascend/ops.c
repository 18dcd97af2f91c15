/* SPDX-License-Identifier: Apache-2.0
 * ops.c - small launches: casts, copies, fills, element-wise operators, and tensors that must be packed for an
 * operator. */
#include "ops.h"

void asc_cast(asc_call *c, asc_view to, asc_view from)
{
    const aclTensor *src = asc_t(c, from), *dst = asc_t(c, to);
    ASC_LAUNCH(c, Cast, src, to.dtype, dst);
}

void asc_copy(asc_call *c, asc_view to, asc_view from)
{
    const aclTensor *dst = asc_t(c, to), *src = asc_t(c, from);
    ASC_LAUNCH(c, InplaceCopy, dst, src);
}

void asc_zero(asc_call *c, asc_view v) { asc_memset_zero(c, v.data, (size_t)asc_count(&v) * asc_size(v.dtype)); }

void asc_add_to(asc_call *c, asc_view to, asc_view from)
{
    const aclTensor *dst = asc_t(c, to), *src = asc_t(c, from);
    const aclScalar *one = asc_s(c, 1);
    ASC_LAUNCH(c, InplaceAdd, dst, src, one);
}

void asc_scale(asc_call *c, asc_view v, double by)
{
    if (asc_count(&v) == 0) return;
    const aclTensor *t = asc_t(c, v);
    const aclScalar *s = asc_s(c, by);
    ASC_LAUNCH(c, InplaceMuls, t, s);
}

void asc_fill_where(asc_call *c, asc_view v, asc_view mask, double value)
{
    const aclTensor *dst = asc_t(c, v), *where = asc_t(c, mask);
    const bool whole = v.dtype == ACL_INT32 || v.dtype == ACL_INT64;
    const aclScalar *with = whole ? asc_si(c, (int64_t)value) : asc_s(c, value);
    ASC_LAUNCH(c, InplaceMaskedFillScalar, dst, where, with);
}

/* ---- Element-wise, into new scratch ---- */

asc_view asc_like(asc_call *c, asc_view v)
{
    return v.ndim == 1   ? asc_new1(c, v.dtype, v.dims[0])
           : v.ndim == 2 ? asc_new2(c, v.dtype, v.dims[0], v.dims[1])
                         : asc_new3(c, v.dtype, v.dims[0], v.dims[1], v.dims[2]);
}

#define UNARY(Name)                                                                                                    \
    asc_view asc_do_##Name(asc_call *c, asc_view x)                                                                    \
    {                                                                                                                  \
        const asc_view r = asc_like(c, x);                                                                             \
        const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);                                                          \
        ASC_LAUNCH(c, Name, tx, tr);                                                                                   \
        return r;                                                                                                      \
    }

#define BINARY(Name)                                                                                                   \
    asc_view asc_do_##Name(asc_call *c, asc_view x, asc_view y)                                                        \
    {                                                                                                                  \
        const asc_view r = asc_like(c, x);                                                                             \
        const aclTensor *tx = asc_t(c, x), *ty = asc_t(c, y), *tr = asc_t(c, r);                                       \
        ASC_LAUNCH(c, Name, tx, ty, tr);                                                                               \
        return r;                                                                                                      \
    }

#define WITH_ALPHA(Name)                                                                                               \
    asc_view asc_do_##Name(asc_call *c, asc_view x, asc_view y)                                                        \
    {                                                                                                                  \
        const asc_view r = asc_like(c, x);                                                                             \
        const aclTensor *tx = asc_t(c, x), *ty = asc_t(c, y), *tr = asc_t(c, r);                                       \
        const aclScalar *one = asc_s(c, 1);                                                                            \
        ASC_LAUNCH(c, Name, tx, ty, one, tr);                                                                          \
        return r;                                                                                                      \
    }

UNARY(Silu)
UNARY(Relu)
UNARY(Sigmoid)
UNARY(Sqrt)
BINARY(Mul)
BINARY(Div)
BINARY(SiluBackward)
BINARY(SigmoidBackward)
WITH_ALPHA(Add)
WITH_ALPHA(Sub)

asc_view asc_do_Muls(asc_call *c, asc_view x, double by)
{
    const asc_view r = asc_like(c, x);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclScalar *s = asc_s(c, by);
    ASC_LAUNCH(c, Muls, tx, s, tr);
    return r;
}

asc_view asc_do_Adds(asc_call *c, asc_view x, double plus)
{
    const asc_view r = asc_like(c, x);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclScalar *s = asc_s(c, plus), *one = asc_s(c, 1);
    ASC_LAUNCH(c, Adds, tx, s, one, tr);
    return r;
}

asc_view asc_do_Clamp(asc_call *c, asc_view x, const double *low, const double *high)
{
    const asc_view r = asc_like(c, x);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclScalar *lo = low ? asc_s(c, *low) : NULL, *hi = high ? asc_s(c, *high) : NULL;
    ASC_LAUNCH(c, Clamp, tx, lo, hi, tr);
    return r;
}

/* ---- Packed tensors ---- */

asc_view asc_packed_as(asc_call *c, asc_view v, aclDataType dtype)
{
    if (v.dtype == dtype && asc_is_packed(&v)) return asc_shape(v, v.ndim, v.dims[0], v.dims[1], v.dims[2]);
    asc_view like = v;
    like.dtype = dtype;
    const asc_view to = asc_like(c, like);
    if (v.dtype != dtype && asc_is_packed(&v)) asc_cast(c, to, v);
    else asc_copy(c, to, v);
    return to;
}

asc_view asc_packed(asc_call *c, const fmoe_tensor *t)
{
    const asc_view v = asc_of(t);
    return asc_packed_as(c, v, v.dtype);
}

asc_view asc_target(asc_call *c, const fmoe_tensor *t, aclDataType dtype, bool add)
{
    asc_view v = asc_of(t);
    if (!add && v.dtype == dtype && asc_is_packed(&v)) return asc_shape(v, v.ndim, v.dims[0], v.dims[1], v.dims[2]);
    v.dtype = dtype;
    return asc_like(c, v);
}

void asc_deliver(asc_call *c, const fmoe_tensor *t, asc_view from, bool add)
{
    const asc_view v = asc_of(t);
    if (c->status != FMOE_OK || v.data == from.data) return;
    if (add) asc_add_to(c, v, from);
    else if (v.dtype != from.dtype && asc_is_packed(&v)) asc_cast(c, v, from);
    else asc_copy(c, v, from);
}
