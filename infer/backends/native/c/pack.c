// The packing of weights, and the life of a model's pool.
#include "model.h"

#include <string.h>

// Packs [out, in] values of `itemsize` bytes, whose rows and columns lie `row_stride` and `column_stride` values apart.
__attribute__((visibility("default"))) void tk_pack(const struct matrix *m, const void *source, int64_t itemsize,
                                                    int64_t row_stride, int64_t column_stride) {
    int64_t columns = m->in / m->slices, pairs = (columns + 1) / 2;
    int64_t line = PANEL * itemsize, slice_bytes = pairs * 2 * line;
    char *to = (char *)m->data;
    for (int64_t panel = 0; panel * PANEL < m->out; panel++, to += m->panel_bytes) {
        int64_t rows = m->out - panel * PANEL < PANEL ? m->out - panel * PANEL : PANEL;
        memset(to, 0, (size_t)m->panel_bytes);
        for (int64_t k = 0; k < m->in; k++) {
            char *pair = to + k / columns * slice_bytes + k % columns / 2 * 2 * line;
            int64_t half = k % columns % 2;
            const char *from = (const char *)source + (panel * PANEL * row_stride + k * column_stride) * itemsize;
            for (int64_t r = 0; r < rows; r++, from += row_stride * itemsize) {
                int64_t at = m->format == BF16 ? 2 * r + half : half * PANEL + r;
                if (itemsize == 2) memcpy(pair + 2 * at, from, 2);
                else memcpy(pair + 4 * at, from, 4);
            }
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
