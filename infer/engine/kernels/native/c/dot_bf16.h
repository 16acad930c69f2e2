// Products of rounded rows with panels by VDPBF16PS (AVX512_BF16), or by its model.
//
// An element is one chain over the pairs of columns in order; of a pair, the odd product is added first.
#ifndef TK_DOT_BF16_H
#define TK_DOT_BF16_H

#include "model_dot.h"

#if VW != PANEL
#error "a panel is one vector of 16 floats"
#endif

#define DOT_ROWS 6  // 6 x 4 sums, four vectors of weights and one pair of a row fill 29 registers

#if defined(__AVX512BF16__)
INLINE vf dot_pairs(vf sums, pairs_vector weights, uint32_t pair) {
    return (vf)_mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32((int32_t)pair));
}
#else  // not inlined: models take long to compile
static __attribute__((noinline)) vf dot_pairs(vf sums, pairs_vector weights, uint32_t pair) {
    for (int i = 0; i < VW; i++) sums[i] = model_dot(sums[i], weights[i], pair);
    return sums;
}
#endif

// sums[r][p] = row r, from `x` on, times 16 columns of panel p, for `rows` rows, a constant, of a block.
INLINE void dot_sums(const int rows, const struct group *g, const uint16_t *x, const char *const *panels, int64_t pairs,
                     vf *sums) {
#pragma GCC unroll 24
    for (int i = 0; i < rows * GROUP_PANELS; i++) sums[i] = v_set1(0.0f);
    for (int64_t k = 0; k < pairs; k++) {
        const uint16_t *at = x + k / (BLOCK_COLUMNS / 2) * g->step_values + k % (BLOCK_COLUMNS / 2) * 2;
        pairs_vector weights[GROUP_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PANELS; p++) memcpy(&weights[p], panels[p] + k * PAIR_BYTES, PAIR_BYTES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, at + r * BLOCK_COLUMNS, sizeof pair);
#pragma GCC unroll 4
            for (int p = 0; p < GROUP_PANELS; p++)
                sums[r * GROUP_PANELS + p] = dot_pairs(sums[r * GROUP_PANELS + p], weights[p], pair);
        }
    }
}

// The first columns of row `row`.
INLINE const uint16_t *row_at(const struct group *g, int64_t row) {
    return g->rows + row / BLOCK_ROWS * g->block_values + row % BLOCK_ROWS * BLOCK_COLUMNS;
}

// `rows` rows of a block, a constant, by four panels; see rounded.h. The loop is that of `dot_sums`, written out:
// called from here, gcc makes one of it that takes 5 to 8 % longer (measured on Zen, with the prompts of bf16 models).
INLINE void dot_tile(const int rows, const struct group *g, int64_t row) {
    vf sums[DOT_ROWS * GROUP_PANELS];
#pragma GCC unroll 24
    for (int i = 0; i < rows * GROUP_PANELS; i++) sums[i] = v_set1(0.0f);
    const uint16_t *x = g->rows + row / BLOCK_ROWS * g->block_values + row % BLOCK_ROWS * BLOCK_COLUMNS;
    for (int64_t k = 0; k < g->pairs; k++) {
        const uint16_t *at = x + k / (BLOCK_COLUMNS / 2) * g->step_values + k % (BLOCK_COLUMNS / 2) * 2;
        pairs_vector weights[GROUP_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < GROUP_PANELS; p++) memcpy(&weights[p], g->panels[p] + k * PAIR_BYTES, PAIR_BYTES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, at + r * BLOCK_COLUMNS, sizeof pair);
#pragma GCC unroll 4
            for (int p = 0; p < GROUP_PANELS; p++)
                sums[r * GROUP_PANELS + p] = dot_pairs(sums[r * GROUP_PANELS + p], weights[p], pair);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < rows * GROUP_PANELS; i++)
        v_store(g->sums + (row + i / GROUP_PANELS) * GROUP_COLUMNS + i % GROUP_PANELS * PANEL, sums[i]);
}

static void dot_1(const struct group *g, int64_t row) { dot_tile(1, g, row); }
static void dot_2(const struct group *g, int64_t row) { dot_tile(2, g, row); }
static void dot_3(const struct group *g, int64_t row) { dot_tile(3, g, row); }
static void dot_4(const struct group *g, int64_t row) { dot_tile(4, g, row); }
static void dot_5(const struct group *g, int64_t row) { dot_tile(5, g, row); }
static void dot_6(const struct group *g, int64_t row) { dot_tile(6, g, row); }

// The rows of a tile from row r on: nearly equal parts of what is left of a block.
INLINE int64_t rows_of_dot_tile(const struct group *g, int64_t r) {
    int64_t end = r / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS, left = (end < g->count ? end : g->count) - r;
    int64_t parts = (left + DOT_ROWS - 1) / DOT_ROWS;
    return (left + parts - 1) / parts;
}

static void sum_group(const struct group *g) {
    static void (*const tiles[DOT_ROWS])(const struct group *, int64_t) = {dot_1, dot_2, dot_3, dot_4, dot_5, dot_6};
    for (int64_t r = 0, count; r < g->count; r += count) {
        count = rows_of_dot_tile(g, r);
        tiles[count - 1](g, r);
    }
}

INLINE void begin_products(int64_t height) { (void)height; }
INLINE void end_products(void) {}

// Returns the reason why this CPU's instruction must not be used; "" if there is none.
static const char *refusal(void) {
    uint32_t state = 1;
    for (int i = 0; i < 1000; i++) {
        float sums[VW], found[VW];
        uint32_t weights[VW], pair = 0;
        pairs_vector loaded;
        for (int lane = 0; lane < VW; lane++) {
            sums[lane] = check_value(&state);
            weights[lane] = (uint32_t)model_round(check_value(&state)) << 16 | model_round(check_value(&state));
        }
        pair = (uint32_t)model_round(check_value(&state)) << 16 | model_round(check_value(&state));
        memcpy(&loaded, weights, sizeof loaded);
        v_store(found, dot_pairs(v_load(sums), loaded, pair));
        for (int lane = 0; lane < VW; lane++) sums[lane] = model_dot(sums[lane], weights[lane], pair);
        if (memcmp(sums, found, sizeof sums)) return "VDPBF16PS does not give the sums of Intel's manual";
    }
    return "";
}

#endif
