/* SPDX-License-Identifier: Apache-2.0
 * bench_peers.h - other libraries' products under the same layer, for comparison. */
#ifndef FMOE_BENCH_PEERS_H
#define FMOE_BENCH_PEERS_H

#include "bench.h"
#include "fusedmoe.h"

const char *bench_peer_name(int i); /* NULL past the last */

/* The forward of the layer `f` on peer i; false where the peer is not there, or not for this type. */
bool bench_peer(int i, const bench_shape *shape, const fmoe_experts_args *f, bench_case *c);

#endif
