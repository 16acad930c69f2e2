// Rows that are rounded to bf16 for products by instructions for bf16, in the blocks that the instructions read.
#ifndef TK_ROUNDING_H
#define TK_ROUNDING_H

#include "model_dot.h"
#include "shares.h"

#define PAIR_BYTES (4 * PANEL)
#if defined(TK_AMX)
#define COLUMN_STEP 32  // columns that an element's sum takes together
#elif defined(TK_DOT_BF16)
#define COLUMN_STEP 2
#else
#define COLUMN_STEP 0  // rows stay fp32
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
    __m512bh line =
        _mm512_cvtne2ps_pbh(count > VW ? v_load_part(x + VW, count - VW) : v_set1(0.0f), v_load_part(x, count));
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

// Rounds a vector as round_line does.
INLINE void store_rounded(vf v, uint16_t *to) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh(v);
    memcpy(to, &rounded, sizeof rounded);
#else
    float values[VW];
    v_store(values, v);
    for (int i = 0; i < VW; i++) to[i] = model_round(values[i]);
#endif
}

// Where columns [column, column + PANEL) of row r of `rows` rounded ones lie, for a weight whose slices are whole
// steps.
INLINE uint16_t *rounded_at(const struct matrix *w, void *rounded, int64_t rows, int64_t r, int64_t column) {
    int64_t height = block_height(rows), steps = w->in / BLOCK_COLUMNS;
    int64_t line = (r / height * steps + column / BLOCK_COLUMNS) * height + r % height;
    return (uint16_t *)rounded + line * BLOCK_COLUMNS + column % BLOCK_COLUMNS;
}

// Whether the operation before a product writes its rows rounded to their buffer, so that nothing is left to prepare.
INLINE int arrives_rounded(const struct model *m, const struct operation *product) {
    const struct matrix *w = &product->matrix;
    if (product->adapters && m->step.num_adapted) return 0;  // their factors take rows of fp32
    if (product->kind != MULTIPLY || !takes_rounded(w) || w->in / w->slices % BLOCK_COLUMNS) return 0;
    if (product->source == NORMED) return product[-1].kind == NORM && !norms_for_itself(m, product - 1);
    if (product->source == ATTENDED) return m->head_dim % BLOCK_COLUMNS == 0;
    return product[-1].variant == 0 && takes_rounded(&product[-2].matrix);  // gate and up are multiplied together
}

#endif
