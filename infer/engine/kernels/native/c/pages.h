// Products of a few rows with a page of floats of the cache: the scores of attention, and its weighted values. They are
// summed as in a linear layer.
#ifndef TK_PAGES_H
#define TK_PAGES_H

#include "append.h"

// The operands of a product. While it runs it fetches what is needed next into the cache.
struct product {
    const void *x;  // fp32, or int16 for integers
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

#endif
