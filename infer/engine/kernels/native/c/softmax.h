// The state of a softmax over the keys read so far, for the rows of an item: their largest score, the sum of their
// weights, and their weighted values.
#ifndef TK_SOFTMAX_H
#define TK_SOFTMAX_H

#include "pages.h"

#define LEAST_SCORE -3e38f

struct softmax {
    float *largest, *total;  // [rows]
    float *values;           // [rows][padded head]
};

// A head's values are panels of dims: what pads the last is zero.
INLINE int64_t padded_head(const struct model *m) { return (m->head_dim + PANEL - 1) / PANEL * PANEL; }

// The groups of dims that have a scale of their own in int4.
INLINE int64_t groups_of_head(const struct model *m) { return (m->head_dim + GROUP - 1) / GROUP; }

// The memory of a state: it begins on a cache line of its own.
INLINE int64_t softmax_floats(int64_t rows, int64_t width) {
    return (2 * rows + PANEL - 1) / PANEL * PANEL + rows * width;
}
INLINE struct softmax softmax_at(float *at, int64_t rows) {
    return (struct softmax){at, at + rows, at + (2 * rows + PANEL - 1) / PANEL * PANEL};
}

static void clear_softmax(struct softmax *state, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) state->largest[r] = LEAST_SCORE, state->total[r] = 0.0f;
    memset(state->values, 0, (size_t)(rows * width) * sizeof *state->values);
}

// Clears the lanes that are not in [from, to).
INLINE vf v_only(vf v, int64_t from, int64_t to) {
    vi lanes;
    for (int i = 0; i < VW; i++) lanes[i] = i;
    int32_t low = from < 0 ? 0 : from < VW ? (int32_t)from : VW, high = to < 0 ? 0 : to < VW ? (int32_t)to : VW;
    return (vf)((vi)v & (lanes >= vi_set1(low)) & (lanes < vi_set1(high)));
}

// Turns a row's scores of `keys` keys, a multiple of PANEL, into weights; it sees the keys [from, to). With scales,
// those of the values, the weights are multiplied by them, and the scale in which they fit int16 is returned.
static float weigh(float *s, int64_t keys, int64_t from, int64_t to, const float *scales, struct softmax *state,
                   int64_t r, int64_t width) {
    int64_t low = from / VW * VW, high = (to + VW - 1) / VW * VW;
    memset(s, 0, (size_t)low * sizeof *s);
    memset(s + high, 0, (size_t)(keys - high) * sizeof *s);
    if (from == to) return 0.0f;
    for (int64_t i = low; i < from; i++) s[i] = LEAST_SCORE;
    for (int64_t i = to; i < high; i++) s[i] = LEAST_SCORE;
    vf top = v_set1(state->largest[r]);
    for (int64_t i = low; i < high; i += VW) top = v_max(v_load(s + i), top);
    float largest = v_largest(top), before[VW] = {state->largest[r] - largest}, keep[VW];
    v_store(keep, v_exp(v_load(before)));
    vf middle = v_set1(largest), sum = v_set1(0.0f), most = v_set1(LEAST_SCALE), scaled = v_set1(0.0f);
    for (int64_t i = low; i < high; i += VW) {
        int whole = i >= from && i + VW <= to;
        vf weight = v_exp(v_load(s + i) - middle);
        if (!whole) weight = v_only(weight, from - i, to - i);
        sum = sum + weight;
        if (scales) {
            weight = weight * v_load(scales + i);
            if (!whole) weight = v_only(weight, from - i, to - i);  // of a key that it must not see, NaN stays out
            most = v_max(weight, most);
            scaled = scaled + weight;
        }
        v_store(s + i, weight);
    }
    state->total[r] = state->total[r] * keep[0] + v_sum(sum);
    state->largest[r] = largest;
    float *values = state->values + r * width;
    for (int64_t i = 0; i < width; i += VW) v_store(values + i, v_load(values + i) * v_set1(keep[0]));
    return scale_of(most, scaled);
}

// Adds the integer sums of a row's values in their scale.
INLINE void add_sums(struct softmax *state, int64_t r, int64_t width, const int32_t *sums, float scale) {
    for (int64_t i = r * width; i < (r + 1) * width; i += VW)
        v_store(state->values + i, v_load(state->values + i) + vi_to_float(vi_load(sums + i)) * v_set1(scale));
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

#endif
