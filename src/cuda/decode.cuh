// SPDX-License-Identifier: Apache-2.0
// decode.cuh - few tokens, inference: weights are streamed once.
#pragma once
#include "common.cuh"

// Runs the forward of few tokens where that path applies; false: it does not, and nothing was done. Scratch: a_rows [R, I] in the
// plan's dtype.
bool decode_run(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run, void *a_rows);
