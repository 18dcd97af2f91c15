/* SPDX-License-Identifier: Apache-2.0
 * words.c - the words, symbols and operands of PTX: parse.c makes statements of them. Names in braces, as inline
 * assembly has them, are known there only. */
#include "parse.h"

#include <ctype.h>
#include <fenv.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const special_names[] = {
    "%tid.x",       "%tid.y",       "%tid.z",   "%ntid.x",          "%ntid.y",
    "%ntid.z",      "%ctaid.x",     "%ctaid.y", "%ctaid.z",         "%nctaid.x",
    "%nctaid.y",    "%nctaid.z",    "%laneid",  "%cluster_ctarank", "%cluster_nctarank",
    "%smid",        "%nsmid",       "%warpid",  "%lanemask_lt",     "%lanemask_le",
    "%lanemask_gt", "%lanemask_ge", NULL};

void fail(parser *s, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(s->error, s->error_size, format, list);
    va_end(list);
    const char *const at = s->statement ? s->statement : s->p, *const end = strpbrk(at, ";\n");
    if (n > 0 && (size_t)n < s->error_size)
        snprintf(s->error + n, s->error_size - (size_t)n, ": %.*s", end ? (int)(end - at) : 60, at);
    longjmp(s->failed, 1);
}

void *grow(void *list, int count, int *room, size_t size)
{
    if (count < *room) return list;
    *room = *room ? 2 * *room : 64;
    list = realloc(list, (size_t)*room * size);
    if (!list) abort();
    return list;
}

/* ---- Words ---- */

void skip(parser *s)
{
    for (;;) {
        while (isspace((unsigned char)*s->p)) s->p++;
        if (s->p[0] == '/' && s->p[1] == '/') s->p += strcspn(s->p, "\n");
        else if (s->p[0] == '/' && s->p[1] == '*') s->p = strstr(s->p, "*/") + 2;
        else return;
    }
}
bool take(parser *s, char c)
{
    skip(s);
    if (*s->p != c) return false;
    s->p++;
    return true;
}
void want(parser *s, char c)
{
    if (!take(s, c)) fail(s, "'%c' is missing", c);
}
bool word_char(const char *p) { return isalnum((unsigned char)*p) || strchr("_$%.", *p); }
size_t word_length(const char *p)
{
    const char *const begin = p;
    while (*p && (word_char(p) || (p[0] == ':' && p[1] == ':') || (p[0] == ':' && p > begin && p[-1] == ':'))) p++;
    return (size_t)(p - begin);
}
void word(parser *s, char *out, size_t size)
{
    skip(s);
    const size_t n = word_length(s->p);
    if (!n || n >= size) fail(s, "no word here, or one that is too long");
    memcpy(out, s->p, n);
    out[n] = 0;
    s->p += n;
}

/* ---- Symbols ---- */

static unsigned hash(const char *name, size_t n)
{
    unsigned h = 5381;
    for (size_t i = 0; i < n; i++) h = h * 33 + (unsigned char)name[i];
    return h % BUCKETS;
}
int room_for(parser *s, int width) /* a register's place */
{
    const size_t at = s->k->registers;
    s->k->registers += (size_t)width * LANES;
    return (int)at;
}
symbol *declare(parser *s, const char *name, symbol_kind kind, int at, int width, int count)
{
    s->symbols = grow(s->symbols, s->symbol_count, &s->symbol_room, sizeof *s->symbols);
    const unsigned h = hash(name, strlen(name));
    s->symbols[s->symbol_count] = (symbol){strdup(name), kind, at, width, count, s->bucket[h], s->scope};
    s->bucket[h] = s->symbol_count++;
    return &s->symbols[s->symbol_count - 1];
}
static bool is_open(const parser *s, int scope)
{
    for (int i = 0; i < 64 && s->open[i] >= 0; i++)
        if (s->open[i] == scope) return true;
    return false;
}
symbol *look(parser *s, const char *name, size_t n)
{
    for (int i = s->bucket[hash(name, n)]; i >= 0; i = s->symbols[i].next)
        if (strlen(s->symbols[i].name) == n && !memcmp(s->symbols[i].name, name, n) && is_open(s, s->symbols[i].scope))
            return &s->symbols[i];
    return NULL;
}
void open_scope(parser *s)
{
    int i = 0;
    while (i < 62 && s->open[i] >= 0) i++;
    s->open[i] = s->scope = ++s->next_scope;
    s->open[i + 1] = -1;
}
void close_scope(parser *s)
{
    int i = 0;
    while (s->open[i + 1] >= 0) i++;
    s->open[i] = -1;
    s->scope = i ? s->open[i - 1] : 0;
}

int constant_at(parser *s, uint64_t bits, int width)
{
    if (width < 8) bits &= (1ull << 8 * width) - 1;
    kernel *const k = s->k;
    for (int i = k->constant_count; i-- > 0 && i > k->constant_count - 64;)
        if (k->constants[i].bits == bits && k->constants[i].width == width) return k->constants[i].at;
    k->constants = grow(k->constants, k->constant_count, &s->constant_room, sizeof *k->constants);
    k->constants[k->constant_count++] = (constant){room_for(s, width), width, bits};
    return k->constants[k->constant_count - 1].at;
}

/* ---- Types and modifiers ---- */

/* In the order of `type`. */
static const char *const type_names[] = {"",    "pred", "b8",  "u8",  "s8",     "b16", "u16",    "s16",
                                         "f16", "bf16", "b32", "u32", "s32",    "f32", "bf16x2", "f16x2",
                                         "b64", "u64",  "s64", "f64", "e4m3x2", NULL};
const int type_bytes[] = {0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 2};
type type_of(const char *name)
{
    for (int t = PRED; t <= E4M3X2; t++)
        if (!strcmp(name, type_names[t])) return (type)t;
    return NO_TYPE;
}
static int number_of(const char *const names[], const char *name)
{
    for (int i = 0; names[i]; i++)
        if (!strcmp(names[i], name)) return i;
    return -1;
}
void modifiers(instruction *i, const char *name)
{
    static const char *const compares[] = {"eq",  "ne",  "lt",   "le",  "gt",  "ge",  "lo",  "ls",  "hi",  "hs",
                                           "equ", "neu", "ltu",  "leu", "gtu", "geu", "num", "nan", "and", "or",
                                           "xor", "add", "exch", "cas", "min", "max", "inc", "dec", NULL};
    static const char *const spaces[] = {"generic",         "global", "shared",      "param",
                                         "shared::cluster", "local",  "shared::cta", NULL};
    static const char *const roundings[] = {"rn", "rz", "rm", "rp", "rzi", "rni", "rmi", "rpi", NULL};
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO,   FE_DOWNWARD,  FE_UPWARD,
                                INTEGER_ZERO, INTEGER_NEAREST, INTEGER_DOWN, INTEGER_UP};
    char copy[200], *rest = copy;
    snprintf(copy, sizeof copy, "%s", name);
    strsep(&rest, ".");
    i->compare = i->combine = -1;
    for (int types = 0; rest;) {
        const char *const token = strsep(&rest, ".");
        const type t = type_of(token);
        int n;
        if (t && types < 4) i->type[types++] = t;
        else if ((n = number_of(compares, token)) >= 0) *(i->compare < 0 ? &i->compare : &i->combine) = n;
        else if ((n = number_of(spaces, token)) >= 0) i->space = n == 6 ? SHARED : (space)n;
        else if ((n = number_of(roundings, token)) >= 0) i->rounding = modes[n];
        else if (!strcmp(token, "sat")) i->saturate = true;
    }
}

const op *find_op(const char *name)
{
    static const op *const tables[] = {integer_ops, float_ops, warp_ops, memory_ops, matrix_ops, async_ops};
    const op *best = NULL;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const op *o = tables[t]; o->name; o++) {
            const size_t n = strlen(o->name) - 1;
            if (!strcmp(o->name, name)) return o;
            if (o->name[n] == '*' && !strncmp(o->name, name, n) && (!best || strlen(best->name) < n + 1)) best = o;
        }
    return best;
}

/* ---- Operands ---- */

void put(parser *s, operands *o, int at, int width)
{
    if (o->count == MOST_ARGS) fail(s, "too many operands");
    o->at[o->count] = at, o->width[o->count++] = (uint8_t)width;
}

uint64_t number(parser *s)
{
    skip(s);
    const bool minus = take(s, '-');
    skip(s);
    char *end;
    uint64_t v;
    if (s->p[0] == '0' && (s->p[1] == 'f' || s->p[1] == 'F' || s->p[1] == 'd' || s->p[1] == 'D')) {
        v = strtoull(s->p + 2, &end, 16);
    } else v = strtoull(s->p, &end, 0);
    if (end == s->p) fail(s, "no number here");
    if (*end == 'U') end++;
    s->p = end;
    return minus ? -v : v;
}
static int special_register(parser *s, const char *name)
{
    const int n = number_of(special_names, name);
    if (n < 0) return -1;
    if (!s->k->special[n]) s->k->special[n] = room_for(s, 4);
    return s->k->special[n];
}

instruction *emit(parser *s)
{
    kernel *const k = s->k;
    k->code = grow(k->code, k->length, &s->code_room, sizeof *k->code);
    instruction *const i = &k->code[k->length++];
    memset(i, 0, sizeof *i);
    i->guard = i->mask = -1;
    i->rounding = FE_TONEAREST;
    i->text = s->statement;
    return i;
}
void keep(instruction *i, const operands *o)
{
    i->operands = o->count;
    i->at = malloc(sizeof *i->at * (size_t)(o->count + 1));
    i->width = malloc((size_t)o->count + 1);
    if (!i->at || !i->width) abort();
    memcpy(i->at, o->at, sizeof *i->at * (size_t)o->count);
    memcpy(i->width, o->width, (size_t)o->count);
}
static void offset_address(warp *w, const instruction *i, uint32_t lanes)
{
    uint64_t *const d = REG(uint64_t, 0);
    const uint64_t *const a = REG(uint64_t, 1);
    EACH(d[l] = a[l] + (uint64_t)i->imm[0]);
}

static int parameters_at(parser *s) /* the register with the address of all parameters, known at the launch */
{
    if (!s->k->special[PARAMS]) s->k->special[PARAMS] = room_for(s, 8);
    return s->k->special[PARAMS];
}

/* A register, a constant of `width` bytes, or the address of a variable. */
void value(parser *s, operands *o, int width)
{
    skip(s);
    if (isdigit((unsigned char)*s->p) || *s->p == '-') {
        put(s, o, constant_at(s, number(s), width), width);
        return;
    }
    char name[600];
    word(s, name, sizeof name);
    if (!strcmp(name, "_")) {
        put(s, o, room_for(s, 8), 8);
        return;
    }
    if (!strcmp(name, "WARP_SZ")) {
        put(s, o, constant_at(s, LANES, width), width);
        return;
    }
    const int special = special_register(s, name);
    if (special >= 0) {
        put(s, o, special, 4);
        return;
    }
    symbol *v = look(s, name, strlen(name));
    if (v && v->kind == REGISTER) {
        put(s, o, v->at, v->width);
        return;
    }
    if (v && v->kind == VARIABLE) {
        put(s, o, constant_at(s, (uint64_t)v->at, width), width);
        return;
    }
    if (v && v->kind == PARAMETER) { /* its address, in a register of its own */
        const int own = room_for(s, 8), at = v->at;
        instruction *const i = emit(s);
        i->fn = offset_address, i->imm[0] = at;
        operands both = {0};
        put(s, &both, own, 8), put(s, &both, parameters_at(s), 8);
        keep(i, &both);
        put(s, o, own, 8);
        return;
    }
    size_t n = strlen(name);
    while (n && isdigit((unsigned char)name[n - 1])) n--;
    v = look(s, name, n);
    const int index = atoi(name + n);
    if (!v || v->kind != RANGE || index >= v->count) fail(s, "'%s' is not declared", name);
    put(s, o, v->at + index * v->width * LANES, v->width);
}

static const symbol *parameter_here(parser *s)
{
    skip(s);
    const symbol *const v = look(s, s->p, word_length(s->p));
    return v && v->kind == PARAMETER ? v : NULL;
}

/* [register + offset], [variable + offset], [address, {coordinates}] */
void memory(parser *s, operands *o, int64_t *imm)
{
    want(s, '[');
    const symbol *const v = parameter_here(s);
    if (v) {
        *imm = v->at;
        s->p += word_length(s->p);
        put(s, o, parameters_at(s), 8);
    } else value(s, o, 8);
    if (take(s, '+')) *imm += (int64_t)number(s);
    if (take(s, ',')) {
        want(s, '{');
        do value(s, o, 4);
        while (take(s, ','));
        want(s, '}');
    }
    want(s, ']');
}

int width_of(parser *s, const instruction *i, char letter)
{
    switch (letter) {
    case 'p': return 1;
    case 'h': return 2;
    case 'w': return 4;
    case 'd': return 8;
    case 's': return type_bytes[i->type[1]];
    case 't':
    case 'v':
        if (i->type[0]) return type_bytes[i->type[0]];
    }
    fail(s, "an operand without a type");
}

void jump(parser *s, const char *name, int instruction)
{
    s->jumps = grow(s->jumps, s->jump_count, &s->jump_room, sizeof *s->jumps);
    s->jumps[s->jump_count].name = strdup(name);
    s->jumps[s->jump_count].instruction = instruction;
    int n = 0;
    for (; s->open[n] >= 0 && n < 16; n++) s->jumps[s->jump_count].scope[n] = s->open[n];
    s->jumps[s->jump_count++].scopes = n;
}
