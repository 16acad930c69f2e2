// The appends of keys and values to the cache: normed, rotated, and rounded once to the cache's format. What is stored of
// a token depends on that token alone.
#ifndef TK_APPEND_H
#define TK_APPEND_H

#include "rows.h"

#define LEAST_SCALE 1e-30f  // so that zeros are not divided by zero

// A pass of the transform: short halves are constants, so that the compiler makes vectors of them.
INLINE void add_and_subtract(float *x, int64_t n, int64_t half) {
    for (int64_t low = 0; low < n; low += 2 * half)
        for (int64_t i = low; i < low + half; i++) {
            float first = x[i], second = x[i + half];
            x[i] = first + second;
            x[i + half] = first - second;
        }
}

// The Hadamard transform of a head, in blocks of m->hadamard dims; a second time turns it back.
static void hadamard(const struct model *m, float *x) {
    if (m->hadamard == 1) return;
    for (int64_t half = 1; half < m->hadamard; half *= 2) {
        if (half == 1) add_and_subtract(x, m->head_dim, 1);
        else if (half == 2) add_and_subtract(x, m->head_dim, 2);
        else if (half == 4) add_and_subtract(x, m->head_dim, 4);
        else add_and_subtract(x, m->head_dim, half);
    }
    float scale = 1.0f / sqrtf((float)m->hadamard);
    for (int64_t i = 0; i < m->head_dim; i++) x[i] *= scale;
}

// Norms a head if it has a norm, rotates its pairs (d, d + half), scales it and transforms it.
static void rotate_head(const struct model *m, int64_t t, const float *x, float *y, const float *weight, float eps,
                        float scale) {
    int64_t n = m->head_dim, half = n / 2;
    if (weight) norm_row(x, y, n, weight, NULL, 0, eps);
    else memmove(y, x, (size_t)n * sizeof *y);
    const float *cosine = m->cosines + t * half, *sine = m->sines + t * half;
    for (int64_t i = 0; m->frequencies && i < half; i++) {
        float a = y[i], b = y[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
    }
    for (int64_t i = 0; i < n; i++) y[i] *= scale;
    hadamard(m, y);
}

INLINE char *page(const struct model *m, int32_t layer, int64_t block, int values, int64_t head) {
    return m->cache + layer * m->layer_bytes + ((block * 2 + values) * m->kv_heads + head) * m->page_bytes;
}

// PANEL values as the cache stores them.
union stored {
    float wide[PANEL];
    uint16_t half[PANEL];
    uint8_t byte[PANEL];
};

// Rounds PANEL values; those of int8 are multiplied by `inverse`.
INLINE union stored round_values(int format, const float *x, float inverse) {
    union stored to;
    if (format == FP32) memcpy(to.wide, x, sizeof to.wide);
    for (int i = 0; format == BF16 && i < PANEL; i++) to.half[i] = float_to_bf16(x[i]);
    for (int i = 0; format == FP16 && i < PANEL; i++) to.half[i] = float_to_fp16(x[i]);
    for (int i = 0; format == FP8 && i < PANEL; i++) to.byte[i] = float_to_fp8(x[i]);
    for (int i = 0; format == INT8 && i < PANEL; i++) {
        float value = nearbyintf(x[i] * inverse);
        value = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
        to.byte[i] = (uint8_t)(value == value ? (int8_t)value : 0);
    }
    return to;
}

// Stores up to PANEL rounded values of a token, behind each other along a page's panels or, `across`, along their lines.
// `pair` is the first of their pairs of columns; `place` the token's place in a panel, or in a pair.
INLINE void store_values(int format, const char *values, int64_t count, int across, char *pair, int64_t place) {
    int64_t size = format == FP32 ? 4 : format == FP8 || format == INT8 ? 1 : 2, together = format == BF16 || format == INT8;
    if (across && together)
        for (int64_t i = 0; i < count; i++) memcpy(pair + (2 * i + place) * size, values + i * size, (size_t)size);
    else if (across)
        memcpy(pair + place * PANEL * size, values, (size_t)(count * size));
    else if (together)
        for (int64_t i = 0; i < count; i += 2, pair += 2 * PANEL * size)
            memcpy(pair + 2 * place * size, values + i * size, (size_t)(2 * size));
    else
        for (int64_t i = 0; i < count; i++)
            memcpy(pair + (i * PANEL + place) * size, values + i * size, (size_t)size);
}

// The scale of int8 for n floats; NaN if one of them is not finite, which reaches the logits, and is then reported.
static float scale_of_head(const float *x, int64_t n) {
    vf largest = v_set1(0.0f), odd = v_set1(0.0f);
    for (int64_t i = 0; i < n; i += VW) {
        vf value = v_load_part(x + i, n - i);
        largest = v_max(v_abs(value), largest);
        odd = odd + (value - value);
    }
    float scale = v_largest(largest) / 127.0f;
    return (scale > LEAST_SCALE ? scale : LEAST_SCALE) + v_sum(odd);
}

// Appends a key (panels of 16 tokens, pairs along the head) or a value (panels of 16 dims, pairs along the tokens).
INLINE void append_head(const struct model *m, int format, char *to, int64_t offset, int values, const float *x) {
    int64_t n = m->head_dim, lines = values ? m->block_size : n, panel_bytes = lines / 2 * pair_bytes(format);
    float scale = format == INT8 ? scale_of_head(x, n) : 1.0f, inverse = isnan(scale) ? 0.0f : 1.0f / scale;
    if (format == INT8) ((float *)(to + m->scale_offset))[offset] = scale;
    char *pair = to + (values ? offset / 2 * pair_bytes(format) : offset / PANEL * panel_bytes);
    for (int64_t i = 0; i < n; i += PANEL, pair += values ? panel_bytes : PANEL / 2 * pair_bytes(format)) {
        float part[PANEL] = {0};
        int64_t count = n - i < PANEL ? n - i : PANEL;
        memcpy(part, x + i, (size_t)count * sizeof *part);
        union stored rounded = round_values(format, part, inverse);
        store_values(format, (const char *)&rounded, count, values, pair, values ? offset % 2 : offset % PANEL);
    }
}
static void append_to_page(const struct model *m, char *to, int64_t offset, int values, const float *x) {
    switch (m->kv_format) {  // constants, so that the loops are compiled for each
        case FP32: append_head(m, FP32, to, offset, values, x); break;
        case BF16: append_head(m, BF16, to, offset, values, x); break;
        case FP16: append_head(m, FP16, to, offset, values, x); break;
        case FP8: append_head(m, FP8, to, offset, values, x); break;
        case INT8: append_head(m, INT8, to, offset, values, x); break;
    }
}

// Threads share kv heads, each with the query heads of its group, and then tokens.
static void append(const struct model *m, const struct operation *op, int32_t thread) {
    int64_t n = m->head_dim, group = m->heads / m->kv_heads, tokens = m->step.tokens;
    struct share mine = share_of(m, m->kv_heads * tokens, thread);
    float *scratch = scratch_of(m, thread), scale = 1.0f / sqrtf((float)n);
    for (int64_t i = mine.first; i < mine.last; i++) {
        int64_t h = i / tokens, t = i % tokens;
        const float *query = row(m, QKV, t) + h * group * n, *key = row(m, QKV, t) + (m->heads + h) * n;
        for (int64_t g = 0; g < group; g++)
            rotate_head(m, t, query + g * n, row(m, QUERY, t) + (h * group + g) * n, op->weight, op->eps, scale);
        int64_t block = m->step.slots[t] / m->block_size, offset = m->step.slots[t] % m->block_size;
        rotate_head(m, t, key, scratch, op->offset, op->eps, 1.0f);
        append_to_page(m, page(m, op->layer, block, 0, h), offset, 0, scratch);
        memcpy(scratch, key + m->kv_heads * n, (size_t)n * sizeof *scratch);
        hadamard(m, scratch);
        append_to_page(m, page(m, op->layer, block, 1, h), offset, 1, scratch);
    }
}

// Clears the blocks that sequences begin in this step: an earlier owner may have left NaN there.
static void clear_blocks(const struct model *m, int32_t thread) {
    struct share mine = share_of(m, (int64_t)m->step.begun * m->num_layers, thread);
    for (int64_t i = mine.first; i < mine.last; i++)
        memset(page(m, (int32_t)(i % m->num_layers), m->step.begun_blocks[i / m->num_layers], 0, 0), 0,
               (size_t)(2 * m->kv_heads * m->page_bytes));
}

#endif
