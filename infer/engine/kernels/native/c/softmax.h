// The state of a softmax over the keys read so far, for the rows of an item: their largest score, the sum of their
// weights, and their weighted values.
#ifndef TK_SOFTMAX_H
#define TK_SOFTMAX_H

#include "integers.h"

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

// The keys of a tile, counted from its first one, that a row sees.
struct seen {
    int64_t from, to;
};

// Where a row's weights are stored a second time, rounded, in the pass that computes them.
struct narrow_weights {
    const float *scales;  // those of the keys' values, which rounded weights are multiplied by; or NULL
    void *to;             // int16 or bf16, 32 after 32
    int64_t step;         // the values from one 32 to the next
};
enum narrow { WIDE, TO_INT16, TO_BF16 };

// The largest score of the keys [from, to), LEAST_SCORE without one; those around them, in the same vectors, become it.
INLINE float largest_score(float *s, struct seen seen) {
    int64_t low = seen.from / VW * VW, high = (seen.to + VW - 1) / VW * VW;
    for (int64_t i = low; i < seen.from; i++) s[i] = LEAST_SCORE;
    for (int64_t i = seen.to; i < high; i++) s[i] = LEAST_SCORE;
    vf top = v_set1(LEAST_SCORE);
    for (int64_t i = low; i < high; i += VW) top = v_max(v_load(s + i), top);
    return v_largest(top);
}

// Makes `score` the largest of a row where it is larger, and adapts its sums.
INLINE void raise_largest(struct softmax *state, int64_t r, int64_t width, float score) {
    if (score <= state->largest[r]) return;
    vf keep = v_exp_below_zero(v_set1(state->largest[r] - score));
    float *values = state->values + r * width;
    state->largest[r] = score;
    state->total[r] *= keep[0];
    for (int64_t i = 0; i < width; i += VW) v_store(values + i, v_load(values + i) * keep);
}

// The scale in which int16 holds the weights of a tile times the scales of values: a weight is at most that of the
// tile's largest score, which is given less that of all tiles, and a scale at most `largest_scale`.
INLINE float scale_of_weights(float score, float largest_scale) {
    vf most = v_exp_below_zero(v_set1(score)) * v_set1(largest_scale);
    return v_max(v_set1(LEAST_SCALE), most)[0] / 32767.0f;
}

INLINE void store_narrow(const enum narrow kind, const struct narrow_weights *narrow, int64_t i, vf weights) {
    if (kind == TO_INT16) v_store_int16((int16_t *)narrow->to + i, weights);
    if (kind == TO_BF16) store_rounded(weights, (uint16_t *)narrow->to + i / 32 * narrow->step + i % 32);
}

// Turns the scores of VW keys from key i on into weights, and returns them; the row sees them all if they are whole.
INLINE vf weigh_vector(const enum narrow kind, const int whole, float *s, int64_t i, struct seen seen, vf middle,
                       vf inverse, const struct narrow_weights *narrow) {
    vf weights = v_exp_below_zero(v_load(s + i) - middle);
    if (!whole) weights = v_only(weights, seen.from - i, seen.to - i);
    v_store(s + i, weights);
    if (kind == WIDE) return weights;
    vf scaled = weights;
    if (narrow->scales) scaled = scaled * v_load(narrow->scales + i);
    if (kind == TO_INT16) scaled = scaled * inverse;
    if (!whole) scaled = v_only(scaled, seen.from - i, seen.to - i);  // NaN of keys that it must not see
    store_narrow(kind, narrow, i, scaled);
    return weights;
}

// Turns a row's scores of `keys` keys, a multiple of PANEL, into weights, also narrow ones of a constant kind, those of
// int16 divided by `scale`. The row's largest score is known (raise_largest).
INLINE void weigh(const enum narrow kind, float *s, int64_t keys, struct seen seen, const struct narrow_weights *narrow,
                  float scale, struct softmax *state, int64_t r) {
    int64_t low = seen.from / VW * VW, high = (seen.to + VW - 1) / VW * VW, i = low;
    vf middle = v_set1(state->largest[r]), sum = v_set1(0.0f), inverse = v_set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    for (int64_t k = 0; k < low; k += VW) v_store(s + k, sum), store_narrow(kind, narrow, k, sum);
    for (int64_t k = high; k < keys; k += VW) v_store(s + k, sum), store_narrow(kind, narrow, k, sum);
    if (i < seen.from) sum = sum + weigh_vector(kind, 0, s, i, seen, middle, inverse, narrow), i += VW;
#pragma GCC unroll 4
    for (; i + VW <= seen.to; i += VW) sum = sum + weigh_vector(kind, 1, s, i, seen, middle, inverse, narrow);
    if (i < high) sum = sum + weigh_vector(kind, 0, s, i, seen, middle, inverse, narrow);
    state->total[r] += v_sum(sum);
}

// Adds the integer sums of `count` of a row's values, each less an integer, in their scale, and `more` to each.
INLINE void add_sums(float *values, const int32_t *sums, int64_t count, int32_t less, float scale, float more) {
    for (int64_t i = 0; i < count; i += VW) {
        vf sum = vi_to_float(vi_load(sums + i) - vi_set1(less));
        v_store(values + i, v_load(values + i) + v_fma(sum, v_set1(scale), v_set1(more)));
    }
}

// The largest of the positive values of some keys, zero without one; NaN if one of them is.
static float largest_in(const float *values, struct seen seen) {
    vf largest = v_set1(0.0f), odd = v_set1(0.0f);
    for (int64_t i = seen.from / VW * VW; i < seen.to; i += VW) {
        vf each = v_load(values + i);
        if (i < seen.from || i + VW > seen.to) each = v_only(each, seen.from - i, seen.to - i);
        largest = v_max(each, largest);
        odd = odd + (each - each);
    }
    return v_largest(largest) + v_sum(odd);
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
