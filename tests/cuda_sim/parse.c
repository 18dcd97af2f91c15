/* SPDX-License-Identifier: Apache-2.0
 * parse.c - the text of a PTX module into instructions, one kernel at a time. Functions (.func) become part of the
 * kernel that calls them: none calls itself. */
#include "parse.h"

#include <ctype.h>
#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Calls: parameters of a function are registers of its own ---- */

static void parse_function(parser *s, const char *name);

static instruction *copy_value(parser *s, int to, int to_width, int from, int from_width)
{
    instruction *const i = emit(s);
    i->fn = find_op("mov.copy")->fn;
    operands o = {0};
    put(s, &o, to, to_width), put(s, &o, from, from_width);
    keep(i, &o);
    return i;
}

/* What belongs to a function is known everywhere. */
static const symbol *of_function(parser *s, const char *name, symbol_kind kind, int room, int width)
{
    symbol *v = look(s, name, strlen(name));
    if (v) return v;
    const int scope = s->scope;
    s->scope = 0;
    v = declare(s, name, kind, room_for(s, room), width, 0);
    s->scope = scope;
    return v;
}

static void call(parser *s)
{
    operands results = {0}, given = {0};
    char name[600];
    if (take(s, '(')) {
        do value(s, &results, 8);
        while (take(s, ','));
        want(s, ')'), want(s, ',');
    }
    word(s, name, sizeof name);
    if (take(s, ',')) {
        want(s, '(');
        do value(s, &given, 8);
        while (take(s, ','));
        want(s, ')');
    }
    /* Its code comes after all that is there when the kernel ends. */
    const symbol *const f = of_function(s, name, FUNCTION, 4, 4);
    char part[700];
    const int back = f->at;
    for (int n = 0; n < given.count; n++) {
        snprintf(part, sizeof part, "%s_param_%d", name, n);
        const symbol *const v = of_function(s, part, REGISTER, 8, given.width[n]);
        copy_value(s, v->at, given.width[n], given.at[n], given.width[n]);
    }
    instruction *const i = emit(s);
    i->flow = CALL;
    operands o = {0};
    put(s, &o, back, 4);
    keep(i, &o);
    jump(s, name, s->k->length - 1);
    if (results.count > 1) fail(s, "a function with several results");
    if (results.count) {
        snprintf(part, sizeof part, "%s_result", name);
        const symbol *const v = of_function(s, part, REGISTER, 8, results.width[0]);
        copy_value(s, results.at[0], results.width[0], v->at, results.width[0]);
    }
}

/* ---- Statements ---- */

static void static_variable(parser *s, const char *name, int align, int64_t bytes)
{
    s->k->shared = (s->k->shared + (size_t)align - 1) / (size_t)align * (size_t)align;
    declare(s, name, VARIABLE, STATIC_SHARED + (int)s->k->shared, 1, 0);
    s->k->shared += (size_t)bytes;
}

/* .reg .b32 a, %r<9>;  .shared .align 4 .b8 name[16];  .param .b64 name; (of a call) */
static void directive(parser *s)
{
    char name[600], kind[40];
    word(s, kind, sizeof kind);
    if (strcmp(kind, ".reg") && strcmp(kind, ".shared") && strcmp(kind, ".param") &&
        strcmp(kind, ".local")) { /* .pragma, .loc */
        s->p += strcspn(s->p, ";\n");
        take(s, ';');
        return;
    }
    int align = 1;
    type t = NO_TYPE;
    do {
        word(s, name, sizeof name);
        if (!strcmp(name, ".align")) align = (int)number(s);
        else t = type_of(name + 1);
        skip(s);
    } while (*s->p == '.');
    const int width = type_bytes[t];
    if (!t) fail(s, "a type that is not known");
    do {
        word(s, name, sizeof name);
        if (!strcmp(kind, ".shared") || !strcmp(kind, ".local")) {
            int64_t n = 1;
            if (take(s, '[')) n = *s->p == ']' ? 0 : (int64_t)number(s), want(s, ']');
            if (align < width) align = width;
            if (kind[1] == 's') static_variable(s, name, align, n * width);
            else {
                s->k->local = (s->k->local + 15) / 16 * 16;
                declare(s, name, VARIABLE, (int)s->k->local, 1, 0); /* its address is a constant, too */
                s->k->local += (size_t)(n * width);
            }
        } else if (take(s, '<')) {
            const int count = (int)number(s);
            want(s, '>');
            declare(s, name, RANGE, 0, width, count)->at = (int)s->k->registers;
            s->k->registers += (size_t)count * (size_t)width * LANES;
        } else declare(s, name, REGISTER, room_for(s, 8), width, 0);
    } while (take(s, ','));
    want(s, ';');
}

/* st.param and ld.param of a parameter of a function, which is a register here; false: it is something else. */
static bool call_parameter(parser *s, const char *name, int guard, bool not)
{
    const bool load = !strncmp(name, "ld.param", 8);
    if (!load && strncmp(name, "st.param", 8)) return false;
    const char *const begin = s->p;
    operands result = {0}, parameter = {0};
    skip(s);
    if (load && *s->p != '{') value(s, &result, 8), want(s, ',');
    if (take(s, '[')) {
        skip(s);
        const symbol *const v = look(s, s->p, word_length(s->p));
        if (v && v->kind == REGISTER && s->p[0] != '%') {
            const int width = v->width;
            value(s, &parameter, 8);
            if (take(s, '+') && number(s)) fail(s, "a part of a parameter of a function");
            want(s, ']');
            if (!load) want(s, ','), value(s, &result, width);
            want(s, ';');
            const operands *const to = load ? &result : &parameter, *const from = load ? &parameter : &result;
            instruction *const i = copy_value(s, to->at[0], to->width[0], from->at[0], from->width[0]);
            i->guard = guard, i->guard_not = not;
            return true;
        }
    }
    s->p = begin;
    return false;
}

static void statement(parser *s)
{
    char name[200];
    bool not = false;
    int guard = -1;
    s->statement = s->p;
    if (take(s, '@')) {
        not = take(s, '!');
        operands g = {0};
        value(s, &g, 1);
        guard = g.at[0];
    }
    word(s, name, sizeof name);
    operands o = {0};
    if (!strncmp(name, "call", 4)) {
        if (guard >= 0) fail(s, "a call with a predicate");
        call(s);
        want(s, ';');
        return;
    }
    if (call_parameter(s, name, guard, not)) return;
    const op *const found = find_op(name);
    if (!found) fail(s, "no such instruction here yet");
    instruction proto = {.rounding = FE_TONEAREST};
    modifiers(&proto, name);
    int addresses = 0;
    char label[200] = "";
    bool optional = false;
    int first = 1;
    for (const char *c = found->operands; *c; c++) {
        if (*c == '?') {
            optional = true;
            continue;
        }
        if (!first && !take(s, ',')) {
            if (optional) break;
            fail(s, "operands are missing");
        }
        skip(s);
        if (first && optional && *s->p == ';') break;
        first = 0;
        if (*c == 'm') memory(s, &o, &proto.imm[addresses++]);
        else if (*c == 'l') word(s, label, sizeof label);
        else if (*c == 'v' && take(s, '{')) {
            int parts = 1; /* mov takes a register apart, the others have whole elements */
            for (const char *q = s->p; !strncmp(name, "mov", 3) && *q && *q != '}'; q++) parts += *q == ',';
            do value(s, &o, width_of(s, &proto, 'v') / parts);
            while (take(s, ','));
            want(s, '}');
        } else if (take(s, '!')) fail(s, "'!' before an operand");
        else if (*c == 'x') value(s, &o, 4);
        else if (*c == 'b') { /* result|predicate */ value(s, &o, width_of(s, &proto, 't'));
            if (take(s, '|')) value(s, &o, 1);
            else put(s, &o, room_for(s, 1), 1);
        } else value(s, &o, width_of(s, &proto, *c));
    }
    want(s, ';');
    instruction *const i = emit(s);
    const char *const text = i->text;
    *i = proto;
    i->text = text;
    i->fn = found->fn, i->flow = found->flow, i->kind = found->kind;
    i->guard = guard, i->guard_not = not;
    i->mask = found->flow == TOGETHER && found->kind >= 0 && found->kind < 16 ? found->kind : -1;
    if (!strcmp(name, "ret") && s->return_to >= 0) put(s, &o, s->return_to, 4);
    else if (!strcmp(name, "ret")) i->flow = EXIT;
    keep(i, &o);
    if (label[0]) jump(s, label, s->k->length - 1);
}

static void body(parser *s)
{
    want(s, '{');
    open_scope(s);
    for (int depth = 1; depth;) {
        skip(s);
        if (take(s, '{')) {
            open_scope(s), depth++;
            continue;
        }
        if (take(s, '}')) {
            close_scope(s), depth--;
            continue;
        }
        if (take(s, ';')) continue;
        s->statement = s->p;
        if (*s->p == '.') {
            directive(s);
            continue;
        }
        const size_t n = word_length(s->p);
        const char *after = s->p + n;
        if (n && *after == ':' && after[1] != ':') {
            char name[200];
            word(s, name, sizeof name);
            s->p++;
            declare(s, name, LABEL, s->k->length, 0, 0);
            continue;
        }
        if (n && word_char(s->p) && s->p[n - 1] == ':') fail(s, "a label that looks like a name");
        if (!*s->p) fail(s, "the text ends within a function");
        statement(s);
    }
}

/* Where a definition of `name` begins in the module: after its name. */
static const char *definition(const char *module, const char *keyword, const char *name)
{
    const size_t n = strlen(name);
    for (const char *p = module; (p = strstr(p, keyword)) != NULL; p += strlen(keyword)) {
        const char *const line_end = p + strcspn(p, "\n"), *at = p;
        while ((at = strstr(at, name)) != NULL && at < line_end) {
            const char *const end = at + n;
            if (!word_char(at - 1) && (*end == '(' || *end == '\n' || *end == ' ' || !*end || (*end == ')')))
                return end;
            at = end;
        }
    }
    return NULL;
}

static void parse_function(parser *s, const char *name)
{
    s->p = definition(s->module, ".func", name);
    if (!s->p) fail(s, "the function '%s' is not in this module", name);
    const symbol *const f = look(s, name, strlen(name));
    s->return_to = f->at;
    s->p += strcspn(s->p, "{");
    declare(s, name, LABEL, s->k->length, 0, 0);
    char result[700];
    snprintf(result, sizeof result, "%s_result", name);
    const symbol *const r = look(s, result, strlen(result));
    if (r) declare(s, "func_retval0", REGISTER, r->at, r->width, 0);
    body(s);
}

static void resolve(parser *s, int n)
{
    for (int i = s->symbol_count; i-- > 0;) {
        const symbol *const v = &s->symbols[i];
        if (v->kind != LABEL || strcmp(v->name, s->jumps[n].name)) continue;
        for (int j = s->jumps[n].scopes; j-- > -1;)
            if (v->scope == (j < 0 ? 0 : s->jumps[n].scope[j])) {
                s->k->code[s->jumps[n].instruction].target = v->at;
                return;
            }
    }
    fail(s, "no label '%s'", s->jumps[n].name);
}

static void parameters(parser *s)
{
    char name[600];
    kernel *const k = s->k;
    int room = 0;
    want(s, '(');
    while (!take(s, ')')) {
        int align = 1, width = 0;
        int64_t count = 1;
        skip(s);
        while (*s->p == '.') {
            word(s, name, sizeof name);
            if (!strcmp(name, ".align")) align = (int)number(s);
            else if (strcmp(name, ".param")) width = type_bytes[type_of(name + 1)];
            skip(s);
        }
        word(s, name, sizeof name);
        if (take(s, '[')) count = (int64_t)number(s), want(s, ']');
        if (align < width) align = width;
        k->params = (k->params + (size_t)align - 1) / (size_t)align * (size_t)align;
        declare(s, name, PARAMETER, (int)k->params, width, 0);
        if (k->param_count == room) {
            room = room ? 2 * room : 8;
            k->param_at = realloc(k->param_at, sizeof(size_t) * (size_t)room);
            k->param_size = realloc(k->param_size, sizeof(size_t) * (size_t)room);
            if (!k->param_at || !k->param_size) abort();
        }
        k->param_at[k->param_count] = k->params;
        k->param_size[k->param_count++] = (size_t)count * (size_t)width;
        k->params += (size_t)count * (size_t)width;
        take(s, ',');
    }
}

/* .extern .shared .align 16 .b8 name[]; is the launch's dynamic memory. Others of the module are not known here. */
static void module_variables(parser *s)
{
    for (const char *p = s->module; (p = strstr(p, ".extern .shared ")) != NULL;) {
        s->p = p += strlen(".extern .shared ");
        char name[600];
        do {
            word(s, name, sizeof name);
            if (!strcmp(name, ".align")) number(s);
            skip(s);
        } while (*s->p == '.');
        word(s, name, sizeof name);
        declare(s, name, VARIABLE, DYNAMIC_SHARED, 1, 0);
    }
}

kernel *ptx_parse(const char *module, const char *name, char *error, size_t size)
{
    parser *const s = calloc(1, sizeof *s);
    kernel *const k = calloc(1, sizeof *k);
    if (!s || !k) abort();
    s->module = module, s->k = k, s->error = error, s->error_size = size, s->return_to = -1;
    memset(s->bucket, 0xff, sizeof s->bucket);
    memset(s->open, 0xff, sizeof s->open);
    s->open[0] = 0;
    k->name = strdup(name);
    k->registers = LANES * 8; /* offset 0: none */
    kernel *volatile result = NULL;
    s->p = definition(module, ".entry", name);
    if (!s->p) snprintf(error, size, "the kernel %s is not in this module", name);
    else if (!setjmp(s->failed)) {
        parameters(s);
        const char *const code = s->p;
        module_variables(s);
        s->p = code;
        s->p += strcspn(s->p, "{");
        body(s);
        for (int i = 0; i < s->symbol_count; i++)
            if (s->symbols[i].kind == FUNCTION) {
                char *const f = strdup(s->symbols[i].name);
                parse_function(s, f);
                free(f);
            }
        for (int i = 0; i < s->jump_count; i++) resolve(s, i);
        result = k;
    }
    for (int i = 0; i < s->symbol_count; i++) free(s->symbols[i].name);
    for (int i = 0; i < s->jump_count; i++) free(s->jumps[i].name);
    free(s->symbols), free(s->jumps), free(s);
    return result;
}
