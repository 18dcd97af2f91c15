/* SPDX-License-Identifier: Apache-2.0
 * count.c - what the simulator counts, what it holds against its callers, and failures on request.
 *
 * Counters: launches, launches_elsewhere (by other threads than the first), bytes_read, bytes_written, syncs,
 * hidden_rounds (launches that one call of Cat or SplitTensor is beyond the first), aicpu (launches on the AI CPU),
 * hollow_launches (from a cache entry without tasks: nothing ran), pta_stores (phase 1 in torch_npu's hash mode),
 * undocumented (calls that the host code takes and no document allows), copies_h2d, copies_d2h, copies_d2d,
 * hidden_copies (views an operator silently copies first), violations; live_tensors, live_lists, live_scalars,
 * live_arrays, live_executors, live_allocations, live_bytes, peak_bytes, live_streams, live_events; "aclnnX" or
 * "aclrtX": calls of that function. Switches: delay_us (before each task of a stream), phase2_delay_us (in phase 2 on
 * other threads than the first), count_only (operators are counted, not computed), gating_perverse (another order of
 * equal scores), cache_guard (cache.c), no_null_outputs (an optional output may not be NULL), quiet (violations are
 * counted and not printed). */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define MAX_NAMES 1024
#define TRACE_BYTES (1 << 20)

typedef struct {
    const char *name;
    int64_t value;
} entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry counters[MAX_NAMES], options[32];
static char trace_text[TRACE_BYTES];
static size_t trace_used;
static char first_violation[512];
static char fail_name[96];
static int64_t fail_after;
static int fail_code;
static __thread char message[1024], handed_out[1024];

static entry *find(entry *table, size_t size, const char *name)
{
    size_t h = 5381;
    for (const char *c = name; *c; c++) h = h * 33 + (unsigned char)*c;
    for (size_t i = 0; i < size; i++) {
        entry *e = &table[(h + i) % size];
        if (!e->name) e->name = strdup(name);
        if (strcmp(e->name, name) == 0) return e;
    }
    fprintf(stderr, "ascend_sim: too many names\n");
    abort();
}

int sim_enter(const char *function)
{
    int code = 0;
    pthread_mutex_lock(&lock);
    find(counters, MAX_NAMES, function)->value++;
    const bool releases = strstr(function, "Destroy") || strstr(function, "Repeatable") ||
                          strstr(function, "RecentErrMsg") || strstr(function, "aclrtFree");
    const size_t n = strlen(fail_name); /* "aclnn*": any that begins so */
    const bool meant = n && fail_name[n - 1] == '*' ? !releases && strncmp(fail_name, function, n - 1) == 0
                                                    : strcmp(fail_name, function) == 0;
    if (fail_after > 0 && meant && --fail_after == 0) {
        code = fail_code;
        find(counters, MAX_NAMES, "injected")->value++;
    }
    pthread_mutex_unlock(&lock);
    if (code) sim_message("%s: failure %d injected by the simulator", function, code);
    return code;
}

void sim_add(const char *counter, int64_t amount)
{
    pthread_mutex_lock(&lock);
    find(counters, MAX_NAMES, counter)->value += amount;
    pthread_mutex_unlock(&lock);
}

void sim_violation(const char *format, ...)
{
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    pthread_mutex_lock(&lock);
    if (!first_violation[0]) memcpy(first_violation, text, sizeof text);
    find(counters, MAX_NAMES, "violations")->value++;
    const bool quiet = find(options, 32, "quiet")->value != 0;
    pthread_mutex_unlock(&lock);
    if (!quiet) fprintf(stderr, "ascend_sim: violation: %s\n", text);
}

void sim_message(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
}

const char *sim_take_message(void)
{
    if (!message[0]) return NULL;
    memcpy(handed_out, message, sizeof message);
    message[0] = 0;
    return handed_out;
}

void sim_trace(const char *line)
{
    pthread_mutex_lock(&lock);
    const size_t n = strlen(line);
    if (trace_used + n + 2 < TRACE_BYTES) {
        memcpy(trace_text + trace_used, line, n);
        trace_used += n;
        trace_text[trace_used++] = '\n';
        trace_text[trace_used] = 0;
    }
    pthread_mutex_unlock(&lock);
}

void fmoe_sim_reset(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_NAMES; i++)
        if (counters[i].name && strncmp(counters[i].name, "live_", 5) != 0 &&
            strcmp(counters[i].name, "violations") != 0)
            counters[i].value = 0;
    find(counters, MAX_NAMES, "peak_bytes")->value = find(counters, MAX_NAMES, "live_bytes")->value;
    trace_used = 0;
    trace_text[0] = 0;
    pthread_mutex_unlock(&lock);
}

void fmoe_sim_forgive(void)
{
    pthread_mutex_lock(&lock);
    find(counters, MAX_NAMES, "violations")->value = 0;
    first_violation[0] = 0;
    pthread_mutex_unlock(&lock);
}

int64_t fmoe_sim_get(const char *counter)
{
    pthread_mutex_lock(&lock);
    const int64_t v = find(counters, MAX_NAMES, counter)->value;
    pthread_mutex_unlock(&lock);
    return v;
}

void fmoe_sim_fail(const char *function, int64_t nth, int code)
{
    pthread_mutex_lock(&lock);
    snprintf(fail_name, sizeof fail_name, "%s", function ? function : "");
    fail_after = nth;
    fail_code = code;
    pthread_mutex_unlock(&lock);
}

void fmoe_sim_set(const char *what, int64_t value)
{
    pthread_mutex_lock(&lock);
    find(options, 32, what)->value = value;
    pthread_mutex_unlock(&lock);
}

int64_t fmoe_sim_option(const char *what)
{
    pthread_mutex_lock(&lock);
    const int64_t v = find(options, 32, what)->value;
    pthread_mutex_unlock(&lock);
    return v;
}

size_t fmoe_sim_trace(char *text, size_t n)
{
    pthread_mutex_lock(&lock);
    if (n) {
        const size_t c = trace_used < n - 1 ? trace_used : n - 1;
        memcpy(text, trace_text, c);
        text[c] = 0;
    }
    const size_t used = trace_used;
    pthread_mutex_unlock(&lock);
    return used;
}

const char *fmoe_sim_violation_text(void) { return first_violation; }
