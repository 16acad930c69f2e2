// Products of rounded rows with quantized weights by TDPBF16PS, or by its model; see coded.h. A group's partial sum is
// one of steps of 32 columns. Few rows take plain vectors: a chain of fused products over a step's even columns, one
// over its odd ones, which have the bits of a tile. Of more rows, some groups of two panels are widened to tiles, and
// all rows pass them.
#ifndef TK_CODED_TILES_H
#define TK_CODED_TILES_H

#include "amx.h"

#define FEW_CODED_ROWS 2     // that take plain vectors
#define WIDENED_COLUMNS 384  // of two panels that are widened together, at most: half of a first cache of 48 KiB
#define WIDENED_BYTES (WIDENED_COLUMNS / BLOCK_COLUMNS * STEP_BYTES)

// The two columns of a pair, of `place` of those of a line.
INLINE void widen_columns(const int bits, const char *line, const int place, vf *even, vf *odd) {
    vi words = load_line(line);
    if (bits == 8) *even = widened_bytes(words, 2 * place), *odd = widened_bytes(words, 2 * place + 1);
    else *even = widened_nibbles(words, place), *odd = widened_nibbles(words, place + 4);
}

// Adds the products of `rows` rows with the first `count` lines of a step to partial sums; `x` begins with the step.
INLINE void few_step(const int rows, const int bits, const char *const *lines, int64_t count, int64_t ahead,
                     const uint16_t *x, vf *partial) {
    float columns[2][FEW_CODED_ROWS][BLOCK_COLUMNS / 2] __attribute__((aligned(64)));  // even ones, and odd ones
    vf even[FEW_CODED_ROWS * GROUP_PANELS], odd[FEW_CODED_ROWS * GROUP_PANELS];
#pragma GCC unroll 2
    for (int r = 0; r < rows; r++) {
        vi pairs = load_line((const char *)(x + r * BLOCK_COLUMNS));
        v_store(columns[0][r], (vf)(pairs << 16));
        v_store(columns[1][r], v_high_halves(pairs));
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * GROUP_PANELS; i++) even[i] = odd[i] = v_set1(0.0f);
    for (int64_t l = 0; l < count; l++) {
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PANELS; p++) __builtin_prefetch(lines[p] + l * LINE_BYTES + ahead);
#pragma GCC unroll 4
        for (int place = 0; place < pairs_of_line(bits); place++)
#pragma GCC unroll 4
            for (int p = 0; p < GROUP_PANELS; p++) {
                vf first, second;
                widen_columns(bits, lines[p] + l * LINE_BYTES, place, &first, &second);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) {
                    int i = r * GROUP_PANELS + p;
                    int64_t k = l * pairs_of_line(bits) + place;
                    even[i] = fma_flushed(v_set1(columns[0][r][k]), first, even[i]);
                    odd[i] = fma_flushed(v_set1(columns[1][r][k]), second, odd[i]);
                }
            }
    }
    // A tile goes on with products of zeros, which make a zero positive.
    vf zero = v_set1(0.0f);
    int padded = count * pairs_of_line(bits) < BLOCK_COLUMNS / 2;
#pragma GCC unroll 8
    for (int i = 0; i < rows * GROUP_PANELS; i++) {
        if (padded) even[i] = even[i] + zero, odd[i] = odd[i] + zero;
        partial[i] = add_flushed(partial[i], add_flushed(even[i], odd[i]));
    }
}

// `rows` rows from row `row` on by all groups; codes have `bits` bits. Both are constants.
INLINE void few_coded(const int rows, const int bits, const struct coded *c, int64_t row) {
    const struct group *g = c->g;
    const uint16_t *x = g->rows + row / BLOCK_ROWS * g->block_values + row % BLOCK_ROWS * BLOCK_COLUMNS;
    const int64_t most = BLOCK_COLUMNS / 2 / pairs_of_line(bits);  // lines of a step
    vf sums[FEW_CODED_ROWS * GROUP_PANELS];
#pragma GCC unroll 8
    for (int i = 0; i < rows * GROUP_PANELS; i++) sums[i] = v_set1(0.0f);
    for (int64_t n = 0; n < c->groups; n++) {
        vf partial[FEW_CODED_ROWS * GROUP_PANELS];
#pragma GCC unroll 8
        for (int i = 0; i < rows * GROUP_PANELS; i++) partial[i] = v_set1(0.0f);
        int64_t ahead = codes_ahead(c, n, CODES_AHEAD * LINE_BYTES);
        for (int64_t l = 0; l < c->lines; l += most, x += g->step_values) {
            const char *lines[GROUP_PANELS];
            for (int p = 0; p < GROUP_PANELS; p++) lines[p] = g->panels[p] + n * c->bytes + (1 + l) * LINE_BYTES;
            few_step(rows, bits, lines, c->lines - l < most ? c->lines - l : most, ahead, x, partial);
        }
#pragma GCC unroll 8
        for (int i = 0; i < rows * GROUP_PANELS; i++)
            sums[i] = add_group(bits, c, row + i / GROUP_PANELS, n,
                                scaling_of(bits, g->panels[i % GROUP_PANELS] + n * c->bytes), partial[i], sums[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows * GROUP_PANELS; i++)
        v_store(g->sums + (row + i / GROUP_PANELS) * GROUP_COLUMNS + i % GROUP_PANELS * PANEL, sums[i]);
}

// Widens the codes of a group of a panel, which begins with its headers, to whole steps, and fetches lines that lie
// `ahead`. What is left of the last step is zero.
INLINE void widen_group(const int bits, const char *group, int64_t lines, int64_t steps, char *to, int64_t ahead) {
    char *end = to + steps * STEP_BYTES;
    __builtin_prefetch(group + ahead);
    for (int64_t l = 1; l <= lines; l++) {
        __builtin_prefetch(group + l * LINE_BYTES + ahead);
#pragma GCC unroll 4
        for (int place = 0; place < pairs_of_line(bits); place++, to += PAIR_BYTES) {
            pairs_vector pair = widened_pair(bits, group + l * LINE_BYTES, place);
            memcpy(to, &pair, PAIR_BYTES);
        }
    }
    memset(to, 0, (size_t)(end - to));
}

// Groups [first, last) of two panels, widened.
struct widened {
    char panels[2][WIDENED_BYTES] __attribute__((aligned(64)));
    int64_t first, last;
};
typedef float partial_sums[GROUP_ROWS * 2 * PANEL];

// Two blocks of rows, or one, from row `row` on by a group of two widened panels.
INLINE void multiply_tiles(const int blocks, const struct coded *c, const struct widened *wide, int64_t row, int64_t n,
                           float *to) {
    const struct group *g = c->g;
    const uint16_t *rows = g->rows + row / BLOCK_ROWS * g->block_values + n * c->steps * g->step_values;
    const char *tile = wide->panels[0] + (n - wide->first) * c->steps * STEP_BYTES;
    zero_sums();
    for (int64_t k = 0; k < c->steps; k++, rows += g->step_values, tile += STEP_BYTES) {
        tile_load_passing(4, rows, LINE);
        tile_load(6, tile, LINE);
        tile_multiply(0, 4, 6);
        tile_load(7, tile + WIDENED_BYTES, LINE);
        tile_multiply(1, 4, 7);
        if (blocks == 1) continue;
        tile_load_passing(5, rows + g->block_values, LINE);
        tile_multiply(2, 5, 6);
        tile_multiply(3, 5, 7);
    }
    store_sums(to, blocks == 1 ? NULL : to + BLOCK_ROWS * 2 * PANEL, 2 * PANEL);
}

// Adds a group's partial sums of `count` rows and panels `first` and `first` + 1 to the sums of the groups before.
INLINE void add_tiles(const int bits, const struct coded *c, int first, int64_t row, int64_t count, int64_t n,
                      const float *partial) {
    for (int p = 0; p < 2; p++) {
        struct scaling by = scaling_of(bits, c->g->panels[first + p] + n * c->bytes);
        float *to = c->g->sums + row * GROUP_COLUMNS + (first + p) * PANEL;
        for (int64_t r = 0; r < count; r++, to += GROUP_COLUMNS)
            v_store(to, add_group(bits, c, row + r, n, by, v_load(partial + (2 * r + p) * PANEL),
                                  n ? v_load(to) : v_set1(0.0f)));
    }
}

// All rows by groups of two panels that are widened together. While tiles multiply a group, vectors add the one before.
INLINE void pass_tiles(const int bits, const struct coded *c, int first, const struct widened *wide) {
    partial_sums partial[2] __attribute__((aligned(64)));
    for (int64_t row = 0; row < c->g->count; row += GROUP_ROWS) {
        int64_t left = c->g->count - row, count = left < GROUP_ROWS ? left : GROUP_ROWS;
        for (int64_t n = wide->first; n <= wide->last; n++) {
            if (n < wide->last) {
                if (count <= BLOCK_ROWS) multiply_tiles(1, c, wide, row, n, partial[n % 2]);
                else multiply_tiles(2, c, wide, row, n, partial[n % 2]);
            }
            if (n > wide->first) add_tiles(bits, c, first, row, count, n - 1, partial[(n - 1) % 2]);
        }
    }
}

// All rows by panels `first` and `first` + 1, while lines come of the panels that are next.
INLINE void many_coded(const int bits, const struct coded *c, int first, const char *next) {
    int64_t room = c->steps * STEP_BYTES, most = WIDENED_BYTES / room;
    int64_t jump = next - c->g->panels[first] - c->groups * c->bytes;
    struct widened wide;
    for (wide.first = 0; wide.first < c->groups; wide.first = wide.last) {
        wide.last = wide.first + most < c->groups ? wide.first + most : c->groups;
        int64_t ahead = most * c->bytes + (wide.last == c->groups ? jump : 0);
        for (int p = 0; p < 2; p++)
            for (int64_t n = wide.first; n < wide.last; n++)
                widen_group(bits, c->g->panels[first + p] + n * c->bytes, c->lines, c->steps,
                            wide.panels[p] + (n - wide.first) * room, ahead);
        pass_tiles(bits, c, first, &wide);
    }
}

INLINE void sum_codes_of(const int bits, const struct coded *c) {
    const struct group *g = c->g;
    const char *next = g->panels[0] + g->jump;
    int are_four = g->panels[2] != g->panels[1];
    if (g->count == 1) few_coded(1, bits, c, 0);
    else if (g->count == 2) few_coded(2, bits, c, 0);
    else {
        many_coded(bits, c, 0, are_four ? g->panels[2] : next);
        if (are_four) many_coded(bits, c, 2, next);
    }
}

// All rows by the codes of a slice.
static __attribute__((noinline)) void sum_codes(const struct coded *c) {
    if (c->bits == 8) sum_codes_of(8, c);
    else sum_codes_of(4, c);
}

#endif
