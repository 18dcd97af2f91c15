/* SPDX-License-Identifier: Apache-2.0
 * stream.c - streams are queues with a thread of their own, so whoever forgets to synchronise reads old data. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"
#include "stream.h"

typedef struct task {
    void (*fn)(void *);
    void *arg;
    struct task *next;
} task;

struct sim_stream {
    pthread_mutex_t lock;
    pthread_cond_t change;
    task *head, *tail;
    bool started, busy, stop;
    int error;
    pthread_t thread;
    sim_stream *next;
};

struct sim_event {
    pthread_mutex_t lock;
    pthread_cond_t change;
    int64_t issued, completed;
    struct timespec when;
    int users; /* the owner and the tasks that refer to it */
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static sim_stream *all;
static __thread sim_stream *running; /* on a worker: its stream */

static void *work(void *arg)
{
    sim_stream *s = running = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->head && !s->stop) pthread_cond_wait(&s->change, &s->lock);
        task *t = s->head;
        if (!t) break;
        s->head = t->next;
        if (!s->head) s->tail = NULL;
        s->busy = true;
        pthread_mutex_unlock(&s->lock);
        const int64_t delay = fmoe_sim_option("delay_us");
        if (delay > 0) usleep((useconds_t)delay);
        t->fn(t->arg);
        free(t);
        pthread_mutex_lock(&s->lock);
        s->busy = false;
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

sim_stream *sim_stream_new(void)
{
    sim_stream *s = calloc(1, sizeof *s);
    if (!s) abort();
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    pthread_mutex_lock(&all_lock);
    s->next = all;
    all = s;
    pthread_mutex_unlock(&all_lock);
    sim_add("live_streams", 1);
    return s;
}

bool sim_stream_exists(const sim_stream *s)
{
    bool found = false;
    pthread_mutex_lock(&all_lock);
    for (const sim_stream *p = all; p && !found; p = p->next) found = p == s;
    pthread_mutex_unlock(&all_lock);
    return found;
}

aclError sim_stream_delete(sim_stream *s)
{
    if (!sim_stream_exists(s)) return ACL_E_NO_STREAM;
    pthread_mutex_lock(&all_lock);
    sim_stream **at = &all;
    while (*at != s) at = &(*at)->next;
    *at = s->next;
    pthread_mutex_unlock(&all_lock);
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->change);
    const bool started = s->started;
    pthread_mutex_unlock(&s->lock);
    if (started) pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->change);
    free(s);
    sim_add("live_streams", -1);
    return ACL_OK;
}

aclError sim_submit(sim_stream *s, void (*fn)(void *), void *arg)
{
    if (!sim_stream_exists(s)) {
        sim_message("stream %p does not exist", (void *)s);
        return ACL_E_NO_STREAM;
    }
    task *t = malloc(sizeof *t);
    if (!t) abort();
    *t = (task){fn, arg, NULL};
    pthread_mutex_lock(&s->lock);
    if (!s->started) s->started = pthread_create(&s->thread, NULL, work, s) == 0;
    if (s->tail) s->tail->next = t;
    else s->head = t;
    s->tail = t;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    return ACL_OK;
}

static aclError wait_until(sim_stream *s, const struct timespec *deadline)
{
    if (!sim_stream_exists(s)) return ACL_E_NO_STREAM;
    int late = 0;
    pthread_mutex_lock(&s->lock);
    while ((s->head || s->busy) && !late) {
        if (deadline) late = pthread_cond_timedwait(&s->change, &s->lock, deadline);
        else pthread_cond_wait(&s->change, &s->lock);
    }
    if (s->head || s->busy) {
        pthread_mutex_unlock(&s->lock);
        sim_message("the stream is not done in time");
        return ACL_E_TIMEOUT;
    }
    const int error = s->error;
    s->error = 0;
    pthread_mutex_unlock(&s->lock);
    if (error) sim_message("the stream has failed: %d", error);
    return error;
}

aclError sim_stream_wait(sim_stream *s) { return wait_until(s, NULL); }

aclError sim_device_wait(int32_t ms)
{
    sim_stream *list[256];
    int n = 0, error = 0;
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += ms / 1000;
    deadline.tv_nsec += ms % 1000 * 1000000L;
    if (deadline.tv_nsec >= 1000000000L) deadline.tv_sec++, deadline.tv_nsec -= 1000000000L;
    pthread_mutex_lock(&all_lock);
    for (sim_stream *s = all; s && n < 256; s = s->next) list[n++] = s;
    pthread_mutex_unlock(&all_lock);
    for (int i = 0; i < n; i++) {
        const int e = wait_until(list[i], ms < 0 ? NULL : &deadline);
        if (e && !error) error = e;
    }
    return error;
}

bool sim_stream_idle(sim_stream *s)
{
    pthread_mutex_lock(&s->lock);
    const bool idle = !s->head && !s->busy;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

void sim_stream_error(int code)
{
    if (running && !running->error) running->error = code;
}

/* ---- events ---- */

sim_event *sim_event_new(void)
{
    sim_event *e = calloc(1, sizeof *e);
    if (!e) abort();
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->change, NULL);
    e->users = 1;
    sim_add("live_events", 1);
    return e;
}

void sim_event_release(sim_event *e)
{
    pthread_mutex_lock(&e->lock);
    const int left = --e->users;
    pthread_mutex_unlock(&e->lock);
    if (left) return;
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->change);
    free(e);
    sim_add("live_events", -1);
}

typedef struct {
    sim_event *event;
    int64_t number;
} mark;

static void record_task(void *arg)
{
    mark *m = arg;
    pthread_mutex_lock(&m->event->lock);
    m->event->completed = m->number;
    clock_gettime(CLOCK_MONOTONIC, &m->event->when);
    pthread_cond_broadcast(&m->event->change);
    pthread_mutex_unlock(&m->event->lock);
    sim_event_release(m->event);
    free(m);
}

static void wait_for(sim_event *e, int64_t number)
{
    pthread_mutex_lock(&e->lock);
    while (e->completed < number) pthread_cond_wait(&e->change, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

static void wait_task(void *arg)
{
    mark *m = arg;
    wait_for(m->event, m->number);
    sim_event_release(m->event);
    free(m);
}

static aclError submit_mark(sim_stream *s, sim_event *e, bool record)
{
    mark *m = malloc(sizeof *m);
    if (!m) abort();
    pthread_mutex_lock(&e->lock);
    if (record) e->issued++;
    *m = (mark){e, e->issued};
    e->users++;
    pthread_mutex_unlock(&e->lock);
    const aclError error = sim_submit(s, record ? record_task : wait_task, m);
    if (error) {
        sim_event_release(e);
        free(m);
    }
    return error;
}

aclError sim_event_record(sim_event *e, sim_stream *s) { return submit_mark(s, e, true); }
aclError sim_event_make_wait(sim_event *e, sim_stream *s) { return submit_mark(s, e, false); }
void sim_event_wait(sim_event *e) { wait_for(e, e->issued); }

bool sim_event_done(sim_event *e)
{
    pthread_mutex_lock(&e->lock);
    const bool done = e->completed >= e->issued;
    pthread_mutex_unlock(&e->lock);
    return done;
}

double sim_event_ms(const sim_event *a, const sim_event *b)
{
    return 1e3 * (double)(b->when.tv_sec - a->when.tv_sec) + 1e-6 * (double)(b->when.tv_nsec - a->when.tv_nsec);
}
