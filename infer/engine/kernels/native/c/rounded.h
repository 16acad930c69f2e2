// Products of bf16 and quantized weights by instructions for bf16: rows are rounded to bf16, once per operation, in the
// blocks that the instructions read. An element's sum has one order, whatever the number of rows, panels and threads. A
// unit that defines TK_AMX or TK_DOT_BF16 has such products; in the others bf16 weights are widened in registers
// (matmul.h).
#ifndef TK_ROUNDED_H
#define TK_ROUNDED_H

#include "rows.h"

#define GROUP_ROWS (2 * BLOCK_ROWS)  // two blocks of rows, which tiles multiply together
#define GROUP_PANELS 4               // panels that are multiplied together
#define STRIPE_ROWS 256              // rows that pass some panels before the next ones are read
#define GROUP_COLUMNS (GROUP_PANELS * PANEL)
#define FEW_ROWS 4             // so few are rounded by every thread for itself: that costs less than a barrier
#define LEAST_ROWS 64          // that pass all panels together
#define ROUNDED_BYTES 1048576  // of the rows that pass all panels together: half of a core's second cache

// `count` rows, at most STRIPE_ROWS, by four panels, in one slice. Rounded rows lie in blocks of 16, all as high as the
// first: in a block 32 columns of every row, row after row, then the next 32. A slice, or a group of codes, begins
// with a step of its own; its padding is zero. Rows that fill up the last block may hold any values.
struct group {
    const uint16_t *rows;                      // the first step of columns of the first block
    int64_t count, step_values, block_values;  // values from one step, and from one block, to the next
    const char *panels[GROUP_PANELS];          // the last one is repeated where there are fewer
    int64_t jump;                              // bytes to the panels that are multiplied next in their places
    int64_t pairs;                             // of columns, of weights in bf16
    float *sums;                               // [STRIPE_ROWS][GROUP_COLUMNS], the results
};
typedef float stripe_sums[STRIPE_ROWS * GROUP_COLUMNS];

#include "coded.h"
#if defined(TK_AMX)
#define HAS_TILES 1
#include "coded_tiles.h"
#elif defined(TK_DOT_BF16)
#include "coded_dot.h"
#else
INLINE void begin_products(int64_t height) { (void)height; }
INLINE void sum_group(const struct group *g) { (void)g; }
INLINE void sum_codes(const struct coded *c) { (void)c; }
INLINE void end_products(void) {}
INLINE const char *refusal(void) { return ""; }
#endif
#ifndef HAS_TILES
#define HAS_TILES 0
#endif

// Returns the rows as a product takes them, unless they arrived so: all threads round their shares, and `shared`
// becomes 1, or, of few rows, all for themselves. NULL: the product takes the rows as they are.
static const uint16_t *rounded_for(const struct model *m, const struct operation *product, const float *x,
                                   int64_t x_stride, int64_t rows, int32_t thread, int *shared) {
    const struct matrix *w = &product->matrix;
    if (arrives_rounded(m, product)) return (const uint16_t *)m->buffers[product->source];
    if (!rows || !takes_rounded(w)) return NULL;
    int64_t values = rounded_values(w, rows);
    int alone = rows <= FEW_ROWS && values * m->threads <= m->rounded_values;
    uint16_t *to = m->rounded + (alone ? thread * values : 0);
    struct share mine = alone ? (struct share){0, rows} : share_of(m, rows, thread);
    round_rows(w, x, x_stride, rows, to, mine.first, mine.last);
    *shared |= !alone;
    return to;
}

// Sums `count` rows from row r on, of `rows` rounded ones, times four panels in one slice.
static void sum_slice(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t r, int64_t count,
                      const char *const panel[GROUP_PANELS], const char *next, int slice, float *sums) {
    int64_t step = block_height(rows) * BLOCK_COLUMNS, block = steps_of_row(w) * step;
    int64_t bytes = w->panel_bytes / w->slices, at = r / BLOCK_ROWS * block + slice * (block / w->slices);
    struct group g = {x + at, count, step, block, {NULL}, next - panel[0], bytes / PAIR_BYTES, sums};
    for (int p = 0; p < GROUP_PANELS; p++) g.panels[p] = panel[p] + slice * bytes;
    if (!has_pairs(w)) {
        sum_group(&g);
        return;
    }
    struct coded c = coded_of(&g, w, row_sums(w, x, rows) + r * sums_of_row(w), slice);
    uint32_t state = flush_denormals();
    sum_codes(&c);
    restore_denormals(state);
}

// Adds the sums of the slices at place i as a binary tree, and the bias.
INLINE vf sum_of_slices(const struct matrix *w, const stripe_sums *sums, int64_t i, const float *bias) {
    vf sum = v_load(sums[0] + i);
    if (w->slices > 1) {
        vf parts[MAX_SLICES];
        for (int s = 0; s < w->slices; s++) parts[s] = v_load(sums[s] + i);
        for (int step = 1; step < w->slices; step *= 2)
            for (int s = 0; s + step < w->slices; s += 2 * step) parts[s] = parts[s] + parts[s + step];
        sum = parts[0];
    }
    if (bias) sum = sum + v_load(bias);
    return sum;
}

// The bias from a column on, or NULL.
INLINE const float *bias_at(const struct matrix *w, int64_t column) { return w->bias ? w->bias + column : NULL; }

INLINE const char *panel_at(const struct matrix *w, int64_t panel) {
    return (const char *)w->data + panel * w->panel_bytes;
}

// The rounded rows that pass all panels together: they stay in a core's second cache, unless they would be very few.
INLINE int64_t rounded_rows_together(const struct matrix *w) {
    int64_t rows = ROUNDED_BYTES / (2 * steps_of_row(w) * BLOCK_COLUMNS) / GROUP_ROWS * GROUP_ROWS;
    if (rows < LEAST_ROWS) return LEAST_ROWS;
    return rows < STRIPE_ROWS ? rows : rows / STRIPE_ROWS * STRIPE_ROWS;
}

// Multiplies `count` rows from row `from` on, of `rows` rounded ones, by panels [first, last) of a weight.
static void multiply_rounded(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t from, int64_t count,
                             int64_t first, int64_t last, float *out, int64_t out_stride, int add,
                             const struct addition *addition) {
    stripe_sums sums[MAX_SLICES] __attribute__((aligned(64)));
    begin_products(block_height(rows));
    for (int64_t p = first, panels; p < last; p += panels) {
        panels = last - p < GROUP_PANELS ? last - p : GROUP_PANELS;
        const char *panel[GROUP_PANELS], *next = panel_at(w, p + panels);
        for (int64_t i = 0; i < GROUP_PANELS; i++) panel[i] = panel_at(w, p + (i < panels ? i : panels - 1));
        for (int64_t r = from, part; r < from + count; r += part) {
            part = from + count - r < STRIPE_ROWS ? from + count - r : STRIPE_ROWS;
            for (int s = 0; s < w->slices; s++) {
                sum_slice(w, x, rows, r, part, panel, next, s, sums[s]);
                add_adapters(addition, s, r, part, p, p + panels, sums[s], GROUP_COLUMNS);
            }
            for (int64_t i = 0; i < part; i++)
                for (int64_t c = 0; c < panels * PANEL; c += VW) {
                    float *to = out + (r + i) * out_stride + p * PANEL + c;
                    vf sum = sum_of_slices(w, sums, i * GROUP_COLUMNS + c, bias_at(w, p * PANEL + c));
                    if (add) sum = v_load(to) + sum;
                    v_store(to, sum);
                }
        }
    }
    end_products();
}

// The same by panels [first, last) of gate, and by those of up, `apart` panels behind them; stores the gated products
// alone, rounded if the product that follows takes them so.
static void multiply_gated(const struct model *m, const struct operation *op, const uint16_t *x, int64_t from,
                           int64_t count, int64_t first, int64_t last, const struct addition *addition) {
    const struct matrix *w = &op->matrix, *following = arrives_rounded(m, op + 2) ? &op[2].matrix : NULL;
    int64_t rows = m->step.tokens, apart = (w->out + PANEL - 1) / PANEL / 2;
    stripe_sums sums[MAX_SLICES] __attribute__((aligned(64)));
    begin_products(block_height(rows));
    for (int64_t p = first; p < last; p += 2) {
        int64_t panels = last - p < 2 ? 1 : 2, second = p + panels - 1;
        const char *panel[GROUP_PANELS] = {panel_at(w, p), panel_at(w, second), panel_at(w, apart + p),
                                           panel_at(w, apart + second)};
        const char *next = panel_at(w, p + panels);
        for (int64_t r = from, part; r < from + count; r += part) {
            part = from + count - r < STRIPE_ROWS ? from + count - r : STRIPE_ROWS;
            for (int s = 0; s < w->slices; s++) {
                sum_slice(w, x, rows, r, part, panel, next, s, sums[s]);
                add_adapters(addition, s, r, part, p, p + panels, sums[s], GROUP_COLUMNS);
                add_adapters(addition, s, r, part, apart + p, apart + p + panels, sums[s] + 2 * PANEL, GROUP_COLUMNS);
            }
            for (int64_t i = 0; i < part; i++)
                for (int64_t c = 0; c < panels * PANEL; c += VW) {
                    int64_t at = i * GROUP_COLUMNS + c;
                    vf gate = sum_of_slices(w, sums, at, bias_at(w, p * PANEL + c));
                    vf up = sum_of_slices(w, sums, at + 2 * PANEL, bias_at(w, (apart + p) * PANEL + c));
                    vf gated = activate(0, gate, up);
                    if (following)
                        store_rounded(gated, rounded_at(following, m->buffers[GATED], rows, r + i, p * PANEL + c));
                    else v_store(row(m, GATED, r + i) + p * PANEL + c, gated);
                }
        }
    }
    end_products();
}

// Multiplies one block of rounded rows by panels of a weight; slices stay apart, `apart` floats from one to the next.
static void multiply_apart(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t panels, float *out,
                           int64_t out_stride, int64_t apart) {
    float sums[BLOCK_ROWS * GROUP_COLUMNS] __attribute__((aligned(64)));
    begin_products(rows);
    for (int64_t p = 0, count; p < panels; p += count) {
        count = panels - p < GROUP_PANELS ? panels - p : GROUP_PANELS;
        const char *panel[GROUP_PANELS];
        for (int64_t i = 0; i < GROUP_PANELS; i++) panel[i] = panel_at(w, p + (i < count ? i : count - 1));
        for (int s = 0; s < w->slices; s++) {
            sum_slice(w, x, rows, 0, rows, panel, panel[0], s, sums);
            for (int64_t r = 0; r < rows; r++)
                memcpy(out + s * apart + r * out_stride + p * PANEL, sums + r * GROUP_COLUMNS,
                       (size_t)(count * PANEL) * sizeof *out);
        }
    }
    end_products();
}

#endif
