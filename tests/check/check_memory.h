/* SPDX-License-Identifier: Apache-2.0
 * check_memory.h - what check.c alone needs of check_memory.c. */
#ifndef FMOE_CHECK_MEMORY_H
#define FMOE_CHECK_MEMORY_H

void check_memory_free(void); /* after each draw */

#endif
