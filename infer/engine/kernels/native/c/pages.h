// Products of a few rows with a page of the cache: the scores of attention, and its weighted values.
//
// Floats are summed as in a linear layer. With int8, outside of models in fp32 (see widened.h), a row is rounded to
// int16 with one scale, and its sums with the stored integers are exact in 32 bits: 32767 * 127 * 512 < 2^31, so a head
// has at most 512 dims, a tile fewer keys.
#ifndef TK_PAGES_H
#define TK_PAGES_H

#include "append.h"

// The operands of a product. While it runs it fetches what is needed next into the cache.
struct product {
    const void *x;  // fp32, or int16 for int8
    int64_t x_stride, rows;
    const char *page;
    int64_t panel_bytes, panels, pairs;
    struct ahead ahead;
};

#define PAGE_TILE(rows, panels, format, name)                                                                         \
    static void name(const float *x, int64_t x_stride, const char *w, int64_t panel_bytes, int64_t pairs, float *out, \
                     int64_t out_stride, const float *bias, int add, struct ahead ahead) {                            \
        tile(rows, panels, format, 1, x, x_stride, w, panel_bytes, pairs, out, out_stride, bias, add, ahead);         \
    }
#define PAGE_TILES(format)                       \
    PAGE_TILE(1, 2, format, page_##format##_1_2) \
    PAGE_TILE(1, 4, format, page_##format##_1_4) \
    PAGE_TILE(2, 2, format, page_##format##_2_2) \
    PAGE_TILE(3, 2, format, page_##format##_3_2)
PAGE_TILES(FP32)
PAGE_TILES(BF16)
PAGE_TILES(FP16)
PAGE_TILES(FP8)
#define PAIRED(format) {page_##format##_1_2, page_##format##_2_2, page_##format##_3_2}
static const tile_function TWO_PANELS[4][3] = {PAIRED(FP32), PAIRED(BF16), PAIRED(FP16), PAIRED(FP8)};
static const tile_function FOUR_PANELS[4] = {page_FP32_1_4, page_BF16_1_4, page_FP16_1_4, page_FP8_1_4};
TILE(1, 1, FP8, tile_FP8_1_1)
TILE(2, 1, FP8, tile_FP8_2_1)
TILE(3, 1, FP8, tile_FP8_3_1)
TILE(4, 1, FP8, tile_FP8_4_1)
TILE(5, 1, FP8, tile_FP8_5_1)
TILE(6, 1, FP8, tile_FP8_6_1)
MORE_TILES(FP8)
static const tile_function ONE_PANEL_OF_FP8[MOST_ROWS] = {NARROW(FP8) MORE_NARROW(FP8)};

// out[r] (+)= x[r] by the page's panels. Few rows take several panels at once: their sums are too few to hide the
// latency of a fused product.
static void multiply_page(int format, const struct product *p, float *out, int64_t out_stride, int add) {
    struct ahead ahead = p->ahead;
    for (int64_t panel = 0, wide; panel < p->panels; panel += wide) {
        int64_t left = p->panels - panel;
        wide = p->rows == 1 && left >= 4 ? 4 : p->rows <= 3 && left >= 2 ? 2 : 1;
        const char *w = p->page + panel * p->panel_bytes;
        ahead.bytes = p->ahead.bytes;
        for (int64_t r = 0, count; r < p->rows; r += count) {
            count = rows_of_tile(p->rows - r);
            tile_function multiply = wide == 4       ? FOUR_PANELS[format]
                                     : wide == 2     ? TWO_PANELS[format][count - 1]
                                     : format == FP8 ? ONE_PANEL_OF_FP8[count - 1]
                                                     : NARROW_TILES[format][count - 1];
            multiply((const float *)p->x + r * p->x_stride, p->x_stride, w, p->panel_bytes, p->pairs,
                     out + r * out_stride + panel * PANEL, out_stride, NULL, add, ahead);
            ahead.bytes = 0;  // the first rows fetch for all
        }
        ahead.from += p->pairs * p->ahead.bytes * wide;
    }
}

// The sums of `rows` rows with one panel of integers of so many bits, both constants.
INLINE void integer_sums(const int bits, const int rows, const int16_t *x, int64_t x_stride, const char *w,
                         int64_t pairs, struct ahead ahead, vi *sums) {
#pragma GCC unroll 16
    for (int i = 0; i < rows * VECTORS; i++) sums[i] = vi_set1(0);
    for (int64_t k = 0; k < pairs; k++) {
        __builtin_prefetch(ahead.from + k * ahead.bytes, 0, 2);
        vi stored[VECTORS];
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++)
            stored[n] =
                bits == 8 ? v_widen_pairs(w + k * 2 * PANEL + n * 2 * VW) : v_widen_nibbles(w + k * PANEL + n * VW);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * k, sizeof both);
#pragma GCC unroll 2
            for (int n = 0; n < VECTORS; n++)
                sums[r * VECTORS + n] = v_add_dot(sums[r * VECTORS + n], vi_set1(both), stored[n]);
        }
    }
}

// The scores of one panel of keys: sums in the scales of rows and keys.
INLINE void score_tile(const int rows, const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,
                       struct ahead ahead, const float *row_scales, const float *scales, float *out) {
    vi sums[MOST_ROWS * VECTORS];
    integer_sums(8, rows, x, x_stride, w, pairs, ahead, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++)
            v_store(out + r * KEY_TILE + n * VW,
                    vi_to_float(sums[r * VECTORS + n]) * v_load(scales + n * VW) * v_set1(row_scales[r]));
}

// Adds the sums of one panel of values to those of the pages before it.
INLINE void value_tile(const int bits, const int rows, const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,
                       struct ahead ahead, int32_t *out, int64_t out_stride) {
    vi sums[MOST_ROWS * VECTORS];
    integer_sums(bits, rows, x, x_stride, w, pairs, ahead, sums);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++) {
            int32_t *to = out + r * out_stride + n * VW;
            vi_store(to, vi_load(to) + sums[r * VECTORS + n]);
        }
}

typedef void (*score_function)(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, struct ahead ahead,
                               const float *row_scales, const float *scales, float *out);
typedef void (*value_function)(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, struct ahead ahead,
                               int32_t *out, int64_t out_stride);

#define VALUE_TILE(bits, rows)                                                                               \
    static void value_tile_##bits##_##rows(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, \
                                           struct ahead ahead, int32_t *out, int64_t out_stride) {           \
        value_tile(bits, rows, x, x_stride, w, pairs, ahead, out, out_stride);                               \
    }
#define INTEGER_TILES(rows)                                                                                       \
    static void score_tile_##rows(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,               \
                                  struct ahead ahead, const float *row_scales, const float *scales, float *out) { \
        score_tile(rows, x, x_stride, w, pairs, ahead, row_scales, scales, out);                                  \
    }                                                                                                             \
    VALUE_TILE(8, rows)                                                                                           \
    VALUE_TILE(4, rows)
INTEGER_TILES(1)
INTEGER_TILES(2)
INTEGER_TILES(3)
INTEGER_TILES(4)
INTEGER_TILES(5)
INTEGER_TILES(6)
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
static const score_function SCORE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(score_tile_);
static const value_function VALUE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(value_tile_8_);
static const value_function NIBBLE_VALUE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(value_tile_4_);

// scores[r] = x[r] by a page of int8 keys with their scales; x[r] has the scale row_scales[r].
static void score_page(const struct product *p, const float *row_scales, const float *scales, float *scores) {
    struct ahead ahead = p->ahead;
    for (int64_t panel = 0; panel < p->panels; panel++, ahead.from += p->pairs * p->ahead.bytes) {
        ahead.bytes = p->ahead.bytes;
        for (int64_t r = 0, count; r < p->rows; r += count, ahead.bytes = 0) {
            count = rows_of_tile(p->rows - r);
            SCORE_TILES[count - 1]((const int16_t *)p->x + r * p->x_stride, p->x_stride,
                                   p->page + panel * p->panel_bytes, p->pairs, ahead, row_scales + r,
                                   scales + panel * PANEL, scores + r * KEY_TILE + panel * PANEL);
        }
    }
}

// sums[r] += x[r] by panels of integer values.
static void sum_page(const value_function *tiles, const struct product *p, int32_t *sums, int64_t sums_stride) {
    struct ahead ahead = p->ahead;
    for (int64_t panel = 0; panel < p->panels; panel++, ahead.from += p->pairs * p->ahead.bytes) {
        ahead.bytes = p->ahead.bytes;
        for (int64_t r = 0, count; r < p->rows; r += count, ahead.bytes = 0) {
            count = rows_of_tile(p->rows - r);
            tiles[count - 1]((const int16_t *)p->x + r * p->x_stride, p->x_stride, p->page + panel * p->panel_bytes,
                             p->pairs, ahead, sums + r * sums_stride + panel * PANEL, sums_stride);
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
