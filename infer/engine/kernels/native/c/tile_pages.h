// Pages of the cache as tiles of AMX: 32 keys, or their values in 32 dims, as two panels of pairs of bf16. A page in
// bf16 is taken as it lies; others are widened. The codes of int8 and of fp8 are exact in bf16, and int8's scales are
// left to the scores and weights; an element of 4 bits, code * scale + zero, is rounded.
#ifndef TK_TILE_PAGES_H
#define TK_TILE_PAGES_H

#include "widened.h"

#if defined(TK_AMX)
// A page, or its twin.
struct source {
    int format;
    const char *page, *scales;
};
INLINE struct source page_source(const struct model *m, const struct operation *op, const struct item *item, int64_t at,
                                 int values) {
    const char *page = page_of(m, op, item, at, values);
    return (struct source){values ? m->value_format : m->key_format, page, page + m->scale_offset[values]};
}
INLINE struct source twin_source(const struct model *m, const struct operation *op, const struct item *item, int64_t at,
                                 int values) {
    const char *page = twin_of(m, op, item, at, values);
    return (struct source){INT8, page, page + m->twin_scale_offset};
}

// Two panels as tiles.
struct tiled {
    const char *panel;
    int64_t panel_bytes;  // from the first to the second
};

// Rounds VW pairs of an even and an odd column.
INLINE void round_pairs(vf even, vf odd, uint16_t *to) {
#if defined(__AVX512BF16__)
    static const uint16_t order[2 * VW] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_loadu_si512(order), apart));
#else
    for (int i = 0; i < VW; i++) to[2 * i] = model_round(even[i]), to[2 * i + 1] = model_round(odd[i]);
#endif
}

// Widens a step of a panel of int8; with each of its lines it fetches one, as do those that follow.
INLINE void widen_bytes(const char *from, uint16_t *to, struct ahead *ahead) {
    for (int line = 0; line < BLOCK_COLUMNS / 2; line++, from += 2 * PANEL, to += 2 * PANEL) {
        __builtin_prefetch(ahead->from, 0, 2);
        ahead->from += ahead->bytes;
#if defined(__AVX512BF16__)
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(from + PANEL))));
        __m512bh both = _mm512_cvtne2ps_pbh(high, low);
        memcpy(to, &both, sizeof both);
#else
        for (int i = 0; i < 2 * PANEL; i++) to[i] = model_round((float)(int8_t)from[i]);
#endif
    }
}

INLINE void widen_fp8(const char *from, uint16_t *to, struct ahead *ahead) {
    for (int line = 0; line < BLOCK_COLUMNS / 2; line++, from += 2 * PANEL, to += 2 * PANEL) {
        __builtin_prefetch(ahead->from, 0, 2);
        ahead->from += ahead->bytes;
#if defined(__AVX512BF16__)
        // The exponent of fp8 counts from 7, that of bf16 from 127; a subnormal number is looked up.
        static const uint16_t subnormal[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
        __m128i even = _mm_loadu_si128((const __m128i *)from), odd = _mm_loadu_si128((const __m128i *)(from + PANEL));
        __m256i pairs = _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
        __m512i wide = _mm512_cvtepi8_epi16(pairs), size = _mm512_and_si512(wide, _mm512_set1_epi16(0x7f));
        __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
        __mmask32 low = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(0x78));
        value = _mm512_mask_permutexvar_epi16(value, low, size, _mm512_loadu_si512(subnormal));
        __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
        value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7fff));
        _mm512_storeu_si512(to, _mm512_or_si512(value, _mm512_and_si512(wide, _mm512_set1_epi16((int16_t)0x8000))));
#else
        vf even[VECTORS], odd[VECTORS], scale = v_set1(FP8_SCALE);
        load_column(FP8, from, 0, even);
        load_column(FP8, from, 1, odd);
        for (int n = 0; n < VECTORS; n++) round_pairs(even[n] * scale, odd[n] * scale, to + n * 2 * VW);
#endif
    }
}

// Widens a step of keys, or of values, in 4 bits: `token` is its first key and `group` the group of its dims.
INLINE void widen_nibbles(const struct model *m, int values, const char *from, const char *scales, int64_t token,
                          int64_t group, uint16_t *to, struct ahead *ahead) {
    const uint16_t *stored = (const uint16_t *)scales + group * 2 * m->block_size + token;
    float scale[BLOCK_COLUMNS], zero[BLOCK_COLUMNS];
    for (int i = 0; i < (values ? BLOCK_COLUMNS : PANEL); i += VW) {
        v_store(scale + i, v_widen_fp16(stored + i));
        v_store(zero + i, v_widen_fp16(stored + m->block_size + i));
    }
    for (int line = 0; line < BLOCK_COLUMNS / 2; line++, from += PANEL, to += 2 * PANEL) {
        __builtin_prefetch(ahead->from, 0, 2);
        ahead->from += ahead->bytes;
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++) {
            vi both = v_widen_nibbles(from + n * VW);
            vf even = vi_to_float(both & vi_set1(0xffff)), odd = vi_to_float(both >> 16);
            if (values)
                even = v_fma(even, v_set1(scale[2 * line]), v_set1(zero[2 * line])),
                odd = v_fma(odd, v_set1(scale[2 * line + 1]), v_set1(zero[2 * line + 1]));
            else
                even = v_fma(even, v_load(scale + n * VW), v_load(zero + n * VW)),
                odd = v_fma(odd, v_load(scale + n * VW), v_load(zero + n * VW));
            round_pairs(even, odd, to + n * 2 * VW);
        }
    }
}

// The keys of a page from its key `token` on: two panels of all dims. `widened` has room for them.
INLINE struct tiled tiles_of_keys(const struct model *m, struct source keys, int64_t token, uint16_t *widened,
                                  struct ahead *ahead) {
    int64_t lines = m->head_dim / 2, steps = m->head_dim / BLOCK_COLUMNS, bytes = pair_bytes(keys.format);
    const char *from = keys.page + token / PANEL * lines * bytes;
    if (keys.format == BF16) return (struct tiled){from, lines * bytes};
    for (int64_t i = 0; i < 2 * steps; i++, from += BLOCK_COLUMNS / 2 * bytes) {
        uint16_t *to = widened + i * STEP_BYTES / 2;
        if (keys.format == INT8) widen_bytes(from, to, ahead);
        else if (keys.format == FP8) widen_fp8(from, to, ahead);
        else widen_nibbles(m, 0, from, keys.scales, token + i / steps * PANEL, i % steps, to, ahead);
    }
    return (struct tiled){(const char *)widened, steps * STEP_BYTES};
}

// The values of a page from its key `token` and from dim `dim` on: a step of two panels.
INLINE struct tiled tiles_of_values(const struct model *m, struct source values, int64_t token, int64_t dim,
                                    uint16_t *widened, struct ahead *ahead) {
    int64_t bytes = pair_bytes(values.format), panel_bytes = m->block_size / 2 * bytes;
    const char *from = values.page + dim / PANEL * panel_bytes + token / 2 * bytes;
    if (values.format == BF16) return (struct tiled){from, panel_bytes};
    for (int64_t i = 0; i < 2; i++, from += panel_bytes) {
        uint16_t *to = widened + i * STEP_BYTES / 2;
        if (values.format == INT8) widen_bytes(from, to, ahead);
        else if (values.format == FP8) widen_fp8(from, to, ahead);
        else widen_nibbles(m, 1, from, values.scales, token, dim / GROUP, to, ahead);
    }
    return (struct tiled){(const char *)widened, STEP_BYTES};
}
#endif

#endif
