// Mixtures of experts, EXPERT_TOKENS tokens at a time. Every (token, choice) pair has a row; rows are ordered by
// expert, so that an expert's weights are read once for all its rows. A token adds its experts' outputs in ascending
// order of their numbers, slice by slice: its bits do not depend on other tokens, nor, with slices, on tp.
#ifndef TK_EXPERTS_H
#define TK_EXPERTS_H

#include "rounded.h"

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#define EXCLUDED -3e38f  // what an expert is chosen by that is chosen already, or in no group of the token

// Turns the scores of a row into weights; returns the number by which they are divided when they are taken.
static float weigh_experts(const struct operation *op, float *scores) {
    float largest = op->variant ? 0.0f : scores[0], total = 0.0f;
    for (int64_t e = 1; !op->variant && e < op->experts; e++) largest = scores[e] > largest ? scores[e] : largest;
    for (int64_t e = 0; e < op->experts; e++) {
        float exponent[VW] = {op->variant ? -scores[e] : scores[e] - largest}, weight[VW];
        v_store(weight, v_exp(v_load(exponent)));
        total += scores[e] = op->variant ? 1.0f / (1.0f + weight[0]) : weight[0];
    }
    return op->variant ? 1.0f : total;
}

// The sum of the two largest numbers of a group.
INLINE float best_two(const float *numbers, int64_t size) {
    float first = EXCLUDED, second = EXCLUDED;
    for (int64_t i = 0; i < size; i++) {
        if (numbers[i] > first) second = first, first = numbers[i];
        else if (numbers[i] > second) second = numbers[i];
    }
    return first + second;
}

// The place of the largest number that is not excluded, the first of equals; -1 without one, or if all are NaN.
INLINE int32_t largest_of(const float *numbers, int64_t count) {
    int32_t best = -1;
    for (int32_t i = 0; i < count; i++)
        if (numbers[i] > EXCLUDED && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

// Excludes all groups but the best.
static void exclude_groups(const struct operation *op, float *numbers) {
    int64_t size = op->experts / op->groups;
    float sums[MAX_GROUPS];
    for (int64_t g = 0; g < op->groups; g++) sums[g] = best_two(numbers + g * size, size);
    for (int64_t i = 0; i < op->top_groups; i++) {
        int32_t best = largest_of(sums, op->groups);
        if (best >= 0) sums[best] = EXCLUDED;
    }
    for (int64_t e = 0; e < op->experts; e++)
        if (sums[e / size] > EXCLUDED) numbers[e] = EXCLUDED;
}

// Weighs the experts of each row of SCORES, and chooses the best: the lowest of equals first.
static void route(const struct model *m, const struct operation *op, int32_t thread) {
    struct share mine = share_of(m, m->step.tokens, thread);
    int64_t k = op->top_k;
    for (int64_t t = mine.first; t < mine.last; t++) {
        float *scores = row(m, SCORES, t), *numbers = scores + op->experts, kept = 0.0f;
        float total = weigh_experts(op, scores);
        for (int64_t e = 0; e < op->experts; e++) numbers[e] = scores[e] + (op->offset ? op->offset[e] : 0.0f);
        if (op->groups > 1) exclude_groups(op, numbers);
        int32_t *chosen = m->chosen + t * k;
        float *weights = m->chosen_weights + t * k;
        for (int64_t i = 0; i < k; i++) {
            int32_t best = largest_of(numbers, op->experts);
            if (best < 0) best = 0;  // all are NaN: so is the weight, and the logits will say it
            float weight = scores[best] / total;
            numbers[best] = EXCLUDED;
            kept += weight;
            int64_t at = i;  // ascending by expert
            for (; at > 0 && chosen[at - 1] > best; at--) chosen[at] = chosen[at - 1], weights[at] = weights[at - 1];
            chosen[at] = best;
            weights[at] = weight;
        }
        if (op->variant) kept += 1e-20f;  // as transformers has it: all weights may be 0
        for (int64_t i = 0; i < k; i++) weights[i] = (op->normalize ? weights[i] / kept : weights[i]) * op->scale;
    }
}

// The layout of m->pairs for one group of tokens: the rows' pairs, then each expert's first row, then the row of a
// pair.
struct pairs {
    int32_t *of_row, *first, *row_of;
};
INLINE struct pairs pairs_of(const struct model *m, const struct operation *op) {
    int32_t *base = m->pairs;
    return (struct pairs){base, base + EXPERT_TOKENS * op->top_k, base + EXPERT_TOKENS * op->top_k + op->experts + 1};
}

static void order_pairs(const struct model *m, const struct operation *op, int64_t token, int64_t tokens) {
    struct pairs p = pairs_of(m, op);
    int64_t count = tokens * op->top_k;
    memset(p.first, 0, (size_t)(op->experts + 1) * sizeof *p.first);
    for (int64_t i = 0; i < count; i++) p.first[m->chosen[token * op->top_k + i] + 1]++;
    for (int64_t e = 0; e < op->experts; e++) p.first[e + 1] += p.first[e];
    for (int64_t i = 0; i < count; i++) {
        int32_t expert = m->chosen[token * op->top_k + i];
        p.row_of[i] = p.first[expert]++;
        p.of_row[p.row_of[i]] = (int32_t)i;
    }
    for (int64_t e = op->experts; e > 0; e--) p.first[e] = p.first[e - 1];
    p.first[0] = 0;
}

// The rows from r on, before `last` and no more than a tile, whose tokens have the adapter of `*slot`, -1 for none.
static int64_t rows_of_slot(const struct model *m, const struct operation *op, int64_t token, int64_t r, int64_t last,
                            int32_t *slot) {
    const int32_t *of_row = pairs_of(m, op).of_row;
    int64_t count = 0, most = least(MOST_ROWS, last - r);
    while (count < most) {
        int32_t own = slot_of(m, token + of_row[r + count] / op->top_k);
        if (count && own != *slot) break;
        *slot = own;
        count++;
    }
    return count;
}

// Where the rows of experts from r on lie: those of tokens, which are gathered, or those that were gated.
static const float *rows_of_experts(const struct model *m, const struct operation *op, int first, int64_t token,
                                    int64_t r, int64_t count, int32_t thread) {
    if (!first) return m->expert_gated + r * m->expert_gated_stride;
    float *gathered = scratch_of(m, thread);
    for (int64_t i = 0; i < count; i++)
        memcpy(gathered + i * m->strides[NORMED], row(m, NORMED, token + pairs_of(m, op).of_row[r + i] / op->top_k),
               (size_t)m->strides[NORMED] * sizeof *gathered);
    return gathered;
}

// Multiplies the rows that have an adapter by A of their expert, each slice on its own: threads take tiles in turn, and
// wait for each other.
static void multiply_down(const struct model *m, const struct operation *op, const struct adapter *adapters, int first,
                          int64_t token, int32_t thread) {
    if (!adapters || !m->step.adapter_of) return;
    const int32_t *starts = pairs_of(m, op).first;
    int64_t x_stride = first ? m->strides[NORMED] : m->expert_gated_stride, tiles = 0;
    for (int64_t e = 0; e < op->experts; e++)
        for (int64_t r = starts[e], count; r < starts[e + 1]; r += count) {
            int32_t slot = -1;
            count = rows_of_slot(m, op, token, r, starts[e + 1], &slot);
            if (slot < 0 || !adapters[slot].down.out || tiles++ % m->threads != thread) continue;
            const struct matrix *w = &adapters[slot].down;
            const float *x = rows_of_experts(m, op, first, token, r, count, thread), *scales = adapters[slot].scales;
            int64_t panels = (w->out + PANEL - 1) / PANEL, ranks = panels * PANEL, columns = w->in / w->slices;
            for (int64_t s = 0; s < w->slices; s++) {
                const char *data = (const char *)w->data + e * panels * w->panel_bytes;
                float *to = m->low + r * m->low_stride + s * ranks;
                multiply_panels(w->format, x + s * columns, x_stride, count, data + s * (w->panel_bytes / w->slices),
                                w->panel_bytes, panels, (columns + 1) / 2, to, m->low_stride, NULL, 0);
                for (int64_t i = 0; i < count * ranks; i++)
                    to[i / ranks * m->low_stride + i % ranks] *= scales[i % ranks];
            }
        }
    tk_barrier(m->pool);
}

// Adds the products with B of an expert to `rows` rows from row r on, panels [low, high), and to all slices, which stay
// `apart`; `out` begins with them.
static void add_expert_adapters(const struct model *m, const struct operation *op, const struct adapter *adapters,
                                int64_t e, int64_t token, int64_t r, int64_t rows, int64_t low, int64_t high,
                                float *out, int64_t out_stride, int64_t apart) {
    if (!adapters || !m->step.adapter_of) return;
    for (int64_t last = r + rows, count; r < last; r += count, out += count * out_stride) {
        int32_t slot = -1;
        count = rows_of_slot(m, op, token, r, last, &slot);
        if (slot < 0) continue;
        const struct matrix *down = &adapters[slot].down;
        for (int32_t s = 0; down->out && s < down->slices; s++)
            add_factors(m, &adapters[slot], e, s, r, count, low, high, out + s * apart, out_stride);
    }
}

// Multiplies the rows of every expert by its weight; threads share the panels of all experts. Slices stay apart.
static void multiply_experts(const struct model *m, const struct operation *op, const struct matrix *all, int first,
                             int64_t token, int32_t thread) {
    const struct adapter *adapters = first ? op->adapters : op->second_adapters;
    multiply_down(m, op, adapters, first, token, thread);
    struct pairs p = pairs_of(m, op);
    int64_t panels = (all->out + PANEL - 1) / PANEL, slices = first ? 1 : all->slices;
    struct share mine = share_of(m, op->experts * panels, thread);
    int64_t columns = all->in / slices, pairs = (columns + 1) / 2;
    int64_t stride = first ? m->strides[NORMED] : m->expert_gated_stride,
            bytes = is_quantized(all) ? 0 : pairs * pair_bytes(all->format);
    int64_t out_stride = first ? m->expert_inner_stride : m->strides[PARTIAL];
    int64_t apart = EXPERT_TOKENS * op->top_k * out_stride;
    for (int64_t e = mine.first / panels; e < op->experts && e * panels < mine.last; e++) {
        int64_t low = mine.first > e * panels ? mine.first - e * panels : 0,
                high = least(panels, mine.last - e * panels);
        struct matrix w = *all;
        w.data = (const char *)all->data + (e * panels + low) * all->panel_bytes;
        for (int64_t r = p.first[e], count; r < p.first[e + 1]; r += count) {
            count = least(MOST_ROWS, p.first[e + 1] - r);
            const float *x = rows_of_experts(m, op, first, token, r, count, thread);
            float *out = (first ? m->expert_inner : m->expert_out) + r * out_stride + low * PANEL;
            float *prepared = scratch_of(m, thread) + MOST_ROWS * m->strides[NORMED];
            if (takes_spread(&w)) {
                for (int64_t i = 0; i < count; i++) spread_row(&w, x + i * stride, prepared + i * spread_floats(&w));
                multiply_spread_apart(&w, prepared, count, high - low, out, out_stride, apart);
            } else if (takes_rounded(&w)) {
                uint16_t *rounded = (uint16_t *)prepared;
                round_rows(&w, x, stride, count, rounded, 0, count);
                multiply_apart(&w, rounded, count, high - low, out, out_stride, apart);
            } else
                for (int64_t s = 0; s < slices; s++)
                    multiply_panels(w.format, x + s * columns, stride, count, (const char *)w.data + s * bytes,
                                    w.panel_bytes, high - low, pairs, out + s * apart, out_stride, NULL, 0);
            add_expert_adapters(m, op, adapters, e, token, r, count, low, high, out, out_stride, apart);
        }
    }
}

static void combine_experts(const struct model *m, const struct operation *op, int64_t token, int64_t tokens,
                            int32_t thread) {
    struct pairs p = pairs_of(m, op);
    int64_t slices = op->second.slices, width = m->strides[PARTIAL];
    struct share mine = share_of(m, tokens, thread);
    for (int64_t t = mine.first; t < mine.last; t++)
        for (int64_t c = 0; c < m->hidden_size; c += VW) {
            vf sums[MAX_SLICES];
            for (int64_t s = 0; s < slices; s++) {
                sums[s] = v_set1(0.0f);
                for (int64_t i = t * op->top_k; i < (t + 1) * op->top_k; i++) {
                    vf weight = v_set1(m->chosen_weights[token * op->top_k + i]);
                    const float *y = m->expert_out + (s * EXPERT_TOKENS * op->top_k + p.row_of[i]) * width + c;
                    sums[s] = v_fma(weight, v_load(y), sums[s]);
                }
            }
            for (int64_t step = 1; step < slices; step *= 2)
                for (int64_t s = 0; s + step < slices; s += 2 * step) sums[s] = sums[s] + sums[s + step];
            float *to = row(m, op->target, token + t) + c;
            if (op->add) sums[0] = v_load(to) + sums[0];
            v_store(to, sums[0]);
        }
}

static void experts(struct model *m, const struct operation *op, int32_t thread) {
    for (int64_t token = 0; token < m->step.tokens; token += EXPERT_TOKENS) {
        int64_t tokens = least(EXPERT_TOKENS, m->step.tokens - token), columns = op->second.in;
        if (thread == 0) order_pairs(m, op, token, tokens);
        tk_barrier(m->pool);
        multiply_experts(m, op, &op->matrix, 1, token, thread);
        tk_barrier(m->pool);
        struct share mine = share_of(m, tokens * op->top_k, thread);
        for (int64_t r = mine.first; r < mine.last; r++)
            gate_row(m->expert_inner + r * m->expert_inner_stride, m->expert_gated + r * m->expert_gated_stride,
                     columns, 0, columns, 0);
        tk_barrier(m->pool);
        multiply_experts(m, op, &op->second, 0, token, thread);
        tk_barrier(m->pool);
        combine_experts(m, op, token, tokens, thread);
        tk_barrier(m->pool);
    }
}

#endif
