/* SPDX-License-Identifier: Apache-2.0
 * error.c - status names and the last error of each thread. */
#include <stdarg.h>
#include <stdio.h>

#include "error.h"

static _Thread_local char last_error[512];

fmoe_status fmoe_fail(fmoe_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

const char *fmoe_last_error(void) { return last_error; }

const char *fmoe_status_string(fmoe_status status)
{
    static const char *const names[] = {
        [FMOE_OK] = "FMOE_OK",
        [FMOE_ERR_NULL] = "FMOE_ERR_NULL",
        [FMOE_ERR_ABI] = "FMOE_ERR_ABI",
        [FMOE_ERR_ARG] = "FMOE_ERR_ARG",
        [FMOE_ERR_SHAPE] = "FMOE_ERR_SHAPE",
        [FMOE_ERR_DTYPE] = "FMOE_ERR_DTYPE",
        [FMOE_ERR_STRIDE] = "FMOE_ERR_STRIDE",
        [FMOE_ERR_ALIGN] = "FMOE_ERR_ALIGN",
        [FMOE_ERR_ALIAS] = "FMOE_ERR_ALIAS",
        [FMOE_ERR_INDEX] = "FMOE_ERR_INDEX",
        [FMOE_ERR_OVERFLOW] = "FMOE_ERR_OVERFLOW",
        [FMOE_ERR_WORKSPACE] = "FMOE_ERR_WORKSPACE",
        [FMOE_ERR_NOMEM] = "FMOE_ERR_NOMEM",
        [FMOE_ERR_HANDLE] = "FMOE_ERR_HANDLE",
        [FMOE_ERR_PLAN] = "FMOE_ERR_PLAN",
        [FMOE_ERR_BACKEND] = "FMOE_ERR_BACKEND",
        [FMOE_ERR_DEVICE] = "FMOE_ERR_DEVICE",
        [FMOE_ERR_UNSUPPORTED] = "FMOE_ERR_UNSUPPORTED",
        [FMOE_ERR_EXCHANGE] = "FMOE_ERR_EXCHANGE",
    };
    const size_t i = (size_t)status;
    return i < sizeof names / sizeof *names ? names[i] : "unknown fmoe_status";
}

int fmoe_version(void) { return FMOE_VERSION; }

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
const char *fmoe_version_string(void)
{
    return TEXT(FMOE_VERSION_MAJOR) "." TEXT(FMOE_VERSION_MINOR) "." TEXT(FMOE_VERSION_PATCH);
}
