// Functions whose bits are the same as in exact_math.py and philox.py: fixed chains of IEEE operations, without libm.
//
// Loops run over a block of BLOCK tokens, so that every compiler makes vectors of them.
#ifndef TK_EXACT_MATH_H
#define TK_EXACT_MATH_H

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

#define BLOCK 64           // tokens that all passes over a row handle together
#define DRAWS (BLOCK / 4)  // Philox's draws for a block: four tokens share one

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint64_t double_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// exp of a score from -80 to 0, with a relative error of 2.6e-7 near 0 and 1.1e-6 at -20.
static inline float exp_float(float x) {
    const float y = x * 1.44269504f;
    const float t = y + 12582912.0f;  // rounds to an integer, which stands in the low bits
    const float f = y - (t - 12582912.0f);
    float p = 1.3264724e-3f;  // 2^f, the least largest error among polynomials of this degree
    p = p * f + 9.671513e-3f;
    p = p * f + 5.5507336e-2f;
    p = p * f + 2.4022242e-1f;
    p = p * f + 6.93147e-1f;
    p = p * f + 1.0f;
    return p * float_of((float_bits(t) << 23) + 0x3F800000u);
}

static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float smaller(float a, float b) { return a < b ? a : b; }

// Computes exp of the scores of a block, at most 0; below -80 it is that of -80, whose weight is 0.
static inline void block_exp(const float s[BLOCK], float e[BLOCK]) {
    float x[BLOCK];
    for (int i = 0; i < BLOCK; i++)  // a loop of its own, or compilers make a branch of it and no vectors of the rest
        x[i] = larger(s[i], -80.0f);
    for (int i = 0; i < BLOCK; i++) e[i] = exp_float(x[i]);
}

// The power of two that, added and subtracted, rounds weights so that any sum of `vocab` of them is exact.
static inline double weight_bound(int64_t vocab) {
    double bound = 1.0;
    for (; vocab; vocab >>= 1) bound *= 2.0;
    return bound;
}

// The natural logarithm of a positive normal number (fdlibm, e_log.c).
static inline double log_double(double value) {
    int64_t bits = (int64_t)double_bits(value);
    const int64_t k = (bits - 0x3FE6A09E00000000) >> 52;  // value = 2^k * m with m about in [sqrt(1/2), sqrt(2))
    bits = (int64_t)((uint64_t)bits - ((uint64_t)k << 52));
    double m;
    memcpy(&m, &bits, sizeof m);
    const double f = m - 1.0, s = f / (2.0 + f), z = s * s;
    double p = 1.479819860511658591e-01;
    p = p * z + 1.531383769920937332e-01;
    p = p * z + 1.818357216161805012e-01;
    p = p * z + 2.222219843214978396e-01;
    p = p * z + 2.857142874366239149e-01;
    p = p * z + 3.999999999940941908e-01;
    p = p * z + 6.666666666666735130e-01;
    const double half_square = 0.5 * f * f, k_double = (double)k;
    const double low = s * (half_square + z * p) + k_double * 1.90821492927058770002e-10;
    return k_double * 6.93147180369123816490e-01 - ((half_square - low) - f);
}

// Standard Gumbel noise from a random word; it lies between -3.2 and 22.9.
static inline double gumbel(uint32_t word) { return -log_double(-log_double(((double)word + 0.5) * 0x1p-32)); }

// Sums of weights, as integers: adding `bound` rounds a weight to a multiple of bound * 2^-52 and leaves the multiple
// in the bits of the double, which take no further operation to sum.
#define SUMS 8

static inline void add_weights(const float e[BLOCK], double bound, uint64_t sum[SUMS]) {
    for (int first = 0; first < BLOCK; first += SUMS)
        for (int i = 0; i < SUMS; i++) sum[i] += double_bits((double)e[first + i] + bound);
}

// The sum of the weights of so many blocks.
static inline double sum_of(const uint64_t sum[SUMS], int64_t num_blocks, double bound) {
    uint64_t total = 0;
    for (int i = 0; i < SUMS; i++) total += sum[i];
    return (double)(total - (uint64_t)(num_blocks * BLOCK) * double_bits(bound)) * (bound * 0x1p-52);
}

// 64-bit lanes whose low halves are Philox's words; products take the low halves alone, so the high ones may hold
// anything. Vectors by hand: gcc makes lanes of 32 bits of the plain loop, and spends most of it on moving them about.
#if defined(__AVX512F__)
#define LANES 8
typedef uint64_t lanes __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
#define LOW_PRODUCT(a, b) (lanes) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__)
#define LANES 4
typedef uint64_t lanes __attribute__((vector_size(32)));
typedef uint32_t words __attribute__((vector_size(32)));
#define LOW_PRODUCT(a, b) (lanes) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#else
#define LANES 2
typedef uint64_t lanes __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));
#if defined(__SSE2__)
#define LOW_PRODUCT(a, b) (lanes) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#else
#define LOW_PRODUCT(a, b) ((a) & 0xFFFFFFFFu) * ((b) & 0xFFFFFFFFu)
#endif
#endif

#define ROUNDS 10

// Computes the keys of Philox's rounds, two for each.
static inline void philox_keys(uint64_t seed, lanes key[2 * ROUNDS]) {
    const lanes zero = {0};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < ROUNDS; round++) {
        key[2 * round] = zero + k0;
        key[2 * round + 1] = zero + k1;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

// Philox4x32-10 (Salmon et al., SC 2011) of the counters (x0, x1, first + i, 0); see word_of.
static inline void philox_block(const lanes key[2 * ROUNDS], uint32_t x0, uint32_t x1, uint32_t first,
                                lanes word[BLOCK / 2 / LANES]) {
    const lanes zero = {0}, factor0 = zero + 0xD2511F53u, factor1 = zero + 0xCD9E8D57u;
    lanes number = zero + first;
    for (int lane = 0; lane < LANES; lane++) number[lane] += (uint64_t)lane;
    for (int i = 0; i < BLOCK / 2 / LANES; i += 2, number += LANES) {
        lanes c0 = zero + x0, c1 = zero + x1, c2 = number, c3 = zero;
        for (int round = 0; round < ROUNDS; round++) {
            const lanes p0 = LOW_PRODUCT(c0, factor0), p1 = LOW_PRODUCT(c2, factor1);
            c0 = (p1 >> 32) ^ c1 ^ key[2 * round];
            c1 = p1;
            c2 = (p0 >> 32) ^ c3 ^ key[2 * round + 1];
            c3 = p0;
        }
        word[i] = (c0 & 0xFFFFFFFFu) | (c1 << 32);
        word[i + 1] = (c2 & 0xFFFFFFFFu) | (c3 << 32);
    }
}

// Whether one of a block's words is at least `least`.
static inline int any_word(const lanes word[BLOCK / 2 / LANES], uint32_t least) {
    lanes hit = {0};
    uint64_t any = 0;
    for (int i = 0; i < BLOCK / 2 / LANES; i++) hit |= (lanes)((words)word[i] >= least);
    for (int lane = 0; lane < LANES; lane++) any |= hit[lane];
    return any != 0;
}

// The word of the block's token i, which is word i % 4 of its draw number i / 4.
static inline uint32_t word_of(const lanes word[BLOCK / 2 / LANES], int i) {
    const int draw = i / 4, pair = i % 4 / 2;
    return (uint32_t)(word[draw / LANES * 2 + pair][draw % LANES] >> (i % 2 * 32));
}

#endif
