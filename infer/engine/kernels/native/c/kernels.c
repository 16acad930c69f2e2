// One instruction set's kernels: the whole step, carried out by every thread of the pool. The build compiles this file
// once per instruction set, with its flags and its TK_NAME.
#define _GNU_SOURCE  // syscall, in amx.h
#include "attention.h"
#include "experts.h"
#include "given_tokens.h"
#include "link.h"

#define JOIN(a, b) a##b
#define NAMED(a, b) JOIN(a, b)

#define TAKEN_ROWS 24   // a thread takes about as many rows times panels at once, but no more than TAKEN_PANELS panels
#define TAKEN_PANELS 4  // which a tile of one row multiplies side by side

// The panels that a thread takes at once. Many rounded rows pass all of them together: they are taken by eighths of a
// share.
static int64_t panels_to_take(const struct model *m, int64_t rows, int64_t panels, int are_rounded) {
    if (!are_rounded)
        return rows * TAKEN_PANELS <= TAKEN_ROWS ? TAKEN_PANELS : rows < TAKEN_ROWS ? TAKEN_ROWS / rows : 1;
    int64_t eighth = panels / (8 * m->threads) / GROUP_PANELS * GROUP_PANELS;
    return rows <= GROUP_ROWS || eighth < GROUP_PANELS ? GROUP_PANELS : eighth;
}

// Multiplies some rows by `panels` panels of A of their adapter, from panel number n of its slices on, and scales them.
static void multiply_low(const struct model *m, const struct adapter *adapter, const float *x, int64_t x_stride,
                         int64_t r, int64_t rows, int64_t n, int64_t panels) {
    const struct matrix *w = &adapter->down;
    int64_t all = (w->out + PANEL - 1) / PANEL, slice = n / all, panel = n % all, columns = w->in / w->slices;
    float *to = m->low + r * m->low_stride + n * PANEL;
    multiply_panels(w->format, x + r * x_stride + slice * columns, x_stride, rows,
                    (const char *)w->data + panel * w->panel_bytes + slice * (w->panel_bytes / w->slices),
                    w->panel_bytes, panels, (columns + 1) / 2, to, m->low_stride, NULL, 0);
    for (; rows--; to += m->low_stride)
        for (int64_t c = 0; c < panels * PANEL; c += VW)
            v_store(to + c, v_load(to + c) * v_load(adapter->scales + panel * PANEL + c));
}

// Whether rows of the step have an adapter beside a weight.
INLINE int is_adapted(const struct model *m, const struct operation *op) { return op->adapters && m->step.num_adapted; }

// Multiplies the rows that have an adapter by A of their own, each slice on its own. Threads take tiles in turn: of few
// rows several panels side by side, whose sums hide the latency of a fused product.
static void multiply_downs(const struct model *m, const struct operation *op, const float *x, int64_t x_stride,
                           int32_t thread) {
    int64_t tiles = 0;
    for (int64_t i = 0; is_adapted(m, op) && i < m->step.num_adapted; i++) {
        const struct adapted_rows *held = &m->step.adapted[i];
        const struct adapter *adapter = op->adapters + held->slot;
        int64_t panels = (adapter->down.out + PANEL - 1) / PANEL, parts = panels * adapter->down.slices;
        int64_t wide = held->last - held->first <= 2 ? TAKEN_PANELS : 1;
        for (int64_t n = 0, some; n < parts; n += some) {
            some = least(wide, panels - n % panels);
            for (int64_t r = held->first, count; r < held->last; r += count) {
                count = rows_of_tile(held->last - r);
                if (tiles++ % m->threads == thread) multiply_low(m, adapter, x, x_stride, r, count, n, some);
            }
        }
    }
}

// Multiplies rows by the weight of an operation, and by the adapters beside it. Threads take panels, of gate and up
// each a pair, as they become free, one block of rows after the other, and apply the activation to what they have
// multiplied. They wait for what others have prepared just before they read it.
static void product(const struct model *m, const struct operation *op, const float *x, int64_t x_stride, int64_t rows,
                    float *out, int64_t out_stride, int32_t thread) {
    if (!rows) return;
    const struct matrix *w = &op->matrix;
    int shared = 0;
    multiply_downs(m, op, x, x_stride, thread);
    const uint16_t *rounded = rounded_for(m, op, x, x_stride, rows, thread, &shared);
    const float *spread = spread_for(m, w, x, x_stride, rows, thread, &shared);
    struct addition adapted = {.model = m, .adapters = op->adapters}, *addition = is_adapted(m, op) ? &adapted : NULL;
    if (addition || shared) adapted.arrival = tk_arrive(m->pool);
    if (shared) tk_await(m->pool, adapted.arrival);
    const struct operation *gate = gates(op) ? op + 1 : NULL;
    int64_t groups = gate && gate->variant == 0 ? 2 : 1, units = (w->out + PANEL - 1) / PANEL / groups;
    int64_t block = least(rows, rounded ? rounded_rows_together(w) : rows_together(w->in, rows));
    int64_t most = panels_to_take(m, rows, units, rounded != NULL);
    struct division division = tk_divide(m->pool, thread, (rows + block - 1) / block * units);
    for (int64_t first, last, next; tk_take(&division, most, &first, &last);)
        for (; first < last; first = next) {
            int64_t r = first / units * block, count = least(block, rows - r), low = first % units;
            next = least(last, first - low + units);
            if (rounded && groups == 2) {
                multiply_gated(m, op, rounded, r, count, low, low + next - first, addition);
                continue;
            }
            for (int64_t g = 0; g < groups; g++) {
                int64_t from = g * units + low, to = from + next - first;
                adapted.row = rounded ? 0 : r;  // rounded rows are counted from the step's first
                if (rounded) multiply_rounded(w, rounded, rows, r, count, from, to, out, out_stride, op->add, addition);
                else if (spread)
                    multiply_spread(w, spread + r * spread_floats(w), count, from, to, out + r * out_stride, out_stride,
                                    op->add, addition);
                else
                    multiply(w, x + r * x_stride, x_stride, count, out + r * out_stride, out_stride, op->add, from, to,
                             addition);
            }
            if (gate) gate_panels(m, gate, r, r + count, low, low + next - first);
        }
    if (addition) tk_await(m->pool, adapted.arrival);  // a thread that found nothing to add, too
}

static void multiply_rows(const struct model *m, const struct operation *op, int32_t thread) {
    const float *x = op->source == NORMED ? normed(m, op, thread) : m->buffers[op->source];
    product(m, op, x, m->strides[op->source], m->step.tokens, m->buffers[op->target], m->strides[op->target], thread);
}

// Multiplies wanted rows [first, last), of those whose logits are computed, by a head: the operation's, or another one.
static void multiply_head(const struct model *m, const struct operation *op, const struct matrix *w, int64_t first,
                          int64_t last, int32_t thread) {
    const float *x = normed(m, op, thread) + (m->head_first + first) * m->strides[NORMED];
    float *out = row(m, LOGITS, first) + m->rank * ((w->out + PANEL - 1) / PANEL * PANEL);
    struct operation by = *op;
    by.matrix = *w;
    product(m, &by, x, m->strides[NORMED], last - first, out, m->strides[LOGITS], thread);
}

// The slot of the adapter whose own head a wanted row is multiplied by; -1: it is the model's.
static int32_t slot_of_head(const struct model *m, const struct operation *op, int64_t index) {
    int32_t slot = op->heads ? slot_of(m, m->step.rows[m->head_first + index]) : -1;
    return slot < 0 || !op->heads[slot].data ? -1 : slot;
}

// All rows are multiplied by the model's head, whose weights are read once, and then rows of adapters with a head by
// theirs, in place of that, as long as the next row has the same.
static void head(const struct model *m, const struct operation *op, int32_t thread) {
    int64_t rows = m->head_count, plain = 0;
    for (int64_t i = 0; i < rows; i++) plain += slot_of_head(m, op, i) < 0;
    if (plain) multiply_head(m, op, &op->matrix, 0, rows, thread);
    for (int64_t first = 0, last; plain < rows && first < rows; first = last) {
        int32_t slot = slot_of_head(m, op, first);
        for (last = first + 1; last < rows && slot_of_head(m, op, last) == slot;) last++;
        if (slot < 0) continue;
        tk_barrier(m->pool);  // the prepared rows of all products have one place
        multiply_head(m, op, &op->heads[slot], first, last, thread);
    }
}

static void run_operation(struct model *m, const struct operation *op, int32_t thread) {
    switch (op->kind) {
        case EMBED: embed(m, op, thread); break;
        case NORM: norm(m, op, thread); break;
        case MULTIPLY: multiply_rows(m, op, thread); break;
        case APPEND: append(m, op, thread); break;
        case ATTEND: attend(m, op, thread); break;
        case GATE:
            if (!gates(op - 1)) gate(m, op, thread);
            break;
        case ROUTE:
            multiply_rows(m, op, thread);
            tk_barrier(m->pool);
            route(m, op, thread);
            break;
        case EXPERTS: experts(m, op, thread); break;
        case REDUCE: reduce(m, op, thread); break;
        case HEAD: head(m, op, thread); break;
    }
}

// Moves the parts of a row that the ranks computed together, where they are padded.
static void close_gaps(const struct model *m, int64_t index) {
    int64_t out = m->operations[m->num_operations - 1].matrix.out, padded = (out + PANEL - 1) / PANEL * PANEL;
    float *logits = row(m, LOGITS, index);
    for (int32_t r = 1; out != padded && r < m->tp; r++)
        memmove(logits + r * out, logits + r * padded, (size_t)out * sizeof *logits);
}

// Samples this rank's share of the rows, which its threads take one by one; a row's result depends on that row alone.
static void sample(struct model *m, int32_t thread) {
    struct sampling *s = m->sampling;
    for (;;) {
        int64_t index = m->rank + (int64_t)m->tp * __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (index >= m->head_count) return;
        if (!s->again) close_gaps(m, index);
        s->rows(s->batch, index, index + 1, s->scratch + thread * s->scratch_bytes);
    }
}

// Waits for the logits of all ranks; samples, and waits for the results of all ranks.
static void finish_head(struct model *m, int32_t thread) {
    if (m->tp == 1 && !m->sampling) return;
    if (thread == 0 && m->sampling) m->sampling->next = 0;
    meet_all(m, thread);
    if (!m->sampling) return;
    sample(m, thread);
    if (m->tp > 1) meet_all(m, thread);
}

static void run_step(void *argument, int32_t thread) {
    struct model *m = argument;
    clear_blocks(m, thread);
    rotations(m, thread);
    for (int64_t i = 0; i < m->num_operations; i++) {
        if (thread == 0 && m->operations[i].kind == ATTEND) m->counter = 0;
        if (i && !needs_no_barrier(m, &m->operations[i - 1])) tk_barrier(m->pool);
        run_operation(m, &m->operations[i], thread);
    }
    finish_head(m, thread);
}

static void run_head(void *argument, int32_t thread) {
    struct model *m = argument;
    if (m->tp > 1) {  // every rank has read the logits, or the results, before
        if (thread == 0) meet(m);
        tk_barrier(m->pool);
    }
    head(m, &m->operations[m->num_operations - 1], thread);
    finish_head(m, thread);
}

static void run_sample(void *argument, int32_t thread) {
    struct model *m = argument;
    sample(m, thread);
    if (m->tp > 1) meet_all(m, thread);
}

// Computes m->step, and the logits of its first m->head_count wanted rows; sends their samples, if m->channel is given.
__attribute__((visibility("default"))) void NAMED(tk_step_, TK_NAME)(struct model *m) {
    refresh(m);
    tk_pool_run(m->pool, run_step, m);
    if (m->channel) send_result(m, m->channel);  // the worker sees the end of the engine, too
}

struct sampled_again {
    struct model *model;
    struct masked masked;
};

static void run_sample_again(void *argument, int32_t thread) {
    const struct sampled_again *a = argument;
    struct model *m = a->model;
    struct sampling *s = m->sampling;
    for (int64_t i;
         i = m->rank + (int64_t)m->tp * __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED), i < a->masked.count;)
        s->rows(s->batch, a->masked.rows[i], a->masked.rows[i] + 1, s->scratch + thread * s->scratch_bytes);
    if (m->tp > 1) meet_all(m, thread);
}

// Takes masks, and samples their rows with them; returns 0 if the engine has ended.
static int sample_again(struct model *m, const struct channel *c) {
    struct sampled_again again = {.model = m};
    const struct masked *masked = &again.masked;
    char *body = consume_masks(c, &again.masked);
    if (!body) return 0;
    int32_t before = masked->count ? c->mask[masked->rows[0]] : 0;  // of each of them: it has candidates
    for (int32_t i = 0; i < masked->count; i++) c->mask[masked->rows[i]] = i;
    *c->masks = masked->masks, *c->mask_stride = masked->words;
    m->sampling->next = 0;
    tk_pool_run(m->pool, run_sample_again, &again);
    for (int32_t i = 0; i < masked->count; i++) c->mask[masked->rows[i]] = before;
    *c->masks = NULL;
    free(body);
    return 1;
}

// Waits for the tokens that the engine chooses among candidates, and samples rows again if it sends masks before;
// returns 0 if another message comes, which is left, or the end.
static int receive_tokens(struct model *m, const struct channel *c) {
    for (;;) {
        enum reply reply = next_reply(c);
        if (reply == CHOSEN) return consume_tokens(c, &m->step);
        if (reply == OTHER || !sample_again(m, c) || !send_result(m, c)) return 0;
    }
}

// Decodes ahead from the last step, each sequence of which sampled a token; returns the number of further steps.
__attribute__((visibility("default"))) int32_t NAMED(tk_decode_ahead_, TK_NAME)(struct model *m, struct channel *c) {
    int32_t steps = 0;
    c->has_next = c->num_added = c->has_left = 0;
    for (int64_t body; (body = peek_step(c)) > 0;) {
        if (consume_next_step(m, c, body)) {
            if (c->num_candidates && !receive_tokens(m, c)) {
                c->has_next = 1;
                break;
            }
            advance(m, c);
        } else if (!consume_given(m, c, body)) break;
        tk_pool_run(m->pool, run_step, m);
        steps++;
        if (!send_result(m, c)) break;  // the worker sees the end, too
    }
    return steps;
}

// Computes the logits of further wanted rows of the last step: m->head_count of them from m->head_first on.
__attribute__((visibility("default"))) void NAMED(tk_head_, TK_NAME)(struct model *m) {
    tk_pool_run(m->pool, run_head, m);
}

// Samples the m->head_count rows whose logits were computed last without sampling; waits for the results of all ranks.
__attribute__((visibility("default"))) void NAMED(tk_sample_, TK_NAME)(struct model *m) {
    m->sampling->next = 0;
    tk_pool_run(m->pool, run_sample, m);
}

// A product alone, for tests: rows of x by a packed weight.
__attribute__((visibility("default"))) void NAMED(tk_multiply_, TK_NAME)(const struct matrix *w, const float *x,
                                                                         int64_t x_stride, int64_t rows, float *out,
                                                                         int64_t out_stride) {
    int64_t panels = (w->out + PANEL - 1) / PANEL;
    if (takes_spread(w)) {
        float *spread = calloc((size_t)(rows * spread_floats(w)), sizeof *spread);
        for (int64_t r = 0; r < rows; r++) spread_row(w, x + r * x_stride, spread + r * spread_floats(w));
        multiply_spread(w, spread, rows, 0, panels, out, out_stride, 0, NULL);
        free(spread);
    } else if (takes_rounded(w)) {
        uint16_t *rounded = calloc((size_t)rounded_values(w, rows), sizeof *rounded);
        round_rows(w, x, x_stride, rows, rounded, 0, rows);
        multiply_rounded(w, rounded, rows, 0, rows, 0, panels, out, out_stride, 0, NULL);
        free(rounded);
    } else multiply(w, x, x_stride, rows, out, out_stride, 0, 0, panels, NULL);
}

// The columns that a sum of bf16 products takes together, to a multiple of which a slice is packed; 0 if rows stay
// fp32.
__attribute__((visibility("default"))) int32_t NAMED(tk_column_step_, TK_NAME)(void) { return COLUMN_STEP; }

// The reason why this machine must not use the kernels; "" if there is none. Called before threads start.
__attribute__((visibility("default"))) const char *NAMED(tk_refusal_, TK_NAME)(void) { return refusal(); }
