// Threads that share the items of a region. A thread that is late costs nothing: whoever is there takes the next item.
// One that was interrupted within an item holds up the region, which is how a busy machine shows: when that costs too much
// of what the helpers save, they rest until a core has nothing to do. So a worker leaves a second core to who wants it.
#pragma once
#include "idle.h"
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 64
#define SPINS 4000       // looks before a waiting thread sleeps: some tens of microseconds, the pause between two layers
#define PRICE 0.33       // of what helpers save is spent on waiting for them at most ...
#define CREDIT 0.01      // ... once so many seconds of saved waiting are used up
#define FIRST_REST 0.1   // seconds with fewer helpers then, and twice as long after each rest that follows soon
#define LONGEST_REST 2.0
#define LOOK 0.1         // seconds from one look for an idle core to the next
#define IDLE 0.4         // of a core, which is then taken to be idle

typedef void (*item_function)(void *context, int64_t item);

static struct {
    pthread_mutex_t owner;  // of the region; there is one at a time in a process
    pthread_mutex_t lock;   // for sleeping and waking only
    pthread_cond_t wake;
    item_function run;
    void *context;
    int64_t items;
    int helpers;           // threads started
    int allowed;           // helpers that may take part now
    double credit;          // seconds of waiting that are not spent yet
    double rest, rest_end;  // how long a rest is, and when the last one ends
    double looked, idle;    // when idle_seconds() was asked last, and what it said
    atomic_int guests;     // helpers that this region still admits
    atomic_int inside;     // helpers that may look at the region
    atomic_uint epoch;     // counts regions
    _Atomic int64_t next;  // item to be taken
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .allowed = MAX_THREADS,
    .credit = CREDIT,
};

static void pool_take(void) {
    int64_t item;
    while ((item = atomic_fetch_add(&pool.next, 1)) < pool.items) pool.run(pool.context, item);
}

static void *pool_helper(void *argument) {
    unsigned seen = (unsigned)(uintptr_t)argument;
    for (;;) {
        for (int spins = 0; atomic_load(&pool.epoch) == seen;) {
            if (++spins < SPINS) {
                _mm_pause();
                continue;
            }
            pthread_mutex_lock(&pool.lock);
            while (atomic_load(&pool.epoch) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
        }
        seen = atomic_load(&pool.epoch);
        atomic_fetch_add(&pool.inside, 1);  // before the look at `guests`: the owner closes first and then waits
        if (atomic_fetch_sub(&pool.guests, 1) > 0) pool_take();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static void pool_grow(int helpers) {
    for (; pool.helpers < helpers; pool.helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_helper, (void *)(uintptr_t)atomic_load(&pool.epoch)) != 0) return;
        pthread_detach(thread);
    }
}

static double pool_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Say whether a core has been idle since the last look; yes where nobody can tell.
static int pool_finds_core(double now) {
    const double before = pool.idle, since = now - pool.looked;
    pool.looked = now;
    pool.idle = idle_seconds();
    return pool.idle < 0 || pool.idle - before >= IDLE * since;
}

static int pool_invited(int wanted) {
    if (pool.allowed < wanted) {
        const double now = pool_now();
        if (now >= pool.rest_end) {
            const int more = pool.allowed ? 2 * pool.allowed : 1, found = pool_finds_core(now);
            if (found) pool.allowed = more;
            pool.rest_end = now + (found ? pool.rest : LOOK);
        }
    }
    return pool.allowed < wanted ? pool.allowed : wanted;
}

static void pool_rest(int helpers, double now) {
    pool.allowed = helpers / 2;
    pool.rest = now < pool.rest_end + pool.rest ? 2 * pool.rest : FIRST_REST;
    if (pool.rest > LONGEST_REST) pool.rest = LONGEST_REST;
    pool.rest_end = now + pool.rest;
    pool.credit = CREDIT;
    pool_finds_core(now);
}

// Wait for the helpers to leave, and weigh that against the time that the caller would have needed for their items.
static void pool_close(int helpers, double begun) {
    atomic_store(&pool.guests, 0);
    const double since = pool_now();
    for (int spins = 0; atomic_load(&pool.inside) > 0;) {
        if (++spins < SPINS) _mm_pause();
        else sched_yield();
    }
    const double now = pool_now();
    pool.credit += PRICE * helpers * (since - begun) - (now - since);
    if (pool.credit > CREDIT) pool.credit = CREDIT;
    if (pool.credit < 0) pool_rest(helpers, now);
}

// Call run(context, i) for every i below `items` on up to `threads` threads, the caller's included; return when all
// have returned. Where the pool is taken by another thread, the caller does all by itself.
static void parallel(item_function run, void *context, int64_t items, int64_t threads) {
    int wanted = (int)(threads < MAX_THREADS ? threads : MAX_THREADS) - 1;
    if (wanted < 1 || items <= 1 || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t item = 0; item < items; item++) run(context, item);
        return;
    }
    int helpers = pool_invited(wanted);
    if (helpers == 0) {
        for (int64_t item = 0; item < items; item++) run(context, item);
    } else {
        pool_grow(helpers);
        pool.run = run;
        pool.context = context;
        pool.items = items;
        atomic_store(&pool.next, 0);
        atomic_store(&pool.guests, helpers);
        pthread_mutex_lock(&pool.lock);
        atomic_fetch_add(&pool.epoch, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
        const double begun = pool_now();
        pool_take();
        pool_close(helpers, begun);
    }
    pthread_mutex_unlock(&pool.owner);
}
