// Causal attention over the paged cache. The rows of a kv head's queries, tokens x heads of its group, are taken
// up to ATTENTION_ROWS at a time, so that they share the reads of keys and values. A row's keys are summed tile by tile
// from the sequence's start (online softmax: Milakov and Gimelshein, arXiv 1805.02867), split by split, and splits are
// merged in order: its bits depend on its own keys only. A key that a row must not see has the weight zero.
#ifndef TK_ATTENTION_H
#define TK_ATTENTION_H

#include "tile_attention.h"
#include "widened.h"

static void read_queries(const struct model *m, const struct item *item, struct workspace *w) {
    int64_t n = m->head_dim, width = padded_head(m), group = m->heads / m->kv_heads;
    int is_rounded = is_integer(m->key_format) && !is_widened(m, m->key_format);
    if (takes_tiles(m)) begin_attention(item->rows);
    for (int64_t r = 0; r < item->rows; r++) {
        int64_t i = item->first + r;
        const float *query = row(m, QUERY, item->span->first + i / group) + (item->head * group + i % group) * n;
        if (takes_tiles(m)) {
            round_into_steps(query, n, w->queries, item->rows, n / BLOCK_COLUMNS, r);
            continue;
        }
        float *to = is_rounded ? w->scores : w->queries + r * width;
        memcpy(to, query, (size_t)n * sizeof *to);
        memset(to + n, 0, (size_t)(width - n) * sizeof *to);
        if (!is_rounded) continue;
        int16_t *rounded = (int16_t *)w->queries + r * width;
        w->query_scales[r] = scale_of_query(to, width);
        round_row(to, width, w->query_scales[r], rounded);
        if (m->key_format == INT4) order_digits(rounded, width, digits_of(w->queries, width) + r * width);
        for (int64_t g = 0; m->key_format == INT4 && g < groups_of_head(m); g++) {
            int32_t sum = 0;
            for (int64_t d = g * GROUP; d < (g + 1) * GROUP && d < n; d++) sum += rounded[d];
            w->query_sums[r * groups_of_head(m) + g] = (float)sum;
        }
    }
}

static void score_tile_of_keys(const struct model *m, const struct operation *op, const struct item *item,
                               struct workspace *w, int64_t low, int64_t high) {
    int64_t n = m->head_dim, size = m->block_size, widen = is_widened(m, m->key_format);
    for (int64_t at = low; at < high; at += size) {
        int64_t panels = ((high - at < size ? high - at : size) + PANEL - 1) / PANEL;
        if (m->key_format == INT4 && !widen) {
            score_block(m, op, item, w, at, panels, w->scores + at - low);
            continue;
        }
        const char *keys = page_of(m, op, item, at, 0);
        struct product p = {w->queries,
                            padded_head(m),
                            item->rows,
                            keys,
                            n / 2 * pair_bytes(m->key_format),
                            panels,
                            n / 2,
                            fetch_page(m, op, item, at, 1, panels * (n / 2))};
        if (widen) multiply_block(m, op, item, at, 0, &p, w->widened, w->scores + at - low, KEY_TILE);
        else if (m->key_format == INT8)
            score_page(&p, w->query_scales, (const float *)(keys + m->scale_offset[0]), w->scores + at - low);
        else multiply_page(m->key_format, &p, w->scores + at - low, KEY_TILE, 0);
    }
}

// Adds int8 values of a tile, whose weights are rounded.
static void add_tile_of_integers(const struct model *m, const struct operation *op, const struct item *item,
                                 const struct workspace *w, int64_t low, int64_t high, float *values) {
    int64_t width = padded_head(m);
    struct value_pages pages = pages_of_values(m, op, item, low, high);
    sum_values(8, w->weights, item->rows, &pages, 0, width / PANEL, w->sums, width);
    for (int64_t r = 0; r < item->rows; r++)
        add_sums(values + r * width, w->sums + r * width, width, 0, w->weight_scales[r], 0.0f);
}

static void add_tile_of_values(const struct model *m, const struct operation *op, const struct item *item,
                               struct workspace *w, int64_t low, int64_t high, float *values) {
    int64_t width = padded_head(m), size = m->block_size;
    for (int64_t at = low; at < high; at += size) {
        int64_t keys = high - at < size ? high - at : size;
        struct product p = {w->scores + at - low,
                            KEY_TILE,
                            item->rows,
                            page_of(m, op, item, at, 1),
                            size / 2 * pair_bytes(m->value_format),
                            width / PANEL,
                            (keys + 1) / 2,
                            fetch_values(m, op, item, at, keys)};
        if (is_widened(m, m->value_format)) multiply_block(m, op, item, at, 1, &p, w->widened, values, width);
        else multiply_page(m->value_format, &p, values, width, 1);
    }
}

// Turns the scores of a tile's keys [low, high) into weights, rounded for values in int8 as integers.
static void weigh_for_integers(const struct model *m, const struct operation *op, const struct item *item,
                               struct workspace *w, int64_t low, int64_t high, struct softmax *state) {
    int64_t keys = (high - low + PANEL - 1) / PANEL * PANEL, size = m->block_size;
    struct narrow_weights narrow = {.scales = w->value_scales, .step = 32};
    float scores[ATTENTION_ROWS];
    for (int64_t at = low; at < high; at += size)
        memcpy(w->value_scales + at - low, page_of(m, op, item, at, 1) + m->scale_offset[1],
               (size_t)size * sizeof(float));
    raise_rows(m, op, item, w, low, high, state, scores);
    struct seen before = {0, 0};
    float of_values = 0.0f;
    for (int64_t r = 0; r < item->rows; r++) {
        struct seen seen = keys_seen(m, op, item, r, low, high);
        if (seen.from != before.from || seen.to != before.to)
            of_values = largest_in(w->value_scales, seen), before = seen;
        w->weight_scales[r] = seen.from < seen.to ? scale_of_weights(scores[r] - state->largest[r], of_values) : 0.0f;
    }
    for (int64_t r = 0; r < item->rows; r++) {
        narrow.to = w->weights + r * KEY_TILE;
        weigh(TO_INT16, w->scores + r * KEY_TILE, keys, keys_seen(m, op, item, r, low, high), &narrow,
              w->weight_scales[r], state, r);
    }
}

// The same where weights stay floats.
static void weigh_for_floats(const struct model *m, const struct operation *op, const struct item *item,
                             struct workspace *w, int64_t low, int64_t high, struct softmax *state) {
    int64_t keys = (high - low + PANEL - 1) / PANEL * PANEL;
    float scores[ATTENTION_ROWS];
    raise_rows(m, op, item, w, low, high, state, scores);
    for (int64_t r = 0; r < item->rows; r++)
        weigh(WIDE, w->scores + r * KEY_TILE, keys, keys_seen(m, op, item, r, low, high), NULL, 0.0f, state, r);
}

// The keys [low, high) of a tile: scores, softmax, weighted values.
static void attend_tile(const struct model *m, const struct operation *op, const struct item *item, struct workspace *w,
                        int64_t low, int64_t high, struct softmax *state) {
    if (takes_tiles(m)) {
        score_by_tiles(m, op, item, w, low, high);
        weigh_for_tiles(m, op, item, w, low, high, state);
        add_by_tiles(m, op, item, w, low, high, state->values);
        return;
    }
    int widen = is_widened(m, m->value_format);
    score_tile_of_keys(m, op, item, w, low, high);
    if (m->value_format == INT8 && !widen) {
        weigh_for_integers(m, op, item, w, low, high, state);
        add_tile_of_integers(m, op, item, w, low, high, state->values);
        return;
    }
    weigh_for_floats(m, op, item, w, low, high, state);
    if (m->value_format == INT4 && !widen) add_nibbles(m, op, item, w, low, high, state->values);
    else add_tile_of_values(m, op, item, w, low, high, state->values);
}

// The keys of a split that the rows of an item see.
static void attend_split(const struct model *m, const struct operation *op, const struct item *item, int64_t split,
                         struct workspace *w, struct softmax *state) {
    int64_t from = split * KEY_SPLIT, end = from + KEY_SPLIT < item->stop ? from + KEY_SPLIT : item->stop;
    clear_softmax(state, item->rows, padded_head(m));
    for (int64_t low = item->start > from ? item->start : from; low < end; low += KEY_TILE)
        attend_tile(m, op, item, w, low, low + KEY_TILE < end ? low + KEY_TILE : end, state);
}

// Writes an item's rows, rounded if the product that follows takes them so.
static void write_attended(const struct model *m, const struct operation *op, const struct item *item,
                           const struct softmax *all) {
    int64_t n = m->head_dim, width = padded_head(m), group = m->heads / m->kv_heads;
    const struct matrix *rounds = arrives_rounded(m, op + 1) ? &op[1].matrix : NULL;
    for (int64_t r = 0; r < item->rows; r++) {
        int64_t i = item->first + r, t = item->span->first + i / group, column = (item->head * group + i % group) * n;
        float *values = all->values + r * width, *to = rounds ? values : row(m, ATTENDED, t) + column;
        vf total = v_set1(all->total[r]);
        for (int64_t c = 0; c < n; c += VW) v_store_part(to + c, v_load(values + c) / total, n - c);
        hadamard(m, to);
        for (int64_t c = 0; rounds && c < n; c += BLOCK_COLUMNS)
            round_line(to + c, BLOCK_COLUMNS, rounded_at(rounds, m->buffers[ATTENDED], m->step.tokens, t, column + c));
    }
}

static void attend_item(const struct model *m, const struct operation *op, const struct item *item,
                        struct workspace *w) {
    int64_t width = padded_head(m), first = item->start / KEY_SPLIT;
    read_queries(m, item, w);
    clear_softmax(&w->all, item->rows, width);
    for (int64_t split = first; split < first + splits_of(item); split++) {
        attend_split(m, op, item, split, w, &w->part);
        merge_softmax(&w->all, &w->part, item->rows, width);
    }
    write_attended(m, op, item, &w->all);
}

// One split of an item whose splits are shared; the thread that computes the last of them merges all.
static void attend_part(const struct model *m, const struct operation *op, const struct item *item, int64_t part,
                        float *parts, int32_t *done, struct workspace *w) {
    int64_t width = padded_head(m), floats = softmax_floats(item->rows, width), splits = splits_of(item);
    struct softmax own = softmax_at(parts + part * floats, item->rows);
    read_queries(m, item, w);
    attend_split(m, op, item, item->start / KEY_SPLIT + part, w, &own);
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < splits) return;
    *done = 0;
    clear_softmax(&w->all, item->rows, width);
    for (int64_t i = 0; i < splits; i++) {
        struct softmax each = softmax_at(parts + i * floats, item->rows);
        merge_softmax(&w->all, &each, item->rows, width);
    }
    write_attended(m, op, item, &w->all);
}

// The time of an item, in that of a pass over one key with one row: reads cost as much as two rows.
INLINE int64_t cost_of(const struct item *item) { return (item->stop - item->start) * (item->rows + 2); }

static int64_t cost_of_step(const struct model *m, const struct operation *op, int64_t most) {
    int64_t cost = 0, group = m->heads / m->kv_heads;
    for (int32_t s = 0; s < m->step.spans; s++)
        for (int64_t first = 0; first < m->step.span[s].length * group; first += most) {
            struct item item = item_of(m, op, &m->step.span[s], first, most);
            cost += cost_of(&item);
        }
    return cost * m->kv_heads;
}

// A unit of work, an item or one of its splits: units are counted over the rows of all sequences.
struct unit {
    struct item item;
    int32_t span;
    int64_t most;           // the rows of an item, at most
    int64_t first, splits;  // the item's rows; the number of splits that are shared, 1 if they are not
    int64_t begin, part;    // the first unit of these rows, all kv heads together; the split
    float *parts;           // of the rows' shared splits
    int32_t *done;
};

// Moves on to unit `index`; returns 0 if there is none. An item with more than a SHARED_ITEMS-th of a thread's work is
// shared split by split: there are fewer than SHARED_ITEMS times the threads.
static int find_unit(const struct model *m, const struct operation *op, int64_t cost, int64_t index, struct unit *u) {
    int64_t group = m->heads / m->kv_heads;
    for (; u->span < m->step.spans; u->span++, u->first = 0)
        for (; u->first < m->step.span[u->span].length * group; u->first += u->most) {
            u->item = item_of(m, op, &m->step.span[u->span], u->first, u->most);
            int64_t splits = splits_of(&u->item);
            int shared = m->threads > 1 && splits > 1 && cost_of(&u->item) * SHARED_ITEMS * m->threads > cost;
            u->splits = shared ? splits : 1;
            if (index < u->begin + u->splits * m->kv_heads) {
                u->item.head = (index - u->begin) / u->splits;
                u->part = (index - u->begin) % u->splits;
                return 1;
            }
            u->begin += u->splits * m->kv_heads;
            if (shared)
                u->parts += m->kv_heads * splits * softmax_floats(u->item.rows, padded_head(m)), u->done += m->kv_heads;
        }
    return 0;
}

// Threads take the units as they become free.
static void attend(struct model *m, const struct operation *op, int32_t thread) {
    int64_t most = item_rows(m), cost = cost_of_step(m, op, most), index;
    struct workspace w = workspace_of(m, thread);
    struct unit unit = {.most = most, .parts = m->parts, .done = m->parts_done};
    while (index = __atomic_fetch_add(&m->counter, 1, __ATOMIC_RELAXED), find_unit(m, op, cost, index, &unit)) {
        struct unit next = unit;
        struct item item = unit.item;
        if (find_unit(m, op, cost, index + m->threads, &next)) item.next = &next.item;
        if (unit.splits == 1) {
            attend_item(m, op, &item, &w);
            continue;
        }
        int64_t floats = unit.splits * softmax_floats(item.rows, padded_head(m));
        attend_part(m, op, &item, unit.part, unit.parts + item.head * floats, unit.done + item.head, &w);
    }
    if (takes_tiles(m)) end_products();
}

#endif
