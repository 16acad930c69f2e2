// Attention by tiles of AMX, for units that have them: queries and weights are rounded to bf16 once, pages are tiles
// (tile_pages.h). A score is multiplied by its key's scale in int8, a weight by its value's before it is rounded. Sums
// are those of products (amx.h): a score's over steps of 32 dims, a value's over steps of 32 keys, added to what the
// tiles of keys before have given. Of rows that read a twin and rows that do not, each has weights of zero in the
// other's product.
#ifndef TK_TILE_ATTENTION_H
#define TK_TILE_ATTENTION_H

#include "tile_pages.h"

#if defined(TK_AMX)
// The rows of block 0 or 1 of an item.
INLINE int64_t block_rows(int64_t rows, int block) {
    int64_t left = rows - block * BLOCK_ROWS;
    return left < 0 ? 0 : left < BLOCK_ROWS ? left : BLOCK_ROWS;
}

// Where a block's step of 32 values per row begins, of rows of `steps` steps.
INLINE uint16_t *step_of(void *rounded, int64_t rows, int64_t steps, int block, int64_t step) {
    return (uint16_t *)rounded + (block * BLOCK_ROWS * steps + step * block_rows(rows, block)) * BLOCK_COLUMNS;
}

// Rounds `count` values of row r; its other values, up to a whole step, become zero.
INLINE void round_into_steps(const float *x, int64_t count, void *rounded, int64_t rows, int64_t steps, int64_t r) {
    int block = (int)(r / BLOCK_ROWS);
    for (int64_t k = 0; k * BLOCK_COLUMNS < count; k++) {
        int64_t left = count - k * BLOCK_COLUMNS;
        round_line(x + k * BLOCK_COLUMNS, left < BLOCK_COLUMNS ? left : BLOCK_COLUMNS,
                   step_of(rounded, rows, steps, block, k) + r % BLOCK_ROWS * BLOCK_COLUMNS);
    }
}

// Prepares this thread's tiles: 0, 1 and 4 for an item's first block of rows, 2, 3 and 5 for its second, 6 and 7 for
// pages.
static void begin_attention(int64_t rows) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.bytes[t] = LINE, shapes.rows[t] = BLOCK_ROWS;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = (uint8_t)block_rows(rows, 0);
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = (uint8_t)(rows > BLOCK_ROWS ? block_rows(rows, 1) : 1);
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // the intrinsic does not say that it reads all of them
    tile_configure(&shapes);
}

INLINE void fetch_lines(struct ahead ahead, int64_t pairs) {
    for (int64_t at = 0; at < pairs * ahead.bytes; at += LINE) __builtin_prefetch(ahead.from + at, 0, 2);
}

// Adds the products of a step by two panels, `panel_bytes` apart, to the sums of one block of rows or, with `second`,
// of two.
INLINE void add_step(const uint16_t *first, const uint16_t *second, const char *panel, int64_t panel_bytes) {
    tile_load(4, first, LINE);
    tile_load(6, panel, LINE);
    tile_multiply(0, 4, 6);
    tile_load(7, panel + panel_bytes, LINE);
    tile_multiply(1, 4, 7);
    if (!second) return;
    tile_load(5, second, LINE);
    tile_multiply(2, 5, 6);
    tile_multiply(3, 5, 7);
}

// The products of an item's queries with 32 keys; a row's scores are `stride` floats from the row's before.
INLINE void score_keys(const struct model *m, const struct item *item, const struct workspace *w, struct source source,
                       int64_t token, struct ahead *ahead, float *scores, int64_t stride) {
    uint16_t widened[2 * TILED_DIMS * PANEL] __attribute__((aligned(64)));
    int64_t steps = m->head_dim / BLOCK_COLUMNS, two = item->rows > BLOCK_ROWS;
    struct tiled keys = tiles_of_keys(m, source, token, widened, ahead);
    zero_sums();
    for (int64_t k = 0; k < steps; k++)
        add_step(step_of(w->queries, item->rows, steps, 0, k),
                 two ? step_of(w->queries, item->rows, steps, 1, k) : NULL, keys.panel + k * STEP_BYTES,
                 keys.panel_bytes);
    store_sums(scores, two ? scores + BLOCK_ROWS * stride : NULL, stride);
    const float *scales = (const float *)source.scales + token;
    for (int64_t r = 0; source.format == INT8 && r < item->rows; r++)
        for (int64_t i = 0; i < BLOCK_COLUMNS; i += VW)
            v_store(scores + r * stride + i, v_load(scores + r * stride + i) * v_load(scales + i));
}

// The rows of an item that read a block's twin.
INLINE struct readers twin_readers(const struct model *m, const struct item *item, int64_t at, int format) {
    return format == INT4 ? readers_of(m, item, at / m->block_size * m->block_size) : (struct readers){0, 0};
}

// The scores of the keys [low, high) of a tile of keys; those of the last page's other keys are of no use.
static void score_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                           struct workspace *w, int64_t low, int64_t high) {
    float near[ATTENTION_ROWS * BLOCK_COLUMNS] __attribute__((aligned(64)));
    int64_t lines = m->block_size * (m->head_dim / 2) / PANEL;
    for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
        int64_t inside = at % m->block_size;
        float *scores = w->scores + at - low;
        struct ahead ahead = fetch_page(m, op, item, at, 1, lines);
        struct readers twinned = twin_readers(m, item, at, m->key_format);
        if (!inside && m->key_format == BF16) fetch_lines(ahead, lines);
        ahead.from += inside * (m->head_dim / 2) / PANEL * ahead.bytes;
        if (twinned.last < item->rows) {
            score_keys(m, item, w, page_source(m, op, item, at, 0), inside, &ahead, scores, KEY_TILE);
            ahead.bytes = 0;
        }
        if (twinned.first == twinned.last) continue;
        int alone = twinned.last - twinned.first == item->rows;
        score_keys(m, item, w, twin_source(m, op, item, at, 0), inside, &ahead, alone ? scores : near,
                   alone ? KEY_TILE : BLOCK_COLUMNS);
        for (int64_t r = twinned.first; !alone && r < twinned.last; r++)
            memcpy(scores + r * KEY_TILE, near + r * BLOCK_COLUMNS, BLOCK_COLUMNS * sizeof *near);
    }
}

// Turns the scores of the keys [low, high) of a tile into weights, rounded for the pages of values; those of keys whose
// twin a row reads are zero there. Weights of int8 are multiplied by its scales first.
static void weigh_for_tiles(const struct model *m, const struct operation *op, const struct item *item,
                            struct workspace *w, int64_t low, int64_t high, struct softmax *state) {
    int64_t keys = (high - low + PANEL - 1) / PANEL * PANEL, size = m->block_size;
    float scores[ATTENTION_ROWS];
    struct narrow_weights narrow = {.scales = m->value_format == INT8 ? w->value_scales : NULL};
    for (int64_t at = low; narrow.scales && at < high; at += size)
        memcpy(w->value_scales + at - low, page_of(m, op, item, at, 1) + m->scale_offset[1],
               (size_t)size * sizeof(float));
    raise_rows(m, op, item, w, low, high, state, scores);
    for (int64_t r = 0; r < item->rows; r++) {
        int block = (int)(r / BLOCK_ROWS);
        uint16_t *to = step_of(w->weights, item->rows, KEY_TILE / BLOCK_COLUMNS, block, 0);
        narrow.to = to + r % BLOCK_ROWS * BLOCK_COLUMNS;
        narrow.step = block_rows(item->rows, block) * BLOCK_COLUMNS;
        weigh(TO_BF16, w->scores + r * KEY_TILE, keys, keys_seen(m, op, item, r, low, high), &narrow, 0.0f, state, r);
        for (int64_t at = 0; at < keys; at += BLOCK_COLUMNS) {
            uint16_t *line = (uint16_t *)narrow.to + at / BLOCK_COLUMNS * narrow.step;
            if (r < twin_readers(m, item, low + at, m->value_format).last) memset(line, 0, LINE);
            else if (keys - at < BLOCK_COLUMNS) memset(line + PANEL, 0, LINE / 2);
        }
    }
}

// Adds the values of 32 keys, of which `keys` are there, that some rows read from twins.
static void add_twins(const struct model *m, const struct item *item, struct readers twinned, struct source twin,
                      int64_t token, int64_t dim, struct ahead *ahead, const float *scores, int64_t keys) {
    uint16_t weights[ATTENTION_ROWS * BLOCK_COLUMNS] __attribute__((aligned(64)));
    uint16_t widened[2 * BLOCK_COLUMNS * PANEL] __attribute__((aligned(64)));
    struct tiled values = tiles_of_values(m, twin, token, dim, widened, ahead);
    memset(weights, 0, (size_t)item->rows * BLOCK_COLUMNS * sizeof *weights);
    const float *scales = (const float *)twin.scales + token;
    for (int64_t r = twinned.first; r < twinned.last; r++) {
        float scaled[BLOCK_COLUMNS];
        for (int64_t i = 0; i < keys; i += VW)
            v_store(scaled + i, v_load(scores + r * KEY_TILE + i) * v_load(scales + i));
        round_line(scaled, keys, weights + r * BLOCK_COLUMNS);
    }
    add_step(weights, item->rows > BLOCK_ROWS ? weights + BLOCK_ROWS * BLOCK_COLUMNS : NULL, values.panel,
             values.panel_bytes);
}

// Adds the values of the keys [low, high), weighted.
static void add_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                         struct workspace *w, int64_t low, int64_t high, float *sums) {
    uint16_t widened[2 * BLOCK_COLUMNS * PANEL] __attribute__((aligned(64)));
    int64_t width = m->head_dim, steps = KEY_TILE / BLOCK_COLUMNS, lines = m->block_size / 2 * (width / PANEL);
    int64_t two = item->rows > BLOCK_ROWS, keys = (high - low + PANEL - 1) / PANEL * PANEL;
    for (int64_t dim = 0; dim < width; dim += 2 * PANEL) {
        float *first = sums + dim, *second = two ? first + BLOCK_ROWS * width : NULL;
        load_sums(first, second, width);
        for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
            int64_t k = (at - low) / BLOCK_COLUMNS, inside = at % m->block_size, left = low + keys - at;
            struct ahead ahead = fetch_page(m, op, item, at + KEY_TILE, 0, lines);
            struct readers twinned = twin_readers(m, item, at, m->value_format);
            if (!inside && !dim && m->value_format == BF16) fetch_lines(ahead, lines);
            ahead.from += (dim * (m->block_size / 2) + inside * PANEL) / PANEL * ahead.bytes;
            struct ahead with_twin = twinned.last == item->rows ? ahead : no_fetch(ahead.from);
            if (twinned.first < twinned.last)
                add_twins(m, item, twinned, twin_source(m, op, item, at, 1), inside, dim, &with_twin,
                          w->scores + at - low, left < BLOCK_COLUMNS ? left : BLOCK_COLUMNS);
            if (twinned.last == item->rows) continue;
            struct tiled values = tiles_of_values(m, page_source(m, op, item, at, 1), inside, dim, widened, &ahead);
            add_step(step_of(w->weights, item->rows, steps, 0, k),
                     two ? step_of(w->weights, item->rows, steps, 1, k) : NULL, values.panel, values.panel_bytes);
        }
        store_sums(first, second, width);
    }
}
#else
INLINE void round_into_steps(const float *x, int64_t count, void *rounded, int64_t rows, int64_t steps, int64_t r) {
    (void)x, (void)count, (void)rounded, (void)rows, (void)steps, (void)r;
}
INLINE void weigh_for_tiles(const struct model *m, const struct operation *op, const struct item *item,
                            struct workspace *w, int64_t low, int64_t high, struct softmax *state) {
    (void)m, (void)op, (void)item, (void)w, (void)low, (void)high, (void)state;
}
INLINE void begin_attention(int64_t rows) { (void)rows; }
INLINE void score_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                           struct workspace *w, int64_t low, int64_t high) {
    (void)m, (void)op, (void)item, (void)w, (void)low, (void)high;
}
INLINE void add_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                         struct workspace *w, int64_t low, int64_t high, float *sums) {
    (void)m, (void)op, (void)item, (void)w, (void)low, (void)high, (void)sums;
}
#endif

#endif
