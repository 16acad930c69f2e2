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
#define ADDED_GROUPS 2  // of 4 bits whose partial sums are added together: elements are loaded and stored once for both

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
    if (to < end) memset(to, 0, (size_t)(end - to));  // else the call would cost as much as a line
}

// Groups [first, last) of panels `panel` and `panel` + 1, widened.
struct widened {
    char panels[2][WIDENED_BYTES] __attribute__((aligned(64)));
    int64_t first, last;
    int panel;
};

// Partial sums of some rows and groups of two panels, from `panel` on, until they are added to the rows' sums.
struct partial_sums {
    float of[ADDED_GROUPS][GROUP_ROWS * 2 * PANEL];
    int panel;
    int64_t n, groups;         // the first group, and their number
    int64_t first, next, end;  // rows: from `next` on they are yet to be added
    int64_t share;             // of these rows, that a step of tiles adds
} __attribute__((aligned(64)));

// Adds the partial sums of `groups` groups, a constant, and of rows before `end`.
INLINE void add_rows(const int groups, const int bits, const struct coded *of, struct partial_sums *from, int64_t end) {
    const struct coded c = *of;  // a copy, which no store of sums can change
    for (int p = 0; p < 2; p++) {
        const float *partial = from->of[0] + (2 * (from->next - from->first) + p) * PANEL;
        float *to = c.g->sums + from->next * GROUP_COLUMNS + (from->panel + p) * PANEL;
        struct scaling by[ADDED_GROUPS];
#pragma GCC unroll 2
        for (int i = 0; i < groups; i++)
            by[i] = scaling_of(bits, c.g->panels[from->panel + p] + (from->n + i) * c.bytes);
        const int64_t n = from->n;
        for (int64_t r = from->next; r < end; r++, to += GROUP_COLUMNS, partial += 2 * PANEL) {
            vf sums = n ? v_load(to) : v_set1(0.0f);
#pragma GCC unroll 2
            for (int i = 0; i < groups; i++)
                sums = add_group(bits, &c, r, n + i, by[i], v_load(partial + i * GROUP_ROWS * 2 * PANEL), sums);
            v_store(to, sums);
        }
    }
    from->next = end;
}

// Adds the partial sums of the next `count` rows, or of those that are left.
INLINE void add_some(const int bits, const struct coded *c, struct partial_sums *from, int64_t count) {
    int64_t left = from->end - from->next, end = from->next + (left < count ? left : count);
    if (!left) return;
    if (bits == 4 && from->groups == ADDED_GROUPS) add_rows(ADDED_GROUPS, bits, c, from, end);
    else add_rows(1, bits, c, from, end);
}

// Two blocks of rows, or one, from row `row` on by a group of two widened panels. Each step of tiles also adds some of
// the sums `before`: behind the last one they would lie further away than a CPU looks ahead.
INLINE void multiply_tiles(const int blocks, const int bits, const struct coded *c, const struct widened *wide,
                           int64_t row, int64_t n, float *to, struct partial_sums *before) {
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
        if (blocks == 2) {
            tile_load_passing(5, rows + g->block_values, LINE);
            tile_multiply(2, 5, 6);
            tile_multiply(3, 5, 7);
        }
        add_some(bits, c, before, before->share);
    }
    store_sums(to, blocks == 1 ? NULL : to + BLOCK_ROWS * 2 * PANEL, 2 * PANEL);
}

// All rows by groups of two panels that are widened together. While tiles multiply, vectors add the sums before.
INLINE void pass_tiles(const int bits, const struct coded *c, const struct widened *wide) {
    const int64_t together = bits == 8 ? 1 : ADDED_GROUPS;
    struct partial_sums partial[2], *now = partial, *before = partial + 1;
    before->next = before->end = 0;
    for (int64_t row = 0; row < c->g->count; row += GROUP_ROWS) {
        int64_t left = c->g->count - row, count = left < GROUP_ROWS ? left : GROUP_ROWS;
        for (int64_t n = wide->first; n < wide->last; n += together) {
            int64_t groups = wide->last - n < together ? wide->last - n : together, steps = groups * c->steps;
            before->share = (GROUP_ROWS + steps - 1) / steps;
            for (int64_t i = 0; i < groups; i++) {
                if (count <= BLOCK_ROWS) multiply_tiles(1, bits, c, wide, row, n + i, now->of[i], before);
                else multiply_tiles(2, bits, c, wide, row, n + i, now->of[i], before);
            }
            now->panel = wide->panel, now->n = n, now->groups = groups;
            now->first = now->next = row, now->end = row + count;
            struct partial_sums *added = before;
            before = now, now = added;
        }
    }
    add_some(bits, c, before, GROUP_ROWS);
}

// All rows by panels `first` and `first` + 1, while lines come of the panels that are next.
INLINE void many_coded(const int bits, const struct coded *c, int first, const char *next) {
    int64_t room = c->steps * STEP_BYTES, most = WIDENED_BYTES / room;
    int64_t jump = next - c->g->panels[first] - c->groups * c->bytes;
    struct widened wide;
    wide.panel = first;
    for (wide.first = 0; wide.first < c->groups; wide.first = wide.last) {
        wide.last = wide.first + most < c->groups ? wide.first + most : c->groups;
        int64_t ahead = most * c->bytes + (wide.last == c->groups ? jump : 0);
        for (int p = 0; p < 2; p++)
            for (int64_t n = wide.first; n < wide.last; n++)
                widen_group(bits, c->g->panels[first + p] + n * c->bytes, c->lines, c->steps,
                            wide.panels[p] + (n - wide.first) * room, ahead);
        pass_tiles(bits, c, &wide);
    }
}

INLINE void sum_codes_of(const int bits, const struct coded *c) {
    const struct group *g = c->g;
    const char *next = g->panels[0] + g->jump;
    int are_four = g->panels[2] != g->panels[1];
    if (g->count == 1) few_coded(1, bits, c, 0);
    else if (g->count == 2) few_coded(2, bits, c, 0);
    else {
        for (int panel = 0; panel <= 2 * are_four; panel += 2)
            many_coded(bits, c, panel, panel == 2 * are_four ? next : g->panels[2]);
    }
}

// All rows by the codes of a slice.
static __attribute__((noinline)) void sum_codes(const struct coded *c) {
    if (c->bits == 8) sum_codes_of(8, c);
    else sum_codes_of(4, c);
}

#endif
