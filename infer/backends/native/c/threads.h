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

// A word to wait on, and the number of threads that sleep on it: a writer calls the kernel only if there is one.
struct turnstile {
    uint32_t word, sleepers;
};
// Sleeps, after a short spin, while the word has this value; `shared`: other processes write it.
void tk_wait_while(struct turnstile *turnstile, uint32_t value, int shared);
void tk_turn(struct turnstile *turnstile, uint32_t value, int shared);

#endif
