/* SPDX-License-Identifier: Apache-2.0
 *
 * test_machine.c - ISA levels, the environment (rows 26 and 31 of the fault table), the command and its texts. */
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"
#include "cpu/kernels/kernels.h"

TEST(row26_levels)
{
    CHECK_STATUS(fmoe_cpu_set_max_isa("sse9"), FMOE_ERR_ARG);
    CHECK_ERROR_HAS("sse9");
    CHECK_STATUS(fmoe_cpu_set_max_isa(""), FMOE_ERR_ARG);
    const int levels = fmoe_cpu_level_count();
    for (int i = 0; i < levels; i++) {
        CHECK_STATUS(fmoe_cpu_set_max_isa(fmoe_cpu_level_name(i)), FMOE_OK);
        int at = -1;
        for (int j = 0; j < levels; j++)
            if (!strcmp(fmoe_cpu_isa(), fmoe_cpu_level_name(j))) at = j;
        CHECK(at >= 0 && at <= i); /* never above the cap, never an invention */
        char text[4096];
        api_call c;
        call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_BF16);
        CHECK_STATUS(call_make(&c), FMOE_OK);
        const size_t n = fmoe_plan_describe(c.plan, text, sizeof text);
        CHECK_EQ(n, strlen(text));
        CHECK(strstr(text, fmoe_cpu_isa()) != NULL);
        call_end(&c);
    }
    CHECK_STATUS(fmoe_cpu_set_max_isa(NULL), FMOE_OK);
}

/* The environment is read once: a new process for each value. */
static int run_cli(const char *isa, const char *arguments, char *text, size_t n) /* its exit code */
{
    char command[512];
    snprintf(command, sizeof command, "FMOE_MAX_ISA='%s' '%s' %s 2>&1", isa, FMOE_CLI, arguments);
    FILE *f = popen(command, "r");
    REQUIRE(f != NULL);
    const size_t got = fread(text, 1, n - 1, f);
    text[got] = 0;
    const int code = pclose(f);
    REQUIRE(WIFEXITED(code));
    return WEXITSTATUS(code);
}

static void run_info(const char *isa, char *text, size_t n) { CHECK(run_cli(isa, "info", text, n) == 0); }

TEST(the_command_line_refuses_what_it_cannot_read)
{
    const char *bad[] = {"bench --pass foo", "bench --pass",      "bench --dtype f8", "bench --op gemm",
                         "bench --T 0x",     "bench --seconds 0", "bench what",       "check --seed",
                         "check --what 1",   "check -f nothing",  "rubbish",          ""};
    char text[4096];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const int code = run_cli("", bad[i], text, sizeof text);
        if (code != 2 || !*text) TEST_FAIL("'%s' ends with %d and says '%s'", bad[i], code, text);
    }
}

static void check_width(const char *what, const char *text, bool all)
{
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1)
        if (end - line > 100 && (all || *line == ' '))
            TEST_FAIL("%s: %d columns: %.*s", what, (int)(end - line), (int)(end - line), line);
}

/* Every option that the parsers take, its default where it has one, and the exit status. */
TEST(the_command_line_explains_itself)
{
    const struct {
        const char *command, *words[24];
    } helps[] = {
        {"--help", {"info", "check", "bench", "--version", "Exit status"}},
        {"info --help", {"--json", "FMOE_MAX_ISA", "FMOE_CUDA_LIBRARY", "FMOE_ASCEND_PATH", "Exit status"}},
        {"bench --help", {"--op",
                          "--pass",
                          "--T",
                          "--H",
                          "--I",
                          "--E",
                          "--k",
                          "--dtype",
                          "--threads",
                          "--skew",
                          "--packed",
                          "--peers",
                          "--seconds",
                          "--cpu-time",
                          "--pages",
                          "--json",
                          "default 16,64,512",
                          "ceiling:",
                          "share:",
                          "GF/s:",
                          "(ms)",
                          "Exit status"}},
        {"check --help",
         {"--seconds", "--quick", "-f", "--seed", "--draw", "--loose", "--list", "--bench", "default 30", "bound",
          "Exit status"}},
    };
    char text[8192];
    for (size_t i = 0; i < sizeof helps / sizeof *helps; i++) {
        CHECK_EQ(run_cli("", helps[i].command, text, sizeof text), 0);
        CHECK(strncmp(text, "usage: fusedmoe ", 16) == 0);
        check_width(helps[i].command, text, true);
        for (const char *const *word = helps[i].words; *word; word++)
            if (!strstr(text, *word)) TEST_FAIL("%s does not speak of %s", helps[i].command, *word);
    }
    CHECK_EQ(run_cli("", "--version", text, sizeof text), 0);
    CHECK(!strncmp(text, "fusedmoe ", 9) && !strncmp(text + 9, fmoe_version_string(), strlen(fmoe_version_string())));
}

static int occurrences(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) n++;
    return n;
}

/* Each kernel of the table once, with its level; what a level leaves out is not there. */
TEST(info_names_the_kernels_in_use)
{
    char text[8192], json[8192], isa[64];
    for (int level = 0; level < fmoe_cpu_level_count(); level++) {
        if (!fmoe_cpu_level_available(level)) continue;
        fmoe_kernels k;
        fmoe_kernels_fill(&k, level);
        snprintf(isa, sizeof isa, "%s", fmoe_cpu_level_name(level));
        run_info(isa, text, sizeof text);
        CHECK_EQ(run_cli(isa, "info --json", json, sizeof json), 0);
        check_width("info", text, false);
        const struct {
            const char *field;
            bool used;
        } slots[] = {
#define FMOE_KERNEL_FIELD(type, field) {#field, k.field != NULL},
#define FMOE_KERNEL(lvl, type, field)
#include "cpu/kernels/kernels.inc"
        };
        for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
            int in_text = 0, in_json = 0;
            for (int l = 0; l <= level; l++) {
                char name[96];
                snprintf(name, sizeof name, " %s_%s ", slots[i].field, fmoe_cpu_level_name(l));
                in_text += occurrences(text, name);
                name[strlen(name) - 1] = '\n';
                in_text += occurrences(text, name);
                snprintf(name, sizeof name, "\"%s_%s\"", slots[i].field, fmoe_cpu_level_name(l));
                in_json += occurrences(json, name);
            }
            if (in_text != slots[i].used || in_json != slots[i].used)
                TEST_FAIL("%s: %s, in the text %d times, in the JSON %d", isa, slots[i].field, in_text, in_json);
        }
        CHECK(!strstr(text, " other:")); /* a kernel that no operation has a line for */
        CHECK(strstr(json, "\"backends\": {\"cpu\": ") && strstr(json, "\n  \"cuda\": \""));
        CHECK(strstr(json, "\"cpu_levels\": [\"c\""));
    }
}

TEST(row31_rubbish_in_the_environment)
{
    char text[4096], plain[4096], huge[300];
    run_info("", plain, sizeof plain);
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    const char *rubbish[] = {"rubbish", "avx9000", "AVX2", " avx2", huge, "%s%n%s", "-1"};
    for (size_t i = 0; i < sizeof rubbish / sizeof *rubbish; i++) {
        run_info(rubbish[i], text, sizeof text);
        char *first = strstr(text, "FMOE_MAX_ISA=");
        if (!first || strstr(first + 1, "FMOE_MAX_ISA="))
            TEST_FAIL("'%s' gives no single warning: %s", rubbish[i], text);
        CHECK(strstr(text, "ignored") != NULL);
    }
    run_info("c", text, sizeof text);
    CHECK(strstr(text, "in use c (FMOE_MAX_ISA=c)\n") && !strstr(text, "ignored"));
    CHECK(!strstr(plain, "ignored"));
    /* Only an absolute path is opened: never what the working directory or the loader has under a name. */
    setenv("FMOE_CUDA_LIBRARY", "libm.so.6", 1);
    run_info("", text, sizeof text);
    CHECK(!strstr(text, "libm"));
    setenv("FMOE_CUDA_LIBRARY", "/nonexistent/libm.so.6", 1);
    run_info("", text, sizeof text);
    CHECK(strstr(text, "\ncuda: not ") && strstr(text, ": there is no /nonexistent/libm.so.6\n"));
    setenv("FMOE_CUDA_LIBRARY", "/dev/null", 1); /* it is there, and no library */
    run_info("", text, sizeof text);
    CHECK(strstr(text, "\ncuda: not usable: /dev/null") != NULL);
    unsetenv("FMOE_CUDA_LIBRARY");
}

TEST(backends_that_are_not_there)
{
    fmoe_desc d = call_desc(CALL_EXPERTS, FMOE_F32);
    fmoe_plan plan;
    d.device.type = FMOE_CUDA;
    const fmoe_status cuda = fmoe_plan_create(&plan, &d);
    if (cuda == FMOE_OK) CHECK_STATUS(fmoe_plan_destroy(&plan), FMOE_OK); /* a machine with a GPU */
    else CHECK(cuda == FMOE_ERR_BACKEND && strstr(fmoe_last_error(), "CUDA"));
}

TEST(texts)
{
    for (int s = -1; s < 20; s++) CHECK(fmoe_status_string((fmoe_status)s) && *fmoe_status_string((fmoe_status)s));
    CHECK(!strcmp(fmoe_status_string(FMOE_ERR_UNSUPPORTED), "FMOE_ERR_UNSUPPORTED"));
    CHECK_EQ(fmoe_version(), FMOE_VERSION);
    char text[8192], cut[10];
    const size_t n = fmoe_info(text, sizeof text);
    CHECK_EQ(n, strlen(text));
    CHECK_EQ(fmoe_info(cut, sizeof cut), n);
    CHECK_EQ(strlen(cut), 9);
    CHECK_EQ(fmoe_info(NULL, 0), n);
    const fmoe_desc d = call_desc(CALL_BLOCK, FMOE_F32);
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    const size_t m = fmoe_plan_describe(plan, text, sizeof text);
    CHECK_EQ(m, strlen(text));
    CHECK_EQ(fmoe_plan_describe(plan, cut, sizeof cut), m);
    CHECK_EQ(fmoe_plan_describe(plan, NULL, 0), m);
    CHECK_EQ(fmoe_plan_describe(plan, NULL, 9), m);
    CHECK_EQ(fmoe_info(NULL, 9), n);
    fmoe_plan_destroy(&plan);
}
