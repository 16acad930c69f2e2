// Products of rounded rows with panels by VDPBF16PS (AVX512_BF16), or by its model.
//
// An element is one chain over the pairs of columns in order; of a pair, the odd product is added first.
#ifndef TK_DOT_BF16_H
#define TK_DOT_BF16_H

#include "model_dot.h"

#if VW != PANEL
#error "a panel is one vector of 16 floats"
#endif

#define FEW_DOT_ROWS 3     // that take one panel after the other
#define BYTES_AHEAD 1024   // that few rows fetch before their turn
#define KEPT_BYTES 6144    // of few rows, which stay in the first cache while panels pass it
#define SHORT_BYTES 32768  // of a panel whose reads end soon after the CPU begins to fetch ahead by itself
#define DOT_ROWS 6         // 6 x 4 sums, four vectors of weights and one pair of a row fill 29 registers

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

// Few rows, a constant number, wait for memory, which is read fastest in one place after the other: panel by panel,
// while the lines ahead are fetched into the second cache.
INLINE void dot_panels(const int rows, const struct group *g) {
    for (int p = 0; p < GROUP_PANELS; p++) {
        vf sums[FEW_DOT_ROWS];
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) sums[r] = v_set1(0.0f);
        const char *line = g->panels[p], *end = line + g->pairs * PAIR_BYTES;
        for (const uint16_t *x = g->rows; line < end; x += g->step_values) {
            const uint16_t *at = x, *stop = at + BLOCK_COLUMNS;
            for (; at < stop && line < end; at += 2, line += PAIR_BYTES) {
                pairs_vector weights;
                memcpy(&weights, line, PAIR_BYTES);
                __builtin_prefetch(line + BYTES_AHEAD, 0, 2);
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) {
                    uint32_t pair;
                    memcpy(&pair, at + r * BLOCK_COLUMNS, sizeof pair);
                    sums[r] = dot_pairs(sums[r], weights, pair);
                }
            }
        }
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) v_store(g->sums + r * GROUP_COLUMNS + p * PANEL, sums[r]);
    }
}

// `rows` rows of a block by four panels; see rounded.h. With each of their lines it fetches those of `fetched` panels,
// from number `first` on, that are next in their places: so reads of memory overlap with sums. `rows` and `fetched` are
// constants. The loop is that of `dot_sums`, written out: called from here, gcc makes one of it that takes 5 to 8 %
// longer (measured on Zen, with the prompts of bf16 models).
INLINE void dot_tile(const int rows, const int fetched, const struct group *g, int64_t row, int first) {
    vf sums[DOT_ROWS * GROUP_PANELS];
#pragma GCC unroll 24
    for (int i = 0; i < rows * GROUP_PANELS; i++) sums[i] = v_set1(0.0f);
    const uint16_t *x = g->rows + row / BLOCK_ROWS * g->block_values + row % BLOCK_ROWS * BLOCK_COLUMNS;
    const char *ahead[GROUP_PANELS];
    for (int p = 0; p < fetched; p++) ahead[p] = g->panels[first + p] + g->jump;
    for (int64_t k = 0; k < g->pairs; k++) {
        const uint16_t *at = x + k / (BLOCK_COLUMNS / 2) * g->step_values + k % (BLOCK_COLUMNS / 2) * 2;
#pragma GCC unroll 4
        for (int p = 0; p < fetched; p++) __builtin_prefetch(ahead[p] + k * PAIR_BYTES, 0, 2);
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

#define DOT_PANELS(rows) \
    static void dot_panels_##rows(const struct group *g) { dot_panels(rows, g); }
#define DOT_TILE(rows, fetched)                                                         \
    static void dot_##rows##_##fetched(const struct group *g, int64_t row, int first) { \
        dot_tile(rows, fetched, g, row, first);                                         \
    }
DOT_PANELS(1)
DOT_PANELS(2)
DOT_PANELS(3)
DOT_TILE(5, 4)
DOT_TILE(6, 4)
DOT_TILE(3, 2)
DOT_TILE(4, 2)
DOT_TILE(5, 2)
DOT_TILE(6, 2)
DOT_TILE(1, 0)
DOT_TILE(2, 0)
DOT_TILE(3, 0)
DOT_TILE(4, 0)
DOT_TILE(5, 0)
DOT_TILE(6, 0)
static void (*const DOT_FEW[FEW_DOT_ROWS])(const struct group *) = {dot_panels_1, dot_panels_2, dot_panels_3};
typedef void (*dot_function)(const struct group *, int64_t row, int first);
static const dot_function DOT_ALONE[] = {dot_5_4, dot_6_4};                       // all rows
static const dot_function DOT_FETCHING[] = {dot_3_2, dot_4_2, dot_5_2, dot_6_2};  // the first two tiles
static const dot_function DOT_OTHERS[] = {dot_1_0, dot_2_0, dot_3_0, dot_4_0, dot_5_0, dot_6_0};

// The rows of a tile from row r on: nearly equal parts of what is left of a block.
INLINE int64_t rows_of_dot_tile(const struct group *g, int64_t r) {
    int64_t end = r / BLOCK_ROWS * BLOCK_ROWS + BLOCK_ROWS, left = (end < g->count ? end : g->count) - r;
    int64_t parts = (left + DOT_ROWS - 1) / DOT_ROWS;
    return (left + parts - 1) / parts;
}

static void sum_group(const struct group *g) {
    int64_t row_bytes = 2 * g->pairs * (int64_t)sizeof *g->rows;
    if (g->count <= FEW_DOT_ROWS && g->count * row_bytes <= KEPT_BYTES) {
        DOT_FEW[g->count - 1](g);
        return;
    }
    if (g->count >= 5 && g->count <= DOT_ROWS && g->pairs * PAIR_BYTES <= SHORT_BYTES) {
        DOT_ALONE[g->count - 5](g, 0, 0);
        return;
    }
    int64_t first = g->count <= DOT_ROWS ? GROUP_PANELS : 0;
    for (int64_t r = 0, count; r < g->count; r += count, first += 2) {
        count = rows_of_dot_tile(g, r);
        if (first < GROUP_PANELS) DOT_FETCHING[count - 3](g, r, (int)first);
        else DOT_OTHERS[count - 1](g, r, 0);
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
