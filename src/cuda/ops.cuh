// SPDX-License-Identifier: Apache-2.0
// ops.cuh - the operations behind the backend table.
#pragma once
#include "common.cuh"

// The plan's device is current inside a call; the caller's is restored.
struct DeviceScope {
    int before = -1;
    explicit DeviceScope(int device)
    {
        if (cudaGetDevice(&before) != cudaSuccess || before == device) before = -1;
        // always: a thread that has called nothing yet has no context, and making tensor maps needs one.
        cudaSetDevice(device);
    }
    ~DeviceScope()
    {
        if (before >= 0) cudaSetDevice(before);
    }
};

// Plans and memory may be made while the caller captures a stream into a graph: they are no part of that.
struct OutsideCapture {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
    ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

static constexpr size_t kOpsAlign = 256; // of a workspace

static inline View view(const fmoe_tensor *t)
{
    if (!t) return View{};
    return View{fmoe_data(t), fmoe_tensor_dtype(t), fmoe_stride(t, 0), t->ndim > 1 ? fmoe_stride(t, 1) : 1};
}

// FMOE_ERR_INDEX when an earlier call on this plan met a bad id, size or map entry.
fmoe_status plan_report(const Plan *plan);

// What every run call begins with.
#define BEGIN(p)                                                                                                       \
    const Plan *plan = plan_of(p);                                                                                     \
    DeviceScope scope(plan->device);                                                                                   \
    FMOE_TRY(plan_report(plan));                                                                                       \
    Stream s = stream_of(plan, run)

fmoe_status experts_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved);
fmoe_status ops_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved);
void gmm_carve(fmoe_carve *c, int64_t R, const fmoe_plan_impl *p); // the workspace of a grouped matmul

fmoe_status quantise_stack(const fmoe_quant_args *); // quant/quantise.cu
fmoe_status dequantise_stack(const fmoe_quant_args *);
fmoe_status experts_forward(const fmoe_plan_impl *, const fmoe_experts_args *, const fmoe_run *);
fmoe_status experts_backward(const fmoe_plan_impl *, const fmoe_experts_args *, const fmoe_run *);
fmoe_status route_forward(const fmoe_plan_impl *, const fmoe_route_args *, const fmoe_run *);
fmoe_status route_backward(const fmoe_plan_impl *, const fmoe_route_args *, const fmoe_run *);
fmoe_status permute_forward(const fmoe_plan_impl *, const fmoe_permute_args *, const fmoe_run *);
fmoe_status permute_backward(const fmoe_plan_impl *, const fmoe_permute_args *, const fmoe_run *);
fmoe_status unpermute_forward(const fmoe_plan_impl *, const fmoe_unpermute_args *, const fmoe_run *);
fmoe_status unpermute_backward(const fmoe_plan_impl *, const fmoe_unpermute_args *, const fmoe_run *);
fmoe_status gmm_forward(const fmoe_plan_impl *, const fmoe_gmm_args *, const fmoe_run *);
fmoe_status gmm_backward(const fmoe_plan_impl *, const fmoe_gmm_args *, const fmoe_run *);
fmoe_status activation_forward(const fmoe_plan_impl *, const fmoe_activation_args *, const fmoe_run *);
fmoe_status activation_backward(const fmoe_plan_impl *, const fmoe_activation_args *, const fmoe_run *);

extern const struct fmoe_device_ops fmoe_cuda_device; // ep/ep_rows.cu

// rowmap.cu: other weights for the same rows
void rowmap_weigh(const View &p, int64_t T, int64_t k, const RowMap &m, Stream &s);

// ---- routing kernels (route.cu) ----

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
