"""The kernel of top-k and top-p: it finds the last token that the filters of a row keep, without a sort.

A filter keeps the first part of the tokens in the order of their scores, the lowest id of equals first. So both filters
together are one cut: the key of the last kept token, and its id. A key is the bits of -score, which are in that order.
It is found two bits at a time: a pass sums what is better than each of three keys. Sums are of integers, so no order
matters: tokens are counted for top-k, and for top-p they weigh what they do in `sampler/exact_math.py`, in units of the
step to which weights are rounded there. Launches set `enable_fp_fusion=False`.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

TILE: Final = 2048  # tokens that a program reads at once
_NO_KEY: Any = tl.constexpr(0x7F800000)  # of scores that are not finite, which no row keeps
_LAST_KEY: Any = tl.constexpr(0xFFFFFFFF)
_LAST_ID: Any = tl.constexpr(0x7FFFFFFF)


class Cuts(NamedTuple):
    """The last kept token of each row, by key and id: int32 [R], of keys the bits."""

    key: Any
    last: Any


@triton.jit
def score_of(logits: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns the scores of logits, at most 0, fp32."""
    scores = logits - largest
    if temperature != 1:
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
    return scores


@triton.jit
def is_before(scores: tl.tensor, ids: tl.tensor, key: tl.tensor, last: tl.tensor) -> tl.tensor:
    """Returns the keys of scores, uint32, and whether they are finite and not behind a cut."""
    keys = scores.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    return keys, (keys < _NO_KEY) & ((keys < key) | ((keys == key) & (ids <= last)))


@triton.jit
def _tile(row: tl.tensor, tile: tl.tensor, cut: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the ids and keys of a tile, and whether they are before a cut."""
    ids = tile * S.tile + tl.arange(0, S.tile)
    x = tl.load(row[0] + ids, mask=ids < S.vocab, other=-float("inf"))
    keys, is_kept = is_before(score_of(x, row[1], row[2]), ids, cut[0], cut[1])
    return ids, keys, is_kept


@triton.jit
def _weights(keys: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the weights of `exact_math.weights`, in units of `S.bound` * 2^-52: int64."""
    y = tl.maximum(0.0 - keys.to(tl.float32, bitcast=True), -80.0) * 1.44269504
    t = y + 12582912.0
    f = y - (t - 12582912.0)
    p = f * 1.3264724e-3 + 9.671513e-3
    p = p * f + 5.5507336e-2
    p = p * f + 2.4022242e-1
    p = p * f + 6.93147e-1
    p = p * f + 1.0
    power = ((t.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    wide = (p * power).to(tl.float64) + S.bound
    return wide.to(tl.int64, bitcast=True) - (wide * 0.0 + S.bound).to(tl.int64, bitcast=True)


@triton.jit
def _last_key(row: tl.tensor, cut: tl.tensor, limit: tl.tensor, S: tl.constexpr, IS_WEIGHED: tl.constexpr) -> tl.tensor:
    """Returns the key of the last token whose better ones weigh less than a limit, and what those of better keys weigh.

    All tokens weigh 1 unless they are weighed. Where all of them are less than the limit, the key is the last one.
    """
    key, before, none = cut[0] * 0, limit * 0, tl.full((S.tile,), 0, tl.int64)
    for number in tl.range(0, 16):
        step = (key * 0 + 1) << (30 - 2 * number)
        first, second, third = key + step, key + 2 * step, key + 3 * step
        one, two, three = none, none, none
        for tile in tl.range(0, (S.vocab + S.tile - 1) // S.tile):
            _, keys, is_kept = _tile(row, tile, cut, S)
            weight = is_kept.to(tl.int64)
            if IS_WEIGHED:
                weight = tl.where(is_kept, _weights(keys, S), 0)
            one += tl.where(keys < first, weight, 0)
            two += tl.where(keys < second, weight, 0)
            three += tl.where(keys < third, weight, 0)
        better, worse, worst = tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)
        if worst < limit:
            key, before = third, worst
        elif worse < limit:
            key, before = second, worse
        elif better < limit:
            key, before = first, better
    return key, before


@triton.jit
def _last_id(row: tl.tensor, cut: tl.tensor, key: tl.tensor, count: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the id of the token with which so many have a key, of those before a cut; the last id if fewer do."""
    found, last = count * 0, cut[1] * 0 + _LAST_ID
    for tile in tl.range(0, (S.vocab + S.tile - 1) // S.tile):
        ids, keys, is_kept = _tile(row, tile, cut, S)
        equal = (is_kept & (keys == key)).to(tl.int64)
        number = found + tl.cumsum(equal, axis=0)
        last = tl.minimum(last, tl.min(tl.where((equal > 0) & (number == count), ids, _LAST_ID), axis=0))
        found += tl.sum(equal, axis=0)
    return last


@triton.jit
def _total(row: tl.tensor, cut: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Returns the sum of the weights before a cut, int64."""
    sums = tl.full((S.tile,), 0, tl.int64)
    for tile in tl.range(0, (S.vocab + S.tile - 1) // S.tile):
        _, keys, is_kept = _tile(row, tile, cut, S)
        sums += tl.where(is_kept, _weights(keys, S), 0)
    return tl.sum(sums, axis=0)


@triton.jit
def cut_kernel(logits: tl.tensor, settings: tl.tensor, bests: tl.tensor, cuts: tl.tensor, S: tl.constexpr) -> None:
    """Finds the cut of top-k, and behind it that of top-p among what is left; programs: (row,).

    Args:
        logits: fp32 [R, V].
        settings: the options of rows.
        bests: the largest logit of each block of `SampleShape`, fp32 [R, B].
        cuts: where the results go.
        S: the sizes.
    """
    number = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(settings.temperature + number), tl.load(settings.top_k + number)
    top_p = tl.load(settings.top_p + number)
    key, last = (top_k * 0).to(tl.uint32) + _LAST_KEY, top_k * 0 + _LAST_ID
    has_top_k = (top_k > 0) & (top_k < S.vocab)
    if (temperature > 0) & (has_top_k | (top_p < 1.0)):
        every, best = tl.arange(0, S.blocks), bests + number * S.num_blocks
        largest = tl.max(tl.load(best + every, mask=every < S.num_blocks, other=-float("inf")), axis=0)
        row = (logits + number * S.vocab, largest, temperature)
        if has_top_k:
            limit = top_k.to(tl.int64)
            new, before = _last_key(row, (key, last), limit, S, False)
            last = _last_id(row, (key, last), new, limit - before, S)
            key = new
        if top_p < 1.0:
            share = top_p.to(tl.float64) * _total(row, (key, last), S).to(tl.float64)
            whole = share.to(tl.int64)
            limit = tl.maximum(whole + (whole.to(tl.float64) < share).to(tl.int64), 1)
            new, before = _last_key(row, (key, last), limit, S, True)
            weight = tl.maximum(_weights(new, S), 1)
            last = _last_id(row, (key, last), new, (limit - before + weight - 1) // weight, S)
            key = new
    tl.store(cuts.key + number, key.to(tl.int32, bitcast=True))
    tl.store(cuts.last + number, last)


def find_cuts(logits_RV: torch.Tensor, settings: Any, bests_RB: torch.Tensor, shape: Any) -> Cuts:
    """Returns the cuts of the filters of rows; rows without any keep every finite score.

    Args:
        logits_RV: the logits, fp32.
        settings: the options of the rows, as kernels see them.
        bests_RB: the largest logit of each block.
        shape: the `SampleShape`.
    """
    size, device = len(logits_RV), logits_RV.device
    cuts = Cuts(*(torch.empty(size, dtype=torch.int32, device=device) for _ in Cuts._fields))
    cut_kernel[(size,)](logits_RV, settings, bests_RB, cuts, shape, num_warps=16, enable_fp_fusion=False)
    return cuts
