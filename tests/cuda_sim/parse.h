/* SPDX-License-Identifier: Apache-2.0
 * parse.h - what words.c gives to parse.c. */
#ifndef CUDA_SIM_PARSE_H
#define CUDA_SIM_PARSE_H

#include "ptx.h"

#include <setjmp.h>

typedef enum symbol_kind { REGISTER, RANGE, VARIABLE, PARAMETER, LABEL, FUNCTION } symbol_kind;
typedef struct symbol {
    char *name;
    symbol_kind kind;
    int at, width, count; /* RANGE: count registers name0, name1 ... */
    int next, scope;
} symbol;

enum { BUCKETS = 4096, MOST_ARGS = 160 };
typedef struct parser {
    const char *module, *p; /* where we are */
    kernel *k;
    symbol *symbols;
    int symbol_count, bucket[BUCKETS], scope, next_scope, open[64];
    int code_room, constant_room, symbol_room, jump_room;
    struct {
        char *name;
        int instruction, scopes, scope[16];
    } *jumps; /* to labels that may come later */
    int jump_count;
    int return_to; /* of the function that is parsed: the register with the way back, or -1 */
    const char *statement;
    jmp_buf failed;
    char *error;
    size_t error_size;
} parser;

typedef struct operands {
    int at[MOST_ARGS];
    uint8_t width[MOST_ARGS];
    int count;
} operands;

/* How many bytes a type has is type_bytes[type]. */
extern const int type_bytes[];

_Noreturn void fail(parser *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
void *grow(void *list, int count, int *room, size_t size);
void skip(parser *s);
bool take(parser *s, char c);
void want(parser *s, char c);
bool word_char(const char *p);
size_t word_length(const char *p);
void word(parser *s, char *out, size_t size);
int room_for(parser *s, int width);
symbol *declare(parser *s, const char *name, symbol_kind kind, int at, int width, int count);
symbol *look(parser *s, const char *name, size_t n);
void open_scope(parser *s);
void close_scope(parser *s);
int constant_at(parser *s, uint64_t bits, int width);
type type_of(const char *name);
void modifiers(instruction *i, const char *name);
const op *find_op(const char *name);
void put(parser *s, operands *o, int at, int width);
uint64_t number(parser *s);
void value(parser *s, operands *o, int width);
instruction *emit(parser *s);
void keep(instruction *i, const operands *o);
void memory(parser *s, operands *o, int64_t *imm);
int width_of(parser *s, const instruction *i, char letter);
void jump(parser *s, const char *name, int instruction);

#endif
