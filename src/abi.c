/* SPDX-License-Identifier: Apache-2.0
 * abi.c - structs of other versions. */
#include "abi.h"

#include <string.h>

/* Sizes of the first version are numbers, so that they stay when a struct grows. All of the API is for 64 bits. */
const fmoe_struct_form fmoe_desc_form = {"fmoe_desc", sizeof(fmoe_desc), 176, 0, {0}};
const fmoe_struct_form fmoe_run_form = {"fmoe_run", sizeof(fmoe_run), 56, 0, {0}};
const fmoe_struct_form fmoe_route_args_form = {"fmoe_route_args", sizeof(fmoe_route_args), 64, 0, {0}};
const fmoe_struct_form fmoe_permute_args_form = {"fmoe_permute_args", sizeof(fmoe_permute_args), 48, 0, {0}};
const fmoe_struct_form fmoe_unpermute_args_form = {"fmoe_unpermute_args", sizeof(fmoe_unpermute_args), 64, 0, {0}};
const fmoe_struct_form fmoe_gmm_args_form = {"fmoe_gmm_args", sizeof(fmoe_gmm_args), 88, 0, {0}};
const fmoe_struct_form fmoe_activation_args_form = {"fmoe_activation_args", sizeof(fmoe_activation_args), 40, 0, {0}};
const fmoe_struct_form fmoe_quant_form = {"fmoe_quant", sizeof(fmoe_quant), 64, 0, {0}};
const fmoe_struct_form fmoe_quant_args_form = {"fmoe_quant_args", sizeof(fmoe_quant_args), 32, 0, {0}};
const fmoe_struct_form fmoe_repack_args_form = {"fmoe_repack_args", sizeof(fmoe_repack_args), 48, 0, {0}};
const fmoe_struct_form fmoe_pack_args_form = {
    "fmoe_pack_args", sizeof(fmoe_pack_args), 200, 1, {offsetof(fmoe_pack_args, w)}};
const fmoe_struct_form fmoe_experts_args_form = {"fmoe_experts_args",
                                                 sizeof(fmoe_experts_args),
                                                 432,
                                                 2,
                                                 {offsetof(fmoe_experts_args, w), offsetof(fmoe_experts_args, dw)}};
const fmoe_struct_form fmoe_block_args_form = {"fmoe_block_args",
                                               sizeof(fmoe_block_args),
                                               848,
                                               4,
                                               {offsetof(fmoe_block_args, w), offsetof(fmoe_block_args, shared),
                                                offsetof(fmoe_block_args, dw), offsetof(fmoe_block_args, dshared)}};

/* fmoe_weights of 0.1.0 had no spare fields. */
enum { WEIGHTS_0_1 = 112, SPARE = sizeof(fmoe_weights) - WEIGHTS_0_1 };

/* From 0.1.0: the places of the spare fields stay empty. */
static void spread(const fmoe_struct_form *form, const char *given, size_t size, char *copy)
{
    size_t from = 0, to = 0;
    for (int i = 0; i < form->n_weights; i++) {
        const size_t n = form->weights[i] + WEIGHTS_0_1 - to;
        memcpy(copy + to, given + from, n);
        from += n;
        to += n + SPARE;
    }
    memcpy(copy + to, given + from, size - from);
}

fmoe_status fmoe_struct_read(const fmoe_struct_form *form, const void *given, void *copy, const void **read)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    *read = given;
    if (size == form->size) return FMOE_OK;
    const size_t first = form->least - (size_t)form->n_weights * SPARE; /* of 0.1.0 */
    if (size > FMOE_STRUCT_MOST || (size < form->least && size != first))
        return fmoe_fail(FMOE_ERR_ABI,
                         "%s.size is %zu, this library (%s) knows %zu, %zu of version 0.1.0, and sizes from %zu to %d",
                         form->name, size, fmoe_version_string(), form->size, first, form->least, FMOE_STRUCT_MOST);
    for (size_t i = form->size; i < size; i++)
        if (((const unsigned char *)given)[i])
            return fmoe_fail(FMOE_ERR_ARG,
                             "%s.size is %zu, this library (%s) knows %zu bytes of it, and byte %zu is not zero: a "
                             "field of a later version is set",
                             form->name, size, fmoe_version_string(), form->size, i);
    if (size > form->size) return FMOE_OK;
    memset(copy, 0, form->size);
    if (size < form->least) spread(form, given, size, copy);
    else memcpy(copy, given, size);
    memcpy(copy, &form->size, sizeof form->size);
    *read = copy;
    return FMOE_OK;
}
