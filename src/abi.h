/* SPDX-License-Identifier: Apache-2.0
 *
 * abi.h - structs of callers that were compiled with the header of another version. fusedmoe.h, "Version", has the
 * rules; a struct that grows needs no change here, only new fields at its end. */
#ifndef FMOE_ABI_H
#define FMOE_ABI_H

#include "backend.h"

enum { FMOE_STRUCT_MOST = 4096 }; /* bytes; a larger size is garbage, and memory that is not there would be read */

/* What is known of a public struct that begins with its size. */
typedef struct fmoe_struct_form {
    const char *name;
    size_t size;  /* now */
    size_t least; /* from when its fields are where they are now: 0.1.0, or 0.2.0 where it holds fmoe_weights */
    int n_weights;
    size_t weights[4]; /* offsets of the fmoe_weights it holds */
} fmoe_struct_form;

extern const fmoe_struct_form fmoe_desc_form, fmoe_run_form, fmoe_route_args_form, fmoe_permute_args_form,
    fmoe_unpermute_args_form, fmoe_gmm_args_form, fmoe_activation_args_form, fmoe_pack_args_form,
    fmoe_experts_args_form, fmoe_block_args_form, fmoe_quant_form, fmoe_quant_args_form, fmoe_repack_args_form;

/* The struct as this version has it: *read is `given` where it has all of that, else `copy`, with what was given and
 * zeros for the rest. Reads `given` up to its size only. */
fmoe_status fmoe_struct_read(const fmoe_struct_form *form, const void *given, void *copy, const void **read);

#endif
