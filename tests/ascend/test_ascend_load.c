/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_load.c - what is said when CANN, a symbol or a device is missing. Each case is a process of its own:
 * libraries are looked for once. */
#include <sys/wait.h>
#include <unistd.h>

#include "../test.h"

static char answer[2048];

/* The error of a plan on the device, with these variables set. */
static fmoe_status ask(const char *const *variables, int n)
{
    int pipe_ends[2];
    REQUIRE(pipe(pipe_ends) == 0);
    fflush(stdout);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        for (int i = 0; i < n; i += 2) setenv(variables[i], variables[i + 1], 1);
        fmoe_desc d = {.size = sizeof d,
                       .op = FMOE_OP_EXPERTS,
                       .dtype = FMOE_BF16,
                       .device = {FMOE_ASCEND, 0},
                       .H = 8,
                       .I = 8,
                       .E = 4,
                       .k = 2};
        fmoe_plan p = 0;
        char text[2048] = "";
        const fmoe_status s = fmoe_plan_create(&p, &d);
        snprintf(text + 1, sizeof text - 1, "%s", fmoe_last_error());
        text[0] = (char)s;
        if (write(pipe_ends[1], text, sizeof text) < 0) _exit(2);
        _exit(0);
    }
    close(pipe_ends[1]);
    char text[2049] = "";
    size_t got = 0;
    for (ssize_t r = 1; r > 0 && got < 2048; got += (size_t)r) r = read(pipe_ends[0], text + got, 2048 - got);
    close(pipe_ends[0]);
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    snprintf(answer, sizeof answer, "%s", text + 1);
    return (fmoe_status)text[0];
}

#define ASK(...)                                                                                                       \
    ask((const char *const[]){__VA_ARGS__}, (int)(sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *)))
#define HAS(part) (strstr(answer, part) ? (void)0 : TEST_FAIL("\"%s\" has no \"%s\"", answer, part))

TEST(no_cann)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", "/nonexistent"), FMOE_ERR_BACKEND);
    HAS("libascendcl.so not found in FMOE_ASCEND_PATH /nonexistent");
}

TEST(no_cann_anywhere)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", "", "ASCEND_HOME_PATH", "/nonexistent"), FMOE_ERR_BACKEND);
    HAS("libascendcl.so not found");
}

TEST(symbol_missing)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER "/../nogmm"), FMOE_ERR_BACKEND);
    HAS("symbols aclnnSwiGluGrad, aclnnGroupedMatmulV5 (nor V4) not found in FMOE_ASCEND_PATH");
}

TEST(old_chip)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_SOC", "Ascend910ProB"), FMOE_ERR_BACKEND);
    HAS("Ascend910ProB has no grouped matrix product");
}

TEST(old_cann)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "7.0.1"), FMOE_ERR_BACKEND);
    HAS("CANN 7.0.1 is too old");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.0.0"), FMOE_ERR_BACKEND);
    HAS("CANN 8.0.0 is too old, 8.1 or later is needed");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.1.RC1"), FMOE_OK);
}

TEST(present)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER), FMOE_OK);
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER "/../cann81"), FMOE_OK);
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER "/../split"), FMOE_OK); /* operators in three libraries */
}

TEST(info_is_one_line)
{
    char text[8192];
    setenv("FMOE_ASCEND_PATH", "/nonexistent", 1);
    CHECK(fmoe_info(text, sizeof text) < sizeof text);
    const char *line = strstr(text, "ascend:");
    REQUIRE(line != NULL);
    CHECK(strstr(line, "not available") != NULL && strstr(line, "libascendcl.so") != NULL);
    const char *end = strchr(line, '\n');
    CHECK(end && end[1] == 0); /* the last line, and one only */
}
