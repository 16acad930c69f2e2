// Products of rounded rows with quantized weights by VDPBF16PS, or by its model; see coded.h. A group's partial sum is
// a chain over its pairs of columns. The first rows widen codes in registers, while others are on their way from
// memory, and leave what they widened, some groups of four panels, in the first cache to the rows that follow.
#ifndef TK_CODED_DOT_H
#define TK_CODED_DOT_H

#include "dot_bf16.h"

#define WIDENED_COLUMNS 128  // of four panels that stay widened together, at most: half of a first cache of 32 KiB
#define WIDENED_BYTES (WIDENED_COLUMNS / 2 * PAIR_BYTES)

// Groups [first, last) of four panels, and their codes, widened.
struct widened {
    char panels[GROUP_PANELS][WIDENED_BYTES] __attribute__((aligned(64)));
    int64_t first, last;
};

// Adds the partial sums of group n of some rows to the sums of the groups before.
INLINE void add_partial(const int rows, const int bits, const struct coded *c, int64_t row, int64_t n,
                        const vf *partial) {
#pragma GCC unroll 4
    for (int p = 0; p < GROUP_PANELS; p++) {
        struct scaling by = scaling_of(bits, c->g->panels[p] + n * c->bytes);
        float *to = c->g->sums + row * GROUP_COLUMNS + p * PANEL;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++, to += GROUP_COLUMNS)
            v_store(to,
                    add_group(bits, c, row + r, n, by, partial[r * GROUP_PANELS + p], n ? v_load(to) : v_set1(0.0f)));
    }
}

// Adds the products of some rows, from `x` on, with a line of codes of four panels to partial sums. Unless `kept` is
// NULL, the widened pairs of columns are stored there, those of a panel WIDENED_BYTES behind the panel before.
INLINE void dot_line(const int rows, const int bits, const char *const *lines, const uint16_t *x, char *kept,
                     vf *partial) {
#pragma GCC unroll 4
    for (int place = 0; place < pairs_of_line(bits); place++)
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PANELS; p++) {
            pairs_vector weights = widened_pair(bits, lines[p], place);
            if (kept) memcpy(kept + p * WIDENED_BYTES + place * PAIR_BYTES, &weights, PAIR_BYTES);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                uint32_t pair;
                memcpy(&pair, x + r * BLOCK_COLUMNS + 2 * place, sizeof pair);
                partial[r * GROUP_PANELS + p] = dot_pairs(partial[r * GROUP_PANELS + p], weights, pair);
            }
        }
}

// The first rows by some groups. `rows`, `bits` of a code, and whether they are `kept` are constants. Those that are
// kept come as far ahead as they are many: other rows are multiplied meanwhile.
INLINE void widening_tile(const int rows, const int bits, const int kept, const struct coded *c, struct widened *wide) {
    const struct group *g = c->g;
    const uint16_t *x = g->rows + wide->first * c->steps * g->step_values;
    char *to = wide->panels[0];
    for (int64_t n = wide->first; n < wide->last; n++, x += c->steps * g->step_values) {
        vf partial[DOT_ROWS * GROUP_PANELS];
#pragma GCC unroll 24
        for (int i = 0; i < rows * GROUP_PANELS; i++) partial[i] = v_set1(0.0f);
        int64_t at = n * c->bytes;
        int64_t ahead = codes_ahead(c, n, kept ? (wide->last - wide->first) * c->bytes : CODES_AHEAD * LINE_BYTES);
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PANELS && kept; p++) __builtin_prefetch(g->panels[p] + at + ahead);
        for (int64_t l = 0; l < c->lines; l++) {
            at += LINE_BYTES;
            const char *lines[GROUP_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < GROUP_PANELS; p++) {
                lines[p] = g->panels[p] + at;
                __builtin_prefetch(lines[p] + ahead);
            }
            int64_t k = l * pairs_of_line(bits);
            const uint16_t *pairs = x + k / (BLOCK_COLUMNS / 2) * g->step_values + k % (BLOCK_COLUMNS / 2) * 2;
            dot_line(rows, bits, lines, pairs, kept ? to + k * PAIR_BYTES : NULL, partial);
        }
        add_partial(rows, bits, c, 0, n, partial);
        to += c->lines * pairs_of_line(bits) * PAIR_BYTES;
    }
}

// `rows` rows of a block from row `row` on by widened groups.
INLINE void widened_tile(const int rows, const int bits, const struct coded *c, const struct widened *wide,
                         int64_t row) {
    const struct group *g = c->g;
    int64_t pairs = c->lines * pairs_of_line(bits);
    for (int64_t n = wide->first; n < wide->last; n++) {
        const char *panels[GROUP_PANELS];
        for (int p = 0; p < GROUP_PANELS; p++) panels[p] = wide->panels[p] + (n - wide->first) * pairs * PAIR_BYTES;
        vf partial[DOT_ROWS * GROUP_PANELS];
        dot_sums(rows, g, row_at(g, row) + n * c->steps * g->step_values, panels, pairs, partial);
        add_partial(rows, bits, c, row, n, partial);
    }
}

#define WIDENED(rows, bits)                                                                            \
    static void widened_##bits##_##rows(const struct coded *c, const struct widened *w, int64_t row) { \
        widened_tile(rows, bits, c, w, row);                                                           \
    }
#define WIDENING(rows, bits, kept)                                                            \
    static void widening_##bits##_##rows##_##kept(const struct coded *c, struct widened *w) { \
        widening_tile(rows, bits, kept, c, w);                                                \
    }
#define CODED(bits)      \
    WIDENED(1, bits)     \
    WIDENED(2, bits)     \
    WIDENED(3, bits)     \
    WIDENED(4, bits)     \
    WIDENED(5, bits)     \
    WIDENED(6, bits)     \
    WIDENING(1, bits, 0) \
    WIDENING(2, bits, 0) \
    WIDENING(3, bits, 0) \
    WIDENING(4, bits, 0) \
    WIDENING(5, bits, 0) \
    WIDENING(6, bits, 0) \
    WIDENING(4, bits, 1) \
    WIDENING(5, bits, 1) \
    WIDENING(6, bits, 1)
CODED(8)
CODED(4)
#define OF_ROWS(name, end) name##1##end, name##2##end, name##3##end, name##4##end, name##5##end, name##6##end
typedef void (*widening_function)(const struct coded *, struct widened *);
static const widening_function ALONE[2][DOT_ROWS] = {{OF_ROWS(widening_8_, _0)}, {OF_ROWS(widening_4_, _0)}};
// Of more rows the first tile has 4 to 6.
static const widening_function FIRST[2][3] = {{widening_8_4_1, widening_8_5_1, widening_8_6_1},
                                              {widening_4_4_1, widening_4_5_1, widening_4_6_1}};
static void (*const FOLLOWING[2][DOT_ROWS])(const struct coded *, const struct widened *,
                                            int64_t) = {{OF_ROWS(widened_8_, )}, {OF_ROWS(widened_4_, )}};

// All rows by the codes of a slice.
static __attribute__((noinline)) void sum_codes(const struct coded *c) {
    struct widened wide = {.first = 0, .last = c->groups};
    int64_t first = rows_of_dot_tile(c->g, 0), is_4 = c->bits == 4;
    if (first == c->g->count) {
        ALONE[is_4][first - 1](c, &wide);
        return;
    }
    int64_t most = WIDENED_COLUMNS / (c->lines * (32 / c->bits));
    for (; wide.first < c->groups; wide.first = wide.last) {
        wide.last = wide.first + most < c->groups ? wide.first + most : c->groups;
        FIRST[is_4][first - 4](c, &wide);
        for (int64_t r = first, count; r < c->g->count; r += count) {
            count = rows_of_dot_tile(c->g, r);
            FOLLOWING[is_4][count - 1](c, &wide, r);
        }
    }
}

#endif
