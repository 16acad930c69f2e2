// The exchange between the ranks of a host: fp32 partial sums in shared memory.
#ifndef TK_LINK_H
#define TK_LINK_H

#include "rows.h"

// Waits until every rank has met as often as this one; one thread of a rank calls it.
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
}

// Sums partial over ranks as a binary tree in rank order and adds it to hidden, or writes it (after EMBED).
//
// Ranks write alternately to two areas: when all have met for one exchange, all have read the one before.
static void reduce(struct model *m, const struct operation *op, int32_t thread) {
    struct link *link = &m->link;
    int64_t width = m->hidden_size, count = m->step.tokens * width / VW;
    float *area = link->slots + (link->sequence % 2) * m->tp * link->slot_floats;
    struct share mine = share_of(m, count, thread);
    float *own = area + m->rank * link->slot_floats;
    for (int64_t i = mine.first; i < mine.last; i++)
        v_store(own + i * VW, v_load(row(m, PARTIAL, i * VW / width) + i * VW % width));
    tk_barrier(m->pool);
    if (thread == 0) meet(m);
    tk_barrier(m->pool);
    for (int64_t i = mine.first; i < mine.last; i++) {
        vf sums[MAX_RANKS];
        for (int32_t r = 0; r < m->tp; r++) sums[r] = v_load(area + r * link->slot_floats + i * VW);
        for (int32_t step = 1; step < m->tp; step *= 2)
            for (int32_t r = 0; r + step < m->tp; r += 2 * step) sums[r] = sums[r] + sums[r + step];
        float *to = row(m, HIDDEN, i * VW / width) + i * VW % width;
        if (op->offset) sums[0] = sums[0] + v_load(op->offset + i * VW % width);
        if (op->add) sums[0] = v_load(to) + sums[0];
        v_store(to, sums[0]);
    }
}

#endif
