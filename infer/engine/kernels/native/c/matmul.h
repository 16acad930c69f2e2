// Products of rows of fp32 with packed panels: the linear layers, and attention to keys and values that are floats.
//
// An element is one chain of fused products over the columns in order, whatever the number of rows, panels and threads:
// so a row's bits do not depend on the rest of the batch. The slices of a weight are such chains, added as a tree.
#ifndef TK_MATMUL_H
#define TK_MATMUL_H

#include "model.h"
#include "narrow.h"

#define VECTORS (PANEL / VW)
#define AHEAD 8           // pairs of columns that tiles of several panels fetch before their turn
#define ROW_BYTES 262144  // of the rows that pass all panels together: they stay in a core's second cache
#if VW == 16
#define MOST_ROWS 12  // rows of a tile: the chains of their sums hide the latency of a fused product
#else
#define MOST_ROWS 6  // 6 x 2 sums, two vectors of weights and one of inputs fill 16 registers
#endif

INLINE int64_t pair_bytes(int format) {
    if (format == INT4) return PANEL;
    return format == FP32 ? 8 * PANEL : format == FP8 || format == INT8 ? 2 * PANEL : 4 * PANEL;
}

// Widens vector n of the even (half 0) or odd column of the pair at w.
INLINE vf load_half(int format, const char *w, int n, int half) {
    int at = half * PANEL + n * VW;
    if (format == FP32) return v_load((const float *)w + at);
    if (format == BF16) {
        vi both;
        memcpy(&both, w + n * 4 * VW, sizeof both);
        return half ? v_high_halves(both) : (vf)(both << 16);
    }
    return v_widen_fp16((const uint16_t *)w + at);
}

// Widens all vectors of the even or odd column of the pair at w, those of FP8 divided by FP8_SCALE.
INLINE void load_column(int format, const char *w, int half, vf *to) {
    if (format == FP8) {
        v_widen_fp8((const uint8_t *)w + half * PANEL, to);
        return;
    }
#pragma GCC unroll 4
    for (int n = 0; n < VECTORS; n++) to[n] = load_half(format, w, n, half);
}

// The place from which a tile fetches the next values into the cache: `bytes` further on for every pair of columns.
struct ahead {
    const char *from;
    int64_t bytes;
};

// out[r][p * PANEL + c] (+)= sum over k of x[r][k] w[p][k][c] (+ bias), for `rows` rows and `panels` panels, constants
// as are `format` and `fetch`, which says whether it fetches ahead.
INLINE void tile(const int rows, const int panels, const int format, const int fetch, const float *x, int64_t x_stride,
                 const char *w, int64_t panel_bytes, int64_t pairs, float *out, int64_t out_stride, const float *bias,
                 int add, struct ahead ahead) {
    vf sums[MOST_ROWS * VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < rows * panels * VECTORS; i++) sums[i] = v_set1(0.0f);
    // Few rows wait for memory. The last lines of these panels are followed by the first of the next ones.
    int64_t turn = pairs - AHEAD, near = AHEAD * pair_bytes(format),
            next = panels * panel_bytes - turn * pair_bytes(format);
    for (int64_t k = 0; k < pairs; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const char *line = w + p * panel_bytes + k * pair_bytes(format);
            if (fetch) __builtin_prefetch(ahead.from + (k * panels + p) * ahead.bytes, 0, 2);
            if (fetch && format == FP32 && rows > 3)  // a pair has two lines
                __builtin_prefetch(ahead.from + (k * panels + p) * ahead.bytes + ahead.bytes / 2, 0, 2);
            if (panels > 1 && !fetch) __builtin_prefetch(line + (k < turn ? near : next));
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vf weights[VECTORS];
                load_column(format, line, half, weights);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    vf value = v_set1(x[r * x_stride + 2 * k + half]);
#pragma GCC unroll 4
                    for (int n = 0; n < VECTORS; n++) {
                        vf *sum = &sums[(r * panels + p) * VECTORS + n];
                        *sum = v_fma(value, weights[n], *sum);
                    }
                }
                // Loads stay on their side: with the weights of both halves alive, sums would be spilled.
                __asm__ volatile("" ::: "memory");
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < panels * VECTORS; i++) {
            vf sum = sums[r * panels * VECTORS + i];
            float *to = out + r * out_stride + i * VW;
            if (format == FP8) sum = sum * v_set1(FP8_SCALE);
            if (bias) sum = sum + v_load(bias + i * VW);
            if (add) sum = v_load(to) + sum;
            v_store(to, sum);
        }
    }
}

typedef void (*tile_function)(const float *x, int64_t x_stride, const char *w, int64_t panel_bytes, int64_t pairs,
                              float *out, int64_t out_stride, const float *bias, int add, struct ahead ahead);

#define TILE(rows, panels, format, name)                                                                              \
    static void name(const float *x, int64_t x_stride, const char *w, int64_t panel_bytes, int64_t pairs, float *out, \
                     int64_t out_stride, const float *bias, int add, struct ahead ahead) {                            \
        tile(rows, panels, format, panels == 1, x, x_stride, w, panel_bytes, pairs, out, out_stride, bias, add,       \
             ahead);                                                                                                  \
    }
#define TILES(format)                       \
    TILE(1, 4, format, tile_##format##_1_4) \
    TILE(1, 2, format, tile_##format##_1_2) \
    TILE(2, 2, format, tile_##format##_2_2) \
    TILE(1, 1, format, tile_##format##_1_1) \
    TILE(2, 1, format, tile_##format##_2_1) \
    TILE(3, 1, format, tile_##format##_3_1) \
    TILE(4, 1, format, tile_##format##_4_1) \
    TILE(5, 1, format, tile_##format##_5_1) \
    TILE(6, 1, format, tile_##format##_6_1)
#define NARROW(format)                                                                                       \
    tile_##format##_1_1, tile_##format##_2_1, tile_##format##_3_1, tile_##format##_4_1, tile_##format##_5_1, \
        tile_##format##_6_1
#if VW == 16
#define MORE_TILES(format)                    \
    TILE(7, 1, format, tile_##format##_7_1)   \
    TILE(8, 1, format, tile_##format##_8_1)   \
    TILE(9, 1, format, tile_##format##_9_1)   \
    TILE(10, 1, format, tile_##format##_10_1) \
    TILE(11, 1, format, tile_##format##_11_1) \
    TILE(12, 1, format, tile_##format##_12_1)
#define MORE_NARROW(format)                                                                                      \
    , tile_##format##_7_1, tile_##format##_8_1, tile_##format##_9_1, tile_##format##_10_1, tile_##format##_11_1, \
        tile_##format##_12_1
#else
#define MORE_TILES(format)
#define MORE_NARROW(format)
#endif
TILES(FP32)
MORE_TILES(FP32)
TILES(BF16)
MORE_TILES(BF16)
TILES(FP16)
MORE_TILES(FP16)
static const tile_function NARROW_TILES[3][MOST_ROWS] = {
    {NARROW(FP32) MORE_NARROW(FP32)}, {NARROW(BF16) MORE_NARROW(BF16)}, {NARROW(FP16) MORE_NARROW(FP16)}};
#define WIDE(format) tile_##format##_1_4, tile_##format##_1_2, tile_##format##_2_2
static const tile_function WIDE_TILES[3][3] = {{WIDE(FP32)}, {WIDE(BF16)}, {WIDE(FP16)}};

// Cuts the rows that are left into tiles of nearly equal size: a tile of one or two rows is slow.
INLINE int64_t rows_of_tile(int64_t left) {
    int64_t tiles = (left + MOST_ROWS - 1) / MOST_ROWS;
    return (left + tiles - 1) / tiles;
}

// The rows that pass all panels together: all, or nearly equal parts.
INLINE int64_t rows_together(int64_t in, int64_t rows) {
    int64_t most = ROW_BYTES / (4 * in) < 4 * MOST_ROWS ? 4 * MOST_ROWS : ROW_BYTES / (4 * in);
    int64_t parts = (rows + most - 1) / most;
    return parts > 1 ? (rows + parts - 1) / parts : most;
}

// Multiplies any number of rows by consecutive panels, without slices.
static void multiply_panels(int format, const float *x, int64_t x_stride, int64_t rows, const char *w,
                            int64_t panel_bytes, int64_t panels, int64_t pairs, float *out, int64_t out_stride,
                            const float *bias, int add) {
    for (int64_t p = 0; p < panels;) {
        int wide = rows == 1 && panels - p >= 4 ? 4 : rows <= 2 && panels - p >= 2 ? 2 : 1;
        const char *panel = w + p * panel_bytes;
        const float *panel_bias = bias ? bias + p * PANEL : NULL;
        float *to = out + p * PANEL;
        if (wide > 1)
            WIDE_TILES[format][wide == 4 ? 0 : rows](x, x_stride, panel, panel_bytes, pairs, to, out_stride, panel_bias,
                                                     add, (struct ahead){panel, 0});
        // The first two tiles of a panel fetch the one behind it, a half each: its reads overlap with sums.
        int64_t part = rows <= MOST_ROWS ? panel_bytes : panel_bytes / 2, left = panel_bytes;
        for (int64_t r = 0, count; wide == 1 && r < rows; r += count, left -= part) {
            count = rows_of_tile(rows - r);
            struct ahead ahead = {panel, 0};
            if (left > 0) ahead = (struct ahead){panel + 2 * panel_bytes - left, part / pairs};
            NARROW_TILES[format][count - 1](x + r * x_stride, x_stride, panel, panel_bytes, pairs, to + r * out_stride,
                                            out_stride, panel_bias, add, ahead);
        }
        p += wide;
    }
}

// What adapters add to a product: the products of their factors, of the rows of a step that have an adapter.
struct addition {
    const struct model *model;
    const struct adapter *adapters;  // of the operation, by slot
    int64_t row;                     // the first row of the product, among those of the step
    uint32_t arrival;                // that of this thread: the others' A x is there when all have arrived
};

// Adds the products of one slice with B of an adapter, of one expert, to `rows` rows, panels [first, last); `out`
// begins with both, and the rows of A x with row r.
static void add_factors(const struct model *m, const struct adapter *adapter, int64_t expert, int slice, int64_t r,
                        int64_t rows, int64_t first, int64_t last, float *out, int64_t out_stride) {
    int64_t ranks = (adapter->down.out + PANEL - 1) / PANEL * PANEL;
    for (int32_t p = 0; p < adapter->pairs; p++) {
        const struct up_factor *up = &adapter->ups[p];
        const struct matrix *w = &up->matrix;
        int64_t panels = (w->out + PANEL - 1) / PANEL, stop = up->panel + panels,
                low = up->panel > first ? up->panel : first, high = stop < last ? stop : last;
        if (low < high)
            multiply_panels(w->format, m->low + r * m->low_stride + slice * ranks + up->rank, m->low_stride, rows,
                            (const char *)w->data + (expert * panels + low - up->panel) * w->panel_bytes,
                            w->panel_bytes, high - low, (w->in + 1) / 2, out + (low - first) * PANEL, out_stride, NULL,
                            1);
    }
}

// Adds the products of one slice to `rows` rows from row r on, panels [first, last); `out` begins with both. The first
// slice gets the change of the bias, too. NULL adds nothing.
static void add_adapters(const struct addition *a, int slice, int64_t r, int64_t rows, int64_t first, int64_t last,
                         float *out, int64_t out_stride) {
    if (!a) return;
    const struct step *step = &a->model->step;
    tk_await(a->model->pool, a->arrival);
    for (int64_t i = 0; i < step->num_adapted; i++) {
        const struct adapted_rows *held = &step->adapted[i];
        const struct adapter *adapter = a->adapters + held->slot;
        int64_t from = a->row + r, to = from + rows, begin = held->first > from ? held->first : from,
                end = held->last < to ? held->last : to;
        if (begin < end)
            add_factors(a->model, adapter, 0, slice, begin, end - begin, first, last, out + (begin - from) * out_stride,
                        out_stride);
        if (slice || !adapter->bias) continue;
        for (int64_t n = begin - from; n < end - from; n++)
            for (int64_t c = 0; c < (last - first) * PANEL; c += VW) {
                float *sum = out + n * out_stride + c;
                v_store(sum, v_load(sum) + v_load(adapter->bias + first * PANEL + c));
            }
    }
}

// Multiplies rows by panels whose columns are cut into slices: each slice on its own, then a binary tree.
static void multiply_slices(const struct matrix *m, const float *x, int64_t x_stride, int64_t rows, int64_t first,
                            int64_t panels, float *out, int64_t out_stride, int add, const struct addition *addition) {
    const float *bias = m->bias;
    int64_t columns = m->in / m->slices, pairs = (columns + 1) / 2, bytes = pairs * pair_bytes(m->format);
    float parts[MAX_SLICES][MOST_ROWS * PANEL];
    for (int64_t p = first; p < first + panels; p++) {
        for (int64_t r = 0, count; r < rows; r += count) {
            count = rows_of_tile(rows - r);
            for (int s = 0; s < m->slices; s++) {
                NARROW_TILES[m->format][count - 1](x + r * x_stride + s * columns, x_stride,
                                                   (const char *)m->data + p * m->panel_bytes + s * bytes, 0, pairs,
                                                   parts[s], PANEL, NULL, 0, (struct ahead){m->data, 0});
                add_adapters(addition, s, r, count, p, p + 1, parts[s], PANEL);
            }
            for (int step = 1; step < m->slices; step *= 2)
                for (int s = 0; s + step < m->slices; s += 2 * step)
                    for (int64_t i = 0; i < count * PANEL; i += VW)
                        v_store(parts[s] + i, v_load(parts[s] + i) + v_load(parts[s + step] + i));
            for (int64_t i = 0; i < count * VECTORS; i++) {
                vf sum = v_load(parts[0] + i * VW);
                int64_t column = p * PANEL + i % VECTORS * VW;
                float *to = out + (r + i / VECTORS) * out_stride + column;
                if (bias) sum = sum + v_load(bias + column);
                if (add) sum = v_load(to) + sum;
                v_store(to, sum);
            }
        }
    }
}

// Multiplies rows by the panels [first, last) of a weight.
static void multiply(const struct matrix *m, const float *x, int64_t x_stride, int64_t rows, float *out,
                     int64_t out_stride, int add, int64_t first, int64_t last, const struct addition *addition) {
    if (m->slices > 1) {
        multiply_slices(m, x, x_stride, rows, first, last - first, out, out_stride, add, addition);
        return;
    }
    int64_t block = rows_together(m->in, rows);
    for (int64_t r = 0; r < rows; r += block) {
        int64_t count = rows - r < block ? rows - r : block;
        float *to = out + r * out_stride + first * PANEL;
        multiply_panels(m->format, x + r * x_stride, x_stride, count, (const char *)m->data + first * m->panel_bytes,
                        m->panel_bytes, last - first, (m->in + 1) / 2, to, out_stride,
                        m->bias ? m->bias + first * PANEL : NULL, add);
        add_adapters(addition, 0, r, count, first, last, to, out_stride);
    }
}

#endif
