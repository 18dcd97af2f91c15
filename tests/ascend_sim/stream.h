/* SPDX-License-Identifier: Apache-2.0
 * stream.h - events of the simulator; streams are in sim.h. */
#ifndef FMOE_SIM_STREAM_H
#define FMOE_SIM_STREAM_H

#include "sim.h"

typedef struct sim_event sim_event;

sim_event *sim_event_new(void);
void sim_event_release(sim_event *e);
aclError sim_event_record(sim_event *e, sim_stream *s);
aclError sim_event_make_wait(sim_event *e, sim_stream *s);
void sim_event_wait(sim_event *e);
bool sim_event_done(sim_event *e);
double sim_event_ms(const sim_event *a, const sim_event *b);

#endif
