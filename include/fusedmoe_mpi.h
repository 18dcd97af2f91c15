/* SPDX-License-Identifier: Apache-2.0
 *
 * fusedmoe_mpi.h - an engine of expert parallelism (fusedmoe_ep.h) over MPI: libfusedmoe_mpi.so, built where MPI is
 * found (MPI 3.1 and newer), for the MPI it was built with.
 *
 * Point to point on a duplicate of the caller's communicator, from the thread that calls. Rows are a datatype, so
 * counts are rows: at most INT_MAX to one rank (MPI 4: no such limit). MPI moves messages when it is called, which is
 * in begin and wait: how much runs beside the products depends on the MPI.
 *
 * After an abort or a deadline the memory of exchanges that MPI may still read stays taken until the process ends. */
#ifndef FUSEDMOE_MPI_H
#define FUSEDMOE_MPI_H

#include <mpi.h>

#include "fusedmoe_ep.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fmoe_ep_mpi fmoe_ep_mpi;

/* Collective over comm, both. Sets NULL; NULL is allowed. */
FMOE_API fmoe_status fmoe_ep_mpi_create(fmoe_ep_mpi **engine, MPI_Comm comm);
FMOE_API void fmoe_ep_mpi_destroy(fmoe_ep_mpi **engine);
FMOE_API fmoe_status fmoe_ep_mpi_exchange(fmoe_ep_mpi *engine, fmoe_exchange *exchange);

#ifdef __cplusplus
}
#endif
#endif
