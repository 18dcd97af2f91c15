/* SPDX-License-Identifier: Apache-2.0
 * main.c - fusedmoe info | check | bench: the public API on the command line. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fusedmoe.h"

int fmoe_bench_main(int argc, char **argv);
int fmoe_check_ascend_main(int argc, char **argv);
#ifdef FMOE_WITH_CHECK
int fmoe_check_main(int argc, char **argv);
#endif

/* ---- info ---- */

static void put_string(const char *text, size_t n)
{
    putchar('"');
    for (size_t i = 0; i < n; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\') printf("\\%c", c);
        else if (c < 0x20) printf("\\u%04x", c);
        else putchar(c);
    }
    putchar('"');
}

static void put_words(const char *text, const char *end, bool first)
{
    for (;; first = false) {
        text += strspn(text, " ");
        const size_t n = strcspn(text, " ,\n");
        if (!n || text >= end) return;
        if (!first) fputs(", ", stdout);
        put_string(text, n);
        text += n;
    }
}

/* The text of fmoe_info: its first line is name and version, then "backend: summary" for each backend, and below the
 * CPU's, indented, "operation: kernel kernel ..." with lines that go on. */
static void put_json(const char *text)
{
    const char *const lines = strchr(text, '\n') + 1, *next;
    printf("{\"version\": \"%s\",\n \"cpu_isa\": \"%s\",\n \"cpu_levels\": [", fmoe_version_string(), fmoe_cpu_isa());
    const char *levels = strstr(lines, ", levels ");
    if (levels) put_words(levels + 9, strchr(levels + 9, ','), true);
    fputs("],\n \"backends\": {", stdout);
    bool first = true;
    for (const char *line = lines; *line; line = next) {
        const char *end = strchr(line, '\n'), *colon = strstr(line, ": ");
        next = end + 1;
        if (*line == ' ' || !colon || colon > end) continue;
        if (!first) fputs(",\n  ", stdout);
        put_string(line, (size_t)(colon - line));
        fputs(": ", stdout);
        put_string(colon + 2, (size_t)(end - colon - 2));
        first = false;
    }
    fputs("},\n \"kernels\": {", stdout);
    first = true;
    for (const char *line = lines; *line; line = next) {
        const char *end = strchr(line, '\n'), *title = line + strspn(line, " "), *colon = strchr(line, ':');
        next = end + 1;
        if (title == line) continue;
        const bool goes_on = !colon || colon > end;
        if (!goes_on) {
            fputs(first ? "" : "],\n  ", stdout);
            put_string(title, (size_t)(colon - title));
            fputs(": [", stdout);
        }
        put_words(goes_on ? title : colon + 1, end, !goes_on);
        first = false;
    }
    puts(first ? "}}" : "]}}");
}

static int info_usage(FILE *to, int code)
{
    fputs("usage: fusedmoe info [--json]\n"
          "What this machine and this library have, one line for each backend (cpu, cuda, ascend): what was\n"
          "found, or why it is not there. Below the CPU's line: the kernels that a layer made now would use.\n"
          "\n"
          "  --json  the same as one JSON object: version, cpu_isa (the level in use), cpu_levels, backends,\n"
          "          kernels\n"
          "\n"
          "Environment:\n"
          "  FMOE_MAX_ISA=LEVEL       hold the CPU kernels to a level of those that info lists\n"
          "  FMOE_CUDA_LIBRARY=PATH   the CUDA backend's file, an absolute path; else libfusedmoe_cuda.so\n"
          "                           beside the library\n"
          "  FMOE_ASCEND_PATH=FOLDER  where CANN's libraries are; else what the loader finds\n"
          "\n"
          "Exit status: 0; 2 for a command line that cannot be read.\n",
          to);
    return code;
}

static int info(int argc, char **argv)
{
    const bool json = argc == 2 && strcmp(argv[1], "--json") == 0;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) return info_usage(stdout, 0);
    if (argc > 1 && !json) return info_usage(stderr, 2);
    const size_t n = fmoe_info(NULL, 0) + 1;
    char *text = malloc(n);
    if (!text) return 1;
    fmoe_info(text, n);
    if (json) put_json(text);
    else fputs(text, stdout);
    free(text);
    return 0;
}

/* ---- the command line ---- */

static int check(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i++) /* on a device: in every build */
        if (strcmp(argv[i], "--backend") == 0 && strcmp(argv[i + 1], "ascend") == 0)
            return fmoe_check_ascend_main(argc, argv);
#ifdef FMOE_WITH_CHECK
    return fmoe_check_main(argc, argv);
#else
    (void)argc, (void)argv;
    fputs("this build has no checks: configure with -DFMOE_TESTS=ON\n", stderr);
    return 2;
#endif
}

static int usage(FILE *to, int code)
{
    fputs("usage: fusedmoe info [--json]     what this machine and this library have\n"
          "       fusedmoe check [options]   every CPU kernel and operation against a computation in double\n"
          "       fusedmoe check --backend ascend   every operation on an NPU, with a report to send\n"
          "       fusedmoe bench [options]   time layers and operations on the CPU\n"
          "       fusedmoe --version\n"
          "`fusedmoe info --help`, `check --help` and `bench --help` explain options, defaults and units.\n"
          "Exit status: 0; 1 when a check fails or a file cannot be written; 2 for a command line that\n"
          "cannot be read.\n",
          to);
    return code;
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    if (strcmp(command, "info") == 0) return info(argc - 1, argv + 1);
    if (strcmp(command, "bench") == 0) return fmoe_bench_main(argc - 1, argv + 1);
    if (strcmp(command, "check") == 0) return check(argc - 1, argv + 1);
    if (strcmp(command, "--version") == 0) return printf("fusedmoe %s\n", fmoe_version_string()) < 0;
    if (strcmp(command, "version") == 0) return puts(fmoe_version_string()) < 0;
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0) return usage(stdout, 0);
    return usage(stderr, 2);
}
