/* SPDX-License-Identifier: Apache-2.0
 *
 * bench.c - fusedmoe bench: time operations through the public API, each beside the ceiling measured in the same run.
 *
 * A time is the median of the repetitions that fit the budget, after one to warm up. Products are held against a
 * register-only loop of multiply-adds, the rest against a read of memory, both on the same threads; a forward of few
 * rows also against a sweep over the very weights it reads, for memory differs from buffer to buffer. The repetitions
 * come in rounds, in which everything that is compared has its turn, and a share or ratio is the median over rounds: on
 * a shared machine all of it moves from second to second. Between turns is a pause, for the threads of some peers go on
 * waiting busily for a while (OpenBLAS's took 20 ms of the next one's turn after a pause of 40), and a turn begins with
 * a repetition that does not count, for a peer's threads sleep by then. */
#define FMOE_EXPERIMENTAL
#include "bench.h"
#include "bench_peers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fusedmoe.h"

enum { MAX_VALUES = 16, MAX_TIMES = 200, ROUNDS = 5, MAX_CONTENDERS = 8 };

typedef struct list {
    int64_t v[MAX_VALUES];
    int n;
} list;

typedef struct options {
    const char *ops[MAX_VALUES];
    int n_ops;
    const char *pass; /* fwd, bwd, fwd+bwd; NULL: all three */
    list T, H, I, E, k, dtype, threads;
    double budget; /* seconds a row */
    const char *json;
    bool skew, peers, packed;
    int pages;
    bool cpu_time; /* for a busy machine: CPU seconds over threads instead of wall seconds */
} options;

typedef struct row {
    const char *op, *pass;
    const char *peer; /* NULL: ours */
    bool packed;
    double ratio[2]; /* of a peer's time to ours, plain and packed; 0: none */
    /* Forward of few rows: GB/s of weights read, what a sweep over them reaches, and the share. */
    double weights, stream, stream_share;
    bench_shape shape;
    double ms, best_ms;   /* median and best */
    double rate, ceiling; /* medians: GFLOP/s, or GB/s where nothing is multiplied */
    double share;         /* of the ceiling, the median over rounds */
    bool memory;
} row;

static const char *const dtype_names[] = {"?", "f32", "bf16", "f16"};

/* ---- timing ---- */

static clockid_t the_clock = CLOCK_MONOTONIC;

static double now(void)
{
    struct timespec t;
    clock_gettime(the_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* What has its turn in every round: ours, ours with packed weights, or a peer. */
typedef struct contender {
    row r;
    void (*first)(void *state), (*then)(void *state); /* then: or NULL */
    void *state;
    const bench_case *swept; /* whose weights are swept, or NULL */
    double all[MAX_TIMES], typical[ROUNDS], share[ROUNDS], stream[ROUNDS], stream_share[ROUNDS];
    int n;
    bool warms; /* a turn begins with a repetition that does not count */
} contender;

static double time_once(const contender *c)
{
    const double start = now();
    c->first(c->state);
    if (c->then) c->then(c->state);
    return now() - start;
}

/* One turn: as many repetitions as fit. Work: 1e9 flops or bytes; weights: 1e9 bytes. */
static void turn(contender *c, const options *o, int round, double work, double weights, double ceiling)
{
    const double scale = o->cpu_time ? 1.0 / c->r.shape.threads : 1.0;
    double times[MAX_TIMES], best_sweep = 0;
    int m = 0;
    if (c->warms) time_once(c);
    for (const double begin = now(); m == 0 || (m < MAX_TIMES / ROUNDS && now() - begin < o->budget / ROUNDS); m++) {
        if (c->swept && m < 5) { /* in turns with the layer, the best of them */
            const double rate = weights / c->swept->sweep(c->state, c->r.packed);
            best_sweep = rate > best_sweep ? rate : best_sweep;
        }
        c->all[c->n++] = times[m] = scale * time_once(c);
    }
    c->typical[round] = median(times, m);
    c->share[round] = work / c->typical[round] / ceiling;
    c->stream[round] = best_sweep;
    c->stream_share[round] = best_sweep > 0 ? weights / c->typical[round] / best_sweep : 0;
}

static void time_in_turns(contender *c, int n, const options *o, double work, double weights)
{
    const struct timespec pause = {.tv_nsec = 60000000};
    const double long_enough = 0.5; /* seconds: how it begins makes no difference then */
    const row *ours = &c[0].r;
    double ceilings[ROUNDS];
    for (int i = 0; i < n; i++) c[i].warms = time_once(&c[i]) < long_enough && n > 1;
    for (int round = 0; round < ROUNDS; round++) {
        if (n > 1) nanosleep(&pause, NULL);
        ceilings[round] = ours->memory ? fmoe_cpu_stream_gbytes(ours->shape.threads)
                                       : fmoe_cpu_ceiling_gflops((fmoe_dtype)ours->shape.dtype, ours->shape.threads);
        for (int i = 0; i < n; i++) {
            turn(&c[i], o, round, work, weights, ceilings[round]);
            if (n > 1) nanosleep(&pause, NULL);
        }
    }
    const double ceiling = median(ceilings, ROUNDS);
    for (int i = 0; i < n; i++) {
        row *r = &c[i].r;
        for (int j = 0; r->peer && j < n && !c[j].r.peer; j++) {
            double ratios[ROUNDS];
            for (int round = 0; round < ROUNDS; round++) ratios[round] = c[i].typical[round] / c[j].typical[round];
            r->ratio[j] = median(ratios, ROUNDS);
        }
    }
    for (int i = 0; i < n; i++) {
        row *r = &c[i].r;
        const double typical = median(c[i].all, c[i].n);
        r->ms = 1e3 * typical;
        r->best_ms = 1e3 * c[i].all[0];
        r->rate = work / typical;
        r->ceiling = ceiling;
        r->share = median(c[i].share, ROUNDS);
        r->weights = c[i].swept ? weights / typical : 0;
        r->stream = median(c[i].stream, ROUNDS);
        r->stream_share = median(c[i].stream_share, ROUNDS);
    }
}

/* ---- output ---- */

/* MB of this process that lie in huge pages; -1 where the system does not say. */
static double huge_megabytes(void)
{
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    double kilobytes = -1;
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "AnonHugePages: %lf", &kilobytes) == 1) break;
    if (f) fclose(f);
    return kilobytes < 0 ? -1 : kilobytes * 1024e-6;
}

static const char *kind(const row *r) { return r->peer ? r->peer : r->packed ? "packed" : ""; }

static void print_row(const row *r)
{
    const bench_shape *s = &r->shape;
    printf(
        "%-10s %-7s %-11s %-4s T=%-6lld H=%lld I=%lld E=%lld k=%lld threads=%d %-8s %10.3f ms %9.1f %s  ceiling %8.1f "
        "%6.1f %%"
        "  (best %.3f ms, %.1f %%)\n",
        r->op, r->pass, fmoe_cpu_isa(), dtype_names[s->dtype], (long long)s->T, (long long)s->H, (long long)s->I,
        (long long)s->E, (long long)s->k, s->threads, kind(r), r->ms, r->rate, r->memory ? "GB/s" : "GF/s", r->ceiling,
        100 * r->share, r->best_ms, 100 * r->share * r->ms / r->best_ms);
    if (r->weights > 0)
        printf("%10s reads weights at %.1f GB/s, %.1f %% of %.1f, a sweep over the same\n", "", r->weights,
               100 * r->stream_share, r->stream);
    if (r->peer) printf("%10s by %s: ours is %.2f times as fast", "", r->peer, r->ratio[0]);
    if (r->peer && r->ratio[1] > 0) printf(", with packed weights %.2f", r->ratio[1]);
    if (r->peer) putchar('\n');
    fflush(stdout);
}

static void json_row(FILE *json, const row *r, bool first)
{
    const bench_shape *s = &r->shape;
    const char *unit = r->memory ? "gbytes" : "gflops";
    fprintf(json,
            "%s\n  {\"op\": \"%s\", \"pass\": \"%s\", \"backend\": \"cpu\", \"isa_or_arch\": \"%s\", \"dtype\": "
            "\"%s\", \"T\": %lld, "
            "\"H\": %lld, \"I\": %lld, \"E\": %lld, \"k\": %lld, \"threads\": %d, \"ms\": %.6g, \"best_ms\": %.6g, "
            "\"%s\": %.6g, \"ceiling_%s\": %.6g, \"share\": %.4f, \"packed\": %s, \"gbytes_of_weights\": %.6g, "
            "\"sweep_gbytes\": %.6g, \"sweep_share\": %.4f, \"ratio\": %.4g, \"ratio_packed\": %.4g, \"peer\": "
            "%s%s%s}",
            first ? "" : ",", r->op, r->pass, fmoe_cpu_isa(), dtype_names[s->dtype], (long long)s->T, (long long)s->H,
            (long long)s->I, (long long)s->E, (long long)s->k, s->threads, r->ms, r->best_ms, unit, r->rate, unit,
            r->ceiling, r->share, r->packed ? "true" : "false", r->weights, r->weights > 0 ? r->stream : 0,
            r->weights > 0 ? r->stream_share : 0, r->ratio[0], r->ratio[1], r->peer ? "\"" : "",
            r->peer ? r->peer : "null", r->peer ? "\"" : "");
}

/* ---- one shape of one operation ---- */

static void bench_pass(const options *o, const bench_case *c, const row *like, bool forward, bool backward, FILE *json,
                       bool *first)
{
    static contender all[MAX_CONTENDERS];
    bench_case peers[MAX_CONTENDERS];
    const bool experts = c->experts && !backward;
    const bool few = experts && like->shape.T * like->shape.k < 8 * like->shape.E; /* rows: memory is the ceiling */
    const double forward_work = like->memory ? c->forward_bytes : c->forward_flops;
    const double backward_work = like->memory ? c->backward_bytes : c->backward_flops;
    int n = 0, n_peers = 0;
    all[n++] = (contender){.r = *like, .state = c->state, .swept = few ? c : NULL};
    all[0].first = forward ? c->forward : c->backward;
    all[0].then = forward && backward ? c->backward : NULL;
    if (experts && c->packed) {
        all[n] = all[0];
        all[n].first = c->packed;
        all[n++].r.packed = true;
    }
    for (int i = 0; experts && o->peers && bench_peer_name(i) && n < MAX_CONTENDERS; i++) {
        bench_case *peer = &peers[n_peers];
        if (!bench_peer(i, &like->shape, c->experts, peer)) continue;
        all[n] = (contender){.r = *like, .first = peer->forward, .state = peer->state};
        all[n++].r.peer = bench_peer_name(i);
        n_peers++;
    }
    time_in_turns(all, n, o, 1e-9 * ((forward ? forward_work : 0) + (backward ? backward_work : 0)),
                  few ? 1e-9 * c->forward_bytes : 0);
    for (int i = 0; i < n; i++) {
        print_row(&all[i].r);
        if (json) json_row(json, &all[i].r, *first);
        *first = false;
    }
    for (int i = 0; i < n_peers; i++) peers[i].drop(peers[i].state);
}

enum { PASSES = 3 };
static const struct {
    const char *name;
    bool forward, backward;
} passes[PASSES] = {{"fwd", true, false}, {"bwd", false, true}, {"fwd+bwd", true, true}};

static void bench_shape_of(const options *o, const char *op, const bench_shape *shape, FILE *json, bool *first)
{
    const bench_case c = bench_make(op, shape);
    if (shape->pages)
        printf("pages %s: %.0f MB of this process in huge ones\n", shape->pages == PAGES_HUGE ? "huge" : "small",
               huge_megabytes());
    c.forward(c.state); /* a backward alone needs what the forward saves */
    for (int i = 0; i < PASSES; i++) {
        const row r = {.op = op, .pass = passes[i].name, .shape = *shape, .memory = c.forward_flops == 0};
        if (o->pass && strcmp(o->pass, r.pass) != 0) continue;
        bench_pass(o, &c, &r, passes[i].forward, passes[i].backward, json, first);
    }
    c.drop(c.state);
}

/* ---- the command line ---- */

static bool parse_list(const char *text, list *out)
{
    out->n = 0;
    while (*text && out->n < MAX_VALUES) {
        char *end;
        out->v[out->n++] = strtoll(text, &end, 10);
        if (end == text || out->v[out->n - 1] < 0) return false;
        text = *end == ',' ? end + 1 : end;
    }
    return *text == 0 && out->n > 0;
}

/* Comma-separated names out of a table; index(es) into it. */
static bool parse_names(const char *text, const char *const *names, int n_names, list *out)
{
    char copy[160], *save;
    snprintf(copy, sizeof copy, "%s", text);
    out->n = 0;
    for (char *name = strtok_r(copy, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        int found = 0;
        while (found < n_names && strcmp(name, names[found]) != 0) found++;
        if (found == n_names || out->n == MAX_VALUES) return false;
        out->v[out->n++] = found;
    }
    return out->n > 0;
}

static bool parse_ops(const char *text, options *o)
{
    int n_names = 0;
    list found;
    while (bench_op_names[n_names]) n_names++;
    if (!parse_names(strcmp(text, "all") == 0 ? "experts,block,gmm,activation,permute,unpermute,route" : text,
                     bench_op_names, n_names, &found))
        return false;
    for (int i = 0; i < found.n; i++) o->ops[i] = bench_op_names[found.v[i]];
    o->n_ops = found.n;
    return true;
}

static int usage(FILE *to, int code)
{
    fputs("usage: fusedmoe bench [options]\n"
          "Times layers and operations on the CPU, each beside a ceiling measured in the same run.\n"
          "\n"
          "What is timed (a LIST is values with commas between; lists are crossed):\n"
          "  --op LIST       experts (the default), block, gmm, activation, permute, unpermute, route; or all\n"
          "  --pass PASS     fwd, bwd or fwd+bwd (default: all three)\n"
          "  --T LIST        tokens (default 16,64,512)\n"
          "  --H LIST        hidden size, elements of a token (default 2048)\n"
          "  --I LIST        intermediate size, rows of an expert's gate and of its up (default 1408)\n"
          "  --E LIST        experts (default 32)\n"
          "  --k LIST        experts of every token (default 4)\n"
          "  --dtype LIST    f32, bf16, f16 (default f32,bf16)\n"
          "  --threads LIST  threads, 0: one for every core (default 0)\n"
          "  --skew          every second token has expert 0 among its k; else experts are drawn evenly\n"
          "  --packed        the forward of experts with packed weights too, in turns with the other\n"
          "  --peers         the forward of experts too as a loop over experts on oneDNN (weights packed\n"
          "                  beforehand) and on OpenBLAS, where they are installed\n"
          "How:\n"
          "  --seconds S     time for a row of the table, in seconds (default 1)\n"
          "  --cpu-time      CPU seconds divided by threads instead of seconds: for a machine that is busy\n"
          "  --pages KIND    tensors of 2 MiB and more in huge or in small pages (default: as the system likes)\n"
          "  --json FILE     the rows to a file as well\n"
          "\n"
          "A row: the median time in milliseconds (ms), the rate, its ceiling, the share, and the best time\n"
          "with its share. GF/s: 1e9 multiplications and additions a second; GB/s: 1e9 bytes a second.\n"
          "ceiling: what these threads reach in a loop of multiply-adds on registers alone, or, where nothing\n"
          "is multiplied, in a read of memory.\n"
          "share: the rate divided by the ceiling, in percent, the median over five rounds. What is small\n"
          "enough to stay in the cache can pass 100 % of a read of memory.\n"
          "\n"
          "Exit status: 0; 1 where FILE cannot be written or a shape cannot be run; 2 for a command line that\n"
          "cannot be read.\n",
          to);
    return code;
}

static bool parse(int argc, char **argv, options *o)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        const struct {
            const char *name;
            bool *to;
        } flags[] = {
            {"--skew", &o->skew}, {"--peers", &o->peers}, {"--packed", &o->packed}, {"--cpu-time", &o->cpu_time}};
        bool flag = false;
        for (size_t j = 0; j < sizeof flags / sizeof *flags; j++)
            if (strcmp(name, flags[j].name) == 0) flag = *flags[j].to = true;
        if (flag) continue;
        const struct {
            const char *name;
            list *to;
        } lists[] = {{"--T", &o->T}, {"--H", &o->H}, {"--I", &o->I},
                     {"--E", &o->E}, {"--k", &o->k}, {"--threads", &o->threads}};
        bool known = false;
        for (size_t j = 0; value && j < sizeof lists / sizeof *lists; j++)
            if (strcmp(name, lists[j].name) == 0) known = parse_list(value, lists[j].to);
        if (value && strcmp(name, "--dtype") == 0)
            known = parse_names(value, dtype_names, 4, &o->dtype) && o->dtype.v[0] > 0;
        if (value && strcmp(name, "--op") == 0) known = parse_ops(value, o);
        for (int j = 0; value && strcmp(name, "--pass") == 0 && j < PASSES; j++)
            if (strcmp(value, passes[j].name) == 0) known = (o->pass = value) != NULL;
        if (value && strcmp(name, "--seconds") == 0) known = (o->budget = strtod(value, NULL)) > 0;
        if (value && strcmp(name, "--pages") == 0)
            known = (o->pages = strcmp(value, "huge") == 0    ? PAGES_HUGE
                                : strcmp(value, "small") == 0 ? PAGES_SMALL
                                                              : PAGES_AS_IS) != PAGES_AS_IS;
        if (value && strcmp(name, "--json") == 0) known = (o->json = value) != NULL;
        if (!known) {
            fprintf(stderr, "fusedmoe bench: cannot read %s %s\n", name, value ? value : "");
            return false;
        }
        i++;
    }
    return true;
}

int fmoe_bench_main(int argc, char **argv);

int fmoe_bench_main(int argc, char **argv)
{
    options o = {.ops = {"experts"},
                 .n_ops = 1,
                 .T = {{16, 64, 512}, 3},
                 .H = {{2048}, 1},
                 .I = {{1408}, 1},
                 .E = {{32}, 1},
                 .k = {{4}, 1},
                 .dtype = {{FMOE_F32, FMOE_BF16}, 2},
                 .threads = {{0}, 1},
                 .budget = 1};
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) return usage(stdout, 0);
    if (!parse(argc, argv, &o)) return usage(stderr, 2);
    if (o.cpu_time) the_clock = CLOCK_PROCESS_CPUTIME_ID;
    FILE *json = o.json ? fopen(o.json, "w") : NULL;
    if (o.json && !json) {
        perror(o.json);
        return 1;
    }
    if (json) fputs("[", json);
    bool first = true;
    const list *dims[] = {&o.dtype, &o.T, &o.H, &o.I, &o.E, &o.k, &o.threads};
    int64_t combinations = 1;
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) combinations *= dims[i]->n;
    for (int op = 0; op < o.n_ops; op++)
        for (int64_t c = 0; c < combinations; c++) { /* an odometer over the lists, the last one fastest */
            int64_t v[7], rest = c;
            for (int i = 6; i >= 0; i--) {
                v[i] = dims[i]->v[rest % dims[i]->n];
                rest /= dims[i]->n;
            }
            const bench_shape shape = {.dtype = (int)v[0],
                                       .T = v[1],
                                       .H = v[2],
                                       .I = v[3],
                                       .E = v[4],
                                       .k = v[5],
                                       .skew = o.skew,
                                       .forward_only = o.pass && strcmp(o.pass, "fwd") == 0,
                                       .packed = o.packed,
                                       .pages = o.pages,
                                       .threads = v[6] > 0 ? (int)v[6] : (int)sysconf(_SC_NPROCESSORS_ONLN)};
            bench_shape_of(&o, o.ops[op], &shape, json, &first);
        }
    if (json) {
        fputs("\n]\n", json);
        fclose(json);
    }
    return 0;
}
