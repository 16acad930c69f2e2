// Vectors of floats: intrinsics of AVX2 or AVX-512 where the unit's flags allow them, else GCC's and clang's vector
// extensions, whose width TK_WIDTH sets. Everything is computed in the order that is written: -ffp-contract=off, and a
// fused product only where v_fma says so.
#ifndef TK_SIMD_H
#define TK_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define TK_AVX512 1
#define VW 16  // floats per vector
typedef __m512 vf;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define TK_AVX2 1
#define VW 8
typedef __m256 vf;
#else
#ifdef TK_WIDTH
#define VW TK_WIDTH
#else
#define VW 8
#endif
typedef float vf __attribute__((vector_size(4 * VW), may_alias));
#endif
typedef int32_t vi __attribute__((vector_size(4 * VW), may_alias));
#if VW == 16
#define EVERY_LANE(x) {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}
#else
#define EVERY_LANE(x) {x, x, x, x, x, x, x, x}
#endif

INLINE vf v_load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void v_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf v_set1(float x) { return (vf)EVERY_LANE(x); }
INLINE vi vi_set1(int32_t x) { return (vi)EVERY_LANE(x); }

// The first `count` floats at p; the other lanes are zero.
INLINE vf v_load_part(const float *p, int64_t count) {
    if (count >= VW) return v_load(p);
    float lanes[VW] = {0};
    memcpy(lanes, p, (size_t)count * sizeof *lanes);
    return v_load(lanes);
}
INLINE void v_store_part(float *p, vf v, int64_t count) {
    if (count >= VW) v_store(p, v);
    else memcpy(p, &v, (size_t)count * sizeof *p);
}

// Swaps lanes whose numbers differ by `distance`, a power of two below VW and a constant.
INLINE vf v_swap(vf v, const int distance) {
#if defined(TK_AVX512)
    if (distance == 1) return _mm512_permute_ps(v, 0xb1);
    if (distance == 2) return _mm512_permute_ps(v, 0x4e);
    return distance == 4 ? _mm512_shuffle_f32x4(v, v, 0xb1) : _mm512_shuffle_f32x4(v, v, 0x4e);
#elif defined(TK_AVX2)
    if (distance == 1) return _mm256_permute_ps(v, 0xb1);
    return distance == 2 ? _mm256_permute_ps(v, 0x4e) : _mm256_permute2f128_ps(v, v, 1);
#else
    float from[VW], to[VW];
    v_store(from, v);
    for (int i = 0; i < VW; i++) to[i] = from[i ^ distance];
    return v_load(to);
#endif
}

// Clears the lower 16 bits of every lane.
#if defined(TK_AVX2)
static const uint32_t TK_HIGH_HALVES[VW] = EVERY_LANE(0xffff0000);
INLINE vf v_high_halves(vi v) {
    vf high;  // the mask as a memory operand: in a register of its own it would spill a sum of the widest tile
    __asm__("vandps %2, %1, %0" : "=x"(high) : "x"(v), "m"(TK_HIGH_HALVES));
    return high;
}
#else
INLINE vf v_high_halves(vi v) { return (vf)(v & vi_set1((int32_t)0xffff0000)); }
#endif

INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(TK_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(TK_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// The larger and the smaller of two; NaN in x stays NaN.
INLINE vf v_max(vf bound, vf x) {
#if defined(TK_AVX512)
    return _mm512_max_ps(bound, x);
#elif defined(TK_AVX2)
    return _mm256_max_ps(bound, x);
#else
    vi take = bound > x;
    return (vf)((take & (vi)bound) | (~take & (vi)x));
#endif
}
INLINE vf v_min(vf bound, vf x) {
#if defined(TK_AVX512)
    return _mm512_min_ps(bound, x);
#elif defined(TK_AVX2)
    return _mm256_min_ps(bound, x);
#else
    vi take = bound < x;
    return (vf)((take & (vi)bound) | (~take & (vi)x));
#endif
}

INLINE vf v_abs(vf v) { return (vf)((vi)v & vi_set1(0x7fffffff)); }

// Folds the lanes in one fixed order: those of each half with those of the other until one is left.
#if defined(TK_AVX512) || defined(TK_AVX2)
#if defined(TK_AVX512)
#define HALVES(v, name) \
    _mm256_##name##_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)(v), 1)))
#else
#define HALVES(v, name) (v)
#endif
#define FOLD(v, name)                                                                            \
    __m256 half = HALVES(v, name);                                                               \
    __m128 four = _mm_##name##_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)); \
    __m128 two = _mm_##name##_ps(four, _mm_movehl_ps(four, four));                               \
    return _mm_cvtss_f32(_mm_##name##_ss(two, _mm_movehdup_ps(two)))
INLINE float v_sum(vf v) { FOLD(v, add); }
INLINE float v_largest(vf v) { FOLD(v, max); }  // of a vector without NaN
#else
INLINE float v_sum(vf v) {
    float x[VW];
    v_store(x, v);
    for (int half = VW / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
INLINE float v_largest(vf v) {
    float x[VW];
    v_store(x, v);
    for (int i = 1; i < VW; i++) x[0] = x[i] > x[0] ? x[i] : x[0];
    return x[0];
}
#endif

// exp(x) to about 2 units in the last place; results below 1e-38 are rounded up to it, above 1e38 down; exp(0) is 1.
// The polynomial is that of Cephes' expf (Moshier, 1992).
INLINE vf v_exp(vf x) {
    const vf magic = v_set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    x = v_max(v_set1(-87.0f), v_min(v_set1(88.0f), x));
    vf shifted = v_fma(x, v_set1(1.44269504088896341f), magic);
    vf n = shifted - magic;
    vf r = v_fma(n, v_set1(-0.693359375f), x);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    vf p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    vf y = v_fma(p * r, r, r) + v_set1(1.0f);
    return y * (vf)(((vi)shifted << 23) + vi_set1(0x3f800000));
}

// exp(x) for x up to 0 to about 2 units in the last place, as v_exp in fewer instructions: 2^(x log2 e), whose fraction
// has a polynomial that is 1 at zero. Results below 2^-126 are rounded up to it; NaN stays NaN.
INLINE vf v_exp_below_zero(vf x) {
    const vf magic = v_set1(12582912.0f);  // see v_exp
    vf y = v_max(v_set1(-126.0f), x * v_set1(1.44269504088896341f));
    vf shifted = y + magic, r = y - (shifted - magic), p = v_set1(1.3264727313e-3f);
    p = v_fma(p, r, v_set1(9.6715129912e-3f));
    p = v_fma(p, r, v_set1(5.5507335812e-2f));
    p = v_fma(p, r, v_set1(2.4022242427e-1f));
    p = v_fma(p, r, v_set1(6.9314700365e-1f));
    p = v_fma(p, r, v_set1(1.0f));
    return p * (vf)(((vi)shifted << 23) + vi_set1(0x3f800000));
}

// 1 / x to 2 units in the last place.
INLINE vf v_reciprocal(vf x) {
#if defined(TK_AVX512)  // an estimate and a step of Newton's take a third of a division's time
    vf y = _mm512_rcp14_ps(x);
    return _mm512_fmadd_ps(y, _mm512_fnmadd_ps(x, y, v_set1(1.0f)), y);
#else
    return v_set1(1.0f) / x;
#endif
}

INLINE vi vi_load(const int32_t *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void vi_store(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }
INLINE vf vi_to_float(vi v) { return __builtin_convertvector(v, vf); }

// Rounds to the nearest integers, even if two are as near; they are below 2^22.
INLINE vi v_nearest(vf v) {
#if defined(TK_AVX512)
    return (vi)_mm512_cvtps_epi32(v);
#elif defined(TK_AVX2)
    return (vi)_mm256_cvtps_epi32(v);
#else
    const vf magic = v_set1(12582912.0f);  // see v_exp
    return (vi)(v + magic) - (vi)magic;
#endif
}

// Stores integers within the range of int16.
INLINE void vi_store_int16(int16_t *p, vi v) {
#if defined(TK_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(TK_AVX2)
    __m256i both = (__m256i)v;
    __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128((__m128i *)p, narrow);
#else
    typedef int16_t narrow __attribute__((vector_size(2 * VW)));
    narrow low = __builtin_convertvector(v, narrow);
    memcpy(p, &low, sizeof low);
#endif
}
INLINE void v_store_int16(int16_t *p, vf v) { vi_store_int16(p, v_nearest(v)); }

// Rounds to the nearest of the integers from -127 to 127, even if two are as near; NaN becomes 0.
INLINE void v_store_int8(uint8_t *p, vf v) {
#if defined(TK_AVX512)
    __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-127.0f), _mm512_min_ps(_mm512_set1_ps(127.0f), v));
    __m512i rounded = _mm512_maskz_cvtps_epi32(_mm512_cmpord_ps_mask(v, v), bounded);
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(rounded));
#else
    for (int i = 0; i < VW; i++) {
        float value = nearbyintf(v[i]);
        value = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
        p[i] = (uint8_t)(value == value ? (int8_t)value : 0);
    }
#endif
}

// Widens 2 VW int8 to int16: VW pairs.
INLINE vi v_widen_pairs(const char *p) {
#if defined(TK_AVX512)
    return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif defined(TK_AVX2)
    return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    typedef int8_t stored __attribute__((vector_size(2 * VW)));
    typedef int16_t wide __attribute__((vector_size(4 * VW)));
    stored values;
    memcpy(&values, p, sizeof values);
    return (vi) __builtin_convertvector(values, wide);
#endif
}

// Widens VW bytes, each with two integers of 4 bits, the first one low, to int16: VW pairs.
INLINE vi v_widen_nibbles(const char *p) {
#if defined(TK_AVX512)
    vi both = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(TK_AVX2)
    vi both = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    typedef uint8_t stored __attribute__((vector_size(VW)));
    stored values;
    memcpy(&values, p, sizeof values);
    vi both = __builtin_convertvector(values, vi);
#endif
    return (both | both << 12) & vi_set1(0x000f000f);
}

// Multiplies int16 and adds the two products of each pair to a sum.
INLINE vi v_add_dot(vi sum, vi a, vi b) {
#if defined(TK_AVX512) && defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(TK_AVX512)
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(TK_AVX2)
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#endif
