/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_load.c - what is said when CANN, a symbol or a device is missing. Each case is a process of its own:
 * libraries are looked for once. */
#include <sys/wait.h>
#include <unistd.h>

#include "../test.h"

static char answer[2048];
static int64_t H = 8, E = 4;

/* The error of a plan on the device, or what it says of itself, with these variables set. */
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
                       .H = H,
                       .I = 8,
                       .E = E,
                       .k = 2};
        fmoe_plan p = 0;
        char text[2048] = "";
        const fmoe_status s = fmoe_plan_create(&p, &d);
        if (s == FMOE_OK) fmoe_plan_describe(p, text + 1, sizeof text - 1);
        else snprintf(text + 1, sizeof text - 1, "%s", fmoe_last_error());
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

TEST(first_generation_chip)
{
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_SOC", "Ascend910B"), FMOE_ERR_BACKEND);
    HAS("Ascend910B has no grouped matrix product; 910B1 to 910B4");
    static const char *const good[] = {"Ascend910B1", "Ascend910B4-1", "Ascend910_9391", "Ascend950PR_9589"};
    for (int i = 0; i < 4; i++) CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_SOC", good[i]), FMOE_OK);
}

/* Symbols decide. A version of 8.1 that says 7.7, and none at all, are no reason to refuse; whether dp stays f32 is
 * asked of the operator package, then of symbols that only a newer CANN has, and said where it is not known. */
TEST(versions)
{
#define OLD SIM_FOLDER "/../cann81"
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", OLD, "FMOE_SIM_VERSION", "7.7.0.1.238"), FMOE_OK);
    HAS("CANN 7.7.0.1.238 on");
    HAS("dp of f32 routing weights: rounded to the plan's dtype");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", OLD, "FMOE_SIM_VERSION", ""), FMOE_OK);
    HAS("CANN (version unknown) on");
    HAS("dp of f32 routing weights: rounded to the plan's dtype");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", OLD, "FMOE_SIM_VERSION", "", "FMOE_SIM_OPS_VERSION", "8.5.0"), FMOE_OK);
    HAS("dp of f32 routing weights: f32");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", ""), FMOE_OK); /* newer symbols are there */
    HAS("dp of f32 routing weights: f32");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", OLD, "FMOE_SIM_VERSION", "", "FMOE_ASCEND_MIXED", "1"), FMOE_OK);
    HAS("dp of f32 routing weights: f32");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.3.RC1", "FMOE_ASCEND_MIXED", "0"), FMOE_OK);
    HAS("dp of f32 routing weights: rounded to the plan's dtype");
}

/* MoeInitRouting: V3, but V2 for sizes that torch_npu sends there before CANN 8.5; a variable overrules. */
TEST(routing_table)
{
    H = 2048, E = 128;
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.3.RC1"), FMOE_OK);
    HAS("rows: aclnnMoeInitRoutingV2 + Cast (chosen for these sizes)");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.3.RC1", "FMOE_ASCEND_ROUTING", "v3"), FMOE_OK);
    HAS("rows: aclnnMoeInitRoutingV3");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.5.0"), FMOE_OK);
    HAS("rows: aclnnMoeInitRoutingV3");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_ASCEND_ROUTING", "v2"), FMOE_OK);
    HAS("rows: aclnnMoeInitRoutingV2 + Cast");
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", OLD, "FMOE_ASCEND_ROUTING", "v3"), FMOE_OK);
    HAS("V3 is not there");
    H = 4096;
    CHECK_EQ(ASK("FMOE_ASCEND_PATH", SIM_FOLDER, "FMOE_SIM_VERSION", "8.3.RC1"), FMOE_OK);
    HAS("rows: aclnnMoeInitRoutingV3");
    H = 8, E = 4;
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
