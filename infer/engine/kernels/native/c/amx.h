// Products of rounded rows with panels by TDPBF16PS (AMX), or by its model.
//
// Per 32 columns, the products of even and of odd columns are summed apart; their sum is added to the element. A
// panel's 16 pairs of 16 columns are a tile as it lies in memory. Tiles 0 to 3 are sums; the others are rows and
// weights.
#ifndef TK_AMX_H
#define TK_AMX_H

#include "model_dot.h"

#define LINE 64  // bytes of a row of a tile
#define STEP_BYTES (BLOCK_COLUMNS / 2 * PAIR_BYTES)
#define STEPS_TOGETHER 18  // of two panels, at most: three quarters of a first cache of 48 KiB
#define LINES_AHEAD 6      // that each step fetches, of the panels that come next

struct tile_shapes {  // the operand of LDTILECFG
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define tile_configure(shapes) _tile_loadconfig(shapes)
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, from, stride) _tile_loadd(t, from, stride)
#define tile_load_passing(t, from, stride) _tile_stream_loadd(t, from, stride)
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_multiply(sum, rows, weights) _tile_dpbf16ps(sum, rows, weights)
#else
static _Thread_local struct {
    struct tile_shapes shapes;
    uint16_t values[8][16][LINE / 2];
} tiles;

INLINE void tile_configure(const struct tile_shapes *shapes) {
    memset(&tiles, 0, sizeof tiles);
    tiles.shapes = *shapes;
}
INLINE void tile_release(void) { memset(&tiles, 0, sizeof tiles); }
INLINE void tile_zero(int t) { memset(tiles.values[t], 0, sizeof tiles.values[t]); }
INLINE void tile_load(int t, const void *from, int64_t stride) {
    tile_zero(t);
    for (int r = 0; r < tiles.shapes.rows[t]; r++)
        memcpy(tiles.values[t][r], (const char *)from + r * stride, tiles.shapes.bytes[t]);
}
#define tile_load_passing tile_load
INLINE void tile_store(int t, void *to, int64_t stride) {
    for (int r = 0; r < tiles.shapes.rows[t]; r++)
        memcpy((char *)to + r * stride, tiles.values[t][r], tiles.shapes.bytes[t]);
}
INLINE void tile_multiply(int sum, int rows, int weights) {
    for (int r = 0; r < tiles.shapes.rows[sum]; r++)
        for (int c = 0; c < tiles.shapes.bytes[sum] / 4; c++) {
            float element;
            memcpy(&element, &tiles.values[sum][r][2 * c], 4);
            element = model_tile_dot(element, tiles.values[rows][r], &tiles.values[weights][0][2 * c], LINE / 2,
                                     tiles.shapes.bytes[rows] / 4);
            memcpy(&tiles.values[sum][r][2 * c], &element, 4);
        }
}
#endif

// Prepares this thread's tiles for blocks of `height` rows.
static void begin_products(int64_t height) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) shapes.bytes[t] = LINE, shapes.rows[t] = (uint8_t)(t < 5 ? height : 16);
    __asm__ volatile("" : : "r"(&shapes) : "memory");  // this intrinsic names 8 bytes of them
    tile_configure(&shapes);
}
INLINE void end_products(void) { tile_release(); }

// The intrinsics that load tiles do not say that they read memory: a compiler might leave out or move the stores of
// what they load. Every sequence of loads begins with this.
INLINE void finish_stores(void) { __asm__ volatile("" : : : "memory"); }

INLINE void zero_sums(void) {
    finish_stores();
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}
// Loads tiles 0 and 1 side by side and, unless `second` is NULL, tiles 2 and 3, of rows `stride` floats apart.
INLINE void load_sums(const float *first, const float *second, int64_t stride) {
    finish_stores();
    tile_load(0, first, 4 * stride);
    tile_load(1, first + PANEL, 4 * stride);
    if (!second) return;
    tile_load(2, second, 4 * stride);
    tile_load(3, second + PANEL, 4 * stride);
}
INLINE void store_sums(float *first, float *second, int64_t stride) {
    tile_store(0, first, 4 * stride);
    tile_store(1, first + PANEL, 4 * stride);
    if (!second) return;
    tile_store(2, second, 4 * stride);
    tile_store(3, second + PANEL, 4 * stride);
}

// The block of rows from row `row` on by four panels.
static void sum_block(const struct group *g, int64_t row, int64_t steps) {
    const uint16_t *rows = g->rows + row / BLOCK_ROWS * g->block_values;
    float *sums = g->sums + row * GROUP_COLUMNS;
    zero_sums();
    for (int64_t k = 0; k < steps; k++) {
        int64_t at = k * STEP_BYTES;
        tile_load(4, rows + k * g->step_values, LINE);
        tile_load(5, g->panels[0] + at, LINE);
        tile_multiply(0, 4, 5);
        tile_load(6, g->panels[1] + at, LINE);
        tile_multiply(1, 4, 6);
        tile_load(7, g->panels[2] + at, LINE);
        tile_multiply(2, 4, 7);
        tile_load(5, g->panels[3] + at, LINE);
        tile_multiply(3, 4, 5);
    }
    store_sums(sums, sums + 2 * PANEL, GROUP_COLUMNS);
}

// Two blocks of 16 rows, from row `row` on, by panels `first` and `first` + 1, steps [from, end): a load feeds two
// products. Rows only pass the first cache, so that they do not displace the panels, which the next rows need again.
// Each step fetches LINES_AHEAD lines from `ahead` on.
static void sum_two_blocks(const struct group *g, int64_t row, int first, int64_t from, int64_t end,
                           const char *ahead) {
    const uint16_t *rows = g->rows + row / BLOCK_ROWS * g->block_values, *below = rows + g->block_values;
    float *sums = g->sums + row * GROUP_COLUMNS + first * PANEL;
    if (from) load_sums(sums, sums + BLOCK_ROWS * GROUP_COLUMNS, GROUP_COLUMNS);
    else zero_sums();
    for (int64_t k = from; k < end; k++) {
        int64_t at = k * STEP_BYTES;
        tile_load_passing(4, rows + k * g->step_values, LINE);
        tile_load(6, g->panels[first] + at, LINE);
        tile_multiply(0, 4, 6);
        tile_load(7, g->panels[first + 1] + at, LINE);
        tile_multiply(1, 4, 7);
        tile_load_passing(5, below + k * g->step_values, LINE);
        tile_multiply(2, 5, 6);
        tile_multiply(3, 5, 7);
        for (int i = 0; ahead && i < LINES_AHEAD; i++, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
    }
    store_sums(sums, sums + BLOCK_ROWS * GROUP_COLUMNS, GROUP_COLUMNS);
}

// Some steps of two panels stay in the first cache while all rows pass them: the second cache alone cannot feed the
// tiles.
static void sum_pair(const struct group *g, int first, int64_t paired, int64_t steps, const char *next) {
    const char *end = next + 2 * steps * STEP_BYTES;
    int64_t parts = (steps + STEPS_TOGETHER - 1) / STEPS_TOGETHER;
    for (int64_t part = 0; part < parts; part++) {
        int64_t from = steps * part / parts, to = steps * (part + 1) / parts;
        for (int64_t row = 0; row < paired; row += GROUP_ROWS) {
            sum_two_blocks(g, row, first, from, to, next < end ? next : NULL);
            next += (to - from) * LINES_AHEAD * LINE;
        }
    }
}

static void sum_group(const struct group *g) {
    int64_t steps = g->pairs / (COLUMN_STEP / 2), paired = g->count / GROUP_ROWS * GROUP_ROWS;
    if (g->count - paired > BLOCK_ROWS) paired += GROUP_ROWS;
    sum_pair(g, 0, paired, steps, g->panels[2]);
    if (g->panels[2] != g->panels[1]) sum_pair(g, 2, paired, steps, g->panels[0] + g->jump);
    if (paired < g->count) sum_block(g, paired, steps);
}

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
// Returns whether the CPU has tiles, the system saves them, and it permits this process to use them (Linux,
// arch_prctl): asked before any thread of a pool starts.
static int tiles_are_permitted(void) {
    enum { GET_PERMISSION = 0x1022, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;                             // OSXSAVE
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0;  // AMX-BF16, AMX-TILE
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    uint64_t permitted = 0;
    return (low >> 17 & 3) == 3 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 &&
           syscall(SYS_arch_prctl, GET_PERMISSION, &permitted) == 0 && permitted >> TILE_DATA & 1;
}
#else
INLINE int tiles_are_permitted(void) { return 1; }
#endif

// Returns the reason why this CPU's tiles must not be used; "" if there is none.
static const char *refusal(void) {
    if (!tiles_are_permitted()) return "the system does not permit tiles of AMX";
    uint32_t state = 1;
    for (int i = 0; i < 16; i++) {
        uint16_t rows[16 * 32], weights[16 * 32];
        float sums[16 * 16], found[16 * 16];
        for (int j = 0; j < 16 * 32; j++)
            rows[j] = model_round(check_value(&state)), weights[j] = model_round(check_value(&state));
        for (int j = 0; j < 16 * 16; j++) sums[j] = found[j] = check_value(&state);
        begin_products(16 - i);
        tile_load(0, found, LINE);
        tile_load(4, rows, LINE);
        tile_load(5, weights, LINE);
        tile_multiply(0, 4, 5);
        tile_store(0, found, LINE);
        end_products();
        for (int j = 0; j < (16 - i) * 16; j++)
            sums[j] = model_tile_dot(sums[j], rows + j / 16 * 32, weights + j % 16 * 2, 32, 16);
        if (memcmp(sums, found, sizeof sums)) return "TDPBF16PS does not give the sums of Intel's manual";
    }
    return "";
}

#endif
