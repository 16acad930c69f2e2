"""The formats of keys and values in Triton: how kernels read and store vectors of the pages of `aten/pages.py`.

The parts of a page (`cache.py`) say which format it is: only 4 bits have zeros, only integers have scales, and 8-bit
floats are bytes without scales. A vector has DIM elements, in tiles of WIDTH columns, the next power of two, of which
the others are zeros or unused.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(32)
_LARGEST = tl.constexpr(127.0)
_TINY = tl.constexpr(1e-30)
_LARGEST_FP16 = tl.constexpr(65504.0)
_TINY_FP16 = tl.constexpr(2.0**-24)
_LARGEST_FP8 = tl.constexpr(448.0)
_EVEN = tl.constexpr(1.5 * 2.0**23)  # a sum with it is rounded to an integer, half to even


@triton.jit
def rounded(x: tl.tensor) -> tl.tensor:
    """Rounds fp32 below 2^22 to integers, half to even, as torch does."""
    return (x + _EVEN) - _EVEN


@triton.jit
def _columns(lines: tl.tensor, inside: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Returns offsets and the mask of the elements of vectors, [lines, WIDTH]."""
    columns = tl.arange(0, WIDTH)[None, :]
    return lines[:, None] * DIM + columns, inside[:, None] & (columns < DIM)


@triton.jit
def _from_fp8(bits: tl.tensor) -> tl.tensor:
    """Returns e4m3 as fp32, on cards without that type too: its bits are those of an fp16 that is 256 times smaller."""
    bits = bits.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), x)


@triton.jit
def _to_fp8(x: tl.tensor) -> tl.tensor:
    """Returns fp32 as the bits of e4m3, rounded half to even; what is larger becomes 448."""
    size = tl.minimum(tl.abs(x), _LARGEST_FP8)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    low = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2^-9
    code = tl.where(size < 0.015625, low, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _read_int4(
    pages: tl.tensor, lines: tl.tensor, inside: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    both_at, both_inside = _columns(lines, inside, (DIM + 1) // 2, WIDTH // 2)
    both = tl.load(pages.data + both_at, mask=both_inside, other=0)
    at, has = _columns(lines, inside, (DIM + GROUP - 1) // GROUP, WIDTH // GROUP)
    scales = tl.load(pages.scales + at, mask=has, other=0.0).to(tl.float32)
    zeros = tl.load(pages.zeros + at, mask=has, other=0.0).to(tl.float32)
    codes = tl.reshape(tl.join(both & 15, both >> 4), (lines.shape[0], WIDTH // GROUP, GROUP)).to(tl.float32)
    return tl.reshape(codes * scales[:, :, None] + zeros[:, :, None], (lines.shape[0], WIDTH))


@triton.jit
def read_vectors(
    pages: tl.tensor,
    lines: tl.tensor,
    inside: tl.tensor,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """Reads vectors as COMPUTE [lines, WIDTH]; those that are not inside are finite, and nothing is read for them.

    Args:
        pages: `PageParts`.
        lines: int64, the flat indexes of (block, head, offset).
        inside: which of them are read.
        DIM, WIDTH, COMPUTE: see above, and the dtype of the result.
    """
    if pages.zeros is not None:
        x = _read_int4(pages, lines, inside, DIM, WIDTH)
    else:
        at, has = _columns(lines, inside, DIM, WIDTH)
        x = tl.load(pages.data + at, mask=has, other=0.0)
        if pages.scales is not None:
            x = x.to(tl.float32) * tl.load(pages.scales + lines, mask=inside, other=0.0)[:, None]
        elif pages.data.dtype.element_ty == tl.uint8:
            x = _from_fp8(x)
    return x.to(COMPUTE)


@triton.jit
def _store_int4(
    pages: tl.tensor, lines: tl.tensor, inside: tl.tensor, x: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    GROUPS: tl.constexpr = WIDTH // GROUP
    x = tl.reshape(x, (lines.shape[0], GROUPS, GROUP))
    column = tl.arange(0, GROUPS)[None, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]
    real = column < DIM
    lowest = tl.min(tl.where(real, x, float("inf")), axis=2)
    highest = tl.max(tl.where(real, x, float("-inf")), axis=2)
    nothing = tl.sum(tl.where(real, x - x, 0.0), axis=2)  # NaN where an element is not finite
    zeros = (tl.minimum(tl.maximum(lowest, -_LARGEST_FP16), _LARGEST_FP16) + nothing).to(tl.float16)
    scales = tl.div_rn(highest - zeros.to(tl.float32), tl.full(highest.shape, 15.0, tl.float32))
    scales = tl.minimum(tl.maximum(scales, _TINY_FP16), _LARGEST_FP16).to(tl.float16)
    divisor = tl.broadcast_to(scales.to(tl.float32)[:, :, None], x.shape)
    codes = rounded(tl.div_rn(x - zeros.to(tl.float32)[:, :, None], divisor))
    codes = tl.where(real, tl.minimum(tl.maximum(codes, 0.0), 15.0), 0.0).to(tl.uint8)
    low, high = tl.split(tl.reshape(codes, (lines.shape[0], WIDTH // 2, 2)))
    both_at, both_inside = _columns(lines, inside, (DIM + 1) // 2, WIDTH // 2)
    tl.store(pages.data + both_at, low | (high << 4), mask=both_inside)
    at, has = _columns(lines, inside, (DIM + GROUP - 1) // GROUP, GROUPS)
    tl.store(pages.scales + at, scales, mask=has)
    tl.store(pages.zeros + at, zeros, mask=has)


@triton.jit
def store_vectors(
    pages: tl.tensor, lines: tl.tensor, inside: tl.tensor, x: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """Stores fp32 [lines, WIDTH], whose columns from DIM on are zeros, rounded to the format; see `read_vectors`."""
    at, has = _columns(lines, inside, DIM, WIDTH)
    if pages.zeros is not None:
        _store_int4(pages, lines, inside, x, DIM, WIDTH)
    elif pages.scales is not None:
        scales = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((lines.shape[0],), _LARGEST, tl.float32))
        scales = tl.maximum(scales, _TINY) + tl.sum(x - x, axis=1)  # NaN where an element is not finite
        codes = rounded(tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)))
        codes = tl.minimum(tl.maximum(codes, -_LARGEST), _LARGEST)
        tl.store(pages.data + at, codes.to(tl.int8), mask=has)
        tl.store(pages.scales + lines, scales, mask=inside)
    elif pages.data.dtype.element_ty == tl.uint8:
        tl.store(pages.data + at, _to_fp8(x), mask=has)
    else:
        tl.store(pages.data + at, x.to(pages.data.dtype.element_ty), mask=has)
