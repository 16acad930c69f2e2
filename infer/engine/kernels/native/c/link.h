// The exchange between the ranks of a host: fp32 partial sums in shared memory.
#ifndef TK_LINK_H
#define TK_LINK_H

#include "rows.h"

// A rank's partial sums in the area that the next exchange uses.
INLINE float *slot(const struct link *link, int32_t tp, int32_t rank, uint32_t sequence) {
    return link->slots + ((int64_t)(sequence % 2) * tp + rank) * link->slot_floats;
}

// Waits until every rank has met as often as this one; one thread of a rank calls it, while the others wait.
//
// Products write partial sums straight to shared memory, alternately to two areas: when all have met for one exchange,
// all have read the one before.
static void meet(struct model *m) {
    struct link *link = &m->link;
    uint32_t sequence = ++link->sequence;
    tk_turn(&link->arrived[m->rank].turnstile, sequence, 1);
    for (int32_t r = 0; r < m->tp; r++) {
        struct turnstile *other = &link->arrived[r].turnstile;
        uint32_t seen;
        while ((int32_t)((seen = __atomic_load_n(&other->word, __ATOMIC_ACQUIRE)) - sequence) < 0)
            tk_wait_while(other, seen, 1);
    }
    m->buffers[PARTIAL] = slot(link, m->tp, m->rank, sequence);
}

// Waits until every thread of every rank has come here.
static void meet_all(struct model *m, int32_t thread) {
    tk_barrier(m->pool);
    if (m->tp == 1) return;
    if (thread == 0) meet(m);
    tk_barrier(m->pool);
}

// The weight of a token's sum: the sigmoid of the product of its normed row with the gate.
static vf weight_of_sum(const struct model *m, const struct operation *op, int64_t token) {
    const float *x = row(m, NORMED, token);
    vf sums[4] = {v_set1(0), v_set1(0), v_set1(0), v_set1(0)}, one = v_set1(1.0f);
    for (int64_t c = 0; c < m->hidden_size; c += VW)
        sums[c / VW % 4] = v_fma(v_load(x + c), v_load(op->weight + c), sums[c / VW % 4]);
    float score = v_sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
    return v_reciprocal(one + v_exp(v_set1(-score)));
}

// Sums the ranks' partial sums as a binary tree in rank order and adds them to hidden, or writes them (after EMBED).
static void reduce(struct model *m, const struct operation *op, int32_t thread) {
    if (m->tp > 1) {
        if (thread == 0) meet(m);  // all threads of this rank have come to this operation
        tk_barrier(m->pool);
    }
    int64_t width = m->hidden_size, count = m->step.tokens * width / VW;
    const float *parts = m->tp > 1 ? slot(&m->link, m->tp, 0, m->link.sequence - 1) : m->buffers[PARTIAL];
    struct share mine = share_of(m, count, thread);
    vf weight = v_set1(1.0f);
    for (int64_t i = mine.first; i < mine.last; i++) {
        vf sums[MAX_RANKS];
        for (int32_t r = 0; r < m->tp; r++) sums[r] = v_load(parts + r * m->link.slot_floats + i * VW);
        for (int32_t step = 1; step < m->tp; step *= 2)
            for (int32_t r = 0; r + step < m->tp; r += 2 * step) sums[r] = sums[r] + sums[r + step];
        float *to = row(m, HIDDEN, i * VW / width) + i * VW % width;
        if (op->weight && (i == mine.first || i * VW % width == 0)) weight = weight_of_sum(m, op, i * VW / width);
        if (op->weight) sums[0] = sums[0] * weight;
        if (op->offset) sums[0] = sums[0] + v_load(op->offset + i * VW % width);
        if (op->add) sums[0] = v_load(to) + sums[0];
        v_store(to, sums[0]);
    }
}

#endif
