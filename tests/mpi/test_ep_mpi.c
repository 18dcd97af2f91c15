/* SPDX-License-Identifier: Apache-2.0
 * test_ep_mpi.c - expert parallelism over MPI: mpirun -np N test_ep_mpi. Every rank draws the same layers, computes
 * them alone, and compares its share. Rank 0 prints; the others count into its failures. */
#define main test_main /* MPI is initialised around it */
#include "unit/ep_layer.h"
#undef main
#include <time.h>
#include <unistd.h>

#include "fusedmoe_mpi.h"

static int rank, ranks;

static void over_mpi(int dtype, int mode, int draws)
{
    for (int i = 0; i < draws; i++) {
        fmoe_ep_mpi *engine;
        fmoe_exchange x;
        ep_layer *l = ep_draw(ranks, dtype, mode);
        ep_rank *s[EP_RANKS];
        ep_one_process(l);
        CHECK_STATUS(fmoe_ep_mpi_create(&engine, MPI_COMM_WORLD), FMOE_OK);
        CHECK_STATUS(fmoe_ep_mpi_exchange(engine, &x), FMOE_OK);
        for (int r = 0; r < ranks; r++) s[r] = ep_share(l, r, &x); /* all draw alike */
        ep_run_rank(s[rank]);
        ep_compare(l, s[rank], rank);
        fmoe_ep_mpi_destroy(&engine);
        int all = test_failures; /* a rank that failed has nothing to say in the next draw */
        MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
        if (all) {
            TEST_FAIL("draw %d: %d failures on all ranks", i, all);
            return;
        }
    }
}

TEST(exact_mode_has_the_bits_of_one_process_f32) { over_mpi(FMOE_F32, FMOE_EP_EXACT, 40); }
TEST(exact_mode_has_the_bits_of_one_process_bf16) { over_mpi(FMOE_BF16, FMOE_EP_EXACT, 40); }
TEST(lean_mode_runs_and_gradients_of_weights_have_the_bits) { over_mpi(FMOE_BF16, FMOE_EP_LEAN, 20); }

/* A rank that comes late: the others have an error that names it, in time, and a new engine works. */
TEST(a_late_rank_is_named)
{
    ep_layer *l = ep_draw(ranks, FMOE_F32, FMOE_EP_EXACT);
    ep_one_process(l);
    fmoe_ep_mpi *engine;
    fmoe_exchange x;
    ep_rank *s[EP_RANKS];
    CHECK_STATUS(fmoe_ep_mpi_create(&engine, MPI_COMM_WORLD), FMOE_OK);
    CHECK_STATUS(fmoe_ep_mpi_exchange(engine, &x), FMOE_OK);
    for (int r = 0; r < ranks; r++) {
        s[r] = ep_share(l, r, &x);
        s[r]->desc.timeout_ms = 150;
    }
    if (rank == 1) nanosleep(&(struct timespec){.tv_nsec = 600000000}, NULL);
    const time_t began = time(NULL);
    ep_run_rank(s[rank]);
    CHECK(time(NULL) - began <= 2);
    CHECK(s[rank]->status != FMOE_OK);
    if (rank != 1 && !strstr(s[rank]->error, "rank 1 has not come") && !strstr(s[rank]->error, "gave up"))
        TEST_FAIL("rank %d says \"%s\"", rank, s[rank]->error);
    fmoe_ep_mpi_destroy(&engine);
    MPI_Barrier(MPI_COMM_WORLD);
    over_mpi(FMOE_F32, FMOE_EP_EXACT, 2);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (rank && !freopen("/dev/null", "w", stdout)) return 2;
    int failed = test_main(argc, argv);
    MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    MPI_Finalize();
    return failed;
}
