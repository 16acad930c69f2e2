// Which part of a step each thread computes, and where threads must wait for each other. No cut changes a bit of the
// result.
//
// Products are divided as threads become free (tk_take). The thread that computes panels of gate and up also gates
// them: it reads what it wrote itself, and no barrier is needed between the two.
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

// Whether the threads that compute a product also apply the activation that follows.
INLINE int gates(const struct operation *product) {
    const struct operation *next = product + 1;
    return product->kind == MULTIPLY && next->kind == GATE && (next->variant == 1 || next->matrix.in % PANEL == 0);
}

// Whether every thread norms all rows for itself, into its scratch: the product that follows reads them there.
INLINE int norms_for_itself(const struct model *m, const struct operation *norm) {
    return norm->kind == NORM && (norm->wanted ? m->step.wanted : m->step.tokens) <= OWN_ROWS && norm[1].kind != ROUTE;
}

// Whether a thread may begin the operation after this one before the others have ended this one.
static int needs_no_barrier(const struct model *m, const struct operation *op) {
    if (op->kind == NORM) return norms_for_itself(m, op);
    return gates(op);
}

#endif
