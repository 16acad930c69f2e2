// A pool of threads that run one function together, and barriers between its parts.
#ifndef TK_THREADS_H
#define TK_THREADS_H

#include <stdint.h>

struct pool;

// Starts threads; fewer if the system refuses more.
struct pool *tk_pool_start(int32_t threads);
int32_t tk_pool_threads(const struct pool *pool);
void tk_pool_stop(struct pool *pool);
// Runs work(argument, thread) on every thread of the pool, the caller being thread 0; returns when all have returned.
void tk_pool_run(struct pool *pool, void (*work)(void *argument, int32_t thread), void *argument);
// Waits until every thread of the pool has called it.
void tk_barrier(struct pool *pool);
// A barrier in two parts: a thread may work between its arrival and its wait for the others. It must wait, with the
// number that it got, before it arrives again.
uint32_t tk_arrive(struct pool *pool);
void tk_await(struct pool *pool, uint32_t arrival);

// Items that the threads of a pool take: each has an equal share, takes from its front and, when it is empty, from the
// ends of the others' shares. So a thread whose core is slow, or taken away, holds up the others less.
struct division {
    struct pool *pool;
    int32_t thread;
    uint32_t number;  // of this division: every thread divides the same items in the same order
    int64_t count;    // less than 2^24
};
struct division tk_divide(struct pool *pool, int32_t thread, int64_t count);
// Takes up to `most` items, [*first, *last); returns 0 when none are left. Other threads may still compute theirs: a
// barrier must follow before what they write is read.
int tk_take(const struct division *division, int64_t most, int64_t *first, int64_t *last);

// A word to wait on, and the number of threads that sleep on it: a writer calls the kernel only if there is one.
struct turnstile {
    uint32_t word, sleepers;
};
// Sleeps, after a short spin, while the word has this value; `shared`: other processes write it.
void tk_wait_while(struct turnstile *turnstile, uint32_t value, int shared);
void tk_turn(struct turnstile *turnstile, uint32_t value, int shared);

#endif
