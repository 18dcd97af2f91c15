// SPDX-License-Identifier: Apache-2.0
// route.cuh - arguments of the routing kernels.
#pragma once
#include "common.cuh"

struct RouteArgs {
    int64_t T, E, k;
    fmoe_route_rule rule;
    uint32_t flags; // of the plan: skip marks
    int replay;
    View logits, ids, weights; // backward: weights are dweights, read
    View dlogits;
    const float *bias;
    int64_t bias_s;
    void *bad_rows; // int64, zero before
    DeviceError *error;
};

bool route_fits(int device, int64_t E, int64_t k, int64_t groups);
void route_run(const RouteArgs &a, bool forward, Stream &s);
