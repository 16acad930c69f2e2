// Attention to integers in models in fp32: a block's codes become floats, which an item's rows then multiply as they do
// those of an fp32 cache. Nothing is rounded to int16, as it is for the sums of integers in pages.h and nibbles.h.
#ifndef TK_WIDENED_H
#define TK_WIDENED_H

#include "nibbles.h"

// Whether keys or values of a format are widened.
INLINE int is_widened(const struct model *m, int format) { return is_integer(format) && m->weight_format == FP32; }

// A code of a token and a group of dims counts code * scale + zero.
struct steps {
    vf scale, zero;
};

// Of keys those of VW tokens from `token` on, of values those of one token.
INLINE struct steps steps_of(const struct model *m, int format, int values, const char *scales, int64_t token,
                             int64_t group) {
    const float *whole = (const float *)scales + token;
    const uint16_t *half = (const uint16_t *)scales + group * 2 * m->block_size + token, *zero = half + m->block_size;
    if (format == INT8) return (struct steps){values ? v_set1(*whole) : v_load(whole), v_set1(0.0f)};
    if (values) return (struct steps){v_set1(fp16_to_float(*half)), v_set1(fp16_to_float(*zero))};
    return (struct steps){v_widen_fp16(half), v_widen_fp16(zero)};
}

// Widens a page of integers, keys or values: the first pairs of its first panels.
INLINE void widen_page(const struct model *m, int format, int values, const char *page, const char *scales,
                       int64_t panels, int64_t pairs, float *to) {
    int64_t lines = (values ? m->block_size : m->head_dim) / 2;
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t k = 0; k < pairs; k++) {
            const char *from = page + (panel * lines + k) * pair_bytes(format);
            float *pair = to + (panel * lines + k) * 2 * PANEL;
#pragma GCC unroll 2
            for (int n = 0; n < VECTORS; n++) {
                vi both = format == INT8 ? v_widen_pairs(from + n * 2 * VW) : v_widen_nibbles(from + n * VW);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    int64_t token = values ? 2 * k + half : panel * PANEL + n * VW;
                    int64_t group = (values ? panel * PANEL : 2 * k) / GROUP;
                    struct steps steps = steps_of(m, format, values, scales, token, group);
                    vf codes = vi_to_float(half ? both >> 16 : both << 16 >> 16);
                    v_store(pair + half * PANEL + n * VW, v_fma(codes, steps.scale, steps.zero));
                }
            }
        }
}

// Multiplies some of an item's rows by a page of integers; p has all but the page's place.
static void multiply_codes(const struct model *m, int format, int values, const char *page, int64_t scale_offset,
                           struct product p, float *widened, float *out, int64_t out_stride) {
    const char *scales = page + scale_offset;
    if (values && format == INT8) widen_page(m, INT8, 1, page, scales, p.panels, p.pairs, widened);
    else if (values) widen_page(m, INT4, 1, page, scales, p.panels, p.pairs, widened);
    else if (format == INT8) widen_page(m, INT8, 0, page, scales, p.panels, p.pairs, widened);
    else widen_page(m, INT4, 0, page, scales, p.panels, p.pairs, widened);
    p.page = (const char *)widened, p.panel_bytes = (values ? m->block_size : m->head_dim) / 2 * pair_bytes(FP32);
    multiply_page(FP32, &p, out, out_stride, values);
}

// The scores of the block at `at`, or its values weighted and added: `all` has all of an item's rows, without a page.
static void multiply_block(const struct model *m, const struct operation *op, const struct item *item, int64_t at,
                           int values, const struct product *all, float *widened, float *out, int64_t out_stride) {
    int format = values ? m->value_format : m->key_format;
    struct readers twinned = format == INT4 ? readers_of(m, item, at) : (struct readers){0, 0};
    struct product near = *all, far = *all;
    near.x = (const float *)all->x + twinned.first * all->x_stride, near.rows = twinned.last - twinned.first;
    far.x = (const float *)all->x + twinned.last * all->x_stride, far.rows = all->rows - twinned.last;
    if (near.rows) {
        near.ahead = no_fetch(all->ahead.from);
        multiply_codes(m, INT8, values, twin_of(m, op, item, at, values), m->twin_scale_offset, near, widened,
                       out + twinned.first * out_stride, out_stride);
    }
    if (far.rows)
        multiply_codes(m, format, values, page_of(m, op, item, at, values), m->scale_offset[values], far, widened,
                       out + twinned.last * out_stride, out_stride);
}

#endif
