"""Causal attention over the paged cache: one kernel for prompts and, over splits of keys, for single tokens.

A program has the rows of one kv head: some tokens of a span, times the query heads that share the kv head. It reads
keys in tiles from the sequence's start, and an online softmax merges them in order (as in FlashAttention, arXiv
2205.14135). Splits are cut at fixed positions and merged in order. So a row's bits depend on neither the batch nor the
cut of its prompt. Where formats have twins, a row reads these for its own block and the sequence's first one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .formats import read_vectors
from .hadamard import hadamard

_LOWEST = tl.constexpr(-3e38)  # the maximum of no scores: finite, so that differences are never NaN


class Spans(NamedTuple):
    """The spans of a step, as tensors that a graph may hold on to; kernels see them as they are here.

    Attributes:
        tiles: the span of each tile of queries, and the number of its first token there: int32 [Q, 2]. Of decoding:
            (span, 0) for each span.
        first: the packed token with which each span begins, int32 [S].
        start: its position in its sequence, int32 [S].
        length: the tokens of each span, int32 [S]; 0: the span is padding, and nothing is computed.
        tables: the blocks of each span's sequence, int32 [S, B]; the rows may lie further apart.
    """

    tiles: Any
    first: Any
    start: Any
    length: Any
    tables: Any


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The constants of attention's kernels.

    Attributes:
        heads, kv_heads, dim: those of this rank.
        width: the columns of a tile.
        size: the size of Hadamard blocks of the output; 1 without.
        block: the tokens of a block.
        rows, keys: the sizes of a tile.
        split: the keys of a split; 0 without splits.
        compute: the dtype of the operands of products.
    """

    heads: int
    kv_heads: int
    dim: int
    width: int
    size: int
    block: int
    rows: int
    keys: int
    split: int
    compute: Any

    @property
    def group(self) -> int:
        """The query heads of a kv head."""
        return self.heads // self.kv_heads

    @property
    def tokens(self) -> int:
        """The tokens of a tile."""
        return 1 if self.split else self.rows // self.group

    @property
    def scale(self) -> float:
        """The factor of scores for a softmax in powers of two."""
        return float(self.dim**-0.5 * 1.4426950408889634)


@triton.jit
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Multiplies on tensor cores; fp32 as sums of three products of TF32, nearly as exact."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _lines(blocks: tl.tensor, key: tl.tensor, head: tl.tensor, S: tl.constexpr) -> tl.tensor:
    return (blocks * S.kv_heads + head) * S.block + key % S.block


@triton.jit
def _weights(scores: tl.tensor, largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Returns the weights of a tile, the factor of earlier sums, and the new maximum and total."""
    new = tl.maximum(largest, tl.max(scores, axis=1))
    keep, weights = tl.exp2(largest - new), tl.exp2(scores - new[:, None])
    return weights, keep, new, total * keep + tl.sum(weights, axis=1)


@triton.jit
def _either(
    pages: tl.tensor,
    twins: tl.tensor,
    lines: tl.tensor,
    twin_lines: tl.tensor,
    inside: tl.tensor,
    near: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Reads vectors, near ones from their twins if there are any."""
    if twins.data is None:
        x = read_vectors(pages, lines, inside, S.dim, S.width, S.compute)
    else:
        far = read_vectors(pages, lines, inside & (near == 0), S.dim, S.width, S.compute)
        own = read_vectors(twins, twin_lines, inside & near, S.dim, S.width, S.compute)
        x = tl.where(near[:, None], own, far)
    return x


@triton.jit
def _tile(
    q: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    low: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Attends to the tile of keys from `low` on, which all rows read from the same pages."""
    position, window, stop, head, table = view
    key = low + tl.arange(0, S.keys)
    inside, near = key < stop, key < S.block
    seen = inside[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
    blocks = tl.load(table + key // S.block, mask=inside, other=0).to(tl.int64)
    lines = _lines(blocks, key, head, S)
    twin_lines = lines
    if pages.value_twins.data is not None:
        twins = tl.load(pages.twin_of + blocks, mask=inside & near, other=0).to(tl.int64)
        twin_lines = _lines(twins, key, head, S)
    k = _either(pages.key_pages, pages.key_twins, lines, twin_lines, inside, near, S)
    scores = tl.where(seen, _product(q, tl.trans(k)) * S.scale, float("-inf"))
    weights, keep, largest, total = _weights(scores, largest, total)
    v = _either(pages.value_pages, pages.value_twins, lines, twin_lines, inside, near, S)
    return largest, total, sums * keep[:, None] + _product(weights.to(S.compute), v)


@triton.jit
def _mixed_tile(
    q: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    low: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Attends to the tile of keys from `low` on, which some rows read from twins: those whose block it is."""
    position, window, stop, head, table = view
    key = low + tl.arange(0, S.keys)
    inside = key < stop
    seen = inside[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
    near = (key[None, :] < S.block) | (key[None, :] // S.block == position[:, None] // S.block)
    blocks = tl.load(table + key // S.block, mask=inside, other=0).to(tl.int64)
    twins = tl.load(pages.twin_of + blocks, mask=inside, other=0).to(tl.int64)
    lines, twin_lines = _lines(blocks, key, head, S), _lines(twins, key, head, S)
    k = read_vectors(pages.key_pages, lines, inside, S.dim, S.width, S.compute)
    scores = _product(q, tl.trans(k))
    if pages.key_twins.data is not None:
        k = read_vectors(pages.key_twins, twin_lines, inside, S.dim, S.width, S.compute)
        scores = tl.where(near, _product(q, tl.trans(k)), scores)
    scores = tl.where(seen, scores * S.scale, float("-inf"))
    weights, keep, largest, total = _weights(scores, largest, total)
    v = read_vectors(pages.value_pages, lines, inside, S.dim, S.width, S.compute)
    sums = sums * keep[:, None] + _product(tl.where(near, 0.0, weights).to(S.compute), v)
    v = read_vectors(pages.value_twins, twin_lines, inside, S.dim, S.width, S.compute)
    return largest, total, sums + _product(tl.where(near, weights, 0.0).to(S.compute), v)


@triton.jit
def _attended(
    q: tl.tensor,
    begin: tl.tensor,
    first_position: tl.tensor,
    view: tl.tensor,
    pages: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Returns the maximum, the total and the sums of query rows over the keys from `begin` on."""
    largest = tl.full((S.rows,), _LOWEST, tl.float32)
    total = tl.full((S.rows,), 0.0, tl.float32)
    sums = tl.full((S.rows, S.width), 0.0, tl.float32)
    stop = view[2]
    if pages.value_twins.data is None:
        for low in tl.range(begin, stop, S.keys):
            largest, total, sums = _tile(q, largest, total, sums, low, view, pages, S)
    else:
        mixed = tl.maximum(begin, first_position // S.block * S.block // S.keys * S.keys)
        if S.block < S.keys:
            # Rows whose own block is not here sum the first block's twins apart, too, as rows whose block it is do.
            for low in tl.range(begin, tl.minimum(tl.minimum(mixed, S.keys), stop), S.keys):
                largest, total, sums = _mixed_tile(q, largest, total, sums, low, view, pages, S)
            begin = tl.maximum(begin, S.keys)
        for low in tl.range(begin, tl.minimum(mixed, stop), S.keys):
            largest, total, sums = _tile(q, largest, total, sums, low, view, pages, S)
        for low in tl.range(mixed, stop, S.keys):
            largest, total, sums = _mixed_tile(q, largest, total, sums, low, view, pages, S)
    return largest, total, sums


@triton.jit(do_not_specialize=["stride", "window"])
def attention_kernel(
    query: tl.tensor,
    out: tl.tensor,
    statistics: tl.tensor,
    spans: tl.tensor,
    stride: tl.tensor,
    pages: tl.tensor,
    window: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Computes a tile of query rows, or its part of a split of the keys; see `paged_attention.py`.

    The stride of the tables' rows is an argument of its own, as Triton compiles anew for some numbers in a tuple.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    span, token = tl.load(spans.tiles + 2 * tile), tl.load(spans.tiles + 2 * tile + 1)
    start, length = tl.load(spans.start + span), tl.load(spans.length + span)
    stop = start + tl.minimum(token + S.tokens, length)
    begin = tl.maximum(start + token - window + 1, 0) // S.keys * S.keys
    if S.split > 0:
        begin = tl.maximum(begin, tl.program_id(2) * S.split)
        stop = tl.minimum(stop, (tl.program_id(2) + 1) * S.split)
    if begin >= stop or token >= length:
        return
    rows, columns = tl.arange(0, S.rows), tl.arange(0, S.width)
    own = token + rows // S.group
    real = (rows < S.tokens * S.group) & (own < length)
    at = ((tl.load(spans.first + span) + own).to(tl.int64) * S.heads + head * S.group + rows % S.group) * S.dim
    has = real[:, None] & (columns < S.dim)[None, :]
    q = tl.load(query + at[:, None] + columns[None, :], mask=has, other=0.0).to(S.compute)
    table = spans.tables + span.to(tl.int64) * stride
    view = (start + own, window, stop, head, table)
    largest, total, sums = _attended(q, begin, start + token, view, pages, S)
    if S.split > 0:
        line = (span * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * S.heads + head * S.group + rows
        tl.store(out + line[:, None] * S.dim + columns[None, :], sums, mask=has)
        tl.store(statistics + line * 2, largest, mask=real)
        tl.store(statistics + line * 2 + 1, total, mask=real)
    else:
        sums = sums / total[:, None]
        if S.size > 1:
            sums = hadamard(sums, S.rows, S.width, S.size)
        tl.store(out + at[:, None] + columns[None, :], sums.to(out.dtype.element_ty), mask=has)


@triton.jit(do_not_specialize=["window", "num_splits"])
def merge_splits_kernel(
    sums: tl.tensor,
    statistics: tl.tensor,
    out: tl.tensor,
    spans: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Merges the splits of one head of one token, in order."""
    span, head = tl.program_id(0), tl.program_id(1)
    if tl.load(spans.length + span) == 0:
        return
    position, columns = tl.load(spans.start + span), tl.arange(0, S.width)
    largest, total = tl.full((1,), _LOWEST, tl.float32), tl.full((1,), 0.0, tl.float32)
    merged = tl.full((1, S.width), 0.0, tl.float32)
    first = tl.maximum(position - window + 1, 0) // S.split
    for split in tl.range(first, position // S.split + 1):
        line = (span * num_splits + split).to(tl.int64) * S.heads + head + tl.arange(0, 1)
        theirs = tl.load(statistics + line * 2)
        new = tl.maximum(largest, theirs)
        keep, add = tl.exp2(largest - new), tl.exp2(theirs - new)
        part = tl.load(sums + line[:, None] * S.dim + columns[None, :], mask=(columns < S.dim)[None, :], other=0.0)
        merged = merged * keep[:, None] + part * add[:, None]
        total = total * keep + tl.load(statistics + line * 2 + 1) * add
        largest = new
    merged = merged / total[:, None]
    if S.size > 1:
        merged = hadamard(merged, 1, S.width, S.size)
    at = (tl.load(spans.first + span).to(tl.int64) * S.heads + head) * S.dim + columns[None, :]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=(columns < S.dim)[None, :])
