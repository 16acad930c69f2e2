// AdamW (arXiv 1711.05101) in one pass over fp32 masters and fp32 or bf16 states, at the speed of memory.
//
// Built once per instruction set, with TK_UNIT as its name. Every operation is one that IEEE 754 rounds exactly, in the
// order of the source, so all units, cuts and numbers of threads give the same bits.
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define JOINED(name, unit) name##_##unit
#define NAMED(name, unit) JOINED(name, unit)
#define PUBLIC __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))  // flags are constants in each loop, which has no branch
#define MOST_THREADS 256
#define BLOCK 256
#define ALIGNED 64  // elements: two threads never write one line of the cache

// One update; the factors are those of a step, computed in double precision.
typedef struct {
    int64_t count;
    float *master;
    void *exp_avg, *exp_avg_sq;  // fp32, or bf16
    const float *grad;
    uint16_t *bf16;        // takes the rounded masters; NULL: nothing does
    float grad_factor;     // for clipping and the loss scale
    float decay_factor;    // 1 - lr * weight_decay
    float new_avg;         // 1 - beta1
    float old_sq, new_sq;  // beta2, 1 - beta2
    float step_size;       // lr / (1 - beta1^t)
    float root;            // sqrt(1 - beta2^t)
    float eps;
    // Of bf16 states: element i has the index first + j / run * stride + j % run in its logical tensor, j = start + i.
    int64_t first, run, stride, start;  // run = 0: the states are fp32
    uint32_t key, word;                 // of the tensor and the step
} adamw_update;

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// The upper half of a value's bits after `added`, below 2^16, was added to them; a NaN gives torch's NaN.
INLINE uint16_t upper_half(float value, uint32_t added) {
    uint32_t rounded = (bits_of(value) + added) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

// To the nearest bf16, ties to even, as torch rounds.
INLINE uint16_t to_bf16(float value) { return upper_half(value, 0x7fffu + (bits_of(value) >> 16 & 1u)); }

// 16 random bits for the index of an element, in two words, under a key; `high` also has the key's second word.
//
// A change of any bit changes each bit of the result in half of all cases: triple32 of Chris Wellons' "hash prospector"
// (2018), a search for such functions, with `high` after its first product. AVX2 has its products, of 32 bits, too.
INLINE uint32_t random_bits(uint32_t low, uint32_t high, uint32_t key) {
    uint32_t x = low ^ key;
    x = (x ^ x >> 17) * 0xed5ad4bbu ^ high;
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x >> 16;
}

INLINE void update_fp32(const adamw_update *given, int64_t begin, int64_t end, int has_bf16) {
    const adamw_update u = *given;
    float *restrict master = u.master, *restrict exp_avg = u.exp_avg, *restrict exp_avg_sq = u.exp_avg_sq;
    const float *restrict grad = u.grad;
    uint16_t *restrict bf16 = u.bf16;

    for (int64_t i = begin; i < end; i++) {
        float g = grad[i] * u.grad_factor;
        float avg = exp_avg[i] + (g - exp_avg[i]) * u.new_avg;
        float sq = exp_avg_sq[i] * u.old_sq + u.new_sq * g * g;
        float value = master[i] * u.decay_factor - u.step_size * avg / (sqrtf(sq) / u.root + u.eps);
        exp_avg[i] = avg;
        exp_avg_sq[i] = sq;
        master[i] = value;
        if (has_bf16) bf16[i] = to_bf16(value);
    }
}

// Updates at most BLOCK neighbours in the tensor, whose indexes have the lower words low, low + 1, ...
//
// Their states become fp32 in the first cache. Of one long loop, a CPU would not see the next turn while it waits for a
// root; of short ones it sees several. The states after these are fetched meanwhile.
INLINE void update_block(const adamw_update *u, int64_t begin, uint32_t count, uint32_t low, uint32_t high,
                         int has_bf16) {
    uint16_t *restrict exp_avg = (uint16_t *)u->exp_avg + begin, *restrict exp_avg_sq =
                                                                     (uint16_t *)u->exp_avg_sq + begin;
    float avg[BLOCK], sq[BLOCK];
    adamw_update wide = *u;

    for (uint32_t i = 0; i < count; i++) {
        avg[i] = from_bf16(exp_avg[i]);
        sq[i] = from_bf16(exp_avg_sq[i]);
    }
    for (uint32_t i = 0; i < BLOCK; i += ALIGNED / 2) {
        __builtin_prefetch(exp_avg + count + i, 1);
        __builtin_prefetch(exp_avg_sq + count + i, 1);
    }
    wide.master += begin;
    wide.grad += begin;
    wide.exp_avg = avg;
    wide.exp_avg_sq = sq;
    if (has_bf16) wide.bf16 += begin;
    update_fp32(&wide, 0, count, has_bf16);
    for (uint32_t i = 0; i < count; i++) exp_avg[i] = to_bf16(avg[i]);
    for (uint32_t i = 0; i < count; i++) exp_avg_sq[i] = upper_half(sq[i], random_bits(low + i, high, u->key));
}

INLINE void update_bf16(const adamw_update *u, int64_t begin, int64_t end, int has_bf16) {
    while (begin < end) {
        int64_t number = u->start + begin, within = number % u->run;
        int64_t index = u->first + number / u->run * u->stride + within;
        int64_t count = end - begin, to_border = (INT64_C(1) << 32) - (index & 0xffffffff);
        if (count > u->run - within) count = u->run - within;
        if (count > to_border) count = to_border;
        if (count > BLOCK) count = BLOCK;
        update_block(u, begin, (uint32_t)count, (uint32_t)index, u->word + (uint32_t)(index >> 32), has_bf16);
        begin += count;
    }
}

typedef struct {
    const adamw_update *update;
    int64_t begin, end;
} part;

static void *run(void *given) {
    const part *p = given;
    if (p->update->run && p->update->bf16) update_bf16(p->update, p->begin, p->end, 1);
    else if (p->update->run) update_bf16(p->update, p->begin, p->end, 0);
    else if (p->update->bf16) update_fp32(p->update, p->begin, p->end, 1);
    else update_fp32(p->update, p->begin, p->end, 0);
    return NULL;
}

// Updates all elements with up to `threads` threads; one that the system does not start does its part here.
PUBLIC void NAMED(tk_adamw, TK_UNIT)(const adamw_update *u, int64_t threads) {
    part parts[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    int started[MOST_THREADS];
    int64_t num_parts = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    int64_t length = (u->count / num_parts + ALIGNED) / ALIGNED * ALIGNED;

    for (int64_t i = 0; i < num_parts; i++) {
        int64_t begin = i * length < u->count ? i * length : u->count;
        int64_t end = u->count - begin < length ? u->count : begin + length;
        parts[i] = (part){u, begin, end};
        started[i] = i > 0 && begin < end && pthread_create(&ids[i], NULL, run, &parts[i]) == 0;
    }
    for (int64_t i = 0; i < num_parts; i++)
        if (!started[i]) run(&parts[i]);
    for (int64_t i = 0; i < num_parts; i++)
        if (started[i]) pthread_join(ids[i], NULL);
}
