/* SPDX-License-Identifier: Apache-2.0
 * main.c - fusedmoe info | check | bench: the public API on the command line. */
#include <stdio.h>
#include <string.h>

#include "fusedmoe.h"

int fmoe_bench_main(int argc, char **argv);
#ifdef FMOE_WITH_CHECK
int fmoe_check_main(int argc, char **argv);
#endif

static int info(void)
{
    char text[4096];
    fmoe_info(text, sizeof text);
    fputs(text, stdout);
    return 0;
}

static int usage(FILE *to, int code)
{
    fputs("usage: fusedmoe info             what this machine and this library have\n"
          "       fusedmoe check [options]  every kernel against the reference (--help for options)\n"
          "       fusedmoe bench [options]  time layers and operations (--help for options)\n"
          "       fusedmoe version\n",
          to);
    return code;
}

int main(int argc, char **argv)
{
    if (argc < 2) return usage(stderr, 2);
    if (strcmp(argv[1], "info") == 0) return info();
    if (strcmp(argv[1], "bench") == 0) return fmoe_bench_main(argc - 1, argv + 1);
    if (strcmp(argv[1], "check") == 0) {
#ifdef FMOE_WITH_CHECK
        return fmoe_check_main(argc - 1, argv + 1);
#else
        fputs("this build has no checks: configure with -DFMOE_TESTS=ON\n", stderr);
        return 2;
#endif
    }
    if (strcmp(argv[1], "version") == 0) return puts(fmoe_version_string()) < 0;
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) return usage(stdout, 0);
    return usage(stderr, 2);
}
