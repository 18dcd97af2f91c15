// SPDX-License-Identifier: Apache-2.0
// backend.cu - the backend table: plans, sizes, words about them, and errors of the runtime in ours.
#include "ops.cuh"
#include "sm80/product.cuh"
#include "sm90/coded/inside.cuh"
#include "sm90/product.cuh"

#include <cstdio>
#include <cstdlib>
#include <new>

const fmoe_core *fmoe_cuda_core;

static constexpr int64_t kMaxExperts = 65535; // the y dimension of a grid

fmoe_status fmoe_cuda_launched(const char *what)
{
    const cudaError_t e = cudaGetLastError();
    if (e == cudaSuccess) return FMOE_OK;
    return FAIL(FMOE_ERR_DEVICE, "CUDA: %s: %s (%s)", what, cudaGetErrorName(e), cudaGetErrorString(e));
}

fmoe_status plan_report(const Plan *plan)
{
    volatile DeviceError *e = plan->error;
    const uint32_t code = e->code;
    if (!code) return FMOE_OK;
    const long long index = e->index, value = e->value, E = plan->shape.E;
    e->code = 0;
    switch (code) {
    case DEVERR_ID:
        return FAIL(
            FMOE_ERR_INDEX,
            "an earlier call on this plan met id %lld in slot %lld (token %lld), E is %lld; the slot was skipped",
            value, index, plan->shape.k ? index / plan->shape.k : index, E);
    case DEVERR_SIZE:
        return FAIL(
            FMOE_ERR_INDEX,
            "an earlier call on this plan met group size or sum %lld at group %lld, which is negative or past the rows",
            value, index);
    default:
        return FAIL(FMOE_ERR_INDEX,
                    "an earlier call on this plan met map[%lld] = %lld, which is out of range; the slot was skipped",
                    index, value);
    }
}

// ---- Plans ----

static fmoe_status runtime_missing(cudaError_t e)
{
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (driver == 0)
        return FAIL(FMOE_ERR_BACKEND, "CUDA: no driver was found (%s); this library was built with CUDA %d.%d",
                    cudaGetErrorString(e), runtime / 1000, runtime % 1000 / 10);
    return FAIL(FMOE_ERR_BACKEND,
                "CUDA: no usable device: %s; the driver supports CUDA %d.%d, this library was built with %d.%d",
                cudaGetErrorString(e), driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
}

__global__ void probe() {}

// What is there, or less: FMOE_CUDA_SHARED (bytes of shared memory a block) and FMOE_CUDA_SMS imitate smaller cards.
static int at_most(int there, const char *name)
{
    const char *text = getenv(name);
    const int asked = text ? atoi(text) : 0;
    return asked > 0 && asked < there ? asked : there;
}

fmoe_status fmoe_cuda_there(int id)
{
    int count = 0;
    const cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess) return runtime_missing(e);
    if (id < 0 || id >= count) return FAIL(FMOE_ERR_BACKEND, "CUDA: device %d was asked for, %d found", id, count);
    return FMOE_OK;
}

static fmoe_status open_device(Plan *plan, int id)
{
    FMOE_TRY(fmoe_cuda_there(id));
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    cudaDeviceGetAttribute(&plan->sms, cudaDevAttrMultiProcessorCount, id);
    plan->sms = at_most(plan->sms, "FMOE_CUDA_SMS");
    int shared = 0;
    cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    plan->shared = (size_t)at_most(shared, "FMOE_CUDA_SHARED");
    const char *const ring = getenv("FMOE_CUDA_RING"); // bytes
    plan->ring = ring && atoll(ring) > 0 ? atoll(ring) : (int64_t)62 << 20;
    const char *const codes = getenv("FMOE_CUDA_CODES"); // ahead: quant/chunks.cuh for all
    plan->inside = !codes || strcmp(codes, "ahead") != 0;
    plan->device = id;
    plan->cc = major * 10 + minor;
    if (plan->cc < 80)
        return FAIL(FMOE_ERR_BACKEND, "CUDA: device %d has compute capability %d.%d, 8.0 is the least", id, major,
                    minor);
    DeviceScope scope(id);
    cudaFuncAttributes code; // a card newer than all code in the library needs a driver that translates its PTX
    cudaError_t e = cudaFuncGetAttributes(&code, probe);
    if (e != cudaSuccess) return runtime_missing(e);
    e = cudaHostAlloc((void **)&plan->error, sizeof(DeviceError), cudaHostAllocMapped | cudaHostAllocPortable);
    if (e != cudaSuccess)
        return FAIL(e == cudaErrorMemoryAllocation ? FMOE_ERR_NOMEM : FMOE_ERR_DEVICE,
                    "CUDA: a page of pinned memory: %s", cudaGetErrorString(e));
    *plan->error = DeviceError{};
    e = cudaHostGetDevicePointer((void **)&plan->error_dev, plan->error, 0);
    if (e != cudaSuccess) {
        cudaFreeHost(plan->error);
        return FAIL(FMOE_ERR_DEVICE, "CUDA: mapped memory: %s", cudaGetErrorString(e));
    }
    return FMOE_OK;
}

static fmoe_status plan_init(fmoe_plan_impl *p)
{
    const OutsideCapture outside;
    const fmoe_desc *d = &p->d;
    if (d->dtype == FMOE_F64) return FAIL(FMOE_ERR_DTYPE, "CUDA: dtype f64 is for the CPU's reference only");
    if (d->E > kMaxExperts && d->op != FMOE_OP_ACTIVATION)
        return FAIL(FMOE_ERR_UNSUPPORTED, "CUDA: E is %lld, at most %lld are supported", (long long)d->E,
                    (long long)kMaxExperts);
    if (d->H > INT32_MAX / 4 || d->I > INT32_MAX / 4 || d->K > INT32_MAX || d->N > INT32_MAX)
        return FAIL(FMOE_ERR_UNSUPPORTED, "CUDA: H, I, K and N must be below 2^29");
    const char *const path = getenv("FMOE_CUDA_PATH");
    if (path && *path && strcmp(path, "sm80") != 0)
        return FAIL(FMOE_ERR_ARG, "CUDA: FMOE_CUDA_PATH is '%.40s', only sm80 is known", path);
    Plan *plan = new (std::nothrow) Plan();
    if (!plan) return FAIL(FMOE_ERR_NOMEM, "no memory for a plan");
    fmoe_status status = open_device(plan, d->device.id);
    if (status == FMOE_OK && d->op == FMOE_OP_ROUTE && !route_fits(plan->device, d->E, d->k, d->route.groups)) {
        status = FAIL(FMOE_ERR_UNSUPPORTED,
                      "CUDA: routing over E = %lld experts needs more shared memory for a token than this device has",
                      (long long)d->E);
        cudaFreeHost(plan->error);
    }
    if (status != FMOE_OK) {
        delete plan;
        return status;
    }
    fmoe_cuda_shape *s = &plan->shape;
    s->H = d->H, s->I = d->I, s->E = d->E, s->k = d->k;
    s->dtype = d->dtype;
    s->gated = p->gated;
    s->cc = plan->cc;
    s->sms = plan->sms;
    s->general = path && *path;
    plan->path = FMOE_PATH_SM80;
    plan->why = "";
    if (d->op == FMOE_OP_EXPERTS || d->op == FMOE_OP_GROUPED_MATMUL) {
        plan->path = fmoe_cuda_choose_path(s, &plan->why);
        if (plan->path == FMOE_PATH_SM90) {
            DeviceScope scope(plan->device);
            cudaError_t e = sm90_driver() ? sm90_setup() : cudaErrorNotSupported;
            if (e == cudaSuccess && plan->inside) e = sm90_coded_setup();
            if (e != cudaSuccess) {
                cudaGetLastError();
                plan->path = FMOE_PATH_SM80;
                plan->why = "the driver lacks tensor maps or the shared memory the Hopper kernels need";
            }
        }
        DeviceScope scope(plan->device);
        plan->stages = d->dtype == FMOE_F32 ? 0 : fmoe_cuda_stages(plan->shared);
        if (plan->stages && mma_setup((size_t)(plan->stages * MMA_STAGE + MMA_EXTRA)) != cudaSuccess) {
            cudaGetLastError();
            plan->stages = 0;
        }
    }
    p->priv = plan;
    return FMOE_OK;
}

static void plan_fini(fmoe_plan_impl *p)
{
    Plan *plan = plan_of(p);
    cudaFreeHost(plan->error);
    delete plan;
    p->priv = nullptr;
}

static fmoe_status bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    return p->d.op == FMOE_OP_EXPERTS ? experts_bytes(p, pass, T, workspace, saved)
                                      : ops_bytes(p, pass, T, workspace, saved);
}

static size_t describe(const fmoe_plan_impl *p, char *text, size_t n)
{
    const Plan *plan = plan_of(p);
    const char *dtype = p->d.dtype == FMOE_F32 ? "f32" : p->d.dtype == FMOE_BF16 ? "bf16" : "f16";
    char line[2000];
    int used =
        snprintf(line, sizeof line, "cuda: device %d, compute capability %d.%d, %d SMs, %s; built with CUDA %d.%d\n",
                 plan->device, plan->cc / 10, plan->cc % 10, plan->sms, dtype, CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10);
    if (p->d.op == FMOE_OP_GROUPED_MATMUL && plan->path == FMOE_PATH_SM90) {
        used += snprintf(
            line + used, sizeof line - (size_t)used,
            "products: sm90 (%s), 256 features x up to %d rows, weight gradients 128x256; in 16 bits, 16-byte aligned\n"
            "f32 results, FMOE_ADD_DX and lists of unequal shapes: sm80 mma.sync, 128x256 tiles; f32 rows and what is "
            "not "
            "aligned: 64x128\n",
            plan->why, 16 * FMOE_CUDA_TOKEN_UNITS);
    } else if (p->d.op == FMOE_OP_EXPERTS && plan->path == FMOE_PATH_SM90) {
        used += snprintf(line + used, sizeof line - (size_t)used,
                         "products: sm90 (%s), 4 stages of 64 in k, pairs of CTAs; 128x256 tiles, or below %d rows an "
                         "expert 256 features x up to %d tokens\n"
                         "weights that are not 16-byte aligned, or in lists of unequal strides: sm80, 64x128 tiles\n"
                         "activation: in the products (dh by a warpgroup of its own); of weights [in,out] separate "
                         "kernels where they are not gated, or interleaved and between 64 and %d rows an expert%s\n",
                         plan->why, FMOE_CUDA_TOKENS_BELOW, 16 * FMOE_CUDA_TOKEN_UNITS, FMOE_CUDA_TOKENS_BELOW,
                         p->d.flags & FMOE_SAME_BITS ? " and not SwiGLU" : "");
    } else if (p->d.op == FMOE_OP_EXPERTS || p->d.op == FMOE_OP_GROUPED_MATMUL) {
        if (plan->stages)
            used += snprintf(line + used, sizeof line - (size_t)used,
                             "products: sm80 mma.sync (%s), 128x256 tiles, %d stages of 64 in k in %zu KiB of shared "
                             "memory, one block an SM%s\n"
                             "operands that are not 16-byte aligned, or in lists of unequal strides: 64x128 tiles\n",
                             plan->why, plan->stages, plan->shared / 1024,
                             p->d.op == FMOE_OP_EXPERTS ? "; activation in the products" : "");
        else
            used += snprintf(line + used, sizeof line - (size_t)used, "products: sm80 %s, 64x128 tiles%s%s\n",
                             p->d.dtype == FMOE_F32 ? "plain f32 multiply-adds" : "mma.sync",
                             *plan->why ? ", because: " : "", plan->why);
    }
    if (p->d.flags & FMOE_QUANT) {
        const bool gmm = p->d.op == FMOE_OP_GROUPED_MATMUL;
        const int64_t each = (gmm ? p->d.K * p->d.N : p->h_cols * p->d.H) * (p->d.dtype == FMOE_F32 ? 4 : 2),
                      some = fmoe_max(fmoe_min(p->d.E, plan->ring / fmoe_max(each, 1)), 1);
        used += snprintf(line + used, sizeof line - (size_t)used,
                         "quantised weights: the experts that have rows are decoded into a ring in the workspace ahead "
                         "of each product, ");
        used += each ? snprintf(line + used, sizeof line - (size_t)used, "%lld of %s at a time\n", (long long)some,
                                gmm ? "w" : "W1")
                     : snprintf(line + used, sizeof line - (size_t)used, "%lld bytes of a list at a time\n",
                                (long long)plan->ring);
        if (plan->inside && !gmm && plan->path == FMOE_PATH_SM90 && p->d.dtype == FMOE_BF16)
            used +=
                snprintf(line + used, sizeof line - (size_t)used,
                         "but stacks are decoded inside the products where groups are 32 or whole 64 codes, without a "
                         "tensor of zeros\n");
    }
    if (p->d.op == FMOE_OP_EXPERTS) {
        const bool lora = p->d.rank1 || p->d.rank2,
                   ranks = fmoe_cuda_decode_rank(p->d.rank1) && fmoe_cuda_decode_rank(p->d.rank2);
        const bool quant = p->d.flags & FMOE_QUANT,
                   precise = quant && p->d.dtype == FMOE_BF16 && !lora; // decode/coded.cuh
        const auto few = quant ? fmoe_cuda_use_decode_coded : fmoe_cuda_use_decode;
        int64_t most = 0, cols = lora ? 0 : fmoe_cuda_most_decode_nmajor(&plan->shape);
        while (ranks && (plan->path == FMOE_PATH_SM90 || plan->stages) && few(&plan->shape, most + 1)) most++;
        if (most && quant)
            used += snprintf(
                line + used, sizeof line - (size_t)used,
                "inference of up to %lld tokens: kernels that stream codes and decode them in registers%s "
                "(stacks; rows of whole 16 bytes; groups of 16, 32, 64 and so on)\n",
                (long long)most,
                precise && !(p->d.flags & FMOE_SAME_BITS)
                    ? ", and of one or two tokens, or of integers, without zero points, round no weight to 16 bits"
                    : "");
        else if (most)
            used += snprintf(
                line + used, sizeof line - (size_t)used,
                "inference of up to %lld tokens, %lld with weights [in,out]: kernels that stream the weights\n",
                (long long)most, (long long)cols);
        if ((quant && !precise) || p->d.flags & FMOE_SAME_BITS)
            snprintf(line + used, sizeof line - (size_t)used,
                     "same bits for any batch%s: a token's out, dx and gradients of its routing weights\n",
                     quant && !(p->d.flags & FMOE_SAME_BITS) ? ", of quantised weights" : "");
        else
            snprintf(
                line + used, sizeof line - (size_t)used,
                "same bits for any batch from T = %lld on, but for interleaved weights [in,out]; FMOE_SAME_BITS: for "
                "all\n",
                (long long)most + 1);
    }
    return (size_t)snprintf(text, n, "%s", line);
}

static const fmoe_backend table = {
    FMOE_BACKEND_VERSION,
    "cuda",
    plan_init,
    plan_fini,
    bytes,
    describe,
    {route_forward, route_backward},
    {permute_forward, permute_backward},
    {unpermute_forward, unpermute_backward},
    {gmm_forward, gmm_backward},
    {activation_forward, activation_backward},
    {experts_forward, experts_backward},
    true,
    true,
    true,
    nullptr,
    nullptr,
    nullptr,
    &fmoe_cuda_device,
    quantise_stack,
    dequantise_stack,
};

extern "C" FMOE_API const fmoe_backend *fmoe_cuda_backend(const fmoe_core *core)
{
    if (!core || core->version != FMOE_BACKEND_VERSION || !core->fail) return nullptr;
    fmoe_cuda_core = core;
    return &table;
}
