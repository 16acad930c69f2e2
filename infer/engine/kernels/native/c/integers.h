// Products of a few rows with integers of the cache. Outside of models in fp32 (see widened.h) a row is rounded to
// int16 with one scale, and its sums with the stored integers are exact in 32 bits: 32767 * 127 * 512 < 2^31, so a head
// has at most 512 dims, a tile fewer keys.
#ifndef TK_INTEGERS_H
#define TK_INTEGERS_H

#include "pages.h"

#if defined(TK_AVX512) && defined(__AVX512VNNI__)
#define DIGITS 2  // of a value that multiplies 4 bits: its bytes
#else
#define DIGITS 1
#endif
#define STRIP 8  // values that v_store_digits orders; it multiplies STRIP / 2 lines of a panel

// Adds the products of `rows` rows, a constant, with a panel of 4 bits; `sums` are those of low bytes, then of high
// ones. A vector has 4 lines of the panel: its bytes become those of 4 lines side by side, for each of 16 columns.
#if DIGITS == 2
INLINE __m512i four_bytes(const int16_t *p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE void add_digits(const int rows, const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,
                       struct ahead ahead, vi *sums) {
    const __m512i lines = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t k = 0; k < pairs; k += STRIP / 2, w += STRIP / 2 * PANEL, x += STRIP) {
#pragma GCC unroll 4
        for (int i = 0; i < STRIP / 2; i++) __builtin_prefetch(ahead.from + (k + i) * ahead.bytes, 0, 2);
        __m512i both = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(lines, _mm512_loadu_si512(w)), bytes);
        __m512i even = _mm512_and_si512(both, low), odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const int16_t *row = x + r * x_stride;
            vi *sum = &sums[2 * r];
            sum[0] = (vi)_mm512_dpbusd_epi32((__m512i)sum[0], four_bytes(row), even);
            sum[1] = (vi)_mm512_dpbusd_epi32((__m512i)sum[1], even, four_bytes(row + 4));
            sum[0] = (vi)_mm512_dpbusd_epi32((__m512i)sum[0], four_bytes(row + 2), odd);
            sum[1] = (vi)_mm512_dpbusd_epi32((__m512i)sum[1], odd, four_bytes(row + 6));
        }
    }
}
#else
INLINE void add_digits(const int rows, const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,
                       struct ahead ahead, vi *sums) {
    (void)rows, (void)x, (void)x_stride, (void)w, (void)pairs, (void)ahead, (void)sums;
}
#endif

// Stores integers within the range of int16 as the other factor of 4 bits: of 8 integers the low bytes of those with
// even numbers, of those with odd ones, then the high bytes.
INLINE void vi_store_digits(int16_t *to, vi v) {
#if DIGITS == 2
    const __m128i order = _mm_set_epi8(15, 11, 7, 3, 13, 9, 5, 1, 14, 10, 6, 2, 12, 8, 4, 0);
    __m256i narrow = _mm512_cvtepi32_epi16((__m512i)v);
    _mm256_storeu_si256((__m256i *)to, _mm256_shuffle_epi8(narrow, _mm256_broadcastsi128_si256(order)));
#else
    vi_store_int16(to, v);
#endif
}

// Stores n values of int16, a multiple of VW, so.
INLINE void order_digits(const int16_t *from, int64_t n, int16_t *to) {
    for (int64_t i = 0; i < n; i += VW) {
        vi values;
        for (int64_t j = 0; j < VW; j++) values[j] = from[i + j];
        vi_store_digits(to + i, values);
    }
}

// The sums that `add_integers` needs: of digits apart.
#define SUMS(bits, rows, panels) ((rows) * (panels) * VECTORS * ((bits) == 4 ? DIGITS : 1))

// Adds the products of `rows` rows with `panels` panels of integers of so many bits, all constants. With 4 bits on
// AVX512_VNNI rows are digits, and there is one panel.
INLINE void add_integers(const int bits, const int rows, const int panels, const int16_t *x, int64_t x_stride,
                         const char *w, int64_t panel_bytes, int64_t pairs, struct ahead ahead, vi *sums) {
    if (bits == 4 && DIGITS == 2) {
        add_digits(rows, x, x_stride, w, pairs, ahead, sums);
        return;
    }
    for (int64_t k = 0; k < pairs; k++) {
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            const char *line = w + p * panel_bytes + k * pair_bytes(bits == 8 ? INT8 : INT4);
            __builtin_prefetch(ahead.from + (k * panels + p) * ahead.bytes, 0, 2);
            vi stored[VECTORS];
#pragma GCC unroll 2
            for (int n = 0; n < VECTORS; n++)
                stored[n] = bits == 8 ? v_widen_pairs(line + n * 2 * VW) : v_widen_nibbles(line + n * VW);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                int32_t both;
                memcpy(&both, x + r * x_stride + 2 * k, sizeof both);
#pragma GCC unroll 2
                for (int n = 0; n < VECTORS; n++) {
                    vi *sum = &sums[(r * panels + p) * VECTORS + n];
                    *sum = v_add_dot(*sum, vi_set1(both), stored[n]);
                }
            }
            // Loads stay on their side: with the codes of both panels alive, AVX2 would spill sums.
            __asm__ volatile("" ::: "memory");
        }
    }
}

INLINE void clear_sums(const int count, vi *sums) {
#pragma GCC unroll 24
    for (int i = 0; i < count; i++) sums[i] = vi_set1(0);
}

// Sum i of a tile, of digits together.
INLINE vi whole_sum(const int bits, const vi *sums, int i) {
    vi sum = sums[i];
    if (bits == 4 && DIGITS == 2) sum = sums[2 * i] + (sums[2 * i + 1] << 8);
    return sum;
}

// The scores of one or two panels of int8 keys: sums in the scales of rows and keys.
INLINE void score_tile(const int rows, const int panels, const int16_t *x, int64_t x_stride, const char *w,
                       int64_t pairs, struct ahead ahead, const float *row_scales, const float *scales, float *out) {
    vi sums[MOST_ROWS * VECTORS];
    clear_sums(rows * panels * VECTORS, sums);
    add_integers(8, rows, panels, x, x_stride, w, pairs * pair_bytes(INT8), pairs, ahead, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < panels * VECTORS; n++)
            v_store(out + r * KEY_TILE + n * VW,
                    vi_to_float(sums[r * panels * VECTORS + n]) * v_load(scales + n * VW) * v_set1(row_scales[r]));
}

// The values of some blocks of a tile of keys.
struct value_pages {
    struct value_page {
        const char *page;
        struct ahead ahead;
        int64_t key, pairs;  // its first key, counted in the tile
    } at[KEY_TILE / PANEL];
    int64_t count, panel_bytes;
};

// The sums of one or two panels of values, from `panel` on; the first rows fetch for all.
INLINE void value_tile(const int bits, const int rows, const int panels, const int16_t *x, const struct value_pages *v,
                       int64_t panel, int fetch, int32_t *out, int64_t out_stride) {
    vi sums[2 * MOST_ROWS * VECTORS];
    clear_sums(SUMS(bits, rows, panels), sums);
    for (int64_t i = 0; i < v->count; i++) {
        const struct value_page *at = &v->at[i];
        struct ahead ahead = {at->ahead.from + panel * at->pairs * at->ahead.bytes, fetch ? at->ahead.bytes : 0};
        add_integers(bits, rows, panels, x + at->key, KEY_TILE, at->page + panel * v->panel_bytes, v->panel_bytes,
                     at->pairs, ahead, sums);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < panels * VECTORS; n++)
            vi_store(out + r * out_stride + n * VW, whole_sum(bits, sums, r * panels * VECTORS + n));
}

typedef void (*score_function)(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, struct ahead ahead,
                               const float *row_scales, const float *scales, float *out);
typedef void (*value_function)(const int16_t *x, const struct value_pages *v, int64_t panel, int fetch, int32_t *out,
                               int64_t out_stride);

#define SCORE_TILE(rows, panels)                                                                               \
    static void score_tile_##panels##_##rows(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, \
                                             struct ahead ahead, const float *row_scales, const float *scales, \
                                             float *out) {                                                     \
        score_tile(rows, panels, x, x_stride, w, pairs, ahead, row_scales, scales, out);                       \
    }
#define VALUE_TILE(bits, rows, panels)                                                                              \
    static void value_tile_##bits##_##panels##_##rows(const int16_t *x, const struct value_pages *v, int64_t panel, \
                                                      int fetch, int32_t *out, int64_t out_stride) {                \
        value_tile(bits, rows, panels, x, v, panel, fetch, out, out_stride);                                        \
    }
#define INTEGER_TILES(rows) \
    SCORE_TILE(rows, 1)     \
    VALUE_TILE(8, rows, 1)  \
    VALUE_TILE(4, rows, 1)
#define WIDE_ROWS 3  // that take two panels of int8 at once: their sums are too few to hide the latency of a product
#define TILES_OF_TWO_PANELS(rows) \
    SCORE_TILE(rows, 2)           \
    VALUE_TILE(8, rows, 2)
INTEGER_TILES(1)
INTEGER_TILES(2)
INTEGER_TILES(3)
INTEGER_TILES(4)
INTEGER_TILES(5)
INTEGER_TILES(6)
TILES_OF_TWO_PANELS(1)
TILES_OF_TWO_PANELS(2)
TILES_OF_TWO_PANELS(3)
#if VW == 16
INTEGER_TILES(7)
INTEGER_TILES(8)
INTEGER_TILES(9)
INTEGER_TILES(10)
INTEGER_TILES(11)
INTEGER_TILES(12)
#define UP_TO_MOST_ROWS(name) \
    {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8, name##9, name##10, name##11, name##12}
#else
#define UP_TO_MOST_ROWS(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#endif
#define UP_TO_WIDE_ROWS(name) {name##1, name##2, name##3}
static const score_function SCORE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(score_tile_1_);
static const score_function WIDE_SCORE_TILES[WIDE_ROWS] = UP_TO_WIDE_ROWS(score_tile_2_);
static const value_function VALUE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(value_tile_8_1_);
static const value_function WIDE_VALUE_TILES[WIDE_ROWS] = UP_TO_WIDE_ROWS(value_tile_8_2_);
static const value_function NIBBLE_VALUE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(value_tile_4_1_);

// The panels that so few rows take at once, of those that are left.
INLINE int64_t wide_panels(int64_t rows, int64_t left) { return rows <= WIDE_ROWS && left >= 2 ? 2 : 1; }

// scores[r] = x[r] by a page of int8 keys with their scales; x[r] has the scale row_scales[r].
static void score_page(const struct product *p, const float *row_scales, const float *scales, float *scores) {
    struct ahead ahead = p->ahead;
    for (int64_t panel = 0, wide; panel < p->panels; panel += wide, ahead.from += wide * p->pairs * p->ahead.bytes) {
        wide = wide_panels(p->rows, p->panels - panel);
        ahead.bytes = p->ahead.bytes;
        for (int64_t r = 0, count; r < p->rows; r += count, ahead.bytes = 0) {
            count = rows_of_tile(p->rows - r);
            score_function tile = wide == 2 ? WIDE_SCORE_TILES[count - 1] : SCORE_TILES[count - 1];
            tile((const int16_t *)p->x + r * p->x_stride, p->x_stride, p->page + panel * p->panel_bytes, p->pairs,
                 ahead, row_scales + r, scales + panel * PANEL, scores + r * KEY_TILE + panel * PANEL);
        }
    }
}

// sums[r] = the weights x[r] of a tile's keys by panels [first, last) of values.
static void sum_values(int bits, const int16_t *x, int64_t rows, const struct value_pages *v, int64_t first,
                       int64_t last, int32_t *sums, int64_t sums_stride) {
    for (int64_t panel = first, wide; panel < last; panel += wide) {
        wide = bits == 8 ? wide_panels(rows, last - panel) : 1;
        for (int64_t r = 0, count; r < rows; r += count) {
            count = rows_of_tile(rows - r);
            value_function tile = bits == 4   ? NIBBLE_VALUE_TILES[count - 1]
                                  : wide == 2 ? WIDE_VALUE_TILES[count - 1]
                                              : VALUE_TILES[count - 1];
            tile(x + r * KEY_TILE, v, panel, r == 0, sums + r * sums_stride + panel * PANEL, sums_stride);
        }
    }
}

// The scale of int16 for values up to the largest lane; NaN if the values, of which a sum is given, are not finite.
INLINE float scale_of(vf largest, vf sum) {
    float odd = v_sum(sum - sum);
    return v_largest(largest) / 32767.0f + odd;
}

// Rounds n floats, a multiple of VW, to int16 in a scale; to zero if it is zero or NaN.
INLINE void round_row(const float *x, int64_t n, float scale, int16_t *to) {
    vf inverse = v_set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < n; i += VW) v_store_int16(to + i, v_load(x + i) * inverse);
}

// The scale of a query of n floats, a multiple of VW.
INLINE float scale_of_query(const float *x, int64_t n) {
    vf largest = v_set1(LEAST_SCALE), sum = v_set1(0.0f);
    for (int64_t i = 0; i < n; i += VW) {
        largest = v_max(v_abs(v_load(x + i)), largest);
        sum = sum + v_abs(v_load(x + i));
    }
    return scale_of(largest, sum);
}

#endif
