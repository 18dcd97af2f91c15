/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz.h - what the fuzz targets share. Under clang -fsanitize=fuzzer the library's main calls LLVMFuzzerTestOneInput;
 * otherwise (FMOE_FUZZ_REPLAY) the main below feeds it every file of the folders it is given, and some inputs made from
 * a seed, so that gcc runs the same code. A finding is an abort with a sentence. */
#ifndef FMOE_FUZZ_H
#define FMOE_FUZZ_H

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "fusedmoe.h"
#include "util.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_FAIL(...) (fprintf(stderr, "fuzz: " __VA_ARGS__), fputc('\n', stderr), abort())

/* The input, byte by byte; zeros after its end. */
typedef struct fuzz_input {
    const uint8_t *p, *end;
} fuzz_input;

static inline uint8_t fuzz_byte(fuzz_input *in) { return in->p < in->end ? *in->p++ : 0; }

static inline uint64_t fuzz_bits(fuzz_input *in, int bytes)
{
    uint64_t v = 0;
    for (int i = 0; i < bytes; i++) v = v << 8 | fuzz_byte(in);
    return v;
}

static inline int64_t fuzz_below(fuzz_input *in, int64_t n)
{
    return n > 0 ? (int64_t)(fuzz_bits(in, 2) % (uint64_t)n) : 0;
}

/* Values from the input: mostly small, now and then anything (NaN, infinities, denormals). */
static inline float fuzz_float(fuzz_input *in)
{
    const uint8_t b = fuzz_byte(in);
    return b < 250 ? (float)((int)b - 125) / 64 : fmoe_bits_to_float((uint32_t)fuzz_bits(in, 4));
}

static inline float fuzz_finite(fuzz_input *in) { return (float)((int)fuzz_byte(in) - 128) / 64; }

/* ---- tensors: freed by fuzz_done ---- */

enum { FUZZ_BLOCKS = 256 };
static void *fuzz_blocks[FUZZ_BLOCKS];
static int fuzz_n_blocks;

/* Exactly n bytes, so that a sanitizer sees the ends. */
static inline void *fuzz_alloc(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (!p || fuzz_n_blocks == FUZZ_BLOCKS) FUZZ_FAIL("the target is out of memory");
    return fuzz_blocks[fuzz_n_blocks++] = p;
}

static inline void fuzz_done(void)
{
    while (fuzz_n_blocks) free(fuzz_blocks[--fuzz_n_blocks]);
}

static inline fmoe_tensor *fuzz_tensor(int dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
    fmoe_tensor *t = fuzz_alloc(sizeof *t + 3 * sizeof(int64_t));
    t->shape = (int64_t *)(t + 1);
    t->shape[0] = a, t->shape[1] = b, t->shape[2] = c;
    t->ndim = ndim;
    t->device.type = FMOE_CPU;
    t->dtype = (fmoe_datatype){dtype < 0 ? 0 : dtype == FMOE_BF16 ? 4 : 2, (uint8_t)(8 * fmoe_dtype_size(dtype)), 1};
    t->data = fuzz_alloc((size_t)(a * (ndim > 1 ? b : 1) * (ndim > 2 ? c : 1)) * fmoe_dtype_size(dtype));
    return t;
}

static inline int64_t fuzz_count(const fmoe_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static inline double fuzz_get(const fmoe_tensor *t, int64_t i)
{
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: return ((const double *)t->data)[i];
    case FMOE_BF16: return (double)fmoe_bf16_to_float(((const uint16_t *)t->data)[i]);
    case FMOE_F16: return (double)fmoe_f16_to_float(((const uint16_t *)t->data)[i]);
    case FMOE_F32: return (double)((const float *)t->data)[i];
    default: return (double)fmoe_get_int(t->data, fmoe_tensor_dtype(t), i);
    }
}

static inline void fuzz_set(const fmoe_tensor *t, int64_t i, float v)
{
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: ((double *)t->data)[i] = (double)v; return;
    case FMOE_BF16: ((uint16_t *)t->data)[i] = fmoe_float_to_bf16(v); return;
    case FMOE_F16: ((uint16_t *)t->data)[i] = fmoe_float_to_f16(v); return;
    default: ((float *)t->data)[i] = v;
    }
}

static inline fmoe_tensor *fuzz_fill(fmoe_tensor *t, fuzz_input *in)
{
    for (int64_t i = 0; i < fuzz_count(t); i++) fuzz_set(t, i, fuzz_finite(in));
    return t;
}

static inline fmoe_tensor *fuzz_f64(const fmoe_tensor *t)
{
    fmoe_tensor *c = fuzz_tensor(FMOE_F64, t->ndim, t->shape[0], t->shape[1], t->shape[2]);
    for (int64_t i = 0; i < fuzz_count(t); i++) ((double *)c->data)[i] = fuzz_get(t, i);
    return c;
}

static inline fmoe_run fuzz_run(fmoe_plan plan, fmoe_pass pass, int64_t T, uint32_t flags)
{
    fmoe_run run = FMOE_RUN_INIT;
    if (fmoe_workspace_bytes(plan, pass, T, &run.workspace_bytes) != FMOE_OK)
        FUZZ_FAIL("workspace: %s", fmoe_last_error());
    run.workspace = fuzz_alloc(run.workspace_bytes);
    run.flags = flags;
    return run;
}

#ifdef FMOE_FUZZ_REPLAY
#include <dirent.h>

static int fuzz_replay_folder(const char *folder)
{
    static uint8_t data[65536];
    int n = 0;
    DIR *d = opendir(folder);
    if (!d) {
        perror(folder);
        exit(1);
    }
    for (struct dirent *e; (e = readdir(d));) {
        char path[4096];
        if (e->d_name[0] == '.' || (size_t)snprintf(path, sizeof path, "%s/%s", folder, e->d_name) >= sizeof path)
            continue;
        FILE *f = fopen(path, "rb");
        if (!f) continue;
        const size_t size = fread(data, 1, sizeof data, f);
        fclose(f);
        LLVMFuzzerTestOneInput(data, size);
        n++;
    }
    closedir(d);
    return n;
}

int main(int argc, char **argv)
{
    uint8_t data[512];
    uint64_t state = 1;
    int n = 0;
    for (int i = 1; i < argc; i++) n += fuzz_replay_folder(argv[i]);
    for (int i = 0; i < 400; i++, n++) { /* the same numbers everywhere */
        const size_t size = (size_t)(state >> 33) % sizeof data;
        for (size_t j = 0; j < sizeof data; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            data[j] = (uint8_t)(state >> 56);
        }
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%d passed, 0 failed, 0 skipped\n", n);
    return 0;
}
#endif

#endif
