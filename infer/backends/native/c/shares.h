// Which part of a step each thread computes, and where threads must wait for each other.
//
// Neighbours in the list of operations are cut alike where they can be: a thread then reads what it wrote itself, and
// the barrier between them is left out. No cut changes a bit of the result.
#ifndef TK_SHARES_H
#define TK_SHARES_H

#include "matmul.h"

#define OWN_ROWS 4  // as many rows every thread norms for itself: that takes less time than a barrier

// The range of `count` items that belongs to a thread.
struct share {
    int64_t first, last;
};
INLINE struct share share_of(const struct model *m, int64_t count, int32_t thread) {
    return (struct share){count * thread / m->threads, count * (thread + 1) / m->threads};
}

INLINE float *row(const struct model *m, int buffer, int64_t index) {
    return m->buffers[buffer] + index * m->strides[buffer];
}

INLINE float *scratch_of(const struct model *m, int32_t thread) { return m->scratch + thread * m->scratch_floats; }

// The panels of a product as groups, one behind the other: those of gate and up; of query, key and value heads. Each has
// `units` equal parts, and a thread takes the same parts of every group.
struct groups {
    int64_t count, units, panels[3];
};
static struct groups groups_of(const struct model *m, const struct operation *op) {
    const struct operation *next = op + 1;
    int64_t panels = (op->matrix.out + PANEL - 1) / PANEL;
    if (op->kind == MULTIPLY && next->kind == GATE && next->variant == 0 && next->matrix.in % PANEL == 0)
        return (struct groups){2, panels / 2, {panels / 2, panels / 2}};
    if (op->kind == MULTIPLY && next->kind == APPEND && m->head_dim % PANEL == 0 && m->kv_heads % m->threads == 0) {
        int64_t head = m->head_dim / PANEL, others = m->kv_heads * head;
        return (struct groups){3, m->kv_heads, {m->heads * head, others, others}};
    }
    return (struct groups){1, panels, {panels}};
}

// Whether every thread norms all rows for itself, into its scratch: the product that follows reads them there.
INLINE int norms_for_itself(const struct model *m, const struct operation *norm) {
    return (norm->wanted ? m->step.wanted : m->step.tokens) <= OWN_ROWS && norm[1].kind != ROUTE;
}

// Whether a thread may begin the operation after this one before the others have ended this one.
static int goes_on(const struct model *m, const struct operation *op) {
    if (op->kind == NORM) return norms_for_itself(m, op);
    if (op->kind != MULTIPLY) return 0;
    if (op[1].kind == GATE) return op[1].variant == 1 || groups_of(m, op).count == 2;
    return op[1].kind == APPEND && groups_of(m, op).count == 3;
}

#endif
