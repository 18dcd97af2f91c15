/* SPDX-License-Identifier: Apache-2.0
 *
 * described.h - reads a text of fmoe_plan_describe: which of its lines are true of one pass of one case, and the
 * kernels that they name. */
#ifndef FMOE_DESCRIBED_H
#define FMOE_DESCRIBED_H

#include "noted_kernels.h"
#include "test.h"

/* Slots of the kernels that a text names; every name is that of a kernel in the table. */
static uint64_t slots_named(const char *text, size_t n)
{
    uint64_t slots = 0;
    for (size_t i = 0; i < n;) {
        const size_t length = strcspn(text + i, " \n");
        bool found = length == 0;
        for (int slot = 0; slot < FMOE_SLOTS && length; slot++) {
            const char *name = fmoe_kernel_name(&real, slot);
            if (!name || strlen(name) != length || strncmp(name, text + i, length)) continue;
            slots |= (uint64_t)1 << slot;
            found = true;
        }
        if (!found) TEST_FAIL("no kernel has the name %.*s", (int)length, text + i);
        i += length + 1;
    }
    return slots;
}

/* One pass of one case: the phrases and conditions of a description that are true of it. */
typedef struct facts {
    const char *yes[40]; /* products without how weights are stored */
    int n;
    const char *when[2];           /* conditions */
    bool out_in1, out_in2, packed; /* how W1 (or w) and W2 are stored; up and down by packed weights */
    int64_t R, active;             /* rows, and experts that have any */
} facts;

static void is_so(facts *f, bool condition, const char *phrase)
{
    if (condition) f->yes[f->n++] = phrase;
}

/* A phrase that ends in a type. */
static void is_so_in(facts *f, bool condition, const char *phrase, int dtype)
{
    char *text = test_alloc(strlen(phrase) + 10);
    sprintf(text, "%s in %s", phrase, dtype == FMOE_BF16 ? "bf16" : dtype == FMOE_F16 ? "f16" : "f32");
    is_so(f, condition, text);
}

static bool is_one_of(const char *const *all, int n, const char *word, size_t length)
{
    for (int i = 0; i < n; i++)
        if (all[i] && strlen(all[i]) == length && !strncmp(all[i], word, length)) return true;
    return false;
}

static bool starts(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

static bool product_is_true(const facts *f, const char *word, size_t n, bool packed)
{
    static const char *const by_packed[] = {"up", "down", "up.b1", "down.b2"};
    return is_one_of(f->yes, f->n, word, n) && (!is_one_of(by_packed, 4, word, n) || packed == f->packed);
}

/* "down da of [out,in]", "dw of experts without rows": whether any of it is true. */
static bool phrase_is_true(const facts *f, const char *phrase, size_t length, bool packed)
{
    const size_t way = strlen(" of [out,in]");
    if (phrase[length - 1] != ']') return product_is_true(f, phrase, length, packed);
    const bool out_in = starts(phrase + length - way, " of [out,in]");
    for (size_t i = 0; i < length - way;) {
        const size_t word = strcspn(phrase + i, " ");
        const bool second = starts(phrase + i, "da") || starts(phrase + i, "down"); /* W2's */
        if ((second ? f->out_in2 : f->out_in1) == out_in && product_is_true(f, phrase + i, word, packed)) return true;
        i += word + 1;
    }
    return false;
}

/* The part of a line before its colon. */
static bool line_is_true(const facts *f, const char *line, size_t length)
{
    bool any = false;
    char what[512];
    snprintf(what, sizeof what, "%.*s", (int)length, line);
    for (char *on; (on = strstr(what, "\n    "));) memmove(on, on + 4, strlen(on + 4) + 1); /* one long line */
    char *forms = strstr(what, " (");                                                       /* their names come last */
    if (forms) *forms = 0;
    const bool packed = strstr(what, ", packed beforehand") != NULL;
    for (char *at = what, *next; at; at = next) {
        next = strstr(at, ", ");
        if (next) *next = 0, next += 2;
        long long rows;
        if (sscanf(at, "1 to %lld rows an expert", &rows) == 1) {
            if (f->R > rows * f->active) return false;
        } else if (sscanf(at, "from %lld rows", &rows) == 1) {
            if (f->R <= (rows - 1) * f->active) return false;
        } else if (starts(at, "dy in") || !strcmp(at, "in stacks") || !strcmp(at, "in lists")) {
            if (!is_one_of(f->when, 2, at, strlen(at))) return false;
        } else if (strcmp(at, "packed beforehand")) {
            any |= phrase_is_true(f, at, strlen(at), packed);
        }
    }
    return any;
}

/* The kernels of all lines that are true, after the first one, which has none. */
static uint64_t described(const char *text, const facts *f)
{
    uint64_t slots = 0;
    for (const char *line = strchr(text, '\n') + 1; *line;) {
        const char *colon = strchr(line, ':'), *end = line - 1;
        do CHECK(strcspn(end + 1, "\n") < 120), end = strchr(end + 1, '\n');
        while (end && end[1] == ' '); /* lines that go on are indented */
        if (!colon || !end || colon > end) {
            TEST_FAIL("a line without kernels: %s", line);
            break;
        }
        if (line_is_true(f, line, (size_t)(colon - line))) slots |= slots_named(colon + 1, (size_t)(end - colon - 1));
        line = end + 1;
    }
    return slots;
}

static void list_slots(const char *what, uint64_t slots)
{
    for (int i = 0; i < FMOE_SLOTS; i++)
        if (slots >> i & 1) printf("    %s: %s\n", what, fmoe_kernel_name(&real, i));
}

/* `unless`: kernels that may have been named and not called. */
static void compare(const char *text, const facts *f, uint64_t unless, const char *what)
{
    const uint64_t calls = atomic_load(&called), named = described(text, f);
    if (!(calls & ~named) && !(named & ~calls & ~unless)) return;
    TEST_FAIL("%s: described and called differ\n%s", what, text);
    list_slots("called, not described", calls & ~named);
    list_slots("described, not called", named & ~calls & ~unless);
}

#endif
