// Causal attention over the paged cache. The rows of a kv head's queries, tokens x heads of its group, are taken
// ATTENTION_ROWS at a time, so that they share the reads of keys and values. A row's keys are summed tile by tile from
// the sequence's start (online softmax: Milakov and Gimelshein, arXiv 1805.02867), split by split, and splits are
// merged in order: its bits depend on its own keys only. A key that a row must not see has the weight zero.
#ifndef TK_ATTENTION_H
#define TK_ATTENTION_H

#include "rows.h"

// The scratch of a thread: queries and two states of a softmax.
struct softmax {
    float largest[ATTENTION_ROWS], total[ATTENTION_ROWS];
    float *values;  // [ATTENTION_ROWS][padded head]
};

// A head's values are panels of dims: the padding of the last is zero.
INLINE int64_t padded_head(const struct model *m) { return (m->head_dim + PANEL - 1) / PANEL * PANEL; }

// The rows of one work item.
struct query_rows {
    const struct span *span;
    int64_t head, first, count;  // kv head; first row of the span's length x group rows
};

// One tile of keys [low, high) of a split: scores, softmax, weighted values.
static void attend_tile(const struct model *m, const struct operation *op, const struct query_rows *rows,
                        const float *queries, float *scores, int64_t low, int64_t high, struct softmax *state) {
    int64_t n = m->head_dim, width = padded_head(m), size = m->block_size, group = m->heads / m->kv_heads;
    int64_t key_panel = n / 2 * pair_bytes(m->kv_format), value_panel = size / 2 * pair_bytes(m->kv_format);
    const int32_t *table = m->step.tables + rows->span->table;
    for (int64_t at = low; at < high; at += size) {
        const char *stored = page(m, op->layer, table[at / size], 0, rows->head);
        int64_t panels = ((high - at < size ? high - at : size) + PANEL - 1) / PANEL;
        multiply_panels(m->kv_format, queries, width, rows->count, stored, key_panel, panels, n / 2, scores + (at - low),
                        KEY_TILE, NULL, 0);
        const float *scales = (const float *)(stored + m->scale_offset);
        for (int64_t r = 0; m->kv_format == INT8 && r < rows->count; r++)
            for (int64_t i = 0; i < panels * PANEL; i++) scores[r * KEY_TILE + at - low + i] *= scales[i];
    }
    int64_t keys = (high - low + PANEL - 1) / PANEL * PANEL;
    for (int64_t r = 0; r < rows->count; r++) {
        float *s = scores + r * KEY_TILE;
        int64_t position = rows->span->start + (rows->first + r) / group;
        int64_t begin = op->window && position - op->window + 1 > low ? position - op->window + 1 : low;
        int64_t end = position + 1 < high ? position + 1 : high;
        int64_t from = begin - low < keys ? begin - low : keys, to = end > begin ? end - low : from;
        memset(s, 0, (size_t)from * sizeof *s);
        memset(s + to, 0, (size_t)(keys - to) * sizeof *s);
        if (from >= to) continue;
        float largest = state->largest[r];
        for (int64_t i = from; i < to; i++) largest = s[i] > largest ? s[i] : largest;
        float before[VW] = {state->largest[r] - largest}, keep[VW];
        v_store(keep, v_exp(v_load(before)));
        vf middle = v_set1(largest), sum = v_set1(0.0f);
        for (int64_t i = from / VW * VW; i < to; i += VW) {
            vf weight = v_exp(v_load(s + i) - middle);
            if (i < from || i + VW > to) {  // lanes that the row must not see
                float lanes[VW];
                v_store(lanes, weight);
                for (int64_t j = 0; j < VW; j++)
                    if (i + j < from || i + j >= to) lanes[j] = 0.0f;
                weight = v_load(lanes);
            }
            v_store(s + i, weight);
            sum = sum + weight;
        }
        state->total[r] = state->total[r] * keep[0] + v_sum(sum);
        state->largest[r] = largest;
        float *values = state->values + r * width;
        for (int64_t i = 0; i < width; i += VW) v_store(values + i, v_load(values + i) * v_set1(keep[0]));
    }
    for (int64_t at = low; at < high; at += size) {
        const char *values = page(m, op->layer, table[at / size], 1, rows->head);
        int64_t count = (high - at < size ? high - at : size);
        const float *scales = (const float *)(values + m->scale_offset);
        for (int64_t r = 0; m->kv_format == INT8 && r < rows->count; r++)
            for (int64_t i = 0; i < count; i++) scores[r * KEY_TILE + at - low + i] *= scales[i];
        multiply_panels(m->kv_format, scores + (at - low), KEY_TILE, rows->count, values, value_panel, width / PANEL,
                        (count + 1) / 2, state->values, width, NULL, 1);
    }
}

static void clear_softmax(struct softmax *state, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) state->largest[r] = -3e38f, state->total[r] = 0.0f;
    memset(state->values, 0, (size_t)(rows * width) * sizeof *state->values);
}

// Adds a split's softmax to that of the splits before it.
static void merge_softmax(struct softmax *all, const struct softmax *part, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        float largest = part->largest[r] > all->largest[r] ? part->largest[r] : all->largest[r];
        float exponents[VW] = {all->largest[r] - largest, part->largest[r] - largest}, factors[VW];
        v_store(factors, v_exp(v_load(exponents)));
        float keep = part->total[r] == 0.0f ? 1.0f : factors[0], add = part->total[r] == 0.0f ? 0.0f : factors[1];
        if (all->total[r] == 0.0f) keep = 0.0f, add = part->total[r] == 0.0f ? 0.0f : 1.0f;
        all->total[r] = all->total[r] * keep + part->total[r] * add;
        all->largest[r] = largest;
        for (int64_t i = r * width; i < (r + 1) * width; i += VW)
            v_store(all->values + i, v_load(all->values + i) * v_set1(keep) + v_load(part->values + i) * v_set1(add));
    }
}

static void attend_rows(const struct model *m, const struct operation *op, const struct query_rows *rows,
                        float *scratch) {
    int64_t n = m->head_dim, width = padded_head(m), group = m->heads / m->kv_heads;
    float *queries = scratch, *scores = queries + ATTENTION_ROWS * width;
    struct softmax all = {.values = scores + ATTENTION_ROWS * KEY_TILE};
    struct softmax part = {.values = all.values + ATTENTION_ROWS * width};
    for (int64_t r = 0; r < rows->count; r++) {
        int64_t i = rows->first + r;
        memcpy(queries + r * width, row(m, QUERY, rows->span->first + i / group) + (rows->head * group + i % group) * n,
               (size_t)n * sizeof *queries);
    }
    int64_t least = rows->span->start + rows->first / group;
    int64_t stop = rows->span->start + (rows->first + rows->count - 1) / group + 1;
    int64_t start = op->window && least - op->window + 1 > 0 ? (least - op->window + 1) / KEY_TILE * KEY_TILE : 0;
    clear_softmax(&all, rows->count, width);
    for (int64_t split = start / KEY_SPLIT * KEY_SPLIT; split < stop; split += KEY_SPLIT) {
        clear_softmax(&part, rows->count, width);
        int64_t end = split + KEY_SPLIT < stop ? split + KEY_SPLIT : stop;
        for (int64_t low = start > split ? start : split; low < end; low += KEY_TILE)
            attend_tile(m, op, rows, queries, scores, low, low + KEY_TILE < end ? low + KEY_TILE : end, &part);
        merge_softmax(&all, &part, rows->count, width);
    }
    for (int64_t r = 0; r < rows->count; r++) {
        int64_t i = rows->first + r;
        float *to = row(m, ATTENDED, rows->span->first + i / group) + (rows->head * group + i % group) * n;
        vf total = v_set1(all.total[r]);
        for (int64_t c = 0; c < n; c += VW) v_store_part(to + c, v_load(all.values + r * width + c) / total, n - c);
    }
}

// Threads take the items, rows of one kv head of one sequence, as they become free.
static void attend(struct model *m, const struct operation *op, int32_t thread) {
    int64_t group = m->heads / m->kv_heads, item = 0;
    int64_t mine = __atomic_fetch_add(&m->counter, 1, __ATOMIC_RELAXED);
    float *scratch = m->scratch + thread * m->scratch_floats;
    for (int32_t s = 0; s < m->step.spans; s++) {
        const struct span *span = &m->step.span[s];
        int64_t rows = span->length * group, tiles = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
        for (; mine < item + tiles * m->kv_heads; mine = __atomic_fetch_add(&m->counter, 1, __ATOMIC_RELAXED)) {
            int64_t first = (mine - item) / m->kv_heads * ATTENTION_ROWS;
            struct query_rows part = {span, (mine - item) % m->kv_heads, first,
                                      rows - first < ATTENTION_ROWS ? rows - first : ATTENTION_ROWS};
            attend_rows(m, op, &part, scratch);
        }
        item += tiles * m->kv_heads;
    }
}

#endif
