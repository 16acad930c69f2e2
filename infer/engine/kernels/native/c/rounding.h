// Rows that are rounded to bf16 for products by instructions for bf16, in the blocks that the instructions read.
#ifndef TK_ROUNDING_H
#define TK_ROUNDING_H

#include "codes.h"
#include "model_dot.h"
#include "shares.h"

#define PAIR_BYTES (4 * PANEL)
typedef uint32_t pairs_vector __attribute__((vector_size(4 * VW), may_alias));
#if defined(TK_AMX)
#define COLUMN_STEP 32  // columns that an element's sum takes together
#elif defined(TK_DOT_BF16)
#define COLUMN_STEP 2
#else
#define COLUMN_STEP 0  // rows stay fp32
#endif

// Returns whether the product with a weight takes rounded rows.
INLINE int takes_rounded(const struct matrix *w) { return COLUMN_STEP && (w->format == BF16 || has_pairs(w)); }

// A rounded row is cut where a weight's sums begin anew: into slices, for codes into groups. Each part is padded.
INLINE int64_t parts_of(const struct matrix *w) { return has_pairs(w) ? groups_in(w) : w->slices; }
INLINE int64_t steps_of_part(const struct matrix *w) {
    return (w->in / parts_of(w) + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
}
INLINE int64_t steps_of_row(const struct matrix *w) { return parts_of(w) * steps_of_part(w); }
INLINE int64_t block_height(int64_t rows) { return rows < BLOCK_ROWS ? rows : BLOCK_ROWS; }

// The number of values of whole blocks of rows; there is a row.
INLINE int64_t block_values(const struct matrix *w, int64_t rows) {
    int64_t height = block_height(rows);
    return (rows + height - 1) / height * height * steps_of_row(w) * BLOCK_COLUMNS;
}

// Behind the blocks of rows for codes of 4 bits lie the sums of each row's groups, fp32: a row's floats; 0 without.
INLINE int64_t sums_of_row(const struct matrix *w) {
    return w->format == PAIRS4 ? (groups_in(w) + PANEL - 1) / PANEL * PANEL : 0;
}
INLINE const float *row_sums(const struct matrix *w, const uint16_t *rounded, int64_t rows) {
    return (const float *)(rounded + block_values(w, rows));
}

// The room for rounded rows and their sums, in values of bf16.
INLINE int64_t rounded_values(const struct matrix *w, int64_t rows) {
    return block_values(w, rows) + 2 * rows * sums_of_row(w);
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

// Adds a rounded line to 16 sums, of each pair of columns the even one first. Units with such rows have VW == 16.
INLINE vf add_line(vf sums, const uint16_t *line) {
    vi pairs;
    memcpy(&pairs, line, sizeof pairs);
    return sums + (vf)(pairs << 16) + v_high_halves(pairs);
}

// Rounds rows [first, last) of `rows` rows, and sums their groups for codes of 4 bits.
static void round_rows(const struct matrix *w, const float *x, int64_t x_stride, int64_t rows, uint16_t *to,
                       int64_t first, int64_t last) {
    int64_t columns = w->in / parts_of(w), steps = steps_of_part(w), height = block_height(rows);
    int64_t wanted = sums_of_row(w);
    float *group_sums = (float *)(to + block_values(w, rows));
    for (int64_t r = first; r < last; r++)
        for (int64_t part = 0; part < parts_of(w); part++) {
            vf sums = v_set1(0.0f);
            for (int64_t i = 0; i < steps; i++) {
                int64_t done = i * BLOCK_COLUMNS, left = columns - done;
                int64_t line = (r / height * steps_of_row(w) + part * steps + i) * height + r % height;
                round_line(x + r * x_stride + part * columns + done, left < BLOCK_COLUMNS ? left : BLOCK_COLUMNS,
                           to + line * BLOCK_COLUMNS);
                if (wanted) sums = add_line(sums, to + line * BLOCK_COLUMNS);
            }
            if (wanted) group_sums[r * wanted + part] = v_sum(sums);
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
    if (product->kind != MULTIPLY || !takes_rounded(w) || w->in / parts_of(w) % BLOCK_COLUMNS) return 0;
    if (sums_of_row(w)) return 0;  // which are made as rows are rounded
    if (product->source == NORMED) return product[-1].kind == NORM && !norms_for_itself(m, product - 1);
    if (product->source == ATTENDED) return m->head_dim % BLOCK_COLUMNS == 0;
    return product[-1].variant == 0 && takes_rounded(&product[-2].matrix);  // gate and up are multiplied together
}

#endif
