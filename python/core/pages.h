/* SPDX-License-Identifier: Apache-2.0
 *
 * pages.h - expert weights in huge pages. See pages.c. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "fusedmoe.h"

void pages_init(void); /* once, before anything else */
/* A weight (or NULL) that is about to be read, in memory of the CPU; from any thread. */
void pages_look_at(const fmoe_tensor *w);
/* Where a lot of memory is about to be touched for the first time: a page fault for 2 MiB, not 4 KiB. */
void pages_prefer(const void *, size_t);
int64_t pages_now(void);            /* nanoseconds */
void pages_ran_since(int64_t then); /* a layer has run since then: a tenth of that is for moving */
size_t pages_moved(void);           /* bytes that lie in huge pages because of it */
