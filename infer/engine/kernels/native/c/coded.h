// Products of rounded rows with quantized weights, what both instructions for bf16 share: codes are bf16 values as they
// are, so only rows are rounded. In each group an element's partial sum has the order of the instruction; it begins
// at zero. The sum of a slice is one chain of fused products: the group's scale times its partial sum, in 4 bits then
// the minimum times the row's group sum; groups ascending. Denormal numbers count as zero, as the instructions have it.
#ifndef TK_CODED_H
#define TK_CODED_H

#include "rounding.h"

#define CODES_AHEAD 8  // lines of each panel that few rows fetch before their turn

// Some rows of a `struct group` by codes in one slice.
struct coded {
    const struct group *g;
    int bits;               // of a code
    const float *row_sums;  // of the first row; in 8 bits there are none
    int64_t row_stride;     // from one row's sums to the next
    int64_t groups;         // in the slice
    int64_t lines, bytes;   // of a group
    int64_t steps;          // of 32 columns of a group, in rounded rows
    int64_t jump;           // bytes from the end of the panels to the next ones
};

// Denormal numbers become zero in vectors of floats until `restore_denormals`.
INLINE uint32_t flush_denormals(void) {
#if defined(TK_AVX512)
    uint32_t state = _mm_getcsr();
    _mm_setcsr(0x1f80 | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return state;
#else
    return 0;
#endif
}
INLINE void restore_denormals(uint32_t state) {
    (void)state;
#if defined(TK_AVX512)
    _mm_setcsr(state);
#endif
}
#if defined(TK_AVX512)
INLINE vf fma_flushed(vf a, vf b, vf c) { return v_fma(a, b, c); }
INLINE vf add_flushed(vf a, vf b) { return a + b; }
#else  // not inlined: models take long to compile
static __attribute__((noinline)) vf fma_flushed(vf a, vf b, vf c) {
    for (int i = 0; i < VW; i++) c[i] = model_fma(a[i], b[i], c[i]);
    return c;
}
static __attribute__((noinline)) vf add_flushed(vf a, vf b) {
    for (int i = 0; i < VW; i++) a[i] = model_add(a[i], b[i]);
    return a;
}
#endif

// Widens the codes of 8 bits in place `place`, of 4, of the words of a line: they become the last bits of a number
// whose exponent gives them their value, and which is taken off again.
INLINE vf widened_bytes(vi line, const int place) {
    if (place >= 2) line = (vi)((pairs_vector)line >> 16);
    const float base = place % 2 ? 0x1p15f : 0x1p23f;
    const vi mask = vi_set1(place % 2 ? 0xff00 : 0xff);
#if defined(TK_AVX512)
    vf wide = (vf)_mm512_ternarylogic_epi32((__m512i)line, (__m512i)mask, (__m512i)v_set1(base), 0xea);
#else
    vf wide = (vf)((line & mask) | (vi)v_set1(base));
#endif
    return wide - v_set1(base + OFFSET);
}

// Widens the codes of 4 bits in place `place`, of 8, of the words of a line.
INLINE vf widened_nibbles(vi line, const int place) {
#if defined(TK_AVX512)
    // A table takes the lower four bits of each lane.
    const vf values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return _mm512_permutexvar_ps((__m512i)((pairs_vector)line >> (4 * place)), values);
#else
    return vi_to_float((line >> (4 * place)) & vi_set1(15));
#endif
}

INLINE vi load_line(const char *from) {
    vi line;
    memcpy(&line, from, sizeof line);
    return line;
}

// Widens a pair of columns, `place` of those of a line, to bf16.
INLINE pairs_vector widened_pair(const int bits, const char *line, const int place) {
    vi words = load_line(line);
    if (bits == 8)
        return (pairs_vector)widened_bytes(words, 2 * place) >> 16 | (pairs_vector)widened_bytes(words, 2 * place + 1);
#if defined(TK_AVX512)
    // A table takes the lower five bits of each half: it has the 16 values twice.
    static const uint16_t values[32] __attribute__((aligned(64))) = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
        0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    __m512i shifted = _mm512_srli_epi16((__m512i)words, 4 * place);
    return (pairs_vector)_mm512_permutexvar_epi16(shifted, _mm512_load_si512(values));
#else
    return (pairs_vector)widened_nibbles(words, place) >> 16 | (pairs_vector)widened_nibbles(words, place + 4);
#endif
}
INLINE int64_t pairs_of_line(const int bits) { return bits == 8 ? 2 : 4; }

// The scales of a group of a panel and, in 4 bits, its minima.
struct scaling {
    vf scales, minima;
};
INLINE struct scaling scaling_of(const int bits, const char *group) {
    vi headers = load_line(group);
    if (bits == 8) return (struct scaling){(vf)headers, v_set1(0.0f)};
    return (struct scaling){(vf)(headers << 16), v_high_halves(headers)};
}

// Adds the partial sums of group n to the sums of row `row`.
INLINE vf add_group(const int bits, const struct coded *c, int64_t row, int64_t n, struct scaling by, vf partial,
                    vf sums) {
    sums = fma_flushed(by.scales, partial, sums);
    if (bits == 8) return sums;
    return fma_flushed(by.minima, v_set1(c->row_sums[row * c->row_stride + n]), sums);
}

// The codes of a slice, and the rows' group sums, from the first row's first on.
INLINE struct coded coded_of(const struct group *g, const struct matrix *w, const float *row_sums, int slice) {
    int64_t groups = groups_in(w) / w->slices;
    return (struct coded){.g = g,
                          .bits = (int)bits_of(w),
                          .row_sums = row_sums + slice * groups,
                          .row_stride = sums_of_row(w),
                          .groups = groups,
                          .lines = lines_of(w),
                          .bytes = group_bytes(w),
                          .steps = steps_of_part(w),
                          .jump = slice < w->slices - 1 ? 0 : g->jump - w->panel_bytes};
}

// The bytes from the codes of group n to those that are read `ahead` bytes later.
INLINE int64_t codes_ahead(const struct coded *c, int64_t n, int64_t ahead) {
    return (c->groups - n) * c->bytes <= ahead ? ahead + c->jump : ahead;
}

#endif
