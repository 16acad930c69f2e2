"""Grouped-query attention (arXiv 2305.13245): the projections; the caller passes the attention over keys in.

Letters: N any leading dims ([B, L] in training, packed [T] in inference), D hidden size, H query heads and K kv heads
of this rank, E head dim.
"""

from typing import Protocol

import torch
from torch import nn

from ..parallel import fusion
from ..parallel.token_noise import TokenNoise
from .placement import Placement
from .recompute import recomputed
from .rope import Rotation, rotate


class AttendingLayer(Protocol):
    """The attention layer that calls an `Attend`.

    Attributes:
        layer: the number of the layer in the model.
        window: the number of positions that a query sees, its own included; None for all before it.
    """

    layer: int
    window: int | None


class Attend(Protocol):
    """The causal attention of one layer, over keys and values that training or inference keeps in its own way."""

    def __call__(
        self, at: AttendingLayer, q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor, /
    ) -> torch.Tensor:
        """Returns the outputs [..., H, E] of all heads; queries and keys are rotated already."""


class Attention(nn.Module):
    """The attention block of a layer: a fused q, k, v projection, attention, and the output projection.

    Norms of heads and rotary embedding are applied if the model has them.
    """

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.self_attn"
        spec = place.spec
        self.layer = layer
        self.window = spec.layers[layer].window
        self.recompute_core = place.recompute == "selective"
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads // place.context.tp.size
        self.num_kv_heads = max(1, spec.num_kv_heads // place.context.tp.size)
        self.qkv_proj = place.column(f"{prefix}.qkv_proj")
        self.q_norm = place.head_norm(f"{prefix}.q_norm")
        self.k_norm = place.head_norm(f"{prefix}.k_norm")
        self.o_proj = place.row(f"{prefix}.o_proj")

    def forward(
        self, x_ND: torch.Tensor, rotary: Rotation | None, attend: Attend, noise: TokenNoise | None = None
    ) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]; `noise` is for dropout of adapters."""
        qkv_NF = self.qkv_proj(x_ND, noise)
        core = (
            recomputed(self._core, qkv_NF, rotary, attend)
            if self.recompute_core
            else self._core(qkv_NF, rotary, attend)
        )
        return self.o_proj(core, noise=noise)  # type: ignore[no-any-return]

    def _core(self, qkv_NF: torch.Tensor, rotary: Rotation | None, attend: Attend) -> torch.Tensor:
        """Maps the output of the first projection to the input of the last one."""
        qkv = qkv_NF.unflatten(-1, (-1, self.head_dim))
        if self.q_norm is None and rotary is not None and fusion.has_few_kernels(qkv):
            qk, v_NKE = qkv.split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=-2)
            q_NHE, k_NKE = rotate(qk, rotary).split((self.num_heads, self.num_kv_heads), dim=-2)
        else:
            q_NHE, k_NKE, v_NKE = self._heads(qkv, rotary)
        out_NHE = attend(self, q_NHE, k_NKE, v_NKE)
        return out_NHE.flatten(-2)

    def _heads(self, qkv: torch.Tensor, rotary: Rotation | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values, of which the first two are normed and rotated one after the other."""
        q_NHE, k_NKE, v_NKE = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHE, k_NKE = self.q_norm(q_NHE), self.k_norm(k_NKE)
        if rotary is not None:
            q_NHE, k_NKE = rotate(q_NHE, rotary), rotate(k_NKE, rotary)
        return q_NHE, k_NKE, v_NKE
