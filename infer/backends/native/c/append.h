// The appends of keys and values to the cache: normed, rotated, and rounded once to the cache's format. What is stored of
// a token depends on that token alone.
#ifndef TK_APPEND_H
#define TK_APPEND_H

#include "rows.h"

#define LEAST_SCALE 1e-30f  // so that zeros are not divided by zero

// The Hadamard transform of a head, in blocks of m->hadamard dims; a second time turns it back.
static void hadamard(const struct model *m, float *x) {
    if (m->hadamard == 1) return;
    for (int64_t half = 1; half < m->hadamard; half *= 2)
        for (int64_t low = 0; low < m->head_dim; low += 2 * half)
            for (int64_t i = low; i < low + half; i++) {
                float first = x[i], second = x[i + half];
                x[i] = first + second;
                x[i + half] = first - second;
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

// Stores one value of a page of panels; `line` runs over the columns that a product sums, `column` over the others.
INLINE void store_value(int format, char *panel, int64_t line, int64_t column, float value, float inverse) {
    int64_t within = column % PANEL;
    char *pair = panel + line / 2 * pair_bytes(format);
    int64_t at = format == BF16 || format == INT8 ? 2 * within + line % 2 : line % 2 * PANEL + within;
    if (format == FP32) ((float *)pair)[at] = value;
    else if (format == BF16) ((uint16_t *)pair)[at] = float_to_bf16(value);
    else if (format == FP16) ((uint16_t *)pair)[at] = float_to_fp16(value);
    else if (format == FP8) ((uint8_t *)pair)[at] = float_to_fp8(value);
    else ((int8_t *)pair)[at] = (int8_t)fmaxf(-127.0f, fminf(127.0f, nearbyintf(value * inverse)));
}

// Appends a key (panels of 16 tokens, pairs along the head) or a value (panels of 16 dims, pairs along the tokens).
static void append_head(const struct model *m, char *to, int64_t offset, int values, const float *x) {
    int64_t n = m->head_dim, lines = values ? m->block_size : n;
    int64_t panel_bytes = lines / 2 * pair_bytes(m->kv_format);
    float inverse = 0.0f;
    if (m->kv_format == INT8) {
        float largest = 0.0f;
        for (int64_t i = 0; i < n; i++) largest = fabsf(x[i]) > largest || isnan(x[i]) ? fabsf(x[i]) : largest;
        float scale = fmaxf(largest / 127.0f, LEAST_SCALE);
        if (isnan(largest) || isinf(largest)) scale = NAN;  // reaches the logits, which are then reported
        ((float *)(to + m->scale_offset))[offset] = scale;
        inverse = isnan(scale) ? 0.0f : 1.0f / scale;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t line = values ? offset : i, column = values ? i : offset;
        float value = m->kv_format == INT8 && isnan(x[i]) ? 0.0f : x[i];
        store_value(m->kv_format, to + column / PANEL * panel_bytes, line, column, value, inverse);
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
        append_head(m, page(m, op->layer, block, 0, h), offset, 0, scratch);
        memcpy(scratch, key + m->kv_heads * n, (size_t)n * sizeof *scratch);
        hadamard(m, scratch);
        append_head(m, page(m, op->layer, block, 1, h), offset, 1, scratch);
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
