// Attention to bf16 keys and values by tiles of AMX, for units that have them: queries and weights are rounded to bf16 once,
// and a page's panels are tiles as they lie. Sums are those of products (amx.h): a score's over steps of 32 dims, a value's
// over steps of 32 keys, added to what the tiles of keys before have given.
#ifndef TK_TILE_ATTENTION_H
#define TK_TILE_ATTENTION_H

#include "items.h"

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

// Prepares this thread's tiles: 0, 1 and 4 for an item's first block of rows, 2, 3 and 5 for its second, 6 and 7 for pages.
static void begin_attention(int64_t rows) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.bytes[t] = LINE, shapes.rows[t] = BLOCK_ROWS;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = (uint8_t)block_rows(rows, 0);
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = (uint8_t)(rows > BLOCK_ROWS ? block_rows(rows, 1) : 1);
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // the intrinsic does not say that it reads all of them
    tile_configure(&shapes);
}

INLINE void fetch_lines(struct ahead ahead, int64_t pairs) {
    for (int64_t at = 0; at < pairs * ahead.bytes; at += LINE) __builtin_prefetch(ahead.from + at);
}

// Adds the products of a step by two panels, `panel_bytes` apart, to the sums of one block of rows or, with `second`, of two.
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

INLINE void load_tiles(const float *sums, int64_t stride, int blocks) {
    tile_load(0, sums, 4 * stride);
    tile_load(1, sums + PANEL, 4 * stride);
    if (blocks == 1) return;
    tile_load(2, sums + BLOCK_ROWS * stride, 4 * stride);
    tile_load(3, sums + BLOCK_ROWS * stride + PANEL, 4 * stride);
}
INLINE void store_tiles(float *sums, int64_t stride, int blocks) {
    tile_store(0, sums, 4 * stride);
    tile_store(1, sums + PANEL, 4 * stride);
    if (blocks == 1) return;
    tile_store(2, sums + BLOCK_ROWS * stride, 4 * stride);
    tile_store(3, sums + BLOCK_ROWS * stride + PANEL, 4 * stride);
}

// The scores of the keys [low, high) of a tile of keys; those of the last page's other keys are of no use.
static void score_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                           struct workspace *w, int64_t low, int64_t high) {
    int64_t steps = m->head_dim / BLOCK_COLUMNS, panel_bytes = steps * STEP_BYTES;
    int blocks = item->rows > BLOCK_ROWS ? 2 : 1;
    for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
        int64_t inside = at % m->block_size;
        const char *keys = page_of(m, op, item, at, 0) + inside / PANEL * panel_bytes;
        if (!inside) fetch_lines(fetch_page(m, op, item, at, 1, 1), 1);
        zero_sums();
        for (int64_t k = 0; k < steps; k++)
            add_step(step_of(w->queries, item->rows, steps, 0, k),
                     blocks == 2 ? step_of(w->queries, item->rows, steps, 1, k) : NULL, keys + k * STEP_BYTES, panel_bytes);
        store_tiles(w->scores + at - low, KEY_TILE, blocks);
    }
}

// Adds the values of the keys [low, high), weighted.
static void add_by_tiles(const struct model *m, const struct operation *op, const struct item *item, struct workspace *w,
                         int64_t low, int64_t high, float *sums) {
    int64_t width = m->head_dim, steps = KEY_TILE / BLOCK_COLUMNS;
    int64_t panel_bytes = m->block_size / BLOCK_COLUMNS * STEP_BYTES;
    int blocks = item->rows > BLOCK_ROWS ? 2 : 1;
    for (int64_t dim = 0; dim < width; dim += 2 * PANEL) {
        load_tiles(sums + dim, width, blocks);
        for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
            int64_t k = (at - low) / BLOCK_COLUMNS, inside = at % m->block_size;
            const char *values = page_of(m, op, item, at, 1) + dim / PANEL * panel_bytes;
            if (!inside && !dim) fetch_lines(fetch_page(m, op, item, at + KEY_TILE, 0, 1), 1);
            add_step(step_of(w->weights, item->rows, steps, 0, k),
                     blocks == 2 ? step_of(w->weights, item->rows, steps, 1, k) : NULL,
                     values + inside / BLOCK_COLUMNS * STEP_BYTES, panel_bytes);
        }
        store_tiles(sums + dim, width, blocks);
    }
}
#else
INLINE void round_into_steps(const float *x, int64_t count, void *rounded, int64_t rows, int64_t steps, int64_t r) {
    (void)x, (void)count, (void)rounded, (void)rows, (void)steps, (void)r;
}
INLINE void begin_attention(int64_t rows) { (void)rows; }
INLINE void score_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                           struct workspace *w, int64_t low, int64_t high) {
    (void)m, (void)op, (void)item, (void)w, (void)low, (void)high;
}
INLINE void add_by_tiles(const struct model *m, const struct operation *op, const struct item *item, struct workspace *w,
                         int64_t low, int64_t high, float *sums) {
    (void)m, (void)op, (void)item, (void)w, (void)low, (void)high, (void)sums;
}
#endif

#endif
