/* SPDX-License-Identifier: Apache-2.0
 * error.h - how every layer of the library reports an error (error.c). */
#ifndef FMOE_ERROR_H
#define FMOE_ERROR_H

#include "fusedmoe.h"

/* Set fmoe_last_error() of this thread and return `status`. */
fmoe_status fmoe_fail(fmoe_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
