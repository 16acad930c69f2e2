// Keys and values of 4 bits: an element is code * scale + zero, both fp16, of its token and group of GROUP dims.
//
// A sequence's first block, and for each query the block that it is in, are read from twins in int8 instead: attention
// gives these keys most of its weight. A row's reads depend on its position alone, so its bits do not depend on its
// neighbours. As with int8, sums with stored integers are exact; a row's weights are rounded to int16 block by block.
#ifndef TK_NIBBLES_H
#define TK_NIBBLES_H

#include "items.h"

// The scales of queries, and their sums in each group, which the zeros of keys are multiplied by.
struct query_scales {
    const float *scales, *sums;
    int64_t groups;
};

// The scores of one panel of keys; `scales` are those of its first group, followed by its zeros, `tokens` of each.
INLINE void score_nibbles(const int rows, const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,
                          struct ahead ahead, struct query_scales queries, const uint16_t *scales, int64_t tokens,
                          float *out) {
    vf scores[MOST_ROWS * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * VECTORS; i++) scores[i] = v_set1(0.0f);
    for (int64_t k = 0, g = 0, some; k < pairs; k += some, g++, scales += 2 * tokens) {
        vi sums[MOST_ROWS * VECTORS];
        some = pairs - k < GROUP / 2 ? pairs - k : GROUP / 2;
        integer_sums(4, rows, x + 2 * k, x_stride, w + k * PANEL, some, ahead, sums);
        ahead.from += some * ahead.bytes;
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++) {
            vf scale = v_widen_fp16(scales + n * VW), zero = v_widen_fp16(scales + tokens + n * VW);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vf *score = &scores[r * VECTORS + n];
                *score = v_fma(vi_to_float(sums[r * VECTORS + n]), scale, *score);
                *score = v_fma(v_set1(queries.sums[r * queries.groups + g]), zero, *score);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++)
            v_store(out + r * KEY_TILE + n * VW, scores[r * VECTORS + n] * v_set1(queries.scales[r]));
}

typedef void (*nibbles_function)(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs, struct ahead ahead,
                                 struct query_scales queries, const uint16_t *scales, int64_t tokens, float *out);
#define NIBBLE_TILE(rows)                                                                                     \
    static void score_nibbles_##rows(const int16_t *x, int64_t x_stride, const char *w, int64_t pairs,        \
                                     struct ahead ahead, struct query_scales queries, const uint16_t *scales, \
                                     int64_t tokens, float *out) {                                            \
        score_nibbles(rows, x, x_stride, w, pairs, ahead, queries, scales, tokens, out);                      \
    }
NIBBLE_TILE(1)
NIBBLE_TILE(2)
NIBBLE_TILE(3)
NIBBLE_TILE(4)
NIBBLE_TILE(5)
NIBBLE_TILE(6)
#if VW == 16
NIBBLE_TILE(7)
NIBBLE_TILE(8)
NIBBLE_TILE(9)
NIBBLE_TILE(10)
NIBBLE_TILE(11)
NIBBLE_TILE(12)
#endif
static const nibbles_function NIBBLE_TILES[MOST_ROWS] = UP_TO_MOST_ROWS(score_nibbles_);

// The scores of the rows from `first` on with a page of keys in 4 bits.
static void score_page_of_nibbles(const struct product *p, struct query_scales queries, const uint16_t *scales,
                                  int64_t tokens, float *scores) {
    struct ahead ahead = p->ahead;
    for (int64_t panel = 0; panel < p->panels; panel++, ahead.from += p->pairs * p->ahead.bytes) {
        ahead.bytes = p->ahead.bytes;
        for (int64_t r = 0, count; r < p->rows; r += count, ahead.bytes = 0) {
            count = rows_of_tile(p->rows - r);
            struct query_scales of_rows = {queries.scales + r, queries.sums + r * queries.groups, queries.groups};
            NIBBLE_TILES[count - 1]((const int16_t *)p->x + r * p->x_stride, p->x_stride,
                                    p->page + panel * p->panel_bytes, p->pairs, ahead, of_rows, scales + panel * PANEL,
                                    tokens, scores + r * KEY_TILE + panel * PANEL);
        }
    }
}

// The scores of a block whose keys have 4 bits and a twin; `out` are those of the first row.
static void score_block(const struct model *m, const struct operation *op, const struct item *item,
                        const struct workspace *w, int64_t at, int64_t panels, float *out) {
    int64_t n = m->head_dim, width = padded_head(m), groups = groups_of_head(m);
    struct readers twinned = readers_of(m, item, at);
    const int16_t *queries = (const int16_t *)w->queries;
    if (twinned.last > twinned.first) {
        const char *keys = twin_of(m, op, item, at, 0);
        int alone = twinned.last == item->rows;
        struct product p = {queries + twinned.first * width,
                            width,
                            twinned.last - twinned.first,
                            keys,
                            n / 2 * pair_bytes(INT8),
                            panels,
                            n / 2,
                            alone ? fetch_page(m, op, item, at, 1, panels * (n / 2)) : no_fetch(keys)};
        score_page(&p, w->query_scales + twinned.first, (const float *)(keys + m->twin_scale_offset),
                   out + twinned.first * KEY_TILE);
    }
    if (twinned.last < item->rows) {
        const char *keys = page_of(m, op, item, at, 0);
        struct product p = {queries + twinned.last * width,
                            width,
                            item->rows - twinned.last,
                            keys,
                            n / 2 * pair_bytes(INT4),
                            panels,
                            n / 2,
                            fetch_page(m, op, item, at, 1, panels * (n / 2))};
        struct query_scales scales = {w->query_scales + twinned.last, w->query_sums + twinned.last * groups, groups};
        score_page_of_nibbles(&p, scales, (const uint16_t *)(keys + m->scale_offset[0]), m->block_size,
                              out + twinned.last * KEY_TILE);
    }
}

// Rounds a row's weights of a block's keys, in the scales of their values, to int16; returns the scale of that.
static float round_weights(const float *weights, const float *scales, int64_t keys, struct seen seen, int16_t *to) {
    float scaled[KEY_TILE];
    vf most = v_set1(LEAST_SCALE), sum = v_set1(0.0f);
    for (int64_t i = 0; i < keys; i += VW) {
        vf x = v_load(weights + i) * v_load(scales + i);
        if (i < seen.from || i + VW > seen.to) x = v_only(x, seen.from - i, seen.to - i);
        most = v_max(x, most);
        sum = sum + x;
        v_store(scaled + i, x);
    }
    float scale = scale_of(most, sum);
    round_row(scaled, keys, scale, to);
    return scale;
}

// The weights times the zeros of a group, summed.
static float sum_zeros(const float *weights, const float *zeros, int64_t keys, struct seen seen) {
    vf sum = v_set1(0.0f);
    for (int64_t i = 0; i < keys; i += VW) {
        vf x = v_load(weights + i) * v_load(zeros + i);
        if (i < seen.from || i + VW > seen.to) x = v_only(x, seen.from - i, seen.to - i);
        sum = sum + x;
    }
    return v_sum(sum);
}

// Adds the values of some panels of a block to the rows [first, last), whose weights are rounded.
static void add_panels(const struct model *m, const struct product *page, const value_function *tiles, int64_t first,
                       int64_t last, const struct workspace *w, float *values) {
    int64_t width = padded_head(m), columns = page->panels * PANEL;
    struct product p = *page;
    p.x = w->weights + first * KEY_TILE, p.x_stride = KEY_TILE, p.rows = last - first;
    for (int64_t r = first; r < last; r++) memset(w->sums + r * width, 0, (size_t)columns * sizeof *w->sums);
    sum_page(tiles, &p, w->sums + first * width, width);
    for (int64_t r = first; r < last; r++) {
        vf scale = v_set1(w->weight_scales[r]), zeros = v_set1(w->zero_sums[r]);
        for (int64_t i = r * width; i < r * width + columns; i += VW)
            v_store(values + i, v_load(values + i) + v_fma(vi_to_float(vi_load(w->sums + i)), scale, zeros));
    }
}

// The values of a block, which have 4 bits and a twin, weighted; `weights` are those of the first row.
static void add_block(const struct model *m, const struct operation *op, const struct item *item,
                      const struct workspace *w, int64_t at, int64_t keys, const float *weights, float *values) {
    int64_t size = m->block_size, panels = padded_head(m) / PANEL, pairs = (keys + 1) / 2;
    int64_t padded = (keys + PANEL - 1) / PANEL * PANEL;
    struct readers twinned = readers_of(m, item, at);
    struct ahead ahead = fetch_page(m, op, item, at + KEY_TILE, 0, panels * pairs);
    if (twinned.last > twinned.first) {
        const char *page = twin_of(m, op, item, at, 1);
        struct product p = {.page = page,
                            .panel_bytes = size / 2 * pair_bytes(INT8),
                            .panels = panels,
                            .pairs = pairs,
                            .ahead = twinned.last == item->rows ? ahead : no_fetch(page)};
        for (int64_t r = twinned.first; r < twinned.last; r++) {
            w->weight_scales[r] =
                round_weights(weights + r * KEY_TILE, (const float *)(page + m->twin_scale_offset), padded,
                              keys_seen(m, op, item, r, at, at + keys), w->weights + r * KEY_TILE);
            w->zero_sums[r] = 0.0f;
        }
        add_panels(m, &p, VALUE_TILES, twinned.first, twinned.last, w, values);
    }
    if (twinned.last == item->rows) return;
    const char *page = page_of(m, op, item, at, 1);
    const uint16_t *stored = (const uint16_t *)(page + m->scale_offset[1]);
    for (int64_t g = 0, panel = 0, some; panel < panels; g++, panel += some, stored += 2 * size) {
        float scales[KEY_TILE], zeros[KEY_TILE];
        for (int64_t i = 0; i < size; i += VW) {
            v_store(scales + i, v_widen_fp16(stored + i));
            v_store(zeros + i, v_widen_fp16(stored + size + i));
        }
        some = panels - panel < GROUP / PANEL ? panels - panel : GROUP / PANEL;
        for (int64_t r = twinned.last; r < item->rows; r++) {
            const float *of_row = weights + r * KEY_TILE;
            struct seen seen = keys_seen(m, op, item, r, at, at + keys);
            w->weight_scales[r] = round_weights(of_row, scales, padded, seen, w->weights + r * KEY_TILE);
            w->zero_sums[r] = sum_zeros(of_row, zeros, padded, seen);
        }
        int64_t panel_bytes = size / 2 * pair_bytes(INT4);
        struct product p = {.page = page + panel * panel_bytes,
                            .panel_bytes = panel_bytes,
                            .panels = some,
                            .pairs = pairs,
                            .ahead = ahead};
        add_panels(m, &p, NIBBLE_VALUE_TILES, twinned.last, item->rows, w, values + panel * PANEL);
        ahead.from += some * pairs * ahead.bytes;
    }
}

#endif
