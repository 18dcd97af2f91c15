/* SPDX-License-Identifier: Apache-2.0
 * acts.h - every activation of fusedmoe.h. */
#ifndef FMOE_TESTS_ACTS_H
#define FMOE_TESTS_ACTS_H

#include "fusedmoe.h"

static const int check_acts[] = {FMOE_ACT_SWIGLU,
                                 FMOE_ACT_GEGLU,
                                 FMOE_ACT_GEGLU_TANH,
                                 FMOE_ACT_REGLU,
                                 FMOE_ACT_SWIGLU_CLAMP,
                                 FMOE_ACT_SWIGLU_OAI,
                                 FMOE_ACT_SWIGLU_CLAMP_OUT,
                                 FMOE_ACT_SILU,
                                 FMOE_ACT_GELU,
                                 FMOE_ACT_GELU_TANH,
                                 FMOE_ACT_RELU,
                                 FMOE_ACT_RELU2};
enum { CHECK_ACTS = sizeof check_acts / sizeof *check_acts };

#endif
