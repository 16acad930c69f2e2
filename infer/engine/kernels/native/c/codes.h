// Quantized weights in memory: codes of 8 or 4 bits in groups of columns, each with a scale, and in 4 bits a minimum.
//
// A group of a panel is a line of 16 headers, then its codes. The header of 8 bits is the scale in fp32; that of 4 bits
// has scale and minimum in bf16, the minimum in the upper half. A code of 8 bits stands for itself less OFFSET.
//
// CODES8 and CODES4, for rows of fp32 (quantized.h): lines of 16 words, one per output row, each with the codes of 4 or
// 8 consecutive columns. PAIRS8 and PAIRS4, for rows of bf16 (coded.h): of 8 bits 16 bytes per column, one per output
// row, with OFFSET taken off; of 4 bits lines of 16 words, each with the codes of 8 columns, those of even columns in
// the lower half.
#ifndef TK_CODES_H
#define TK_CODES_H

#include "model.h"
#include "narrow.h"

#define LINE_BYTES (4 * PANEL)
#define OFFSET 128

INLINE int is_quantized(const struct matrix *w) { return w->format >= CODES8; }
INLINE int has_pairs(const struct matrix *w) { return w->format >= PAIRS8; }
INLINE int64_t bits_of(const struct matrix *w) { return w->format == CODES8 || w->format == PAIRS8 ? 8 : 4; }

// The lines of codes of a group, the columns that they have room for, and the bytes of a group with its headers.
INLINE int64_t lines_of(const struct matrix *w) {
    int64_t columns = 32 / bits_of(w);
    return (w->group + columns - 1) / columns;
}
INLINE int64_t room_of(const struct matrix *w) { return lines_of(w) * (32 / bits_of(w)); }
INLINE int64_t group_bytes(const struct matrix *w) { return (1 + lines_of(w)) * LINE_BYTES; }
INLINE int64_t groups_in(const struct matrix *w) { return w->in / w->group; }

// The code of 4 bits of a column, of 8, in the word of its row.
INLINE uint32_t nibble_at(const struct matrix *w, uint32_t word, int64_t column) {
    int64_t place = has_pairs(w) ? column % 2 * 4 + column / 2 : column;
    return word >> (4 * place) & 15;
}

// Element `column` of row `index` of a quantized weight.
INLINE float quantized_value(const struct matrix *w, int64_t index, int64_t column) {
    const char *group = (const char *)w->data + index / PANEL * w->panel_bytes + column / w->group * group_bytes(w);
    int64_t lane = index % PANEL, within = column % w->group;
    uint32_t header, word;
    memcpy(&header, group + 4 * lane, 4);
    if (bits_of(w) == 4) {
        memcpy(&word, group + (1 + within / 8) * LINE_BYTES + 4 * lane, 4);
        float code = (float)nibble_at(w, word, within % 8);
        return code * bf16_to_float((uint16_t)header) + bf16_to_float((uint16_t)(header >> 16));
    }
    float scale;
    memcpy(&scale, &header, 4);
    const uint8_t *line = (const uint8_t *)group + LINE_BYTES;
    return (float)(line[within / 4 * LINE_BYTES + 4 * lane + within % 4] - OFFSET) * scale;
}

#endif
