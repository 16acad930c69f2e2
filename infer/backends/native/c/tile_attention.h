// Attention by tiles of AMX, for units that have them: queries and weights are rounded to bf16 once, a page's panels are
// tiles as they lie or, of int8, once they are widened. A score is multiplied by its key's scale, a weight by its value's
// before it is rounded. Sums are those of products (amx.h): a score's over steps of 32 dims, a value's over steps of 32
// keys, added to what the tiles of keys before have given.
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
    for (int64_t at = 0; at < pairs * ahead.bytes; at += LINE) __builtin_prefetch(ahead.from + at, 0, 2);
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

// Widens a step of a panel of int8; with each of its lines it fetches one.
INLINE void widen_step(const char *from, uint16_t *to, struct ahead *ahead) {
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

// Two panels of a page as tiles.
struct tiled {
    const char *panel;
    int64_t panel_bytes;  // from the first to the second
};

// Returns `steps` steps of two panels that lie `lines` pairs apart, from pair `line` of `panel` on; int8 is widened.
INLINE struct tiled tiles_of(int format, const char *panel, int64_t lines, int64_t line, int64_t steps, uint16_t *widened,
                             struct ahead *ahead) {
    const char *from = panel + line * pair_bytes(format);
    if (format == BF16) return (struct tiled){from, lines * pair_bytes(format)};
    for (int64_t i = 0; i < 2 * steps; i++)
        widen_step(from + (i / steps * lines + i % steps * (BLOCK_COLUMNS / 2)) * pair_bytes(format),
                   widened + i * STEP_BYTES / 2, ahead);
    return (struct tiled){(const char *)widened, steps * STEP_BYTES};
}

INLINE void scale_scores(float *scores, int64_t rows, const float *scales) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < BLOCK_COLUMNS; i += VW)
            v_store(scores + r * KEY_TILE + i, v_load(scores + r * KEY_TILE + i) * v_load(scales + i));
}

// The scores of the keys [low, high) of a tile of keys; those of the last page's other keys are of no use.
static void score_by_tiles(const struct model *m, const struct operation *op, const struct item *item,
                           struct workspace *w, int64_t low, int64_t high) {
    uint16_t widened[2 * TILED_DIMS * PANEL] __attribute__((aligned(64)));
    int64_t lines = m->head_dim / 2, steps = m->head_dim / BLOCK_COLUMNS;
    int format = m->key_format, blocks = item->rows > BLOCK_ROWS ? 2 : 1;
    for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
        int64_t inside = at % m->block_size;
        const char *page = page_of(m, op, item, at, 0);
        float *scores = w->scores + at - low;
        struct ahead ahead = fetch_page(m, op, item, at, 1, m->block_size * lines / PANEL);
        if (!inside && format == BF16) fetch_lines(ahead, m->block_size * lines / PANEL);
        ahead.from += inside * lines / PANEL * ahead.bytes;
        struct tiled keys = tiles_of(format, page + inside / PANEL * lines * pair_bytes(format), lines, 0, steps, widened,
                                     &ahead);
        zero_sums();
        for (int64_t k = 0; k < steps; k++)
            add_step(step_of(w->queries, item->rows, steps, 0, k),
                     blocks == 2 ? step_of(w->queries, item->rows, steps, 1, k) : NULL, keys.panel + k * STEP_BYTES,
                     keys.panel_bytes);
        store_sums(scores, blocks == 2 ? scores + BLOCK_ROWS * KEY_TILE : NULL, KEY_TILE);
        if (format == INT8)
            scale_scores(scores, item->rows, (const float *)(page + m->scale_offset[0]) + inside);
    }
}

// Adds the values of the keys [low, high), weighted.
static void add_by_tiles(const struct model *m, const struct operation *op, const struct item *item, struct workspace *w,
                         int64_t low, int64_t high, float *sums) {
    uint16_t widened[2 * BLOCK_COLUMNS * PANEL] __attribute__((aligned(64)));
    int64_t width = m->head_dim, steps = KEY_TILE / BLOCK_COLUMNS, lines = m->block_size / 2;
    int format = m->value_format, blocks = item->rows > BLOCK_ROWS ? 2 : 1;
    for (int64_t dim = 0; dim < width; dim += 2 * PANEL) {
        float *first = sums + dim, *second = blocks == 2 ? first + BLOCK_ROWS * width : NULL;
        load_sums(first, second, width);
        for (int64_t at = low; at < high; at += BLOCK_COLUMNS) {
            int64_t k = (at - low) / BLOCK_COLUMNS, inside = at % m->block_size;
            const char *page = page_of(m, op, item, at, 1);
            struct ahead ahead = fetch_page(m, op, item, at + KEY_TILE, 0, lines * width / PANEL);
            if (!inside && !dim && format == BF16) fetch_lines(ahead, lines * width / PANEL);
            ahead.from += (dim * lines + inside * PANEL) / PANEL * ahead.bytes;
            struct tiled values = tiles_of(format, page + dim / PANEL * lines * pair_bytes(format), lines, inside / 2, 1,
                                           widened, &ahead);
            add_step(step_of(w->weights, item->rows, steps, 0, k),
                     blocks == 2 ? step_of(w->weights, item->rows, steps, 1, k) : NULL, values.panel, values.panel_bytes);
        }
        store_sums(first, second, width);
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
