// What limits attention in a core: the exp of a score, and the products of a query with a key and a weight with a
// value.
#include "simd.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)
#define EXPORTED __attribute__((visibility("default")))
#define SCORES 4096  // they stay in the first cache
#define CHAINS 12    // as many rows as a tile of attention has, at most

// Replaces SCORES scores by weights as attention does, also as int16, `passes` times; returns their sum.
EXPORTED float NAMED(weigh_, TK_NAME)(int64_t passes) {
    static _Thread_local float scores[SCORES] __attribute__((aligned(64)));
    static _Thread_local int16_t narrow[SCORES] __attribute__((aligned(64)));
    vf sum = v_set1(0.0f);
    for (int64_t pass = 0; pass < passes; pass++) {
#pragma GCC unroll 4
        for (int i = 0; i < SCORES; i += VW) {
            vf weights = v_exp_below_zero(v_load(scores + i) - v_set1(1.0f));
            v_store(scores + i, weights);
            v_store_int16(narrow + i, weights * v_set1(32767.0f));
            sum = sum + weights;
        }
        __asm__ volatile("" ::: "memory");
    }
    return v_sum(sum);
}

static float ROWS[CHAINS];  // a value, or a pair, of each row of a tile
static int32_t PAIRS[CHAINS];

// Adds `count` products of fp32, or of pairs of int16, to each lane of CHAINS sums; returns the sum of all.
EXPORTED float NAMED(multiply_floats_, TK_NAME)(int64_t count) {
    vf sums[CHAINS], stored = v_set1(1.0f);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = v_set1((float)i);
    for (int64_t k = 0; k < count; k++) {
        __asm__ volatile("" : : "r"(ROWS) : "memory");  // they may have changed
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = v_fma(v_set1(ROWS[i]), stored, sums[i]);
    }
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) sums[0] = sums[0] + sums[i];
    return v_sum(sums[0]);
}
EXPORTED float NAMED(multiply_integers_, TK_NAME)(int64_t count) {
    vi sums[CHAINS], stored = vi_set1(0x10001);
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = vi_set1(i);
    for (int64_t k = 0; k < count; k++) {
        __asm__ volatile("" : : "r"(PAIRS) : "memory");
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sums[i] = v_add_dot(sums[i], vi_set1(PAIRS[i]), stored);
    }
#pragma GCC unroll 12
    for (int i = 1; i < CHAINS; i++) sums[0] = sums[0] + sums[i];
    return v_sum(vi_to_float(sums[0]));
}
