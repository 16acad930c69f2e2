// Operations on single rows: embedding, norms, rotation, activations. A row's result depends on that row alone.
// Buffers' strides are multiples of PANEL floats, and a row's padding is zero.
#ifndef TK_ROWS_H
#define TK_ROWS_H

#include <math.h>

#include "quantized.h"
#include "rounding.h"

INLINE float load_value(int format, const void *data, int64_t index) {
    if (format == FP32) return ((const float *)data)[index];
    uint16_t half = ((const uint16_t *)data)[index];
    return format == BF16 ? bf16_to_float(half) : fp16_to_float(half);
}

// Element `column` of row `index` of a packed weight without slices.
INLINE float packed_value(const struct matrix *w, int64_t index, int64_t column) {
    if (is_quantized(w)) return quantized_value(w, index, column);
    const char *line = (const char *)w->data + index / PANEL * w->panel_bytes + column / 2 * pair_bytes(w->format);
    int64_t within = index % PANEL;
    return load_value(w->format, line, w->format == BF16 ? 2 * within + column % 2 : column % 2 * PANEL + within);
}

static void embed(const struct model *m, const struct operation *op, int32_t thread) {
    struct share mine = share_of(m, m->step.tokens, thread);
    float *sum = m->buffers[op->target];
    for (int64_t t = mine.first; t < mine.last; t++) {
        float *to = sum + t * m->strides[op->target];
        int64_t id = m->step.token_ids[t] - op->rows * m->rank;
        int held = id >= 0 && id < op->rows;
        for (int64_t c = 0; c < m->hidden_size; c++) {
            float value = 0.0f;
            if (held)
                value = op->variant ? packed_value(&op->matrix, id, c)
                                    : load_value(m->weight_format, op->table, id * m->hidden_size + c);
            if (op->positions && m->rank == 0)
                value += load_value(m->weight_format, op->positions, m->step.positions[t] * m->hidden_size + c);
            to[c] = value;
        }
    }
}

// The mean square of n values around a center, and their mean: four sums at a time, added in a fixed order. With a
// center, n is a multiple of VW.
INLINE float mean_square(const float *x, int64_t n, float center) {
    vf sums[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, middle = v_set1(center);
    for (int64_t i = 0; i < n; i += VW) {
        vf value = v_load_part(x + i, n - i) - middle;
        sums[i / VW % 4] = v_fma(value, value, sums[i / VW % 4]);
    }
    return v_sum((sums[0] + sums[2]) + (sums[1] + sums[3])) / (float)n;
}
INLINE float mean_of(const float *x, int64_t n) {
    vf sums[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)};
    for (int64_t i = 0; i < n; i += VW) sums[i / VW % 4] = sums[i / VW % 4] + v_load_part(x + i, n - i);
    return v_sum((sums[0] + sums[2]) + (sums[1] + sums[3])) / (float)n;
}

static void norm_row(const float *x, float *y, int64_t n, const float *weight, const float *offset, int layer_norm,
                     float eps) {
    float center = layer_norm ? mean_of(x, n) : 0.0f;
    vf scale = v_set1(1.0f / sqrtf(mean_square(x, n, center) + eps)), middle = v_set1(center);
    for (int64_t i = 0; i < n; i += VW) {
        vf value = (v_load_part(x + i, n - i) - middle) * scale * v_load(weight + i);
        if (offset) value = value + v_load(offset + i);
        v_store_part(y + i, value, n - i);
    }
}

// The slot of a token's adapter; -1 without one.
INLINE int32_t slot_of(const struct model *m, int64_t token) {
    return m->step.adapter_of ? m->step.adapter_of[token] : -1;
}

// The parameters of a token's norms: its adapter's, or the model's.
INLINE struct vectors vectors_of(const struct model *m, const struct operation *op, int64_t token) {
    int32_t slot = op->vectors ? slot_of(m, token) : -1;
    return slot < 0 ? (struct vectors){op->weight, op->offset} : op->vectors[slot];
}

static void norm(const struct model *m, const struct operation *op, int32_t thread) {
    int64_t rows = op->wanted ? m->step.wanted : m->step.tokens;
    int alone = norms_for_itself(m, op);
    struct share mine = alone ? (struct share){0, rows} : share_of(m, rows, thread);
    float *all = alone ? scratch_of(m, thread) : m->buffers[NORMED];
    const struct matrix *rounds = arrives_rounded(m, op + 1) ? &op[1].matrix : NULL;
    for (int64_t t = mine.first; t < mine.last; t++) {
        float *to = rounds ? scratch_of(m, thread) : all + t * m->strides[NORMED];
        int64_t token = op->wanted ? m->step.rows[t] : t;
        struct vectors by = vectors_of(m, op, token);
        norm_row(row(m, HIDDEN, token), to, m->hidden_size, by.weight, by.offset, op->variant, op->eps);
        for (int64_t c = 0; rounds && c < m->hidden_size; c += BLOCK_COLUMNS)
            round_line(to + c, BLOCK_COLUMNS, rounded_at(rounds, m->buffers[NORMED], rows, t, c));
    }
}

// Where the product after a norm finds its rows.
INLINE const float *normed(const struct model *m, const struct operation *product, int32_t thread) {
    return norms_for_itself(m, product - 1) ? scratch_of(m, thread) : m->buffers[NORMED];
}

// The cosines and sines of the step's positions: the angle is rounded to fp32 as in training, then exact to 1e-9.
static void rotations(const struct model *m, int32_t thread) {
    struct share mine = share_of(m, m->frequencies ? m->step.tokens : 0, thread);
    int64_t half = m->rotated / 2;
    for (int64_t t = mine.first; t < mine.last; t++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (float)m->step.positions[t] * m->frequencies[i];
            double quarters = nearbyint(angle * 0.63661977236758134308);
            double r = (angle - quarters * 1.57079632679489655800) - quarters * 6.12323399573676603587e-17, s = r * r;
            double sine = 1 / 362880.0 + s * (-1 / 39916800.0);  // Taylor's series, |r| <= pi / 4
            sine = r * (1 + s * (-1 / 6.0 + s * (1 / 120.0 + s * (-1 / 5040.0 + s * sine))));
            double cosine = 1 / 40320.0 + s * (-1 / 3628800.0 + s / 479001600.0);
            cosine = 1 + s * (-0.5 + s * (1 / 24.0 + s * (-1 / 720.0 + s * cosine)));
            int64_t turn = (int64_t)quarters & 3;
            double c = turn == 0 ? cosine : turn == 1 ? -sine : turn == 2 ? -cosine : sine;
            double d = turn == 0 ? sine : turn == 1 ? cosine : turn == 2 ? -sine : -cosine;
            m->cosines[t * half + i] = (float)c * m->attention_scaling;
            m->sines[t * half + i] = (float)d * m->attention_scaling;
        }
}

INLINE vf activate(int gelu, vf gate, vf up) {
    const vf one = v_set1(1.0f);
    if (!gelu) return gate * v_reciprocal(one + v_exp(v_set1(0.0f) - gate)) * up;
    // 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3); 1 + tanh(u) = 2 - 2 / (1 + exp(2 u))
    vf u = v_set1(0.7978845608028654f) * (gate + v_set1(0.044715f) * gate * gate * gate);
    return gate * (one - v_reciprocal(one + v_exp(u + u)));
}

// Applies an activation to columns [first, last) of one row: gate in the first `columns`, up behind them.
static void gate_row(const float *inner, float *gated, int64_t columns, int64_t first, int64_t last, int gelu) {
    const float *up = inner + (gelu ? 0 : columns);
    int64_t c = first;
    for (; c + VW <= last; c += VW) v_store(gated + c, activate(gelu, v_load(inner + c), v_load(up + c)));
    if (c < last)
        v_store_part(gated + c, activate(gelu, v_load_part(inner + c, last - c), v_load_part(up + c, last - c)),
                     last - c);
}

// Gates panels of columns of some tokens.
static void gate_panels(const struct model *m, const struct operation *op, int64_t token, int64_t stop, int64_t panel,
                        int64_t last) {
    int64_t columns = op->matrix.in, end = last * PANEL < columns ? last * PANEL : columns;
    for (; token < stop; token++)
        gate_row(row(m, INNER, token), row(m, GATED, token), columns, panel * PANEL, end, op->variant);
}

static void gate(const struct model *m, const struct operation *op, int32_t thread) {
    struct share mine = share_of(m, m->step.tokens, thread);
    gate_panels(m, op, mine.first, mine.last, 0, (op->matrix.in + PANEL - 1) / PANEL);
}

#endif
