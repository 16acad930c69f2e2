// Products of rows of fp32 with quantized weights (codes.h). Only weights are quantized: a code is widened exactly, and
// an element of the result is a sum in fp32. In models in bf16 on instructions for bf16, coded.h has such products.
//
// A lane of a line has 4 or 8 codes of consecutive columns. A code is widened where it lies in the lane: one mask, one
// conversion. It then counts 2^bits times as much per place, so the row's values are multiplied before by as many
// powers of two, which is exact. The code of the last column is shifted down instead.
//
// The order of an element's sum: in each group one chain of fused products over the columns, times the scale; the
// minimum times the sum of the row's values; groups ascending. Rows, panels and threads change nothing.
#ifndef TK_QUANTIZED_H
#define TK_QUANTIZED_H

#include "codes.h"
#include "shares.h"

#define FEW_SPREAD_ROWS 4  // so few are spread by every thread for itself: that costs less than a barrier
#define SPREAD_ROWS 6      // of a tile, on every instruction set: more would take long to compile
#define FETCHED_LINES 8    // that tiles of several panels fetch before their turn
typedef uint32_t vu __attribute__((vector_size(4 * VW), may_alias));

// Whether products with a weight take rows of fp32 that are spread.
INLINE int takes_spread(const struct matrix *w) { return is_quantized(w) && !has_pairs(w); }

// The floats of a row as products take it: the values of each group with its padding, then the groups' sums.
INLINE int64_t spread_floats(const struct matrix *w) {
    return (groups_in(w) * (room_of(w) + 1) + PANEL - 1) / PANEL * PANEL;
}

static void spread_row(const struct matrix *w, const float *x, float *to) {
    int64_t places = 32 / bits_of(w), room = room_of(w);
    float powers[VW], power = 1.0f;
    for (int64_t i = 0; i < VW; i++, power = i % places ? power / (float)(1 << bits_of(w)) : 1.0f)
        powers[i] = i % places == places - 1 ? 1.0f : power;
    vf factors = v_load(powers);
    float *sums = to + groups_in(w) * room;
    for (int64_t g = 0; g < groups_in(w); g++, x += w->group, to += room) {
        vf sum = v_set1(0.0f);
        for (int64_t i = 0; i < room; i += VW) {
            vf values = i < w->group ? v_load_part(x + i, w->group - i) : v_set1(0.0f);
            sum = sum + values;
            v_store_part(to + i, values * factors, room - i);
        }
        sums[g] = v_sum(sum);
    }
}

// Returns the rows as products with a quantized weight take them: all threads spread their shares, and `shared` becomes
// 1, or, of few rows, all for themselves. NULL: it takes others.
static const float *spread_for(const struct model *m, const struct matrix *w, const float *x, int64_t x_stride,
                               int64_t rows, int32_t thread, int *shared) {
    if (!rows || !takes_spread(w)) return NULL;
    int64_t floats = spread_floats(w);
    int alone = rows <= FEW_SPREAD_ROWS && 2 * rows * floats * m->threads <= m->rounded_values;
    float *to = (float *)m->rounded + (alone ? thread * rows * floats : 0);
    struct share mine = alone ? (struct share){0, rows} : share_of(m, rows, thread);
    for (int64_t r = mine.first; r < mine.last; r++) spread_row(w, x + r * x_stride, to + r * floats);
    *shared |= !alone;
    return to;
}

// The code of a lane's column `place` times 2^(bits * place), of the last column times 1. Where sums fill the
// registers, the mask is a memory operand: in a register of its own it would spill a sum.
#define MASK(bits, place) EVERY_LANE(((1u << bits) - 1) << (bits * place))
static const uint32_t CODES8_MASKS[3][VW] = {MASK(8, 0), MASK(8, 1), MASK(8, 2)};
static const uint32_t CODES4_MASKS[7][VW] = {MASK(4, 0), MASK(4, 1), MASK(4, 2), MASK(4, 3),
                                             MASK(4, 4), MASK(4, 5), MASK(4, 6)};
INLINE vf widened(const int bits, const int full, const char *from, const int place) {
    vi line;
    memcpy(&line, from, sizeof line);
    if (place == 32 / bits - 1) return vi_to_float((vi)((vu)line >> (32 - bits)));
    (void)full;  // only AVX2 has so few registers
#if defined(TK_AVX2)
    if (full) {
        const uint32_t (*mask)[VW] = bits == 8 ? &CODES8_MASKS[place] : &CODES4_MASKS[place];
        __asm__("vpand %2, %1, %0" : "=x"(line) : "x"(line), "m"(*mask));
        return vi_to_float(line);
    }
#endif
    return vi_to_float(line & vi_set1(((1 << bits) - 1) << (bits * place)));
}

INLINE vf scales_at(const int bits, const char *header) {
    vi both;
    memcpy(&both, header, sizeof both);
    if (bits == 8) return (vf)both;
    return (vf)(both << 16);
}
INLINE vf minima_at(const int bits, const char *header) {
    vi both;
    memcpy(&both, header, sizeof both);
    if (bits == 8) return (vf)both * v_set1(-(float)OFFSET);
    return v_high_halves(both);
}

// Spread rows of one slice, and where its groups begin in the panels.
struct spread {
    const float *values, *sums;
    int64_t row_floats;  // from one row to the next
    const char *panel;
    int64_t panel_bytes, groups, lines, bytes;
};

#define TILE_VECTORS 12  // of sums, at most

// out[r][p * PANEL + c] = row r times column c of panel p in one slice, for `rows` rows and `panels` panels, constants
// as is `bits`.
INLINE void spread_tile(const int rows, const int panels, const int bits, const struct spread *s, float *out,
                        int64_t out_stride) {
    const int places = 32 / bits;
    vf totals[TILE_VECTORS];
#pragma GCC unroll 24
    for (int i = 0; i < rows * panels * VECTORS; i++) totals[i] = v_set1(0.0f);
    const char *panel = s->panel;
    const int64_t groups = s->groups;
    const float *x = s->values, *x_sums = s->sums;
    const int64_t panel_bytes = s->panel_bytes, row_floats = s->row_floats, bytes = s->bytes, lines = s->lines;
    for (int64_t g = 0; g < groups; g++, panel += bytes) {
        vf sums[TILE_VECTORS];
#pragma GCC unroll 24
        for (int i = 0; i < rows * panels * VECTORS; i++) sums[i] = v_set1(0.0f);
        // Few rows wait for memory. The last lines of these panels are followed by the first of the next ones.
        int64_t left = (groups - g) * bytes - FETCHED_LINES * LINE_BYTES;
        int64_t next = panels == 1 ? panel_bytes : FETCHED_LINES * LINE_BYTES;
        if (panels > 1 && left <= 0) next += (panels - 1) * panel_bytes;
        for (int64_t l = 1; l <= lines; l++, x += places) {
            const char *line = panel + l * LINE_BYTES;
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) __builtin_prefetch(line + p * panel_bytes + next);
#pragma GCC unroll 8
            for (int j = 0; j < places; j++) {
                vf codes[4 * VECTORS];
#pragma GCC unroll 8
                for (int i = 0; i < panels * VECTORS; i++)
                    codes[i] = widened(bits, rows > 2, line + i / VECTORS * panel_bytes + i % VECTORS * 4 * VW, j);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    vf value = v_set1(x[r * row_floats + j]);
#pragma GCC unroll 8
                    for (int i = 0; i < panels * VECTORS; i++)
                        sums[r * panels * VECTORS + i] = v_fma(value, codes[i], sums[r * panels * VECTORS + i]);
                }
                // Lines are loaded again for every place: kept in registers they would spill sums.
                __asm__ volatile("" ::: "memory");
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < panels * VECTORS; i++) {
            const char *header = panel + i / VECTORS * panel_bytes + i % VECTORS * 4 * VW;
            vf scales = scales_at(bits, header), minima = minima_at(bits, header);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                vf *total = &totals[r * panels * VECTORS + i];
                *total = v_fma(scales, sums[r * panels * VECTORS + i], *total);
                *total = v_fma(minima, v_set1(x_sums[r * row_floats + g]), *total);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < panels * VECTORS; i++)
            v_store(out + r * out_stride + i * VW, totals[r * panels * VECTORS + i]);
}

typedef void (*spread_function)(const struct spread *s, float *out, int64_t out_stride);
#define SPREAD_TILE(rows, panels, bits)                                                                     \
    static void spread_##bits##_##rows##_##panels(const struct spread *s, float *out, int64_t out_stride) { \
        spread_tile(rows, panels, bits, s, out, out_stride);                                                \
    }
#define SPREAD_TILES(bits)  \
    SPREAD_TILE(1, 4, bits) \
    SPREAD_TILE(1, 2, bits) \
    SPREAD_TILE(2, 2, bits) \
    SPREAD_TILE(1, 1, bits) \
    SPREAD_TILE(2, 1, bits) \
    SPREAD_TILE(3, 1, bits) \
    SPREAD_TILE(4, 1, bits) \
    SPREAD_TILE(5, 1, bits) \
    SPREAD_TILE(6, 1, bits)
#define SPREAD_NARROW(bits)                                                                                  \
    spread_##bits##_1_1, spread_##bits##_2_1, spread_##bits##_3_1, spread_##bits##_4_1, spread_##bits##_5_1, \
        spread_##bits##_6_1
SPREAD_TILES(8)
SPREAD_TILES(4)
static const spread_function NARROW_SPREAD[2][SPREAD_ROWS] = {{SPREAD_NARROW(8)}, {SPREAD_NARROW(4)}};
static const spread_function TWO_PANELS_SPREAD[2][2] = {{spread_8_1_2, spread_8_2_2}, {spread_4_1_2, spread_4_2_2}};
static const spread_function FOUR_PANELS_SPREAD[2] = {spread_8_1_4, spread_4_1_4};

// Sums one tile of spread rows, from panel p on, in one slice: up to SPREAD_ROWS rows of one panel, or few of several.
static void sum_spread(const struct matrix *w, const float *x, int64_t rows, int64_t p, int64_t panels, int slice,
                       float *out, int64_t out_stride) {
    int64_t groups = groups_in(w) / w->slices, bytes = group_bytes(w);
    struct spread s = {.values = x + slice * groups * room_of(w),
                       .sums = x + groups_in(w) * room_of(w) + slice * groups,
                       .row_floats = spread_floats(w),
                       .panel = (const char *)w->data + p * w->panel_bytes + slice * groups * bytes,
                       .panel_bytes = w->panel_bytes,
                       .groups = groups,
                       .lines = lines_of(w),
                       .bytes = bytes};
    int kind = w->format == CODES4;
    spread_function sum = panels == 4   ? FOUR_PANELS_SPREAD[kind]
                          : panels == 2 ? TWO_PANELS_SPREAD[kind][rows - 1]
                                        : NARROW_SPREAD[kind][rows - 1];
    sum(&s, out, out_stride);
}

// Cuts the rows that are left into tiles of nearly equal size.
INLINE int64_t rows_of_spread_tile(int64_t left) {
    int64_t tiles = (left + SPREAD_ROWS - 1) / SPREAD_ROWS;
    return (left + tiles - 1) / tiles;
}

// The panels that a tile of so few rows takes together: enough sums to hide the latency of a fused product.
INLINE int64_t panels_of_tile(int64_t rows, int64_t left) {
    return rows == 1 && left >= 4 ? 4 : rows <= 2 && left >= 2 ? 2 : 1;
}

// Adds the slices of a tile as a binary tree, the bias and, with `add`, the values that are there.
static void finish_spread(const struct matrix *w, float parts[][SPREAD_ROWS * PANEL], int64_t rows, int64_t columns,
                          const float *bias, float *out, int64_t out_stride, int add) {
    for (int64_t i = 0; i < rows * columns; i += VW) {
        float *to = out + i / columns * out_stride + i % columns;
        vf sums[MAX_SLICES];
        for (int s = 0; s < w->slices; s++) sums[s] = v_load(parts[s] + i);
        for (int step = 1; step < w->slices; step *= 2)
            for (int s = 0; s + step < w->slices; s += 2 * step) sums[s] = sums[s] + sums[s + step];
        if (bias) sums[0] = sums[0] + v_load(bias + i % columns);
        if (add) sums[0] = v_load(to) + sums[0];
        v_store(to, sums[0]);
    }
}

// Multiplies spread rows by panels [first, last) of a quantized weight.
static void multiply_spread(const struct matrix *w, const float *x, int64_t rows, int64_t first, int64_t last,
                            float *out, int64_t out_stride, int add, const struct addition *addition) {
    float parts[MAX_SLICES][SPREAD_ROWS * PANEL] __attribute__((aligned(64)));
    for (int64_t p = first, panels; p < last; p += panels) {
        panels = panels_of_tile(rows, last - p);
        for (int64_t r = 0, count; r < rows; r += count) {
            count = rows_of_spread_tile(rows - r);
            for (int s = 0; s < w->slices; s++) {
                sum_spread(w, x + r * spread_floats(w), count, p, panels, s, parts[s], panels * PANEL);
                add_adapters(addition, s, r, count, p, p + panels, parts[s], panels * PANEL);
            }
            finish_spread(w, parts, count, panels * PANEL, w->bias ? w->bias + p * PANEL : NULL,
                          out + r * out_stride + p * PANEL, out_stride, add);
        }
    }
}

// Multiplies spread rows by panels of a weight; slices stay apart, `apart` floats from one to the next.
static void multiply_spread_apart(const struct matrix *w, const float *x, int64_t rows, int64_t panels, float *out,
                                  int64_t out_stride, int64_t apart) {
    for (int64_t p = 0, together; p < panels; p += together) {
        together = panels_of_tile(rows, panels - p);
        for (int64_t r = 0, count; r < rows; r += count) {
            count = rows_of_spread_tile(rows - r);
            for (int s = 0; s < w->slices; s++)
                sum_spread(w, x + r * spread_floats(w), count, p, together, s,
                           out + s * apart + r * out_stride + p * PANEL, out_stride);
        }
    }
}

#endif
