// The work items of attention: rows that share the reads of their keys, and the memory of the thread that computes
// them.
#ifndef TK_ITEMS_H
#define TK_ITEMS_H

#include "rounded.h"
#include "softmax.h"

#define VECTOR_ROWS 24  // of an item, where attention takes vectors: two tiles
#define FEW_ITEMS 4     // of a thread
#define TILED_DIMS 512  // of a head, at most, where it takes tiles of AMX

// The rows of one work item, and the keys that the first or the last of them sees.
struct item {
    const struct span *span;
    int64_t head, first, rows;  // kv head; first row of the span's length x group rows
    int64_t start, stop;
    const struct item *next;  // the one that this thread expects to take next, or NULL: its first keys are fetched
};

// Whether attention takes tiles of AMX: a model in bf16, and pages of the cache that are whole tiles and not wider.
INLINE int takes_tiles(const struct model *m) {
    int wide = m->key_format == FP32 || m->key_format == FP16 || m->value_format == FP32 || m->value_format == FP16;
    return HAS_TILES && m->weight_format == BF16 && !wide && m->head_dim % BLOCK_COLUMNS == 0 &&
           m->head_dim <= TILED_DIMS && m->block_size % BLOCK_COLUMNS == 0;
}

// The rows of an item, at most: two blocks of tiles, or whole tiles of vectors; half of them in a step with so few
// items that threads would wait for each other.
static int64_t item_rows(const struct model *m) {
    int64_t most = takes_tiles(m) ? ATTENTION_ROWS : VECTOR_ROWS, group = m->heads / m->kv_heads, items = 0;
    for (int32_t s = 0; s < m->step.spans && items < FEW_ITEMS * m->threads; s++)
        items += (m->step.span[s].length * group + most - 1) / most * m->kv_heads;
    return m->threads > 1 && items < FEW_ITEMS * m->threads ? most / 2 : most;
}

// The item of rows from `first` on, at most `most`.
INLINE struct item item_of(const struct model *m, const struct operation *op, const struct span *span, int64_t first,
                           int64_t most) {
    int64_t group = m->heads / m->kv_heads, left = span->length * group - first;
    int64_t rows = left < most ? left : most, least = span->start + first / group;
    return (struct item){.span = span,
                         .first = first,
                         .rows = rows,
                         .start =
                             op->window && least >= op->window ? (least - op->window + 1) / KEY_TILE * KEY_TILE : 0,
                         .stop = span->start + (first + rows - 1) / group + 1};
}

INLINE int64_t splits_of(const struct item *item) { return (item->stop - 1) / KEY_SPLIT - item->start / KEY_SPLIT + 1; }

// A thread's memory.
struct workspace {
    float *queries;                       // [ATTENTION_ROWS][padded head]; int16 for integers, for int4 twice
    float *scores;                        // [ATTENTION_ROWS][KEY_TILE]
    int16_t *weights;                     // [ATTENTION_ROWS][KEY_TILE], for integers, as are those that follow
    int32_t *sums;                        // [ATTENTION_ROWS][padded head]
    float *value_scales;                  // [KEY_TILE]
    float *query_scales, *weight_scales;  // [ATTENTION_ROWS]
    float *query_sums;                    // [ATTENTION_ROWS][groups], for int4
    float *widened;                       // [block_size][padded head], for integers in models in fp32
    struct softmax all, part;
};
static struct workspace workspace_of(const struct model *m, int32_t thread) {
    int64_t width = padded_head(m);
    float *at = m->scratch + thread * m->scratch_floats;
    struct workspace w;
    w.queries = at, at += ATTENTION_ROWS * width;
    w.scores = at, at += ATTENTION_ROWS * KEY_TILE;
    w.weights = (int16_t *)at, at += ATTENTION_ROWS * KEY_TILE / 2;
    w.sums = (int32_t *)at, at += ATTENTION_ROWS * width;
    w.value_scales = at, at += KEY_TILE;
    w.query_scales = at, at += ATTENTION_ROWS;
    w.weight_scales = at, at += ATTENTION_ROWS;
    w.query_sums = at, at += (ATTENTION_ROWS * groups_of_head(m) + PANEL - 1) / PANEL * PANEL;
    w.all = softmax_at(at, ATTENTION_ROWS), at += softmax_floats(ATTENTION_ROWS, width);
    w.part = softmax_at(at, ATTENTION_ROWS), at += softmax_floats(ATTENTION_ROWS, width);
    w.widened = at;
    return w;
}

INLINE int64_t position_of(const struct model *m, const struct item *item, int64_t r) {
    return item->span->start + (item->first + r) / (m->heads / m->kv_heads);
}

// The keys of a tile [low, high) that row r sees.
INLINE struct seen keys_seen(const struct model *m, const struct operation *op, const struct item *item, int64_t r,
                             int64_t low, int64_t high) {
    int64_t position = position_of(m, item, r);
    int64_t end = position + 1 < high ? position + 1 : high;
    int64_t begin = op->window && position - op->window + 1 > low ? position - op->window + 1 : low;
    return begin < end ? (struct seen){begin - low, end - low} : (struct seen){0, 0};
}

// Raises the largest scores of an item's rows to those of the keys [low, high), which it writes to `scores`. That is a
// pass of its own, so that the waits of one row overlap with those of others.
static void raise_rows(const struct model *m, const struct operation *op, const struct item *item,
                       const struct workspace *w, int64_t low, int64_t high, struct softmax *state, float *scores) {
    for (int64_t r = 0; r < item->rows; r++)
        scores[r] = largest_score(w->scores + r * KEY_TILE, keys_seen(m, op, item, r, low, high));
    for (int64_t r = 0; r < item->rows; r++) raise_largest(state, r, padded_head(m), scores[r]);
}

// The rows of an item that read a block's twin: [first, last). Rows from `last` on read its 4 bits, rows before `first`
// see nothing of it.
struct readers {
    int64_t first, last;
};
INLINE int64_t first_row_at(const struct model *m, const struct item *item, int64_t position) {
    int64_t r = (position - item->span->start) * (m->heads / m->kv_heads) - item->first;
    return r < 0 ? 0 : r < item->rows ? r : item->rows;
}
INLINE struct readers readers_of(const struct model *m, const struct item *item, int64_t at) {
    if (at < m->block_size) return (struct readers){0, item->rows};
    return (struct readers){first_row_at(m, item, at), first_row_at(m, item, at + m->block_size)};
}

// A tile's pages, keys or values, in order; while one is multiplied, the other kind's page that is needed a pass later
// is fetched, or its twin, if every row reads that.
INLINE const char *page_of(const struct model *m, const struct operation *op, const struct item *item, int64_t key,
                           int values) {
    return page(m, op->layer, m->step.tables[item->span->table + key / m->block_size], values, item->head);
}
INLINE const char *twin_of(const struct model *m, const struct operation *op, const struct item *item, int64_t key,
                           int values) {
    return twin_page(m, op->layer, m->step.tables[item->span->table + key / m->block_size], values, item->head);
}
INLINE struct ahead no_fetch(const char *page) { return (struct ahead){page, 0}; }
INLINE struct ahead fetch_page(const struct model *m, const struct operation *op, const struct item *item, int64_t key,
                               int values, int64_t pairs) {
    if (key >= item->stop && item->next) key = item->next->start + key % KEY_TILE, item = item->next;
    if (key >= item->stop) return no_fetch((const char *)m->step.tables);
    int format = values ? m->value_format : m->key_format;
    if (format == INT4 && readers_of(m, item, key / m->block_size * m->block_size).last == item->rows)
        return (struct ahead){twin_of(m, op, item, key, values), (m->twin_page_bytes + pairs - 1) / pairs};
    return (struct ahead){page_of(m, op, item, key, values), (m->page_bytes[values] + pairs - 1) / pairs};
}

// Fetches keys of the next tile while a block of values, of which `keys` are there, is multiplied.
INLINE struct ahead fetch_values(const struct model *m, const struct operation *op, const struct item *item, int64_t at,
                                 int64_t keys) {
    return fetch_page(m, op, item, at + KEY_TILE, 0, padded_head(m) / PANEL * ((keys + 1) / 2));
}

// The pages of the values of a tile's keys [low, high), but for those whose twins all rows read.
static struct value_pages pages_of_values(const struct model *m, const struct operation *op, const struct item *item,
                                          int64_t low, int64_t high) {
    struct value_pages pages = {.panel_bytes = m->block_size / 2 * pair_bytes(m->value_format)};
    for (int64_t at = low, size = m->block_size; at < high; at += size) {
        int64_t keys = high - at < size ? high - at : size;
        if (m->value_format == INT4 && readers_of(m, item, at).last == item->rows) continue;
        pages.at[pages.count++] = (struct value_page){page_of(m, op, item, at, 1), fetch_values(m, op, item, at, keys),
                                                      at - low, (keys + 1) / 2};
    }
    return pages;
}

#endif
