/* SPDX-License-Identifier: Apache-2.0
 *
 * peak.c - what this machine can do at most, measured where the kernels run and on as many threads: the rates that
 * benchmarks are held against (the experimental ring of the header). */
#define FMOE_EXPERIMENTAL
#include "cpu/parallel.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct ceiling_run {
    fmoe_peak_fn *peak;
    _Atomic int started;
    int threads;
    double rate[64];
} ceiling_run;

static void ceiling_worker(void *arg, int worker)
{
    ceiling_run *run = arg;
    if (worker >= 64) return;
    atomic_fetch_add(&run->started, 1);
    for (int spin = 0; spin < 1000000 && atomic_load(&run->started) < run->threads; spin++) {}
    double best = 0;
    for (int i = 0; i < 12; i++) { /* the best of 12 slices of some 2 ms, all threads at once */
        const double begin = seconds(), flops = run->peak(200000);
        const double rate = flops / (seconds() - begin);
        best = rate > best ? rate : best;
    }
    run->rate[worker] = best;
}

double fmoe_cpu_ceiling_gflops(fmoe_dtype dtype, int threads)
{
    fmoe_kernels k;
    fmoe_kernels_fill(&k, fmoe_cpu_level());
    ceiling_run run = {.peak = dtype == FMOE_BF16 && k.peak_bf16 ? k.peak_bf16 : k.peak_f32};
    run.threads = threads > 0 ? threads < 64 ? threads : 64 : fmoe_cpu_count();
    fmoe_pool_run(run.threads, ceiling_worker, &run);
    double sum = 0;
    for (int i = 0; i < 64; i++) sum += run.rate[i];
    return sum * 1e-9;
}

typedef struct stream_run {
    const char *data;
    size_t bytes;
    int threads;
    uint64_t sink[64];
} stream_run;

static void stream_worker(void *arg, int worker)
{
    stream_run *run = arg;
    if (worker >= run->threads) return;
    const size_t share = run->bytes / (size_t)run->threads / 64 * 64;
    const uint64_t *p = (const uint64_t *)(const void *)(run->data + (size_t)worker * share);
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < share / 8; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += p[i + (size_t)j];
    run->sink[worker] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

double fmoe_cpu_read_gbytes(const void *data, size_t bytes, int threads)
{
    stream_run run = {.data = data, .bytes = bytes};
    run.threads = threads > 0 ? threads < 64 ? threads : 64 : fmoe_cpu_count();
    const double begin = seconds();
    fmoe_pool_run(run.threads, stream_worker, &run);
    return 1e-9 * (double)bytes / (seconds() - begin);
}

double fmoe_cpu_stream_gbytes(int threads)
{
    const size_t bytes = (size_t)512 << 20;
    char *data = malloc(bytes);
    if (!data) return 0;
    memset(data, 1, bytes);
    double best = 0;
    for (int i = 0; i < 5; i++) best = fmax(best, fmoe_cpu_read_gbytes(data, bytes, threads));
    free(data);
    return best;
}
