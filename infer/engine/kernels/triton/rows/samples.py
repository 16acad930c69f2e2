"""Kernels that choose the tokens of rows, and that move a step of single tokens on to the next.

The noise has the bits of `sampler/philox.py`, and the logarithm is that of `sampler/exact_math.py`: fixed chains of
IEEE operations. Launches therefore set `enable_fp_fusion=False`: a fused product has other bits.

Letters: D draws of a block, 4 tokens of each; R rows, B blocks of a row.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from ......core.integers import ceil_div
from ..step.device_tables import RowOptions
from .filters import TILE, find_cuts, is_before, score_of

_LOWEST: Any = tl.constexpr(-float("inf"))
_NO_TOKEN: Any = tl.constexpr(0x7FFFFFFF)
_FEWEST_DRAWS: Final = 256
_MOST_BLOCKS: Final = 1024  # of a row


@dataclass(frozen=True, slots=True)
class SampleShape:
    """The constants of the kernels.

    Attributes:
        vocab: the logits of a row.
        draws: those of a block.
        num_blocks, blocks: the blocks of a row, and the next power of two.
        tile: the tokens that filters read at once.
        bound: what rounds weights (see `sampler/exact_math.py`).
    """

    vocab: int
    draws: int
    num_blocks: int
    blocks: int
    tile: int
    bound: float

    @staticmethod
    def of(vocab: int) -> "SampleShape":
        """Returns the blocks of a vocabulary."""
        draws = max(_FEWEST_DRAWS, int(triton.next_power_of_2(ceil_div(vocab, 4 * _MOST_BLOCKS))))
        num_blocks = ceil_div(vocab, 4 * draws)
        blocks = int(triton.next_power_of_2(num_blocks))
        return SampleShape(vocab, draws, num_blocks, blocks, TILE, 2.0 ** vocab.bit_length())


class OptionColumns(NamedTuple):
    """The columns of `RowOptions` that kernels read."""

    temperature: Any
    seed_low: Any
    seed_high: Any
    sample_index: Any
    new_number: Any
    top_k: Any
    top_p: Any
    min_p: Any


class BlockBests(NamedTuple):
    """What is found in each block of each row, [R, B].

    Attributes:
        largest: the largest logit, fp32.
        scores: the best score with noise, fp64; of greedy rows the largest logit.
        tokens: the first token that has it, int32.
        finite: whether all logits are finite, int32.
    """

    largest: Any
    scores: Any
    tokens: Any
    finite: Any


@triton.jit
def log(value: tl.tensor) -> tl.tensor:
    """Returns the natural logarithm of positive normal fp64 numbers (fdlibm, e_log.c)."""
    bits = value.to(tl.int64, bitcast=True)
    k = (bits - 0x3FE6A09E00000000) >> 52
    f = (bits - (k << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    p = tl.full(z.shape, 1.479819860511658591e-01, tl.float64)
    p = p * z + tl.full(z.shape, 1.531383769920937332e-01, tl.float64)
    p = p * z + tl.full(z.shape, 1.818357216161805012e-01, tl.float64)
    p = p * z + tl.full(z.shape, 2.222219843214978396e-01, tl.float64)
    p = p * z + tl.full(z.shape, 2.857142874366239149e-01, tl.float64)
    p = p * z + tl.full(z.shape, 3.999999999940941908e-01, tl.float64)
    p = p * z + tl.full(z.shape, 6.666666666666735130e-01, tl.float64)
    half_square = 0.5 * f * f
    k_double = k.to(tl.float64)
    low = s * (half_square + z * p) + k_double * tl.full(z.shape, 1.90821492927058770002e-10, tl.float64)
    return k_double * tl.full(z.shape, 6.93147180369123816490e-01, tl.float64) - ((half_square - low) - f)


@triton.jit
def _unsigned(column: tl.tensor, row: tl.tensor, zero: tl.tensor) -> tl.tensor:
    return zero + tl.load(column + row).to(tl.uint32, bitcast=True)


@triton.jit
def uniform(draws: tl.tensor, row: tl.tensor, options: tl.tensor) -> tl.tensor:
    """Returns the numbers between 0 and 1 of the tokens of draws, int32 [D, 1]: fp64 [D, 4] (see philox.py)."""
    c2 = draws.to(tl.uint32)
    c3 = c2 * 0
    c0, c1 = _unsigned(options.sample_index, row, c3), _unsigned(options.new_number, row, c3)
    k0, k1 = _unsigned(options.seed_low, row, c3), _unsigned(options.seed_high, row, c3)
    m0, m1 = c3 + 0xD2511F53, c3 + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0, low0, high1, low1 = tl.umulhi(c0, m0), c0 * m0, tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    column = tl.arange(0, 4)[None, :]
    words = tl.where(column == 0, c0, tl.where(column == 1, c1, tl.where(column == 2, c2, c3)))
    return (words.to(tl.float64) + 0.5) * 0.00000000023283064365386962890625


@triton.jit
def _first_best(values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Returns the largest of values [D, 4], and the lowest of the tokens that have it."""
    best = tl.max(tl.max(values, axis=1), axis=0)
    token = tl.min(tl.min(tl.where(values == best, tokens, _NO_TOKEN), axis=1), axis=0)
    return best, token


@triton.jit
def largest_logits_kernel(logits: tl.tensor, found: tl.tensor, S: tl.constexpr) -> None:
    """Finds a block's largest logit, and whether all are finite; programs: (row, block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = (block * S.draws + tl.arange(0, S.draws)[:, None]) * 4 + tl.arange(0, 4)[None, :]
    inside = tokens < S.vocab
    x = tl.load(logits + row * S.vocab + tokens, mask=inside, other=_LOWEST)
    is_finite = (tl.abs(x) < float("inf")) | (inside == 0)  # false for NaN
    best, token = _first_best(tl.where(is_finite, x, _LOWEST), tokens)
    at = row * S.num_blocks + block
    tl.store(found.largest + at, best)
    tl.store(found.scores + at, best.to(tl.float64))
    tl.store(found.tokens + at, token)
    tl.store(found.finite + at, tl.min(tl.min(is_finite.to(tl.int32), axis=1), axis=0))


@triton.jit
def noisy_scores_kernel(
    logits: tl.tensor, settings: tl.tensor, cuts: tl.tensor, found: tl.tensor, S: tl.constexpr
) -> None:
    """Finds a block's best score with noise among the kept, if its row is not greedy; programs: (row, block)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(settings.temperature + row)
    if temperature > 0:
        every = tl.arange(0, S.blocks)
        at = found.largest + row * S.num_blocks + every
        largest = tl.max(tl.load(at, mask=every < S.num_blocks, other=_LOWEST), axis=0)
        draws = block * S.draws + tl.arange(0, S.draws)[:, None]
        tokens = draws * 4 + tl.arange(0, 4)[None, :]
        x = tl.load(logits + row * S.vocab + tokens, mask=tokens < S.vocab, other=_LOWEST)
        scores = score_of(x, largest, temperature)
        key = tl.load(cuts.key + row).to(tl.uint32, bitcast=True)
        _, is_kept = is_before(scores, tokens, key, tl.load(cuts.last + row))
        min_p = tl.load(settings.min_p + row)
        if min_p > 0:
            is_kept &= scores.to(tl.float64) >= log(min_p.to(tl.float64))
        noise = 0.0 - log(0.0 - log(uniform(draws, row, settings)))
        totals = tl.where(is_kept, scores.to(tl.float64) + noise, _LOWEST)
        best, token = _first_best(totals, tokens)
        tl.store(found.scores + row * S.num_blocks + block, best)
        tl.store(found.tokens + row * S.num_blocks + block, token)


@triton.jit(do_not_specialize=["num_rows"])
def choose_kernel(found: tl.tensor, result: tl.tensor, num_rows: tl.tensor, S: tl.constexpr) -> None:
    """Writes the token of a row, the first of equals, and whether all its logits are finite; programs: (row,)."""
    row = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, S.blocks)
    inside = every < S.num_blocks
    at = row * S.num_blocks + every
    scores = tl.load(found.scores + at, mask=inside, other=_LOWEST)
    tokens = tl.load(found.tokens + at, mask=inside, other=_NO_TOKEN)
    is_finite = tl.min(tl.load(found.finite + at, mask=inside, other=1), axis=0)
    token = tl.min(tl.where(inside & (scores == tl.max(scores, axis=0)), tokens, _NO_TOKEN), axis=0)
    tl.store(result + row, tl.where(is_finite == 1, token, 0))
    tl.store(result + num_rows + row, is_finite)


@triton.jit
def advance_kernel(
    columns: tl.tensor,
    stride: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    sampled: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Moves a row on by its token, in the order of DECODE_COLUMNS, but for padding; programs: (row,)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(columns + stride + row)
    if position >= 0:
        position += 1
        block = position // BLOCK
        number = tl.load(tables + row * table_stride + block, mask=block < table_stride, other=0)
        tl.store(columns + row, tl.load(sampled + row))
        tl.store(columns + stride + row, position)
        tl.store(columns + 2 * stride + row, number * BLOCK + position % BLOCK)
        counted = columns + 7 * stride + row
        tl.store(counted, tl.load(counted) + 1)


def sample(logits_RV: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """Returns the token of each row, and whether all its logits are finite: int32 [2, R]."""
    num_rows, device = len(logits_RV), logits_RV.device
    shape = SampleShape.of(logits_RV.shape[1])
    size = num_rows, shape.num_blocks
    found = BlockBests(
        torch.empty(size, device=device),
        torch.empty(size, dtype=torch.float64, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int32, device=device),
    )
    columns = OptionColumns(*(options.columns[name] for name in OptionColumns._fields))
    result = torch.empty(2, num_rows, dtype=torch.int32, device=device)
    largest_logits_kernel[size](logits_RV, found, shape, enable_fp_fusion=False)
    cuts = find_cuts(logits_RV, columns, found.largest, shape)
    noisy_scores_kernel[size](logits_RV, columns, cuts, found, shape, enable_fp_fusion=False)
    choose_kernel[(num_rows,)](found, result, num_rows, shape, enable_fp_fusion=False)
    return result


def advance(columns: torch.Tensor, tables: torch.Tensor, sampled_R: torch.Tensor, block_size: int) -> None:
    """Moves DECODE_COLUMNS of a bucket on by a token of each row, in place."""
    advance_kernel[(columns.shape[1],)](
        columns, columns.stride(0), tables, tables.stride(0), sampled_R, BLOCK=block_size
    )
