"""A model in numpy of VDPBF16PS and TDPBF16PS, written apart from the one in C: fp64 sums, rounded to odd first."""

import numpy as np

from tk.core.casts import Array

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
    """Returns a * b + c for bf16 values a and b: rounded once, denormals flushed before and after."""
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


def sliced(x: Array, weight: Array, slices: int, instruction: str) -> Array:
    """Returns fp32 rows times a bf16 weight, whose slices are padded, summed apart, and added as a binary tree."""
    chain, step = {"dot_model": (dot_chain, 2), "amx_model": (tile_chain, 32)}[instruction]
    columns = x.shape[1] // slices
    room = ((0, 0), (0, -columns % step))
    parts = [
        chain(np.pad(round_to_bf16(x[:, at : at + columns]), room), np.pad(weight[:, at : at + columns], room))
        for at in range(0, x.shape[1], columns)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
