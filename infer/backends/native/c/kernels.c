// One instruction set's kernels: the whole step, carried out by every thread of the pool. The build compiles this file
// once per instruction set, with its flags and its TK_NAME.
#include "attention.h"
#include "experts.h"
#include "link.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

static void multiply_rows(const struct model *m, const struct operation *op, int64_t rows, int32_t thread) {
    multiply(&op->matrix, m->buffers[op->source], m->strides[op->source], rows, m->buffers[op->target],
             m->strides[op->target], op->add, thread, m->threads);
}

static void head(const struct model *m, const struct operation *op, int32_t thread) {
    multiply(&op->matrix, row(m, NORMED, m->head_first), m->strides[NORMED], m->head_count,
             m->buffers[LOGITS] + m->rank * ((op->matrix.out + PANEL - 1) / PANEL * PANEL), m->strides[LOGITS], 0, thread, m->threads);
}

static void run_operation(struct model *m, const struct operation *op, int32_t thread) {
    switch (op->kind) {
        case EMBED: embed(m, op, thread); break;
        case NORM: norm(m, op, thread); break;
        case MULTIPLY: multiply_rows(m, op, m->step.tokens, thread); break;
        case APPEND: append(m, op, thread); break;
        case ATTEND: attend(m, op, thread); break;
        case GATE: gate(m, op, thread); break;
        case ROUTE:
            multiply_rows(m, op, m->step.tokens, thread);
            tk_barrier(m->pool);
            route(m, op, thread);
            break;
        case EXPERTS: experts(m, op, thread); break;
        case REDUCE: reduce(m, op, thread); break;
        case HEAD: head(m, op, thread); break;
    }
}

static void run_step(void *argument, int32_t thread) {
    struct model *m = argument;
    clear_blocks(m, thread);
    rotations(m, thread);
    for (int64_t i = 0; i < m->num_operations; i++) {
        if (thread == 0 && m->operations[i].kind == ATTEND) m->counter = 0;
        if (i) tk_barrier(m->pool);
        run_operation(m, &m->operations[i], thread);
    }
    if (m->tp > 1) {  // rank 0 reads the logits of all
        tk_barrier(m->pool);
        if (thread == 0) meet(m);
    }
}

static void run_head(void *argument, int32_t thread) {
    struct model *m = argument;
    if (m->tp > 1) {  // rank 0 has read the logits before
        if (thread == 0) meet(m);
        tk_barrier(m->pool);
    }
    head(m, &m->operations[m->num_operations - 1], thread);
    if (m->tp > 1) {
        tk_barrier(m->pool);
        if (thread == 0) meet(m);
    }
}

// Computes m->step, and the logits of its first m->head_count wanted rows.
__attribute__((visibility("default"))) void NAMED(tk_step_, TK_NAME)(struct model *m) {
    tk_pool_run(m->pool, run_step, m);
}

// Computes the logits of further wanted rows of the last step: m->head_count of them from m->head_first on.
__attribute__((visibility("default"))) void NAMED(tk_head_, TK_NAME)(struct model *m) {
    tk_pool_run(m->pool, run_head, m);
}

// A product alone, for tests: rows of x by a packed weight.
__attribute__((visibility("default"))) void NAMED(tk_multiply_, TK_NAME)(const struct matrix *w, const float *x,
                                                                        int64_t x_stride, int64_t rows, float *out,
                                                                        int64_t out_stride) {
    multiply(w, x, x_stride, rows, out, out_stride, 0, 0, 1);
}
