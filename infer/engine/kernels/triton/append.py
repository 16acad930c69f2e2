"""The kernel between the product that makes queries, keys and values, and attention.

It norms and rotates heads as `aten/interpreter.py` does, rounding where that rounds, writes the queries, and stores
keys and values in pages. A row of a token has H heads of queries, K of keys and K of values, side by side.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..aten.kv_cache import KVCache
from .cache import LayerPages
from .formats import store_vectors
from .hadamard import hadamard
from .rows.norms import NO_VECTORS
from .step.step_adapters import LINE
from .tilings import width_of

_ELEMENTS = 128  # of a program, at least


class HeadWeights(NamedTuple):
    """What a layer does to heads before they are stored; None for what it does not.

    Attributes:
        q_norm, k_norm: the weights of the RMSNorms of query and key heads, [E] each; both or neither.
        factors: the factors of queries, by which keys are divided: fp32 [K, E].
        eps: the epsilon of the norms.
        own: the weights of these norms by adapters.
    """

    q_norm: Any = None
    k_norm: Any = None
    factors: Any = None
    eps: float = 0.0
    own: Any = NO_VECTORS


class _Heads(NamedTuple):
    qkv: Any
    query: Any
    slots: Any


@dataclass(frozen=True, slots=True)
class _Shape:
    """The constants of the kernel; `turned` dims are rotated in pairs, `size` is that of Hadamard blocks, 1 without."""

    heads: int
    kv_heads: int
    dim: int
    width: int
    turned: int
    size: int
    block: int
    tokens: int
    line: int


@triton.jit
def _narrow(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Rounds fp32 to the dtype of a pointer, and widens it again."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _head(
    qkv: tl.tensor, at: tl.tensor, columns: tl.tensor, mask: tl.tensor, scale: tl.tensor, norm: tl.tensor
) -> tl.tensor:
    """Loads some columns of a head, fp32 [tokens, columns], and norms them unless `norm` is None."""
    x = tl.load(qkv + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        weight = tl.load(norm + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        x = _narrow(weight * _narrow(x * scale[:, None], qkv), qkv)
    return x


@triton.jit
def _turned_head(
    qkv: tl.tensor,
    at: tl.tensor,
    tokens: tl.tensor,
    real: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    rotation: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Returns a head of some tokens, normed and rotated, fp32 [tokens, width]."""
    columns = tl.arange(0, S.width)
    has = real[:, None] & (columns < S.dim)[None, :]
    scale = eps
    if norm is not None:
        x = _head(qkv, at, columns, has, scale, None)
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / S.dim + eps)
    x = _head(qkv, at, columns, has, scale, norm)
    if rotation is not None:
        half: tl.constexpr = S.turned // 2
        turned = real[:, None] & (columns < S.turned)[None, :]
        others = tl.where(columns < half, columns + half, columns - half)
        other = _head(qkv, at, others, turned, scale, norm)
        other = tl.where((columns < half)[None, :], -other, other)
        angles = tokens[:, None] * S.turned + columns[None, :]
        cosine = tl.load(rotation[0] + angles, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(rotation[1] + angles, mask=turned, other=0.0).to(tl.float32)
        x = tl.where(turned, _narrow(_narrow(x * cosine, qkv) + _narrow(other * sine, qkv), qkv), x)
    return x


@triton.jit
def _store_twice(
    pages: tl.tensor,
    twins: tl.tensor,
    twin_of: tl.tensor,
    slots: tl.tensor,
    head: tl.tensor,
    x: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Stores vectors in their pages, and in the pages' twins where they have some."""
    block, offset, stored = slots // S.block, slots % S.block, slots >= 0
    store_vectors(pages, (block * S.kv_heads + head) * S.block + offset, stored, x, S.dim, S.width)
    if twins.data is not None:
        twin = tl.load(twin_of + block, mask=stored, other=0).to(tl.int64)
        lines = (twin * S.kv_heads + head) * S.block + offset
        store_vectors(twins, lines, stored & (twin > 0), x, S.dim, S.width)


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_and_append_kernel(
    rows: tl.tensor,
    rotation: tl.tensor,
    weights: tl.tensor,
    pages: tl.tensor,
    num_tokens: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Does one head of some tokens; see `rotate_and_append`."""
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * S.tokens + tl.arange(0, S.tokens)).to(tl.int64)
    real = tokens < num_tokens
    slots = tl.load(rows.slots + tokens, mask=real, other=-1).to(tl.int64)
    at = (tokens * (S.heads + 2 * S.kv_heads) + head) * S.dim
    columns = tl.arange(0, S.width)
    has = real[:, None] & (columns < S.dim)[None, :]
    q_norm, k_norm = weights.q_norm, weights.k_norm
    if weights.own.numbers is not None:
        kind = rows.qkv.dtype.element_ty
        line = weights.own.lines + tl.load(weights.own.numbers + tokens, mask=real, other=0)[:, None] * S.line
        q_norm, k_norm = tl.load(line).to(tl.pointer_type(kind)), tl.load(line + 1).to(tl.pointer_type(kind))
    kv_head = head - S.heads
    if kv_head < 0:
        x = _turned_head(rows.qkv, at, tokens, real, q_norm, weights.eps, rotation, S)
        if weights.factors is not None:
            factor = weights.factors + head // (S.heads // S.kv_heads) * S.dim + columns
            x *= tl.load(factor, mask=columns < S.dim, other=1.0)[None, :]
    elif kv_head < S.kv_heads:
        x = _turned_head(rows.qkv, at, tokens, real, k_norm, weights.eps, rotation, S)
        if weights.factors is not None:
            factor = weights.factors + kv_head * S.dim + columns
            x /= tl.load(factor, mask=columns < S.dim, other=1.0)[None, :]
    else:
        x = tl.load(rows.qkv + at[:, None] + columns[None, :], mask=has, other=0.0).to(tl.float32)
    if S.size > 1:
        x = hadamard(x, S.tokens, S.width, S.size)
    if kv_head < 0:
        to = ((tokens * S.heads + head) * S.dim)[:, None] + columns[None, :]
        tl.store(rows.query + to, x.to(rows.query.dtype.element_ty), mask=has)
    elif kv_head < S.kv_heads:
        _store_twice(pages.key_pages, pages.key_twins, pages.twin_of, slots, kv_head, x, S)
    else:
        _store_twice(pages.value_pages, pages.value_twins, pages.twin_of, slots, kv_head - S.kv_heads, x, S)


def rotate_and_append(
    cache: KVCache,
    layer: int,
    qkv: torch.Tensor,
    query: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    weights: HeadWeights,
) -> None:
    """Norms and rotates heads, writes the queries, and stores keys and values in a layer's pages and their twins.

    Nothing is allocated, and the host waits for nothing.

    Args:
        cache: the rank's cache; queries are rotated as it rotates keys (see `KVCache.rotate`).
        layer: counted from 0.
        qkv: the heads, [T, (H + 2 K) E], contiguous.
        query: gets the queries, [T, H E], contiguous.
        slots: the cache slots of the tokens, int32 or int64 [T]; -1: nothing is stored.
        rotation: cosines and sines of each token, [T, rotated dims] each, contiguous (see `model/rope.py`); None
            without a rotary embedding.
        weights: those of the layer.
    """
    dim, kv_heads = cache.head_dim, cache.num_kv_heads
    heads, width = query.shape[1] // dim, width_of(dim)
    tokens = max(1, _ELEMENTS // width)
    shape = _Shape(
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        width=width,
        turned=rotation[0].shape[1] if rotation else 0,
        size=cache.rotated_size,
        block=cache.block_size,
        tokens=tokens,
        line=LINE,
    )
    rotate_and_append_kernel[(triton.cdiv(len(qkv), tokens), heads + 2 * kv_heads)](
        _Heads(qkv, query, slots), rotation, weights, LayerPages.of(cache, layer), len(qkv), shape, num_warps=1
    )
