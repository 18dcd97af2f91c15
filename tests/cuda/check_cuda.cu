// SPDX-License-Identifier: Apache-2.0
// check_cuda.cu - the CUDA backend against the reference, operation by operation, through the backend tables.
//
//   check_cuda LIBRARY [SEED [CASES [GROUP...]]]     groups: route permute gmm activation batch experts quant
//   gmm_quant special; big only when named. Ended by SIGTERM (timeout) it says how far it came.
#include "check.cuh"

#include <csignal>
#include <ctime>
#include <set>
#include <unistd.h>

uint64_t rng_state = 1;
Arena arena;
int passed, failed, skipped, left_out;
std::string context;
const fmoe_backend *cuda_backend;

static fmoe_status fail_aloud(fmoe_status status, const char *format, ...)
{
    static const bool quiet = getenv("CHECK_QUIET") != nullptr;
    va_list v;
    va_start(v, format);
    if (!quiet) {
        printf("  [status %d: ", (int)status);
        vprintf(format, v);
        printf("]\n");
    }
    va_end(v);
    return status;
}

static void cut_off(int)
{
    printf("%d passed, %d failed, %d skipped, and then the time was over\n", passed, failed, skipped);
    fflush(stdout);
    _exit(failed ? 1 : 3);
}

int main(int argc, char **argv)
{
    signal(SIGTERM, cut_off);
    if (argc < 2) {
        printf("usage: check_cuda LIBRARY [SEED [CASES [GROUP...]]]\n");
        return 2;
    }
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("SKIP: no CUDA device (%s)\n0 passed, 0 failed, 1 skipped\n", cudaGetErrorString(cudaGetLastError()));
        return 0;
    }
    const uint64_t seed = argc > 2 && atoll(argv[2]) ? (uint64_t)atoll(argv[2]) : (uint64_t)time(nullptr);
    const int cases = argc > 3 ? atoi(argv[3]) : 40;
    std::set<std::string> want(argv + (argc < 4 ? argc : 4), argv + argc);
    auto on = [&](const char *g) { return want.empty() || want.count(g); };
    printf("seed %llu\n", (unsigned long long)seed);
    rng_state = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
    void *handle = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        printf("%s\n", dlerror());
        return 1;
    }
    const fmoe_backend_entry entry = (fmoe_backend_entry)dlsym(handle, "fmoe_cuda_backend");
    static const fmoe_core core = {FMOE_BACKEND_VERSION, fail_aloud};
    cuda_backend = entry ? entry(&core) : nullptr;
    if (!cuda_backend) {
        printf("%s has no CUDA backend of version %u\n", argv[1], FMOE_BACKEND_VERSION);
        return 1;
    }
    arena.open(want.count("big") ? (size_t)28 << 30 : (size_t)1 << 30);
    if (on("route")) check_route();
    if (on("permute")) check_permute();
    if (on("gmm")) check_gmm();
    if (on("activation")) check_activation();
    if (on("batch")) check_batch();
    if (on("special")) check_special();
    if (want.count("big")) check_big();
    if (on("experts")) check_experts(cases);
    if (on("quant")) check_quant(cases);
    if (on("inside")) check_inside(cases);
    if (on("gmm_quant")) check_gmm_quant(2 * cases);
    if (left_out) printf("%d cases were larger than FMOE_CHECK_MOST and not run\n", left_out);
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}
