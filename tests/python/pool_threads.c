/* SPDX-License-Identifier: Apache-2.0
 *
 * pool_threads.c - the pool of python/fusedmoe/pool.c without an interpreter's lock around it: threads that take and
 * give, and forks in their midst. test_pool.py builds it plain and with the thread sanitizer. Without arguments:
 * threads; with: forks. */
#include "pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 3000, MIB = 1 << 20 };
static _Atomic int stop, wrong;

static void *churn(void *arg)
{
    const int me = (int)(size_t)arg;
    for (int i = 0; i < ROUNDS && !stop; i++) {
        pool_block *b[2] = {pool_take((size_t)(MIB + (i + me) % 3 * MIB), i % 2), pool_take(MIB, true)};
        for (int j = 0; j < 2; j++) *(int *)b[j]->data = 2 * me + j;
        for (int j = 0; j < 2; j++) wrong |= *(int *)b[j]->data != 2 * me + j;
        pool_give(b[0]);
        pool_give(b[1]);
        if (i % 64 == 0) pool_empty();
    }
    return NULL;
}

int main(int argc, char **argv)
{
    (void)argv;
    pthread_t threads[THREADS];
    if (pool_init()) return 2;
    pool_block *kept = pool_take(MIB, true);
    *(int *)kept->data = 7;
    for (size_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, churn, (void *)i);
    for (int i = 0; argc > 1 && i < 200; i++) {
        const pid_t child = fork();
        if (!child) {
            alarm(10); /* a lock that a thread held at the moment of the fork */
            pool_block *b = pool_take(MIB, true);
            const int ok = *(int *)kept->data == 7 && b;
            *(int *)kept->data = 8;
            pool_give(b);
            pool_empty();
            _exit(ok ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (status) return printf("child %d: status %d\n", i, status), 3;
    }
    stop = argc > 1;
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    const pool_counts now = pool_count();
    const bool too_much = now.live + now.free > now.peak + now.peak / 8;
    const int bad = wrong || *(int *)kept->data != 7 || now.live != kept->bytes || too_much;
    if (bad) printf("wrong %d, live %zu, free %zu, peak %zu\n", wrong, now.live, now.free, now.peak);
    return bad;
}
