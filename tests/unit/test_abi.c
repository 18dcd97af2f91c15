/* SPDX-License-Identifier: Apache-2.0
 *
 * test_abi.c - what the library shows: its symbols, its needs, its structs and its header (layers.py: who includes
 * whom). Symbols and structs are kept in tests/golden; after a wanted change, FMOE_WRITE_GOLDEN=1 test_abi writes them
 * anew and the diff is reviewed. */
#include <stdarg.h>
#include <sys/wait.h>

#include "calls.h"
#include "fusedmoe_ep.h"

/* A command's standard output; the exit status is returned. */
__attribute__((format(printf, 3, 4))) static int output_of(char *text, size_t n, const char *format, ...)
{
    char command[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    FILE *f = popen(command, "r");
    REQUIRE(f != NULL);
    const size_t got = fread(text, 1, n - 1, f);
    text[got] = 0;
    const int code = pclose(f);
    return WIFEXITED(code) ? WEXITSTATUS(code) : -1;
}

static void compare_golden(const char *name, const char *now)
{
    char path[512];
    static char was[32768];
    snprintf(path, sizeof path, FMOE_SOURCE "/tests/golden/%s", name);
    if (getenv("FMOE_WRITE_GOLDEN")) {
        FILE *f = fopen(path, "w");
        REQUIRE(f != NULL);
        fputs(now, f);
        fclose(f);
    }
    FILE *f = fopen(path, "r");
    REQUIRE(f != NULL);
    was[fread(was, 1, sizeof was - 1, f)] = 0;
    fclose(f);
    if (strcmp(was, now) == 0) return;
    const char *a = was, *b = now;
    while (*a && *a == *b) a++, b++;
    while (b > now && b[-1] != '\n') b--, a--;
    TEST_FAIL("%s differs, first at: was \"%.60s\", is \"%.60s\"", path, a, b);
}

TEST(exported_symbols)
{
    static char text[32768];
    CHECK_EQ(output_of(text, sizeof text,
                       "nm -D --defined-only '%s' | awk '{print $3}' | sed 's/@.*//' | LC_ALL=C sort", FMOE_SO),
             0);
    compare_golden("symbols.txt", text);
    char *save, *copy = strcpy(test_alloc(strlen(text) + 1), text);
    for (char *line = strtok_r(copy, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        if (strncmp(line, "fmoe_", 5)) TEST_FAIL("%s is exported", line);
}

/* Every function the header declares is there, and nothing else. */
TEST(header_and_symbols_agree)
{
    static char declared[32768], exported[32768];
    CHECK_EQ(output_of(declared, sizeof declared,
                       "cd '%s/include' && grep -oh 'FMOE_API [a-z].*' fusedmoe.h fusedmoe_ep.h | grep -o "
                       "'fmoe_[a-z0-9_]*(' | tr -d '(' | "
                       "LC_ALL=C sort -u",
                       FMOE_SOURCE),
             0);
    CHECK_EQ(output_of(
                 exported, sizeof exported,
                 "nm -D --defined-only '%s' | awk '{print $3}' | sed 's/@.*//' | grep '^fmoe_[a-z]' | LC_ALL=C sort -u",
                 FMOE_SO),
             0);
    if (strcmp(declared, exported)) TEST_FAIL("header:\n%slibrary:\n%s", declared, exported);
}

TEST(needs_only_libc_and_libm)
{
    char text[4096];
    CHECK_EQ(output_of(text, sizeof text, "readelf -d '%s' | grep NEEDED | sed 's/.*\\[//; s/\\]//'", FMOE_SO), 0);
    char *save;
    int n = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), n++) {
        const int known = !strncmp(line, "libc.", 5) || !strcmp(line, "libm.so.6") || !strncmp(line, "ld-linux", 8) ||
                          !strcmp(line, "libpthread.so.0") || !strcmp(line, "libdl.so.2"); /* libc.: also musl's */
        if (!known) TEST_FAIL("the library needs %s", line);
    }
    CHECK(n > 0);
}

/* Read-only relocations, no executable stack, no text relocations, immediate binding. */
TEST(hardening)
{
    static char text[16384];
    CHECK_EQ(output_of(text, sizeof text, "readelf -lWd '%s'", FMOE_SO), 0);
    CHECK(strstr(text, "GNU_RELRO") && strstr(text, "BIND_NOW") && !strstr(text, "TEXTREL"));
    const char *stack = strstr(text, "GNU_STACK");
    REQUIRE(stack != NULL);
    char line[160];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(stack, "\n"), stack);
    CHECK(strstr(line, "RW ") && !strstr(line, "RWE"));
}

/* ---- structs ---- */

typedef struct field {
    const char *name;
    size_t offset, size;
} field;

static size_t print_struct(char *text, size_t n, const char *name, size_t size, const field *f, size_t fields)
{
    size_t used = (size_t)snprintf(text, n, "%s %zu\n", name, size);
    for (size_t i = 0; i < fields; i++)
        used += (size_t)snprintf(text + used, n - used, "  %s %zu %zu\n", f[i].name, f[i].offset, f[i].size);
    return used;
}

#define F(s, m) {#m, offsetof(s, m), sizeof(((s *)0)->m)}
#define STRUCT(s, ...)                                                                                                 \
    do {                                                                                                               \
        const field f_[] = {__VA_ARGS__};                                                                              \
        used += print_struct(text + used, sizeof text - used, #s, sizeof(s), f_, sizeof f_ / sizeof *f_);              \
    } while (0)

TEST(struct_layouts)
{
    static char text[16384];
    size_t used = 0;
    STRUCT(fmoe_tensor, F(fmoe_tensor, data), F(fmoe_tensor, device), F(fmoe_tensor, ndim), F(fmoe_tensor, dtype),
           F(fmoe_tensor, shape), F(fmoe_tensor, strides), F(fmoe_tensor, byte_offset));
    STRUCT(fmoe_device, F(fmoe_device, type), F(fmoe_device, id));
    STRUCT(fmoe_datatype, F(fmoe_datatype, code), F(fmoe_datatype, bits), F(fmoe_datatype, lanes));
    STRUCT(fmoe_route_rule, F(fmoe_route_rule, score), F(fmoe_route_rule, renormalize), F(fmoe_route_rule, group_score),
           F(fmoe_route_rule, groups), F(fmoe_route_rule, topk_groups), F(fmoe_route_rule, excluded_zero),
           F(fmoe_route_rule, eps), F(fmoe_route_rule, scale));
    STRUCT(fmoe_desc, F(fmoe_desc, size), F(fmoe_desc, op), F(fmoe_desc, dtype), F(fmoe_desc, device), F(fmoe_desc, H),
           F(fmoe_desc, I), F(fmoe_desc, E), F(fmoe_desc, k), F(fmoe_desc, K), F(fmoe_desc, N), F(fmoe_desc, shared_I),
           F(fmoe_desc, rank1), F(fmoe_desc, rank2), F(fmoe_desc, act), F(fmoe_desc, flags), F(fmoe_desc, act_alpha),
           F(fmoe_desc, act_limit), F(fmoe_desc, route), F(fmoe_desc, threads), F(fmoe_desc, parallel),
           F(fmoe_desc, parallel_ctx));
    STRUCT(fmoe_run, F(fmoe_run, size), F(fmoe_run, workspace), F(fmoe_run, workspace_bytes), F(fmoe_run, stream),
           F(fmoe_run, flags), F(fmoe_run, submit), F(fmoe_run, submit_ctx));
    STRUCT(fmoe_route_args, F(fmoe_route_args, size), F(fmoe_route_args, logits), F(fmoe_route_args, select_bias),
           F(fmoe_route_args, ids), F(fmoe_route_args, weights), F(fmoe_route_args, bad_rows),
           F(fmoe_route_args, dweights), F(fmoe_route_args, dlogits));
    STRUCT(fmoe_permute_args, F(fmoe_permute_args, size), F(fmoe_permute_args, x), F(fmoe_permute_args, ids),
           F(fmoe_permute_args, xp), F(fmoe_permute_args, map), F(fmoe_permute_args, counts));
    STRUCT(fmoe_unpermute_args, F(fmoe_unpermute_args, size), F(fmoe_unpermute_args, y), F(fmoe_unpermute_args, map),
           F(fmoe_unpermute_args, weights), F(fmoe_unpermute_args, out), F(fmoe_unpermute_args, dout),
           F(fmoe_unpermute_args, dy), F(fmoe_unpermute_args, dweights));
    STRUCT(fmoe_gmm_args, F(fmoe_gmm_args, size), F(fmoe_gmm_args, x), F(fmoe_gmm_args, w), F(fmoe_gmm_args, bias),
           F(fmoe_gmm_args, sizes), F(fmoe_gmm_args, y), F(fmoe_gmm_args, dy), F(fmoe_gmm_args, dx),
           F(fmoe_gmm_args, dw), F(fmoe_gmm_args, dbias), F(fmoe_gmm_args, cumulative), F(fmoe_gmm_args, list),
           F(fmoe_gmm_args, quant));
    STRUCT(fmoe_activation_args, F(fmoe_activation_args, size), F(fmoe_activation_args, h), F(fmoe_activation_args, a),
           F(fmoe_activation_args, da), F(fmoe_activation_args, dh));
    STRUCT(fmoe_weights, F(fmoe_weights, w1), F(fmoe_weights, b1), F(fmoe_weights, w2), F(fmoe_weights, b2),
           F(fmoe_weights, gate), F(fmoe_weights, up), F(fmoe_weights, down), F(fmoe_weights, lora_a1),
           F(fmoe_weights, lora_b1), F(fmoe_weights, lora_a2), F(fmoe_weights, lora_b2), F(fmoe_weights, lora_scale1),
           F(fmoe_weights, lora_scale2), F(fmoe_weights, packed), F(fmoe_weights, packed_bytes),
           F(fmoe_weights, quant1), F(fmoe_weights, quant2), F(fmoe_weights, quant_gate), F(fmoe_weights, reserved));
    STRUCT(fmoe_quant, F(fmoe_quant, size), F(fmoe_quant, code), F(fmoe_quant, flags), F(fmoe_quant, group_rows),
           F(fmoe_quant, group_cols), F(fmoe_quant, scale_type), F(fmoe_quant, zero), F(fmoe_quant, scale),
           F(fmoe_quant, zeros), F(fmoe_quant, scale2), F(fmoe_quant, lut));
    STRUCT(fmoe_quant_args, F(fmoe_quant_args, size), F(fmoe_quant_args, w), F(fmoe_quant_args, codes),
           F(fmoe_quant_args, quant), F(fmoe_quant_args, stream));
    STRUCT(fmoe_repack_args, F(fmoe_repack_args, size), F(fmoe_repack_args, form), F(fmoe_repack_args, back),
           F(fmoe_repack_args, N), F(fmoe_repack_args, K), F(fmoe_repack_args, foreign), F(fmoe_repack_args, codes));
    STRUCT(fmoe_pack_args, F(fmoe_pack_args, size), F(fmoe_pack_args, w), F(fmoe_pack_args, packed),
           F(fmoe_pack_args, packed_bytes));
    STRUCT(fmoe_experts_args, F(fmoe_experts_args, size), F(fmoe_experts_args, x), F(fmoe_experts_args, ids),
           F(fmoe_experts_args, weights), F(fmoe_experts_args, w), F(fmoe_experts_args, out),
           F(fmoe_experts_args, saved), F(fmoe_experts_args, saved_bytes), F(fmoe_experts_args, dout),
           F(fmoe_experts_args, dx), F(fmoe_experts_args, dweights), F(fmoe_experts_args, dw));
    STRUCT(fmoe_block_args, F(fmoe_block_args, size), F(fmoe_block_args, x), F(fmoe_block_args, w_router),
           F(fmoe_block_args, b_router), F(fmoe_block_args, select_bias), F(fmoe_block_args, w),
           F(fmoe_block_args, shared), F(fmoe_block_args, shared_gate), F(fmoe_block_args, logits),
           F(fmoe_block_args, ids), F(fmoe_block_args, weights), F(fmoe_block_args, out), F(fmoe_block_args, saved),
           F(fmoe_block_args, saved_bytes), F(fmoe_block_args, dout), F(fmoe_block_args, dlogits),
           F(fmoe_block_args, dx), F(fmoe_block_args, dw_router), F(fmoe_block_args, db_router), F(fmoe_block_args, dw),
           F(fmoe_block_args, dshared), F(fmoe_block_args, dshared_gate));
    STRUCT(fmoe_exchange, F(fmoe_exchange, size), F(fmoe_exchange, rank), F(fmoe_exchange, ranks),
           F(fmoe_exchange, ctx), F(fmoe_exchange, counts), F(fmoe_exchange, begin), F(fmoe_exchange, wait),
           F(fmoe_exchange, abort), F(fmoe_exchange, alloc), F(fmoe_exchange, free));
    STRUCT(fmoe_ep_desc, F(fmoe_ep_desc, size), F(fmoe_ep_desc, layer), F(fmoe_ep_desc, exchange),
           F(fmoe_ep_desc, expert), F(fmoe_ep_desc, rank), F(fmoe_ep_desc, placements), F(fmoe_ep_desc, mode),
           F(fmoe_ep_desc, chunks), F(fmoe_ep_desc, capacity), F(fmoe_ep_desc, timeout_ms));
    STRUCT(fmoe_ep_args, F(fmoe_ep_args, size), F(fmoe_ep_args, x), F(fmoe_ep_args, ids), F(fmoe_ep_args, weights),
           F(fmoe_ep_args, out), F(fmoe_ep_args, dout), F(fmoe_ep_args, dx), F(fmoe_ep_args, dweights),
           F(fmoe_ep_args, inference), F(fmoe_ep_args, accumulate), F(fmoe_ep_args, w), F(fmoe_ep_args, dw));
    STRUCT(fmoe_ep_stats, F(fmoe_ep_stats, size), F(fmoe_ep_stats, rows_out), F(fmoe_ep_stats, rows_in),
           F(fmoe_ep_stats, pairs_out), F(fmoe_ep_stats, pairs_in), F(fmoe_ep_stats, bytes_counts),
           F(fmoe_ep_stats, bytes_pairs), F(fmoe_ep_stats, bytes_out), F(fmoe_ep_stats, bytes_back),
           F(fmoe_ep_stats, dropped));
    compare_golden("structs.txt", text);
}

TEST(status_values_are_pinned)
{
    const fmoe_status all[] = {
        FMOE_OK,         FMOE_ERR_NULL,   FMOE_ERR_ABI,   FMOE_ERR_ARG,     FMOE_ERR_SHAPE,    FMOE_ERR_DTYPE,
        FMOE_ERR_STRIDE, FMOE_ERR_ALIGN,  FMOE_ERR_ALIAS, FMOE_ERR_INDEX,   FMOE_ERR_OVERFLOW, FMOE_ERR_WORKSPACE,
        FMOE_ERR_NOMEM,  FMOE_ERR_HANDLE, FMOE_ERR_PLAN,  FMOE_ERR_BACKEND, FMOE_ERR_DEVICE,   FMOE_ERR_UNSUPPORTED};
    for (int i = 0; i < 18; i++) CHECK_EQ(all[i], i);
}

/* ---- versions ---- */

/* The header, CMake, Python and the soname (libfusedmoe.so.0.MINOR before 1.0) say the same. */
TEST(versions_agree)
{
    char text[256], want[64];
    CHECK_EQ(fmoe_version(), FMOE_VERSION);
    const char *const files[][2] = {{"CMakeLists.txt", "^project(fusedmoe VERSION \\([0-9.]*\\).*"},
                                    {"pyproject.toml", "^version = \"\\(.*\\)\"$"}};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(output_of(text, sizeof text, "sed -n 's/%s/\\1/p' '%s/%s'", files[i][1], FMOE_SOURCE, files[i][0]), 0);
        snprintf(want, sizeof want, "%s\n", fmoe_version_string());
        if (strcmp(text, want)) TEST_FAIL("%s has version %s, the library %s", files[i][0], text, want);
    }
    snprintf(want, sizeof want, FMOE_VERSION_MAJOR ? "libfusedmoe.so.%d\n" : "libfusedmoe.so.%d.%d\n",
             FMOE_VERSION_MAJOR, FMOE_VERSION_MINOR);
    CHECK_EQ(output_of(text, sizeof text, "readelf -d '%s' | sed -n 's/.*SONAME.*\\[\\(.*\\)\\]/\\1/p'", FMOE_SO), 0);
    if (strcmp(text, want)) TEST_FAIL("the soname is %s, not %s", text, want);
}

/* ---- the header alone ---- */

static void compile_header(const char *compiler, const char *language, const char *standard)
{
    char text[4096];
    const int code = output_of(text, sizeof text,
                               "echo '#include \"fusedmoe.h\"' | %s -x %s -std=%s -pedantic -Wall -Wextra -Werror "
                               "-I'%s/include' -fsyntax-only - 2>&1",
                               compiler, language, standard, FMOE_SOURCE);
    if (code) TEST_FAIL("%s -std=%s: %s", compiler, standard, text);
}

TEST(header_in_c)
{
    compile_header("cc", "c", "c99");
    compile_header("cc", "c", "c17");
}

TEST(header_in_cpp)
{
    char text[512];
    if (output_of(text, sizeof text, "command -v c++ 2>&1")) SKIP("no C++ compiler is installed");
    compile_header("c++", "c++", "c++11");
    compile_header("c++", "c++", "c++20");
}

/* ---- what its sources may not do ---- */

/* A library path prints nothing and ends nobody's process; no assert as validation. */
TEST(library_does_not_print_or_abort)
{
    static char text[8192];
    output_of(text, sizeof text,
              "cd '%s/src' && grep -nE '(^|[^a-z_.>])(abort|exit|_exit|printf|puts|putchar|perror|assert|alloca)[ "
              "]*\\(' *.c *.h cpu/*.[ch] cpu/*/*.[ch] cpu/*/*/*.[ch] ascend/*.[ch] ascend/cann/*.[ch]",
              FMOE_SOURCE);
    if (*text) TEST_FAIL("found:\n%s", text);
}
