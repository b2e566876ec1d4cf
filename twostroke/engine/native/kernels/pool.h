// Threads that share the items of a region. A thread that is late costs nothing: whoever is there takes the next item.
#pragma once
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define MAX_THREADS 64
#define SPINS 4000  // looks before a waiting thread sleeps: some tens of microseconds, the pause between two layers

typedef void (*item_function)(void *context, int64_t item);

static struct {
    pthread_mutex_t owner;  // of the region; there is one at a time in a process
    pthread_mutex_t lock;   // for sleeping and waking only
    pthread_cond_t wake;
    item_function run;
    void *context;
    int64_t items;
    int helpers;              // threads started
    atomic_int guests;        // helpers that this region still admits
    atomic_int inside;        // helpers that may look at the region
    atomic_uint epoch;        // counts regions
    _Atomic int64_t next;     // item to be taken
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

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

// Call run(context, i) for every i below `items` on up to `threads` threads, the caller's included; return when all
// have returned. Where the pool is taken by another thread, the caller does all by itself.
static void parallel(item_function run, void *context, int64_t items, int64_t threads) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1 || items <= 1 || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t item = 0; item < items; item++) run(context, item);
        return;
    }
    pool_grow((int)threads - 1);
    pool.run = run;
    pool.context = context;
    pool.items = items;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.guests, (int)threads - 1);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.epoch, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    pool_take();
    atomic_store(&pool.guests, 0);
    for (int spins = 0; atomic_load(&pool.inside) > 0;) {
        if (++spins < SPINS) _mm_pause();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.owner);
}
