#define _GNU_SOURCE
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NANOSECONDS 20000  // longer spins would take the core from the awaited thread

// What is left of a thread's share: 16 bits of the division's number, 24 of its first item, 24 of the end. On a cache
// line of its own.
struct left {
    uint64_t word;
    uint32_t divisions;  // that the thread has begun; no other thread reads it
    char padding[52];
};

struct pool {
    int32_t threads;
    struct left *left;  // [threads]
    pthread_t *handles;
    struct turnstile run;    // runs so far; one more to stop
    struct turnstile phase;  // barriers so far
    uint32_t arrived;        // threads at the barrier
    int32_t stop;
    void (*work)(void *, int32_t);
    void *argument;
};

struct start {
    struct pool *pool;
    int32_t thread;
};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("" ::: "memory");
#endif
}

void tk_wait_while(struct turnstile *turnstile, uint32_t value, int shared) {
    int64_t until = 0;
    for (uint32_t spins = 0;; spins++) {
        if (__atomic_load_n(&turnstile->word, __ATOMIC_ACQUIRE) != value) return;
        relax();
        if (spins % 64 != 63) continue;
        if (!until) until = now() + SPIN_NANOSECONDS;
        if (now() >= until) break;
    }
    // Either the writer sees this sleeper, or the kernel sees the new word: both sides are sequentially consistent.
    __atomic_add_fetch(&turnstile->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&turnstile->word, __ATOMIC_SEQ_CST) == value)
        syscall(SYS_futex, &turnstile->word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    __atomic_sub_fetch(&turnstile->sleepers, 1, __ATOMIC_SEQ_CST);
}

void tk_turn(struct turnstile *turnstile, uint32_t value, int shared) {
    __atomic_store_n(&turnstile->word, value, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&turnstile->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &turnstile->word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

uint32_t tk_arrive(struct pool *pool) {
    uint32_t phase = __atomic_load_n(&pool->phase.word, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)pool->threads) {
        __atomic_store_n(&pool->arrived, 0, __ATOMIC_RELAXED);
        tk_turn(&pool->phase, phase + 1, 0);
    }
    return phase;
}

void tk_await(struct pool *pool, uint32_t arrival) { tk_wait_while(&pool->phase, arrival, 0); }

void tk_barrier(struct pool *pool) {
    if (pool->threads > 1) tk_await(pool, tk_arrive(pool));
}

struct division tk_divide(struct pool *pool, int32_t thread, int64_t count) {
    return (struct division){pool, thread, ++pool->left[thread].divisions & 0xffff, count};
}

// Takes from the share of thread `owner`.
//
// A word only goes forward: to later divisions, and within one to fewer items. A thread leaves a division when it has
// seen every word empty in it, or in a later one: accesses to one word have one order for all threads. So a word of an
// earlier division, which is the one before, has nothing left, and the first thread that comes replaces it by the whole
// share. Relaxed accesses are enough: a word says who computes an item, and nothing about memory. The inputs and
// results of items are ordered by the barriers before and behind the division.
static int take_from(const struct division *d, int32_t owner, int64_t most, int64_t *first, int64_t *last) {
    uint64_t *word = &d->pool->left[owner].word, seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    for (;;) {
        int16_t later = (int16_t)(uint16_t)((seen >> 48) - d->number);
        int64_t begin = (int64_t)(seen >> 24 & 0xffffff), end = (int64_t)(seen & 0xffffff), threads = d->pool->threads;
        if (later < 0) begin = d->count * owner / threads, end = d->count * (owner + 1) / threads;
        if (later > 0 || (later == 0 && begin == end)) return 0;
        int64_t taken = end - begin < most ? end - begin : most;
        *first = owner == d->thread ? begin : end - taken;
        *last = *first + taken;
        if (owner == d->thread) begin += taken;
        else end -= taken;
        uint64_t next = (uint64_t)d->number << 48 | (uint64_t)begin << 24 | (uint64_t)end;
        if (__atomic_compare_exchange_n(word, &seen, next, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return taken > 0;
    }
}

int tk_take(const struct division *d, int64_t most, int64_t *first, int64_t *last) {
    for (int32_t i = 0; i < d->pool->threads; i++)
        if (take_from(d, (d->thread + i) % d->pool->threads, most, first, last)) return 1;
    return 0;
}

static void *serve(void *argument) {
    struct start start = *(struct start *)argument;
    struct pool *pool = start.pool;
    free(argument);
    for (uint32_t run = 0;; run++) {
        tk_wait_while(&pool->run, run, 0);
        if (pool->stop) return NULL;
        pool->work(pool->argument, start.thread);
        tk_barrier(pool);
    }
}

struct pool *tk_pool_start(int32_t threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = 1;
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    pool->left = aligned_alloc(sizeof *pool->left, (size_t)threads * sizeof *pool->left);
    if (!pool->handles || !pool->left) {
        free(pool->handles);
        free(pool->left);
        free(pool);
        return NULL;
    }
    memset(pool->left, 0, (size_t)threads * sizeof *pool->left);
    for (int32_t thread = 1; thread < threads; thread++) {
        struct start *start = malloc(sizeof *start);
        if (!start) break;
        *start = (struct start){pool, thread};
        if (pthread_create(&pool->handles[thread], NULL, serve, start)) {
            free(start);
            break;
        }
        pool->threads++;
    }
    return pool;
}

int32_t tk_pool_threads(const struct pool *pool) { return pool->threads; }

void tk_pool_stop(struct pool *pool) {
    pool->stop = 1;
    tk_turn(&pool->run, pool->run.word + 1, 0);
    for (int32_t thread = 1; thread < pool->threads; thread++) pthread_join(pool->handles[thread], NULL);
    free(pool->handles);
    free(pool->left);
    free(pool);
}

void tk_pool_run(struct pool *pool, void (*work)(void *, int32_t), void *argument) {
    pool->work = work;
    pool->argument = argument;
    if (pool->threads > 1) tk_turn(&pool->run, pool->run.word + 1, 0);
    work(argument, 0);
    tk_barrier(pool);
}
