/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_ccl.h - what libfake_ccl.so has beside the functions of NCCL and HCCL: communicators whose ranks are threads of
 * one process and whose memory is the host's, and faults.
 *
 * A stream is NULL (everything is done when the call returns) or a fake_stream: then calls only add to its list, and a
 * thread of it works that off, as a device would. */
#ifndef FAKE_CCL_H
#define FAKE_CCL_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fake_stream fake_stream;
typedef struct fake_group fake_group;

enum { FAKE_MOST = 16 };

typedef struct fake_api {
    fake_group *(*group_new)(int ranks);
    void (*group_free)(fake_group *g);        /* after its communicators were used for the last time */
    void *(*comm)(fake_group *g, int rank);   /* ncclComm_t, HcclComm */
    void (*fail_async)(void *comm, int code); /* what the library found wrong since */
    void (*fail_next)(void *comm, int code);  /* of the next send or exchange: what it answers */
    long (*calls)(void *comm, int what);      /* 0: sends, 1: receives, 2: groups or exchanges, 3: aborts */
    fake_stream *(*stream_new)(void);
    void (*stream_free)(fake_stream *s); /* after what is on its list */
    void (*push)(fake_stream *s, void (*fn)(void *), void *arg);
} fake_api;

/* The symbol "fake_ccl_api". */
#endif
