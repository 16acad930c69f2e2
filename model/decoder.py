"""The decoder, written once for training and inference: what differs, attention over which keys, is passed in.

Letters: N any leading dims ([B, L] in training, packed [T] in inference), D hidden size, H query heads and K kv heads
of this rank, E head dim, V padded vocabulary rows of this rank.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ..core.layout import Layout, LocalParam, local_params
from ..parallel.functions import copy_to_group
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ..parallel.mesh import Group
from .activation import swiglu
from .config import ModelConfig
from .norm import RMSNorm
from .registry import tensor_table
from .rope import Rotation, rotate, rotation


class Attend(Protocol):
    """Causal attention of one layer, however keys and values are kept. Rotary embedding is already applied."""

    def __call__(self, layer: int, q_NHE: torch.Tensor, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> torch.Tensor:
        """Returns [..., H, E]."""


class Placement:
    """Where and how a rank builds its part of the model: group, shapes of its parameters, dtype, device."""

    def __init__(
        self, config: ModelConfig, tp: Group, dtype: torch.dtype, device: torch.device, num_slices: int
    ) -> None:
        params = local_params(tensor_table(config), Layout(tp=tp.size), 0, tp.rank)
        self.shapes = {param.name: param.shape for param in params}
        self.config, self.tp, self.dtype, self.device, self.num_slices = config, tp, dtype, device, num_slices

    def column(self, name: str) -> ColumnParallelLinear:
        """The column-parallel layer whose weight is parameter `name`."""
        rows, columns = self.shapes[name]
        return ColumnParallelLinear(columns, rows, self.tp, dtype=self.dtype, device=self.device)

    def row(self, name: str) -> RowParallelLinear:
        """The row-parallel layer whose weight is parameter `name`."""
        rows, columns = self.shapes[name]
        return RowParallelLinear(
            columns, rows, self.tp, dtype=self.dtype, device=self.device, num_slices=self.num_slices
        )

    def norm(self) -> RMSNorm:
        """A norm over the hidden size."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, dtype=self.dtype, device=self.device)


class Attention(nn.Module):
    """Grouped-query attention: one fused q, k, v projection, the attention passed in, output projection."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        prefix = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.head_dim = place.config.head_dim
        self.num_heads = place.config.num_attention_heads // place.tp.size
        self.num_kv_heads = max(1, place.config.num_key_value_heads // place.tp.size)
        self.qkv_proj = place.column(f"{prefix}.qkv_proj.weight")
        self.o_proj = place.row(f"{prefix}.o_proj.weight")

    def forward(self, x_ND: torch.Tensor, positions: Rotation, attend: Attend) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        qkv = self.qkv_proj(x_ND).unflatten(-1, (-1, self.head_dim))
        q_NHE, k_NKE, v_NKE = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        out_NHE = attend(self.layer, rotate(q_NHE, positions), rotate(k_NKE, positions), v_NKE)
        return self.o_proj(out_NHE.flatten(-2))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.gate_up_proj = place.column(f"model.layers.{layer}.mlp.gate_up_proj.weight")
        self.down_proj = place.row(f"model.layers.{layer}.mlp.down_proj.weight")

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(swiglu(self.gate_up_proj(x_ND)))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = place.norm()
        self.self_attn = Attention(layer, place)
        self.post_attention_layernorm = place.norm()
        self.mlp = GatedMLP(layer, place)

    def forward(self, x_ND: torch.Tensor, positions: Rotation, attend: Attend) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), positions, attend)
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Embedding, layers and final norm: the `model.` of the parameters' names."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        rows, features = place.shapes["model.embed_tokens.weight"]
        self.embed_tokens = VocabParallelEmbedding(rows, features, place.tp, dtype=place.dtype, device=place.device)
        self.layers = nn.ModuleList(DecoderLayer(i, place) for i in range(place.config.num_hidden_layers))
        self.norm = place.norm()


class Decoder(nn.Module):
    """A rank's part of the language model, its weights uninitialised.

    Args:
        tp: tensor-parallel group.
        num_slices: see RowParallelLinear.

    Raises:
        ParallelError: tp does not divide the model.
    """

    def __init__(
        self, config: ModelConfig, tp: Group, *, dtype: torch.dtype, device: torch.device, num_slices: int = 1
    ) -> None:
        super().__init__()
        place = Placement(config, tp, dtype, device, num_slices)
        self.config = config
        self.tp = tp
        self.model = Trunk(place)
        self.lm_head = None if config.tie_word_embeddings else place.column("lm_head.weight")

    def forward(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        """int64 tokens and positions [...] -> final hidden states [..., D] after the last norm."""
        x_ND = self.model.embed_tokens(tokens_N)
        turns = rotation(positions_N, self.config.head_dim, self.config.rope_theta, x_ND.dtype)
        for layer in self.model.layers:
            x_ND = layer(x_ND, turns, attend)
        return self.model.norm(x_ND)  # type: ignore[no-any-return]

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> this rank's columns of the logits [..., V]; columns beyond the vocabulary mean nothing."""
        if self.lm_head is not None:
            return self.lm_head(x_ND)  # type: ignore[no-any-return]
        return F.linear(copy_to_group(x_ND, self.tp), self.model.embed_tokens.weight)

    def local_params(self) -> tuple[LocalParam, ...]:
        """What this rank's parameters hold, in forward order (`core.layout`)."""
        return local_params(tensor_table(self.config), Layout(tp=self.tp.size), 0, self.tp.rank)
