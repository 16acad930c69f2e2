// The appends of keys and values to the cache: normed, rotated, and rounded once to the cache's format. What is stored
// of a token depends on that token alone.
#ifndef TK_APPEND_H
#define TK_APPEND_H

#include "rows.h"

#define LEAST_SCALE 1e-30f        // so that zeros are not divided by zero
#define LEAST_FP16 5.9604645e-8f  // the least and the largest scale of int4
#define LARGEST_FP16 65504.0f

// A pass of the transform within vectors: of two lanes the lower becomes their sum, the upper their difference.
INLINE vf add_and_subtract_lanes(vf v, const int distance) {
    vf sign;
    for (int i = 0; i < VW; i++) sign[i] = i & distance ? -1.0f : 1.0f;
#if defined(TK_AVX512) || defined(TK_AVX2)
    return v_fma(v, sign, v_swap(v, distance));  // the product is exact: one instruction less
#else
    return v_swap(v, distance) + v * sign;
#endif
}

// A pass of the transform over elements that are `half` apart.
INLINE void add_and_subtract(float *x, int64_t n, int64_t half) {
    for (int64_t low = 0; low < n; low += 2 * half)
        for (int64_t i = low; i < low + half; i++) {
            float first = x[i], second = x[i + half];
            x[i] = first + second;
            x[i + half] = first - second;
        }
}
INLINE void add_and_subtract_vectors(float *x, int64_t n, int64_t half) {
    for (int64_t low = 0; low < n; low += 2 * half)
        for (int64_t i = low; i < low + half; i += VW) {
            vf first = v_load(x + i), second = v_load(x + i + half);
            v_store(x + i, first + second);
            v_store(x + i + half, first - second);
        }
}

// The passes within blocks of `count` vectors, a constant, which stay in registers; results are multiplied by `scale`.
INLINE void add_and_subtract_within(const int count, float *x, int64_t n, float scale) {
    for (float *end = x + n; x < end; x += count * VW) {
        vf v[8];
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) {
            v[i] = add_and_subtract_lanes(add_and_subtract_lanes(add_and_subtract_lanes(v_load(x + i * VW), 1), 2), 4);
            if (VW == 16) v[i] = add_and_subtract_lanes(v[i], 8);
        }
#pragma GCC unroll 3
        for (int half = 1; half < count; half *= 2)
#pragma GCC unroll 8
            for (int i = 0; i < count; i++)
                if (!(i & half)) {
                    vf first = v[i], second = v[i + half];
                    v[i] = first + second;
                    v[i + half] = first - second;
                }
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) v_store(x + i * VW, v[i] * v_set1(scale));
    }
}

// The Hadamard transform of a head, in blocks of m->hadamard dims; a second time turns it back.
static void hadamard(const struct model *m, float *x) {
    int64_t n = m->head_dim, half = 1, vectors = m->hadamard / VW;
    float scale = 1.0f / sqrtf((float)m->hadamard);
    switch (vectors) {
        case 0: break;
        case 1: add_and_subtract_within(1, x, n, scale); return;
        case 2: add_and_subtract_within(2, x, n, scale); return;
        case 4: add_and_subtract_within(4, x, n, scale); return;
        case 8: add_and_subtract_within(8, x, n, scale); return;
        default: add_and_subtract_within(8, x, n, 1.0f), half = 8 * VW;
    }
    if (m->hadamard == 1) return;
    for (; half < VW && half < m->hadamard; half *= 2) add_and_subtract(x, n, half);
    for (; half < m->hadamard; half *= 2) add_and_subtract_vectors(x, n, half);
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

// Norms a head if it has a norm, and rotates its pairs (d, d + half); dims behind them stay.
static void rotate_head(const struct model *m, int64_t t, const float *x, float *y, const float *weight, float eps) {
    int64_t n = m->head_dim, half = m->rotated / 2;
    if (weight) norm_row(x, y, n, weight, NULL, 0, eps), x = y;
    if (x != y && (!m->frequencies || 2 * half < n)) memcpy(y, x, (size_t)n * sizeof *y);
    const float *cosine = m->cosines + t * half, *sine = m->sines + t * half;
    for (int64_t i = 0; m->frequencies && i < half; i++) {
        float a = x[i], b = x[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
    }
}

// Multiplies a query by the scale of scores, and by the factors of its kv head's keys if there are some.
INLINE void scale_query(float *x, int64_t n, const float *factors) {
    float scale = 1.0f / sqrtf((float)n);
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
    for (int64_t i = 0; factors && i < n; i++) x[i] *= factors[i];
}

INLINE int is_integer(int format) { return format == INT8 || format == INT4; }

// Blocks hold their layers one after the other: so a few blocks are few pages of the system's memory.
INLINE char *page(const struct model *m, int32_t layer, int64_t block, int values, int64_t head) {
    char *heads = m->cache + (block * m->num_layers + layer) * m->layer_bytes;
    return heads + (values ? m->kv_heads * m->page_bytes[0] : 0) + head * m->page_bytes[values];
}

// The twin of a page in 4 bits: only such pages have one.
INLINE char *twin_page(const struct model *m, int32_t layer, int64_t block, int values, int64_t head) {
    int64_t index =
        (values && m->key_format == INT4 ? m->kv_heads : 0) + head;  // behind keys' twins, if there are some
    return m->twins + (m->twin_of[block] * m->num_layers + layer) * m->twin_layer_bytes + index * m->twin_page_bytes;
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
    for (int i = 0; format == INT8 && i < PANEL; i += VW) v_store_int8(to.byte + i, v_load(x + i) * v_set1(inverse));
    return to;
}

// Stores up to PANEL rounded values of `size` bytes, a constant, of a token, behind each other along a page's panels
// or, `across`, along their lines; `together`: the two of a pair lie side by side. `pair` is the first of their pairs
// of columns; `place` the token's place in a panel, or in a pair.
INLINE void store_sized(const int64_t size, int together, const char *values, int64_t count, int across, char *pair,
                        int64_t place) {
    if (across && together)
        for (int64_t i = 0; i < count; i++) memcpy(pair + (2 * i + place) * size, values + i * size, (size_t)size);
    else if (across) memcpy(pair + place * PANEL * size, values, (size_t)(count * size));
    else if (together)
        for (int64_t i = 0; i < count; i += 2, pair += 2 * PANEL * size)
            memcpy(pair + 2 * place * size, values + i * size, (size_t)(2 * size));
    else
        for (int64_t i = 0; i < count; i++) memcpy(pair + (i * PANEL + place) * size, values + i * size, (size_t)size);
}
INLINE void store_values(int format, const char *values, int64_t count, int across, char *pair, int64_t place) {
    if (format == FP32) store_sized(4, 0, values, count, across, pair, place);
    else if (format == FP8 || format == INT8) store_sized(1, format == INT8, values, count, across, pair, place);
    else store_sized(2, format == BF16, values, count, across, pair, place);
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

// Appends a key (panels of 16 tokens, pairs along the head) or a value (panels of 16 dims, pairs along the tokens) to a
// page whose scales are at `scales`.
INLINE void append_head(const struct model *m, int format, char *to, char *scales, int64_t offset, int values,
                        const float *x) {
    int64_t n = m->head_dim, lines = values ? m->block_size : n, panel_bytes = lines / 2 * pair_bytes(format);
    float scale = format == INT8 ? scale_of_head(x, n) : 1.0f, inverse = isnan(scale) ? 0.0f : 1.0f / scale;
    if (format == INT8) ((float *)scales)[offset] = scale;
    char *pair = to + (values ? offset / 2 * pair_bytes(format) : offset / PANEL * panel_bytes);
    for (int64_t i = 0; i < n; i += PANEL, pair += values ? panel_bytes : PANEL / 2 * pair_bytes(format)) {
        float part[PANEL] = {0};
        int64_t count = n - i < PANEL ? n - i : PANEL;
        memcpy(part, x + i, (size_t)count * sizeof *part);
        union stored rounded = round_values(format, part, inverse);
        store_values(format, (const char *)&rounded, count, values, pair, values ? offset % 2 : offset % PANEL);
    }
}

// The value, at least `least` and at most what fp16 holds, which NaN becomes. Calls of fminf and fmaxf would cost more.
INLINE float bounded(float least, float value) {
    float most = value < LARGEST_FP16 ? value : LARGEST_FP16;
    return most > least ? most : least;
}

// Rounds GROUP dims to 4 bits, and stores their scale and, `tokens` further on, their zero.
static void round_group(const float *x, uint16_t *scale, int64_t tokens, int16_t *codes) {
    vf low = v_load(x), high = low, odd = v_set1(0.0f);
    for (int64_t i = 0; i < GROUP; i += VW) {
        low = v_min(low, v_load(x + i));
        high = v_max(high, v_load(x + i));
        odd = odd + (v_load(x + i) - v_load(x + i));  // zero, if all are finite
    }
    float least = bounded(-LARGEST_FP16, -v_largest(v_set1(0.0f) - low));
    scale[tokens] = float_to_fp16(least + v_sum(odd));
    float zero = fp16_to_float(scale[tokens]);
    scale[0] = float_to_fp16(bounded(LEAST_FP16, (v_largest(high) - zero) / 15.0f));
    memset(codes, 0, GROUP * sizeof *codes);
    float inverse = 1.0f / fp16_to_float(scale[0]);
    for (int64_t i = 0; i < GROUP && !isnan(zero); i += VW) {
        vf value = (v_load(x + i) - v_set1(zero)) * v_set1(inverse);
        v_store_int16(codes + i, v_max(v_set1(0.0f), v_min(v_set1(15.0f), value)));
    }
}

// Writes PANEL codes into the low or the high halves of as many bytes.
INLINE void put_nibbles(uint8_t *to, const int16_t *codes, int64_t high) {
    uint8_t both[PANEL], kept = high ? 15 : 240, times = high ? 16 : 1;
    memcpy(both, to, PANEL);  // bytes that the codes cannot overlap, so that the loop becomes vectors
    for (int i = 0; i < PANEL; i++) both[i] = (uint8_t)((both[i] & kept) | (uint8_t)((uint8_t)codes[i] * times));
    memcpy(to, both, PANEL);
}

// Appends a key or a value to a page of int4.
static void append_nibbles(const struct model *m, char *to, char *scales, int64_t offset, int values, const float *x) {
    int64_t n = m->head_dim, panel_bytes = (values ? m->block_size : n) / 2 * pair_bytes(INT4);
    for (int64_t first = 0; first < n; first += GROUP) {
        int64_t count = n - first < GROUP ? n - first : GROUP;
        float group[GROUP];
        int16_t codes[GROUP];
        for (int64_t i = 0; count < GROUP && i < GROUP; i++) group[i] = x[first + (i < count ? i : 0)];
        uint16_t *scale = (uint16_t *)scales + first / GROUP * 2 * m->block_size + offset;
        round_group(count < GROUP ? group : x + first, scale, m->block_size, codes);
        memset(codes + count, 0, (size_t)(GROUP - count) * sizeof *codes);
        uint8_t *both = (uint8_t *)to + (values ? first / PANEL : offset / PANEL) * panel_bytes;
        both += values ? offset / 2 * pair_bytes(INT4) : first / 2 * pair_bytes(INT4) + offset % PANEL;
        if (values)
            for (int64_t i = 0; i < count; i += PANEL)
                put_nibbles(both + i / PANEL * panel_bytes, codes + i, offset % 2);
        else
            for (int64_t i = 0; i < count; i += 2)
                both[i / 2 * pair_bytes(INT4)] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

static void append_to_page(const struct model *m, int format, char *to, char *scales, int64_t offset, int values,
                           const float *x) {
    switch (format) {  // constants, so that the loops are compiled for each
        case FP32: append_head(m, FP32, to, scales, offset, values, x); break;
        case BF16: append_head(m, BF16, to, scales, offset, values, x); break;
        case FP16: append_head(m, FP16, to, scales, offset, values, x); break;
        case FP8: append_head(m, FP8, to, scales, offset, values, x); break;
        case INT8: append_head(m, INT8, to, scales, offset, values, x); break;
        case INT4: append_nibbles(m, to, scales, offset, values, x); break;
    }
}

// Appends a token's key or value, and what its twin needs.
static void append_vector(const struct model *m, const struct operation *op, int64_t t, int values, int64_t head,
                          const float *x) {
    int64_t block = m->step.slots[t] / m->block_size, offset = m->step.slots[t] % m->block_size;
    int format = values ? m->value_format : m->key_format;
    char *to = page(m, op->layer, block, values, head);
    append_to_page(m, format, to, to + m->scale_offset[values], offset, values, x);
    if (format != INT4) return;
    char *twin = twin_page(m, op->layer, block, values, head);
    append_to_page(m, INT8, twin, twin + m->twin_scale_offset, offset, values, x);
}

// The end of a thread's share of a head's tokens: values of 4 bits of two tokens of a block share bytes.
INLINE int64_t whole_pairs(const struct model *m, int64_t i) {
    int64_t tokens = m->step.tokens, t = i % tokens;
    int shared = m->value_format == INT4 && t && m->step.slots[t] % 2 && m->step.slots[t - 1] == m->step.slots[t] - 1;
    return i < m->kv_heads * tokens && shared ? i + 1 : i;
}

// Threads share kv heads, each with the query heads of its group, and then tokens.
static void append(const struct model *m, const struct operation *op, int32_t thread) {
    int64_t n = m->head_dim, group = m->heads / m->kv_heads, tokens = m->step.tokens;
    struct share mine = share_of(m, m->kv_heads * tokens, thread);
    mine = (struct share){whole_pairs(m, mine.first), whole_pairs(m, mine.last)};
    float *scratch = scratch_of(m, thread);
    for (int64_t i = mine.first; i < mine.last; i++) {
        int64_t h = i / tokens, t = i % tokens;
        const float *query = row(m, QKV, t) + h * group * n, *key = row(m, QKV, t) + (m->heads + h) * n;
        const float *factors = op->factors ? op->factors + h * n : NULL;
        struct vectors norms = vectors_of(m, op, t);
        for (int64_t g = 0; g < group; g++) {
            float *to = row(m, QUERY, t) + (h * group + g) * n;
            rotate_head(m, t, query + g * n, to, norms.weight, op->eps);
            scale_query(to, n, factors);
            hadamard(m, to);
        }
        rotate_head(m, t, key, scratch, norms.offset, op->eps);
        for (int64_t i = 0; factors && i < n; i++) scratch[i] /= factors[i];  // powers of two: exact
        hadamard(m, scratch);
        append_vector(m, op, t, 0, h, scratch);
        memcpy(scratch, key + m->kv_heads * n, (size_t)n * sizeof *scratch);
        hadamard(m, scratch);
        append_vector(m, op, t, 1, h, scratch);
    }
}

// Clears the blocks that sequences begin in this step: an earlier owner may have left NaN there.
static void clear_blocks(const struct model *m, int32_t thread) {
    struct share mine = share_of(m, (int64_t)m->step.begun * m->num_layers, thread);
    int kinds = (m->key_format == INT4) + (m->value_format == INT4);
    for (int64_t i = mine.first; i < mine.last; i++) {
        int32_t layer = (int32_t)(i % m->num_layers), block = m->step.begun_blocks[i / m->num_layers];
        memset(page(m, layer, block, 0, 0), 0, (size_t)m->layer_bytes);
        if (kinds) memset(twin_page(m, layer, block, 0, 0), 0, (size_t)m->twin_layer_bytes);
    }
}

#endif
