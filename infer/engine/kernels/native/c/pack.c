// The packing of weights, and the life of a model's pool.
#include "codes.h"

// Packs the columns of one row in one slice: `even` and `odd` are the bytes in a pair of columns where they belong.
static void pack_columns(char *to, int64_t pair_bytes, int64_t even, int64_t odd, const char *from, int64_t step,
                         int64_t columns, int64_t itemsize) {
    if (itemsize == 2 && step == 2 && odd == even + 2) {  // both values of a pair lie together here and there
        int64_t pairs = columns / 2;
        for (int64_t p = 0; p < pairs; p++) memcpy(to + p * pair_bytes + even, from + 4 * p, 4);
        if (columns % 2) memcpy(to + pairs * pair_bytes + even, from + 4 * pairs, 2);
        return;
    }
    for (int64_t j = 0; j < columns; j++, from += step) {
        char *at = to + j / 2 * pair_bytes + (j % 2 ? odd : even);
        if (itemsize == 2) memcpy(at, from, 2);
        else memcpy(at, from, 4);
    }
}

// Packs [out, in] values of `itemsize` bytes, whose rows and columns lie `row_stride` and `column_stride` values apart.
// A panel stays in the cache meanwhile, so its rows are read one after the other.
__attribute__((visibility("default"))) void tk_pack(const struct matrix *m, const void *source, int64_t itemsize,
                                                    int64_t row_stride, int64_t column_stride) {
    int64_t columns = m->in / m->slices, line = PANEL * itemsize, slice_bytes = m->panel_bytes / m->slices;
    int padded = slice_bytes > columns * line;
    char *to = (char *)m->data;
    for (int64_t panel = 0; panel * PANEL < m->out; panel++, to += m->panel_bytes) {
        int64_t rows = m->out - panel * PANEL < PANEL ? m->out - panel * PANEL : PANEL;
        if (rows < PANEL || padded) memset(to, 0, (size_t)m->panel_bytes);
        for (int64_t r = 0; r < rows; r++) {
            int64_t even = (m->format == BF16 ? 2 * r : r) * itemsize;
            int64_t odd = m->format == BF16 ? even + itemsize : even + line;
            const char *from = (const char *)source + (panel * PANEL + r) * row_stride * itemsize;
            for (int64_t slice = 0; slice < m->slices; slice++)
                pack_columns(to + slice * slice_bytes, 2 * line, even, odd,
                             from + slice * columns * column_stride * itemsize, column_stride * itemsize, columns,
                             itemsize);
        }
    }
}

// Puts the code of a column of a group into its place, in the lane of its row; see codes.h.
static void put_code(int32_t format, uint8_t *lane, int64_t column, uint8_t code) {
    int64_t places = format == CODES8 || format == PAIRS8 ? 4 : 8, place = column % places;
    uint8_t *word = lane + (1 + column / places) * 4 * PANEL;
    if (format == PAIRS4) place = place % 2 * 4 + place / 2;
    if (places == 4) word[place] = code;
    else word[place / 2] |= (uint8_t)(code << 4 * (place % 2));
}

// Packs a quantized weight: codes [out, in], one per byte, and headers [out, in / group]; see codes.h. `m->data` is
// zeroed.
__attribute__((visibility("default"))) void tk_pack_codes(const struct matrix *m, const uint8_t *codes,
                                                          const uint32_t *headers) {
    int64_t groups = m->in / m->group, group_bytes = m->panel_bytes / groups;
    for (int64_t r = 0; r < m->out; r++) {
        uint8_t *lane = (uint8_t *)m->data + r / PANEL * m->panel_bytes + r % PANEL * 4;
        for (int64_t g = 0; g < groups; g++, lane += group_bytes, codes += m->group) {
            memcpy(lane, headers + r * groups + g, 4);
            for (int64_t i = 0; i < m->group; i++) put_code(m->format, lane, i, codes[i]);
        }
    }
}

__attribute__((visibility("default"))) int32_t tk_start_threads(struct model *m, int32_t threads) {
    m->pool = tk_pool_start(threads);
    m->threads = m->pool ? tk_pool_threads(m->pool) : 0;
    return m->threads;
}

__attribute__((visibility("default"))) void tk_stop_threads(struct model *m) {
    tk_pool_stop(m->pool);
    m->pool = NULL;
}
