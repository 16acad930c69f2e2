"""Attention in tiles as an autograd function, over keys that come from anywhere.

Letters: N queries and keys of this rank, M keys of all its tiles, H query heads, K kv heads, E head dim.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from ...parallel.collectives import PendingResult
from .kernels import kernel_for
from .tiled import attend_tiles, differentiate_tiles
from .tiles import AttentionTile


class KeySource(Protocol):
    """The keys and values of a rank's tiles."""

    @property
    def tiles(self) -> Sequence[AttentionTile]:
        """The tiles of this rank's queries; their keys are indexes among the fetched ones."""

    def fetched(self, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
        """Yields kv heads with the keys and values that the tiles need, [M, heads, E], until it had all heads."""

    def start_return(self, dk_MKE: torch.Tensor, dv_MKE: torch.Tensor, like_NKE: torch.Tensor) -> PendingResult:
        """Starts to sum the gradients of this rank's keys and values over all ranks that fetched them.

        Args:
            dk_MKE: the gradient of fetched keys of some heads, fp32.
            dv_MKE: the gradient of their values, fp32.
            like_NKE: this rank's keys, whose dtype the messages have.

        Returns:
            The sums, fp32 [N, 2, heads, E].
        """


class OwnKeys:
    """The keys of a rank that has all keys of its tiles itself, in order.

    Args:
        tiles: the tiles of this rank's queries.
    """

    def __init__(self, tiles: Sequence[AttentionTile]) -> None:
        self.tiles = tiles

    def fetched(self, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> Iterator[tuple[range, torch.Tensor, torch.Tensor]]:
        """Yields all heads at once."""
        yield range(k_NKE.shape[1]), k_NKE, v_NKE

    def start_return(self, dk_MKE: torch.Tensor, dv_MKE: torch.Tensor, like_NKE: torch.Tensor) -> PendingResult:
        """Returns the gradients as they are."""
        return PendingResult(torch.stack((dk_MKE, dv_MKE), dim=1))


class _TiledAttention(torch.autograd.Function):
    """Attention in tiles over fetched keys, of which forward keeps none: q, k and v of this rank, output and LSE."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHE: torch.Tensor,
        k_NKE: torch.Tensor,
        v_NKE: torch.Tensor,
        keys: KeySource,
        scale: float | None,
    ) -> torch.Tensor:
        kernel, served = kernel_for(q_NHE), q_NHE.shape[1] // k_NKE.shape[1]
        out_NHE = torch.empty_like(q_NHE, memory_format=torch.contiguous_format)
        lse_NH = out_NHE.new_empty(q_NHE.shape[:2], dtype=torch.float32)
        for heads, k_MKE, v_MKE in keys.fetched(k_NKE, v_NKE):
            some = slice(heads.start * served, heads.stop * served)
            qkv = (q_NHE[:, some], k_MKE, v_MKE)
            out_NHE[:, some], lse_NH[:, some] = attend_tiles(qkv, keys.tiles, kernel, scale)
        ctx.save_for_backward(q_NHE, k_NKE, v_NKE, out_NHE, lse_NH)
        ctx.keys, ctx.scale, ctx.kernel = keys, scale, kernel
        return out_NHE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHE, k_NKE, v_NKE, out_NHE, lse_NH = ctx.saved_tensors
        served = q_NHE.shape[1] // k_NKE.shape[1]
        dq_NHE, dk_NKE, dv_NKE = (
            torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q_NHE, k_NKE, v_NKE)
        )
        returning: list[tuple[range, PendingResult]] = []

        def receive_first() -> None:
            heads, pending = returning.pop(0)
            sums_N2KE = pending.wait()
            dk_NKE[:, heads.start : heads.stop], dv_NKE[:, heads.start : heads.stop] = sums_N2KE.unbind(1)

        for heads, k_MKE, v_MKE in ctx.keys.fetched(k_NKE, v_NKE):
            some = slice(heads.start * served, heads.stop * served)
            output = (grads[0][:, some], out_NHE[:, some], lse_NH[:, some])
            dq, dk, dv = differentiate_tiles(
                (q_NHE[:, some], k_MKE, v_MKE), output, ctx.keys.tiles, ctx.kernel, ctx.scale
            )
            dq_NHE[:, some] = dq
            returning.append((heads, ctx.keys.start_return(dk, dv, k_NKE)))
            if len(returning) > 1:
                receive_first()
        receive_first()
        return dq_NHE, dk_NKE, dv_NKE, None, None


def tiled_attention(
    q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, keys: KeySource, scale: float | None
) -> torch.Tensor:
    """Returns the outputs [N, H, E] of this rank's queries over the keys of all ranks; every rank calls it.

    Args:
        q_NHE: this rank's queries, in the order of its positions.
        k_NKE: its keys.
        v_NKE: its values.
        keys: brings the keys of other ranks, and returns their gradients.
        scale: the factor of scores; None for 1 / sqrt(E).
    """
    out: torch.Tensor = _TiledAttention.apply(q_NHE, k_NKE, v_NKE, keys, scale)  # type: ignore[no-untyped-call]
    return out
