// The streams of an AdamW update, read and written without its arithmetic: the speed of memory.
#include <pthread.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))

typedef struct {
    int64_t begin, end;
    float *restrict master;
    void *exp_avg, *exp_avg_sq;  // fp32, or bf16
    const float *restrict grad;
    uint16_t *restrict bf16;
    int64_t has_bf16_states;
} streams;

static void *move_bf16_states(const streams *given) {
    const streams s = *given;
    float *restrict master = s.master;
    uint16_t *restrict exp_avg = s.exp_avg, *restrict exp_avg_sq = s.exp_avg_sq, *restrict bf16 = s.bf16;
    const float *restrict grad = s.grad;
    for (int64_t i = s.begin; i < s.end; i++) {
        master[i] += grad[i];
        exp_avg[i] += (uint16_t)i;
        exp_avg_sq[i] += (uint16_t)i;
        bf16[i] = (uint16_t)i;
    }
    return 0;
}

static void *move(void *given) {
    const streams s = *(const streams *)given;
    if (s.has_bf16_states) return move_bf16_states(&s);
    float *restrict master = s.master, *restrict exp_avg = s.exp_avg, *restrict exp_avg_sq = s.exp_avg_sq;
    const float *restrict grad = s.grad;
    uint16_t *restrict bf16 = s.bf16;
    for (int64_t i = s.begin; i < s.end; i++) {  // one addition each: a copy of a stream to itself would be left out
        master[i] += grad[i];
        exp_avg[i] += grad[i];
        exp_avg_sq[i] += grad[i];
        bf16[i] = (uint16_t)i;
    }
    return 0;
}

PUBLIC void move_streams(const streams *parts, int64_t count) {
    pthread_t threads[64];
    for (int64_t i = 1; i < count; i++) pthread_create(&threads[i], 0, move, (void *)&parts[i]);
    move((void *)&parts[0]);
    for (int64_t i = 1; i < count; i++) pthread_join(threads[i], 0);
}
