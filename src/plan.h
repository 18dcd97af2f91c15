/* SPDX-License-Identifier: Apache-2.0
 * plan.h - plans as the rest of the core sees them. */
#ifndef FMOE_PLAN_H
#define FMOE_PLAN_H

#include <stdbool.h>

#include "backend.h"

/* From a handle to the plan, held until released: a plan destroyed meanwhile lives on for the call under way. */
fmoe_status fmoe_plan_acquire(fmoe_plan handle, fmoe_plan_impl **plan);
void fmoe_plan_release(fmoe_plan handle);

/* Without a handle: for the parts of a block. */
fmoe_status fmoe_plan_build(const fmoe_desc *desc, fmoe_plan_impl **plan);
void fmoe_plan_free(fmoe_plan_impl *plan);

enum { PART_COUNT = sizeof((fmoe_plan_impl){0}.part) / sizeof(fmoe_plan_impl *) };

/* block.c */
enum { PART_ROUTER, PART_ROUTE, PART_EXPERTS, PART_GATE, PART_SHARED_ROUTE, PART_SHARED };

fmoe_status fmoe_block_build(fmoe_plan_impl *plan);
fmoe_status fmoe_block_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved);
fmoe_status fmoe_block_run(const fmoe_plan_impl *p, fmoe_pass pass, const fmoe_block_args *a, const fmoe_run *run);

/* Bytes of any plan, block or not. */
fmoe_status fmoe_plan_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved);

#endif
