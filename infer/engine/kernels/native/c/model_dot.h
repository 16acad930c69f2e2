// Models in portable C of the instructions for products of bf16 values, after Intel's manual (SDM, volume 2, VDPBF16PS,
// TDPBF16PS and VCVTNE2PS2BF16): fused products and sums are rounded to nearest even, denormal inputs count as zero,
// denormal results become zero, and MXCSR is neither read nor written. Where a unit's flags do not allow the
// instructions, its kernels run on the models; where they do, the instructions are checked against them.
#ifndef TK_MODEL_DOT_H
#define TK_MODEL_DOT_H

#include <float.h>
#include <math.h>

#include "narrow.h"

INLINE float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

// a * b + c. A result counts as denormal if it is one at 24 bits and any exponent; fmaf has rounded it to fewer bits,
// so that the largest of them may have become the smallest normal number.
static float model_fma(float a, float b, float c) {
    a = flushed(a), b = flushed(b), c = flushed(c);
    float sum = fmaf(a, b, c);
    if (fabsf(sum) == FLT_MIN && fabsf(fmaf(a * 0x1p64f, b, c * 0x1p64f)) < FLT_MIN * 0x1p64f)
        return copysignf(0.0f, sum);
    return flushed(sum);
}

INLINE float model_add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

// VCVTNE2PS2BF16, one value: to nearest even; a NaN keeps its upper bits.
INLINE uint16_t model_round(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return isnan(x) ? (uint16_t)(bits >> 16 | 0x40) : float_to_bf16(flushed(x));
}

// VDPBF16PS, one lane: the odd product is added first.
INLINE float model_dot(float sum, uint32_t a, uint32_t b) {
    sum = model_fma(bf16_to_float((uint16_t)(a >> 16)), bf16_to_float((uint16_t)(b >> 16)), sum);
    return model_fma(bf16_to_float((uint16_t)a), bf16_to_float((uint16_t)b), sum);
}

// TDPBF16PS, one element: products of even and of odd columns are summed apart from zero; their sum is added.
INLINE float model_tile_dot(float sum, const uint16_t *a, const uint16_t *b, int64_t b_stride, int64_t pairs) {
    float even = 0.0f, odd = 0.0f;
    for (int64_t k = 0; k < pairs; k++) {
        even = model_fma(bf16_to_float(a[2 * k]), bf16_to_float(b[k * b_stride]), even);
        odd = model_fma(bf16_to_float(a[2 * k + 1]), bf16_to_float(b[k * b_stride + 1]), odd);
    }
    return model_add(sum, model_add(even, odd));
}

// Values for checks of instructions: every sign, zeros, denormals, and exponents whose products are denormal or normal.
INLINE float check_value(uint32_t *state) {
    static const uint32_t exponents[8] = {0, 1, 63, 64, 126, 127, 127, 128};
    *state = *state * 1664525u + 1013904223u;
    uint32_t random = *state >> 8;
    return bf16_to_float((uint16_t)((random & 0x807f) | exponents[random >> 20 & 7] << 7));
}

#endif
