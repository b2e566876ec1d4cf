// Threads that share the items of a region. A thread that is late costs nothing: whoever is there takes the next item.
// One that was interrupted within an item holds up the region, which is how a busy machine shows: when that costs too much
// of what helpers save, half of them rest until a processor has nothing to do. So a worker leaves a second one to who wants it.
#pragma once
#include "idle.h"
#include <immintrin.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MAX_THREADS 64
#define SPINS 4000       // looks before a waiting thread sleeps: the pause between two layers, 10 to 200 microseconds by processor
#define PRICE 0.33       // of the time that helpers can have saved may be spent on waiting for them ...
#define CREDIT 0.01      // ... and so many seconds more
#define FIRST_REST 0.1   // seconds with fewer helpers then, and twice as long after each rest that follows soon
#define LONGEST_REST 2.0
#define LOOK 0.1         // seconds from one look for an idle processor to the next
#define IDLE 0.4         // of a processor, which is then taken to be idle
#define PATIENCE 10.0    // seconds without one, after which a helper is tried all the same

typedef void (*item_function)(void *context, int64_t item);

static struct {
    pthread_mutex_t owner;  // of the region; there is one at a time in a process
    item_function run;
    void *context;
    int64_t items;
    atomic_int guests;     // helpers that this region still admits
    atomic_int inside;     // helpers that may look at the region
    atomic_uint epoch;     // counts regions
    _Atomic int64_t next;  // item to be taken
    // Sleeping and waking.
    pthread_mutex_t lock;
    pthread_cond_t region, invitation;
    atomic_int invited;  // helpers with a lesser number watch for regions, the others sleep
    int started;         // helpers
    // How many are worth their while.
    int allowed;
    double credit;     // seconds that the owner may still wait for helpers
    double rest;       // seconds of the last one
    double next_look;  // for an idle processor, while helpers rest
    double changed;    // when one was last sent away, or allowed again
    machine_time seen;
} pool = {
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .region = PTHREAD_COND_INITIALIZER,
    .invitation = PTHREAD_COND_INITIALIZER,
    .allowed = MAX_THREADS,
    .credit = CREDIT,
};

static void pool_take(void) {
    int64_t item;
    while ((item = atomic_fetch_add(&pool.next, 1)) < pool.items) pool.run(pool.context, item);
}

// Return once there is a region that helper `number` has not seen and is invited to.
static void pool_await(int number, unsigned seen) {
    for (int spins = 0; spins < SPINS && number < atomic_load(&pool.invited); spins++) {
        if (atomic_load(&pool.epoch) != seen) return;
        _mm_pause();
    }
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        if (number >= atomic_load(&pool.invited)) pthread_cond_wait(&pool.invitation, &pool.lock);
        else if (atomic_load(&pool.epoch) == seen) pthread_cond_wait(&pool.region, &pool.lock);
        else break;
    }
    pthread_mutex_unlock(&pool.lock);
}

static void *pool_helper(void *number) {
    for (unsigned seen = 0;; ) {
        pool_await((int)(intptr_t)number, seen);
        seen = atomic_load(&pool.epoch);
        atomic_fetch_add(&pool.inside, 1);  // before the look at `guests`: the owner closes first and then waits
        if (atomic_fetch_sub(&pool.guests, 1) > 0) pool_take();
        atomic_fetch_sub(&pool.inside, 1);
    }
    return NULL;
}

static void pool_start(int helpers) {
    for (; pool.started < helpers; pool.started++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_helper, (void *)(intptr_t)pool.started) != 0) return;
        pthread_detach(thread);
    }
}

// While helpers rest, look now and then whether one may come again.
static int pool_helpers(int wanted) {
    if (pool.allowed >= wanted) return wanted;
    const double now = now_seconds(CLOCK_MONOTONIC);
    if (now >= pool.next_look) {
        const machine_time before = pool.seen;
        pool.seen = look_at_machine();
        pool.next_look = now + LOOK;
        if (others_left_idle(&before, &pool.seen, IDLE) || now >= pool.changed + PATIENCE) {
            pool.allowed = pool.allowed ? 2 * pool.allowed : 1;
            pool.changed = now;
            pool.next_look = now + pool.rest;
        }
    }
    return pool.allowed < wanted ? pool.allowed : wanted;
}

static void pool_rest(int helpers, double now) {
    pool.allowed = helpers / 2;
    pool.rest = now < pool.changed + 2 * pool.rest ? 2 * pool.rest : FIRST_REST;
    if (pool.rest > LONGEST_REST) pool.rest = LONGEST_REST;
    pool.next_look = now + pool.rest;
    pool.changed = now;
    pool.credit = CREDIT;
    pool.seen = look_at_machine();
}

// Publish a region to so many helpers.
static void pool_open(item_function run, void *context, int64_t items, int helpers) {
    pool.run = run;
    pool.context = context;
    pool.items = items;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.guests, helpers);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.epoch, 1);
    if (atomic_exchange(&pool.invited, helpers) < helpers) pthread_cond_broadcast(&pool.invitation);
    pthread_cond_broadcast(&pool.region);
    pthread_mutex_unlock(&pool.lock);
}

// Wait for the helpers to leave, and weigh that against the time that those who came can have saved.
static void pool_close(int helpers, double begun) {
    const int absent = atomic_exchange(&pool.guests, 0), came = helpers - (absent > 0 ? absent : 0);
    const double since = now_seconds(CLOCK_MONOTONIC);
    for (int spins = 0; atomic_load(&pool.inside) > 0;) {
        if (++spins < SPINS) _mm_pause();
        else sched_yield();
    }
    const double now = now_seconds(CLOCK_MONOTONIC);
    pool.credit += PRICE * came * (since - begun) - (now - since);
    if (pool.credit > CREDIT) pool.credit = CREDIT;
    if (pool.credit < 0) pool_rest(helpers, now);
}

// Call run(context, i) for every i below `items` on up to `threads` threads, the caller's included; return when all
// have returned. Where the pool is taken by another thread, the caller does all by itself.
static void parallel(item_function run, void *context, int64_t items, int64_t threads) {
    const int wanted = (int)(threads < MAX_THREADS ? threads : MAX_THREADS) - 1;
    const int owns = wanted > 0 && items > 1 && pthread_mutex_trylock(&pool.owner) == 0;
    const int helpers = owns ? pool_helpers(wanted) : 0;
    if (helpers) {
        pool_start(helpers);
        pool_open(run, context, items, helpers);
        const double begun = now_seconds(CLOCK_MONOTONIC);
        pool_take();
        pool_close(helpers, begun);
    } else {
        for (int64_t item = 0; item < items; item++) run(context, item);
    }
    if (owns) pthread_mutex_unlock(&pool.owner);
}
