"""Attention in tiles: outputs are merged by their log-sum-exps, and gradients computed from the merged ones
(FlashAttention-2, arXiv 2307.08691, section 3.1).

Letters: N queries of this rank, H query heads, M keys, K kv heads, E head dim.
"""

from collections.abc import Sequence

import torch

from .kernels import Tensors, TileKernel
from .tiles import AttentionTile


def attend_tiles(
    qkv: Tensors, tiles: Sequence[AttentionTile], kernel: TileKernel, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [N, H, E] in the queries' dtype, and the log-sum-exp of each query's scores, fp32 [N, H].

    Args:
        qkv: queries [N, H, E], keys [M, K, E] and values [M, K, E].
        tiles: the pairs, in the order of `tiles.tiles`; keys are indexes of `qkv`.
        kernel: computes a tile.
        scale: the factor of scores; None for 1 / sqrt(E).
    """
    q_NHE = qkv[0]
    out_NHE = torch.empty_like(q_NHE, dtype=torch.float32, memory_format=torch.contiguous_format)
    lse_NH = out_NHE.new_empty(q_NHE.shape[:2])
    for tile in tiles:
        out, lse = kernel.forward(*_inputs(qkv, tile), tile.shape != "rectangle", scale)
        out, lse = _rows(out, tile), _rows(lse, tile)
        mine = slice(tile.queries.start, tile.queries.stop)
        if tile.shape == "diagonal":  # the first tile of its queries
            out_NHE[mine], lse_NH[mine] = out, lse
        else:
            out_NHE[mine].lerp_(out.float(), torch.sigmoid(lse - lse_NH[mine]).unsqueeze(-1))
            lse_NH[mine] = torch.logaddexp(lse_NH[mine], lse)
    return out_NHE.to(q_NHE.dtype), lse_NH


def differentiate_tiles(
    qkv: Tensors, output: Tensors, tiles: Sequence[AttentionTile], kernel: TileKernel, scale: float | None
) -> Tensors:
    """Returns the gradients of queries, keys and values, summed over tiles in fp32.

    Args:
        qkv: see `attend_tiles`.
        output: the gradient of the output, the output, and the log-sum-exp, each as `attend_tiles` returns it.
        tiles: as in `attend_tiles`.
        kernel: computes a tile.
        scale: as in `attend_tiles`.
    """
    dq_NHE, dk_MKE, dv_MKE = (
        torch.zeros_like(each, dtype=torch.float32, memory_format=torch.contiguous_format) for each in qkv
    )
    for tile in tiles:
        grad, out, lse = (_heads_first(each, tile.queries, tile) for each in output)
        found = kernel.backward(_inputs(qkv, tile), grad, out, lse, tile.shape != "rectangle", scale)
        dq, dk, dv = (_rows(each, tile) for each in found)
        dq_NHE[tile.queries.start : tile.queries.stop] += dq
        dk_MKE[tile.keys.start : tile.keys.stop] += dk
        dv_MKE[tile.keys.start : tile.keys.stop] += dv
    return dq_NHE, dk_MKE, dv_MKE


def _inputs(qkv: Tensors, tile: AttentionTile) -> Tensors:
    q, k, v = qkv
    return _heads_first(q, tile.queries, tile), _heads_first(k, tile.keys, tile), _heads_first(v, tile.keys, tile)


def _heads_first(x_NH: torch.Tensor, rows: range, tile: AttentionTile) -> torch.Tensor:
    """Returns some rows of [N, H, ...] as [1, H, rows, ...]. In reverse order, an edge is a diagonal."""
    some = x_NH[rows.start : rows.stop].transpose(0, 1).unsqueeze(0)
    return some.flip(2) if tile.shape == "edge" else some


def _rows(x_1HL: torch.Tensor, tile: AttentionTile) -> torch.Tensor:
    """Returns [1, H, rows, ...] as [rows, H, ...], in the order of positions."""
    some = x_1HL.squeeze(0).transpose(0, 1)
    return some.flip(0) if tile.shape == "edge" else some
