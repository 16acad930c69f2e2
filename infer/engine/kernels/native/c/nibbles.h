// Keys and values of 4 bits: an element is code * scale + zero, both fp16, of its token and group of GROUP dims.
//
// A sequence's first block, and for each query the block that it is in, are read from twins in int8 instead: attention
// gives these keys most of its weight. A row's reads depend on its position alone, so its bits do not depend on its
// neighbours. As with int8, sums with stored integers are exact; a row's weights are rounded to int16 tile by tile for
// each group, those of twins block by block.
#ifndef TK_NIBBLES_H
#define TK_NIBBLES_H

#include "items.h"

#define MIDDLE 8  // of the codes: weights that are rounded multiply their distances from it

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
        vi sums[2 * MOST_ROWS * VECTORS];
        some = pairs - k < GROUP / 2 ? pairs - k : GROUP / 2;
        clear_sums(SUMS(4, rows, 1), sums);
        add_integers(4, rows, 1, x + 2 * k, x_stride, w + k * PANEL, 0, some, ahead, sums);
        ahead.from += some * ahead.bytes;
#pragma GCC unroll 2
        for (int n = 0; n < VECTORS; n++) {
            vf scale = v_widen_fp16(scales + n * VW), zero = v_widen_fp16(scales + tokens + n * VW);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vf *score = &scores[r * VECTORS + n];
                *score = v_fma(vi_to_float(whole_sum(4, sums, r * VECTORS + n)), scale, *score);
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

// The queries of an item a second time, as digits, behind those in order.
INLINE int16_t *digits_of(float *queries, int64_t width) { return (int16_t *)queries + ATTENTION_ROWS * width; }

// The scores of a block whose keys have 4 bits and a twin; `out` are those of the first row.
static void score_block(const struct model *m, const struct operation *op, const struct item *item,
                        const struct workspace *w, int64_t at, int64_t panels, float *out) {
    int64_t n = m->head_dim, width = padded_head(m), groups = groups_of_head(m);
    struct readers twinned = readers_of(m, item, at);
    const int16_t *queries = (const int16_t *)w->queries, *digits = digits_of(w->queries, width);
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
        struct product p = {digits + twinned.last * width,
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

// Adds the values of a block's twin to the rows that read it; `weights` are those of the block in the first row.
static void add_twin(const struct model *m, const struct operation *op, const struct item *item,
                     const struct workspace *w, int64_t at, int64_t keys, const float *weights, float *values) {
    int64_t width = padded_head(m), padded = (keys + PANEL - 1) / PANEL * PANEL;
    struct readers twinned = readers_of(m, item, at);
    const char *page = twin_of(m, op, item, at, 1);
    struct ahead ahead = twinned.last == item->rows ? fetch_values(m, op, item, at, keys) : no_fetch(page);
    struct value_pages pages = {{{page, ahead, 0, (keys + 1) / 2}}, 1, m->block_size / 2 * pair_bytes(INT8)};
    for (int64_t r = twinned.first; r < twinned.last; r++)
        w->weight_scales[r] =
            round_weights(weights + r * KEY_TILE, (const float *)(page + m->twin_scale_offset), padded,
                          keys_seen(m, op, item, r, at, at + keys), w->weights + r * KEY_TILE);
    int64_t rows = twinned.last - twinned.first;
    sum_values(8, w->weights + twinned.first * KEY_TILE, rows, &pages, 0, width / PANEL, w->sums, width);
    for (int64_t r = 0; r < rows; r++)
        add_sums(values + (twinned.first + r) * width, w->sums + r * width, width, 0,
                 w->weight_scales[twinned.first + r], 0.0f);
}

// The keys of a tile [low, high) whose values a row reads in 4 bits.
INLINE struct seen nibbles_seen(const struct model *m, const struct operation *op, const struct item *item, int64_t r,
                                int64_t low, int64_t high) {
    struct seen seen = keys_seen(m, op, item, r, low, high);
    int64_t size = m->block_size, own = position_of(m, item, r) / size * size - low;
    if (seen.from < size - low) seen.from = size - low;
    if (seen.to > own) seen.to = own;
    return seen.from < seen.to ? seen : (struct seen){0, 0};
}

// The sums of a row's weights in a group of values.
struct weight_sums {
    float middles;  // of weights times what MIDDLE counts for
    int32_t whole;  // of weights as integers
};

// Rounds a row's weights of the keys of a tile, in the scales of their values, to int16. Keys that the row does not
// read so have weights of zero.
INLINE struct weight_sums weigh_nibbles(const float *weights, const float *scales, const float *middles, int64_t keys,
                                        struct seen seen, float scale, int16_t *to) {
    vf sum = v_set1(0.0f), inverse = v_set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    vi none = vi_set1(0), whole = none;
    int64_t low = seen.from / VW * VW, high = (seen.to + VW - 1) / VW * VW;
    for (int64_t i = 0; i < low; i += VW) vi_store_digits(to + i, none);
    for (int64_t i = high; i < keys; i += VW) vi_store_digits(to + i, none);
    for (int64_t i = low; i < high; i += VW) {
        vf x = v_load(weights + i), steps = v_load(scales + i), middle = v_load(middles + i);
        if (i < seen.from || i + VW > seen.to)
            steps = v_only(steps, seen.from - i, seen.to - i), middle = v_only(middle, seen.from - i, seen.to - i);
        vi rounded = v_nearest(x * steps * inverse);
        sum = v_fma(x, middle, sum);
        whole = whole + rounded;
        vi_store_digits(to + i, rounded);
    }
    return (struct weight_sums){v_sum(sum), (int32_t)v_sum(vi_to_float(whole))};
}

// Adds the values of a tile's pages in group g. `largest` are the rows' largest weights of them.
static void add_group_of_values(const struct model *m, const struct operation *op, const struct item *item,
                                const struct workspace *w, int64_t low, int64_t high, const struct value_pages *pages,
                                int64_t g, const float *largest, float *values) {
    float *scales = w->value_scales, middles[KEY_TILE], of_values = 0.0f;
    struct weight_sums sums[ATTENTION_ROWS];
    int64_t size = m->block_size, width = padded_head(m), first = g * GROUP / PANEL, last = first + GROUP / PANEL;
    if (last > width / PANEL) last = width / PANEL;
    for (int64_t p = 0; p < pages->count; p++) {
        const uint16_t *stored = (const uint16_t *)(pages->at[p].page + m->scale_offset[1]) + 2 * g * size;
        for (int64_t i = 0, key = pages->at[p].key; i < size; i += VW) {
            vf scale = v_widen_fp16(stored + i), zero = v_widen_fp16(stored + size + i);
            v_store(scales + key + i, scale);
            v_store(middles + key + i, v_fma(scale, v_set1(MIDDLE), zero));
        }
    }
    struct seen before = {0, 0};
    for (int64_t r = 0; r < item->rows; r++) {
        struct seen seen = nibbles_seen(m, op, item, r, low, high);
        if (seen.from != before.from || seen.to != before.to) of_values = largest_in(scales, seen), before = seen;
        w->weight_scales[r] = largest[r] * of_values / 32767.0f;
        sums[r] = weigh_nibbles(w->scores + r * KEY_TILE, scales, middles, (high - low + PANEL - 1) / PANEL * PANEL,
                                seen, w->weight_scales[r], w->weights + r * KEY_TILE);
    }
    sum_values(4, w->weights, item->rows, pages, first, last, w->sums, width);
    for (int64_t r = 0; r < item->rows; r++) {
        int64_t at = r * width + first * PANEL;
        add_sums(values + at, w->sums + at, (last - first) * PANEL, MIDDLE * sums[r].whole, w->weight_scales[r],
                 sums[r].middles);
    }
}

// Adds the weighted values of the keys [low, high) of a tile, which have 4 bits and twins.
static void add_nibbles(const struct model *m, const struct operation *op, const struct item *item,
                        const struct workspace *w, int64_t low, int64_t high, float *values) {
    float largest[ATTENTION_ROWS];
    for (int64_t at = low, size = m->block_size; at < high; at += size) {
        struct readers twinned = readers_of(m, item, at);
        if (twinned.first < twinned.last)
            add_twin(m, op, item, w, at, high - at < size ? high - at : size, w->scores + at - low, values);
    }
    struct value_pages pages = pages_of_values(m, op, item, low, high);
    for (int64_t r = 0; pages.count && r < item->rows; r++)
        largest[r] = largest_in(w->scores + r * KEY_TILE, nibbles_seen(m, op, item, r, low, high));
    for (int64_t g = 0; pages.count && g < groups_of_head(m); g++)
        add_group_of_values(m, op, item, w, low, high, &pages, g, largest, values);
}

#endif
