// Products of bf16 weights by instructions for bf16: rows are rounded to bf16, once per operation, in the blocks that the
// instructions read. An element's sum has one order, whatever the number of rows, panels and threads. A unit that defines
// TK_AMX or TK_DOT_BF16 has such products; in the others bf16 weights are widened in registers (matmul.h).
#ifndef TK_ROUNDED_H
#define TK_ROUNDED_H

#include "model_dot.h"
#include "rows.h"

#define PAIR_BYTES (4 * PANEL)
#define GROUP_ROWS (2 * BLOCK_ROWS)  // rows and panels that are multiplied together
#define GROUP_PANELS 4
#define GROUP_COLUMNS (GROUP_PANELS * PANEL)
#define FEW_ROWS 4                   // so few are rounded by every thread for itself: that costs less than a barrier
#define ROUNDED_BYTES 1048576        // of the rows that pass all panels together: half of a core's second cache

// `count` rows of one or two blocks by four panels, in one slice. Rounded rows lie in blocks of 16, all as high as the
// first: in a block 32 columns of every row, row after row, then the next 32. A slice begins with a step of its own; its
// padding is zero. Rows that fill up the last block may hold any values.
struct group {
    const uint16_t *rows;                      // the first step of columns of the first block
    int64_t count, step_values, block_values;  // values from one step, and from one block, to the next
    const char *panels[GROUP_PANELS];          // the last one is repeated where there are fewer
    int64_t pairs;                             // of columns
    float *sums;                               // [GROUP_ROWS][GROUP_COLUMNS], the results
};

#if defined(TK_AMX)
#include "amx.h"
#elif defined(TK_DOT_BF16)
#include "dot_bf16.h"
#else
#define COLUMN_STEP 0  // rows stay fp32
INLINE void begin_products(int64_t height) { (void)height; }
INLINE void sum_group(const struct group *g) { (void)g; }
INLINE void end_products(void) {}
INLINE const char *refusal(void) { return ""; }
#endif

// Returns whether the product with a weight takes rounded rows.
INLINE int takes_rounded(const struct matrix *w) { return COLUMN_STEP && w->format == BF16; }

INLINE int64_t pairs_of_slice(const struct matrix *w) { return w->panel_bytes / (w->slices * PAIR_BYTES); }
INLINE int64_t steps_of_slice(const struct matrix *w) {
    return (w->in / w->slices + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
}
INLINE int64_t block_height(int64_t rows) { return rows < BLOCK_ROWS ? rows : BLOCK_ROWS; }

// The number of values of rounded rows; there is a row.
INLINE int64_t rounded_values(const struct matrix *w, int64_t rows) {
    int64_t height = block_height(rows);
    return (rows + height - 1) / height * height * w->slices * steps_of_slice(w) * BLOCK_COLUMNS;
}

// Rounds 32 values, of which `count` are given, to nearest even; denormal ones become zero.
INLINE void round_line(const float *x, int64_t count, uint16_t *to) {
#if defined(__AVX512BF16__)
    __m512bh line = _mm512_cvtne2ps_pbh(count > VW ? v_load_part(x + VW, count - VW) : v_set1(0.0f),
                                        v_load_part(x, count));
    memcpy(to, &line, sizeof line);
#else
    for (int64_t i = 0; i < BLOCK_COLUMNS; i++) to[i] = i < count ? model_round(x[i]) : 0;
#endif
}

// Rounds rows [first, last) of `rows` rows.
static void round_rows(const struct matrix *w, const float *x, int64_t x_stride, int64_t rows, uint16_t *to,
                       int64_t first, int64_t last) {
    int64_t columns = w->in / w->slices, steps = steps_of_slice(w), height = block_height(rows);
    for (int64_t r = first; r < last; r++)
        for (int64_t i = 0; i < w->slices * steps; i++) {
            int64_t done = i % steps * BLOCK_COLUMNS, left = columns - done;
            int64_t line = (r / height * w->slices * steps + i) * height + r % height;
            round_line(x + r * x_stride + i / steps * columns + done, left < BLOCK_COLUMNS ? left : BLOCK_COLUMNS,
                       to + line * BLOCK_COLUMNS);
        }
}

// Returns the rows as a product with a weight takes them: all threads round their shares and wait for each other, or, of
// few rows, all for themselves. NULL: the product takes the rows as they are.
static const uint16_t *rounded_for(const struct model *m, const struct matrix *w, const float *x, int64_t x_stride,
                                   int64_t rows, int32_t thread) {
    if (!rows || !takes_rounded(w)) return NULL;
    int64_t values = rounded_values(w, rows);
    int alone = rows <= FEW_ROWS && values * m->threads <= m->rounded_values;
    uint16_t *to = m->rounded + (alone ? thread * values : 0);
    struct share mine = alone ? (struct share){0, rows} : share_of(m, rows, thread);
    round_rows(w, x, x_stride, rows, to, mine.first, mine.last);
    if (!alone) tk_barrier(m->pool);
    return to;
}

// Sums `count` rows from row r on, of `rows` rounded ones, times up to four panels in one slice.
static void sum_slice(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t r, int64_t count,
                      const char *panel, int64_t panels, int slice, float *sums) {
    int64_t step = block_height(rows) * BLOCK_COLUMNS, block = w->slices * steps_of_slice(w) * step;
    x += r / BLOCK_ROWS * block + slice * steps_of_slice(w) * step;
    struct group g = {x, count, step, block, {NULL}, pairs_of_slice(w), sums};
    for (int64_t p = 0; p < GROUP_PANELS; p++)
        g.panels[p] = panel + (p < panels ? p : panels - 1) * w->panel_bytes + slice * g.pairs * PAIR_BYTES;
    sum_group(&g);
}

// Adds the slices as a binary tree, the bias and, with `add`, the values that are there: `count` rows of one group.
static void finish_group(const struct matrix *w, float sums[][GROUP_ROWS * GROUP_COLUMNS], int64_t count, int64_t panels,
                         const float *bias, float *out, int64_t out_stride, int add) {
    int64_t width = panels * VECTORS;
    for (int64_t i = 0; i < count * width; i++) {
        float *to = out + i / width * out_stride + i % width * VW;
        vf parts[MAX_SLICES];
        for (int s = 0; s < w->slices; s++) parts[s] = v_load(sums[s] + i / width * GROUP_COLUMNS + i % width * VW);
        for (int step = 1; step < w->slices; step *= 2)
            for (int s = 0; s + step < w->slices; s += 2 * step) parts[s] = parts[s] + parts[s + step];
        if (bias) parts[0] = parts[0] + v_load(bias + i % width * VW);
        if (add) parts[0] = v_load(to) + parts[0];
        v_store(to, parts[0]);
    }
}

// Multiplies rounded rows by panels [first, last) of a weight.
static void multiply_rounded(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t first, int64_t last,
                             float *out, int64_t out_stride, int add) {
    float sums[MAX_SLICES][GROUP_ROWS * GROUP_COLUMNS] __attribute__((aligned(64)));
    int64_t chunk = ROUNDED_BYTES / (2 * w->slices * steps_of_slice(w) * BLOCK_COLUMNS) / GROUP_ROWS * GROUP_ROWS;
    if (chunk < GROUP_ROWS) chunk = GROUP_ROWS;
    begin_products(block_height(rows));
    for (int64_t from = 0; from < rows; from += chunk)
        for (int64_t p = first, panels; p < last; p += panels) {
            panels = last - p < GROUP_PANELS ? last - p : GROUP_PANELS;
            for (int64_t r = from, count; r < rows && r < from + chunk; r += count) {
                count = rows - r < GROUP_ROWS ? rows - r : GROUP_ROWS;
                const char *panel = (const char *)w->data + p * w->panel_bytes;
                for (int s = 0; s < w->slices; s++) sum_slice(w, x, rows, r, count, panel, panels, s, sums[s]);
                finish_group(w, sums, count, panels, w->bias ? w->bias + p * PANEL : NULL,
                             out + r * out_stride + p * PANEL, out_stride, add);
            }
        }
    end_products();
}

// Multiplies one block of rounded rows by panels of a weight; slices stay apart, `apart` floats from one to the next.
static void multiply_apart(const struct matrix *w, const uint16_t *x, int64_t rows, int64_t panels, float *out,
                           int64_t out_stride, int64_t apart) {
    float sums[GROUP_ROWS * GROUP_COLUMNS] __attribute__((aligned(64)));
    begin_products(rows);
    for (int64_t p = 0, count; p < panels; p += count) {
        count = panels - p < GROUP_PANELS ? panels - p : GROUP_PANELS;
        for (int s = 0; s < w->slices; s++) {
            sum_slice(w, x, rows, 0, rows, (const char *)w->data + p * w->panel_bytes, count, s, sums);
            for (int64_t r = 0; r < rows; r++)
                memcpy(out + s * apart + r * out_stride + p * PANEL, sums + r * GROUP_COLUMNS,
                       (size_t)(count * PANEL) * sizeof *out);
        }
    }
    end_products();
}

#endif
