#define _GNU_SOURCE
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NANOSECONDS 20000  // longer spins would take the core from the awaited thread

struct pool {
    int32_t threads;
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

void tk_barrier(struct pool *pool) {
    if (pool->threads == 1) return;
    uint32_t phase = __atomic_load_n(&pool->phase.word, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&pool->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)pool->threads) {
        __atomic_store_n(&pool->arrived, 0, __ATOMIC_RELAXED);
        tk_turn(&pool->phase, phase + 1, 0);
    } else {
        tk_wait_while(&pool->phase, phase, 0);
    }
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
    for (int32_t thread = 1; pool->handles && thread < threads; thread++) {
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
    free(pool);
}

void tk_pool_run(struct pool *pool, void (*work)(void *, int32_t), void *argument) {
    pool->work = work;
    pool->argument = argument;
    if (pool->threads > 1) tk_turn(&pool->run, pool->run.word + 1, 0);
    work(argument, 0);
    tk_barrier(pool);
}
