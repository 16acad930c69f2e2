// Floats of 16 and 8 bits: from and to fp32.
#ifndef TK_NARROW_H
#define TK_NARROW_H

#include "simd.h"

INLINE float bf16_to_float(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Rounds to nearest even; NaN stays NaN.
INLINE uint16_t float_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE float fp16_to_float(uint16_t h) {
#if defined(TK_AVX512) || defined(TK_AVX2)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff, u;
    float f;
    if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
        f = (float)mantissa * 5.9604644775390625e-8f;
        memcpy(&u, &f, 4);
        u |= sign;
    } else {
        u = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | mantissa << 13;
    }
    memcpy(&f, &u, 4);
    return f;
#endif
}

INLINE vf v_widen_fp16(const uint16_t *p) {
#if defined(TK_AVX512)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(TK_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    float wide[VW];
    for (int i = 0; i < VW; i++) wide[i] = fp16_to_float(p[i]);
    return v_load(wide);
#endif
}

// fp8 (e4m3: no infinity, one NaN of each sign) has the exponents of fp16 less 8: its bits, widened as fp16, count
// FP8_SCALE times too little. Sums are multiplied by it, which is exact.
#define FP8_SCALE 256.0f
INLINE uint16_t fp8_as_fp16(uint8_t b) {
    return (b & 0x7f) == 0x7f ? 0x7fff : (uint16_t)((b & 0x80) << 8 | (b & 0x7f) << 7);
}
#if defined(TK_AVX512) || defined(TK_AVX2)
INLINE __m256i sixteen_fp8_as_fp16(const uint8_t *p) {
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    half = _mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbf80));
    __m256i size = _mm256_or_si256(half, _mm256_set1_epi16((int16_t)0x8000));
    return _mm256_or_si256(half, _mm256_cmpeq_epi16(size, _mm256_set1_epi16((int16_t)0xbf80)));  // NaN: all bits
}
#endif

// Widens 16 of fp8, divided by FP8_SCALE.
INLINE void v_widen_fp8(const uint8_t *p, vf *to) {
#if defined(TK_AVX512)
    to[0] = _mm512_cvtph_ps(sixteen_fp8_as_fp16(p));
#elif defined(TK_AVX2)
    __m256i half = sixteen_fp8_as_fp16(p);
    to[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    to[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#else
    float wide[16];
    for (int i = 0; i < 16; i++) wide[i] = fp16_to_float(fp8_as_fp16(p[i]));
    for (int n = 0; n < 16 / VW; n++) to[n] = v_load(wide + n * VW);
#endif
}

// Rounds to nearest even; larger values than 448 become it.
INLINE uint8_t float_to_fp8(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffff;
    if (size > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (size > 0x43e00000) size = 0x43e00000;
    if (size < 0x3c800000) {  // subnormal: adding 2^14 puts the rounded mantissa into the low bits
        float a;
        memcpy(&a, &size, 4);
        a += 16384.0f;
        memcpy(&size, &a, 4);
        return (uint8_t)(sign | (size - 0x46800000));
    }
    return (uint8_t)(sign | ((size - 0x3c000000 + 0x7ffff + ((size >> 20) & 1)) >> 20));
}

// Rounds to nearest even; values that are too large become infinity.
INLINE uint16_t float_to_fp16(float f) {
#if defined(TK_AVX512) || defined(TK_AVX2)
    return (uint16_t)_cvtss_sh(f, 0);
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = (u >> 16) & 0x8000, size = u & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) {  // subnormal: adding 0.5 puts the rounded mantissa into the low bits
        float a, half = 0.5f;
        memcpy(&a, &size, 4);
        a += half;
        memcpy(&size, &a, 4);
        return (uint16_t)(sign | (size - 0x3f000000));
    }
    return (uint16_t)(sign | ((size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13));
#endif
}

#endif
