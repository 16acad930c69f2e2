"""A model in numpy of VDPBF16PS and TDPBF16PS, written apart from the one in C: fp64 sums, rounded to odd first."""

import numpy as np

from tk.core.casts import Array
from tk.core.quantization import OFFSET, Codes

SMALLEST = np.float32(2.0**-126)


def flush(x: Array) -> Array:
    """Returns fp32 values with zeros of the same sign for denormal ones."""
    flushed: Array = np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x).astype(np.float32)
    return flushed


def round_to_bf16(x: Array) -> Array:
    """Returns fp32 values rounded to the 8 bits of bf16, to nearest even."""
    mantissa, exponent = np.frexp(flush(x).astype(np.float64))
    with np.errstate(over="ignore"):  # more than the largest number is infinite
        rounded: Array = np.ldexp(np.rint(mantissa * 256), exponent - 8).astype(np.float32)
    return rounded


def fma(a: Array, b: Array, c: Array) -> Array:
    """Returns a * b + c for fp32 values: rounded once, denormals flushed before and after."""
    product, addend = np.broadcast_arrays(flush(a).astype(np.float64) * flush(b), flush(c).astype(np.float64))
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    # To odd: where the sum is inexact and its last bit even, its neighbour on the side of the error stands for it.
    is_even = total.view(np.int64) % 2 == 0
    odd = np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
    tiny = np.abs(np.clip(odd * 2.0**64, -1, 1).astype(np.float32)) < SMALLEST * np.float32(2.0**64)
    flushed: Array = np.where(tiny, np.copysign(0, odd), odd).astype(np.float32)
    return flushed


def add(a: Array, b: Array) -> Array:
    """Returns a + b with denormals flushed before and after."""
    return flush(flush(a) + flush(b))


def dot_chain(x: Array, weight: Array) -> Array:
    """Returns bf16 rows [R, K] times a bf16 weight [N, K] as VDPBF16PS sums them: pair by pair, odd before even."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    for column in np.arange(x.shape[1]).reshape(-1, 2)[:, ::-1].ravel():
        sums = fma(x[:, column, None], weight[None, :, column], sums)
    return sums


def tile_chain(x: Array, weight: Array) -> Array:
    """Returns the rows of `dot_chain` as TDPBF16PS sums them: per 32 columns the even ones plus the odd ones."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], 32):
        halves = []
        for start in (first, first + 1):
            half = np.zeros_like(sums)
            for column in range(start, first + 32, 2):
                half = fma(x[:, column, None], weight[None, :, column], half)
            halves.append(half)
        sums = add(sums, add(*halves))
    return sums


CHAINS = {"dot_model": (dot_chain, 2), "amx_model": (tile_chain, 32)}


def tree(parts: list[Array]) -> Array:
    """Returns the sum of slices, added as a binary tree."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def sliced(x: Array, weight: Array, slices: int, instruction: str) -> Array:
    """Returns fp32 rows times a bf16 weight, whose slices are padded, summed apart, and added as a binary tree."""
    chain, step = CHAINS[instruction]
    columns = x.shape[1] // slices
    room = ((0, 0), (0, -columns % step))
    return tree(
        [
            chain(np.pad(round_to_bf16(x[:, at : at + columns]), room), np.pad(weight[:, at : at + columns], room))
            for at in range(0, x.shape[1], columns)
        ]
    )


def group_sums(x: Array) -> Array:
    """Returns the sums of rows of bf16 values: 16 sums of pairs in turn, then halves of these."""
    pairs = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 16, 2)
    sums = np.zeros((len(x), 16), np.float32)
    for step in range(pairs.shape[1]):
        for side in (0, 1):
            sums = sums + pairs[:, step, :, side]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums


def coded(x: Array, codes: Codes, slices: int, instruction: str) -> Array:
    """Returns fp32 rows times a quantized weight: each group's sum times its scale, minima times the rows' sums."""
    chain, step = CHAINS[instruction]
    grouping, groups = codes.grouping, codes.scales.shape[1]
    values = codes.codes.astype(np.float32) - np.float32(OFFSET if grouping.bits == 8 else 0)
    room, rounded, parts = ((0, 0), (0, -grouping.columns % step)), round_to_bf16(x), []
    for group in range(groups):
        columns = slice(group * grouping.columns, (group + 1) * grouping.columns)
        if group % (groups // slices) == 0:
            parts.append(np.zeros((len(x), len(values)), np.float32))
        partial = chain(np.pad(rounded[:, columns], room), np.pad(values[:, columns], room))
        parts[-1] = fma(partial, codes.scales[:, group], parts[-1])
        if grouping.bits == 4:
            parts[-1] = fma(group_sums(rounded[:, columns]), codes.minima[:, group], parts[-1])
    return tree(parts)
