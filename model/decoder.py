"""The decoder, written once for every architecture, for training and for inference.

An architecture's file says what it is made of (`spec.DecoderSpec`); what training and inference do differently,
attention over which keys, is passed in.

Letters: N any leading dims ([B, L] in training, packed [T] in inference), D hidden size, V padded vocabulary rows of
this rank.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..core.layout import LocalParam
from ..parallel.functions import copy_to_group
from ..parallel.mesh import Group
from .attention import Attend, Attention
from .config import ModelConfig
from .experts import MixtureOfExperts
from .mlp import GatedMLP, PlainMLP
from .placement import Placement
from .registry import decoder_spec
from .rope import Rotation, rotation
from .spec import POSITIONS, ExpertsSpec


class DecoderLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.input_layernorm = place.norm()
        self.self_attn = Attention(layer, place)
        self.post_attention_layernorm = place.norm()
        self.mlp = _feed_forward(layer, place)

    def forward(self, x_ND: torch.Tensor, turns: Rotation | None, attend: Attend) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), turns, attend)
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND))  # type: ignore[no-any-return]


def _feed_forward(layer: int, place: Placement) -> nn.Module:
    block = place.spec.layers[layer].feed_forward
    if isinstance(block, ExpertsSpec):
        return MixtureOfExperts(layer, block, place)
    return GatedMLP(layer, place) if block.activation == "swiglu" else PlainMLP(layer, place)


class PositionEmbedding(nn.Module):
    """A learned vector per position, replicated over tensor-parallel ranks."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.weight = place.empty(POSITIONS)

    def forward(self, positions_N: torch.Tensor) -> torch.Tensor:
        """int64 positions [...] -> [..., D]."""
        return F.embedding(positions_N, self.weight)


class Trunk(nn.Module):
    """Embeddings, layers and final norm: the `model.` of the parameters' names."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.embed_tokens = place.embedding()
        self.embed_positions = PositionEmbedding(place) if POSITIONS in place.shapes else None
        self.layers = nn.ModuleList(DecoderLayer(i, place) for i in range(len(place.spec.layers)))
        self.norm = place.norm()


class Decoder(nn.Module):
    """A rank's part of the language model, its weights uninitialised.

    Args:
        tp: tensor-parallel group.
        num_slices: see RowParallelLinear.
        row_tile: see MixtureOfExperts.

    Raises:
        ParallelError: tp does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_slices: int = 1,
        row_tile: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = decoder_spec(config)
        self.tp = tp
        place = Placement.of(self.spec, tp, dtype, device, num_slices, row_tile)
        self._params = place.params
        self.model = Trunk(place)
        self.lm_head = None if config.tie_word_embeddings else place.head()

    def forward(self, tokens_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        """int64 tokens and positions [...] -> final hidden states [..., D] after the last norm."""
        x_ND = self.model.embed_tokens(tokens_N)
        if self.model.embed_positions is not None:
            x_ND = x_ND + self.model.embed_positions(positions_N)
        rope = self.spec.rope
        turns = None if rope is None else rotation(positions_N, self.spec.head_dim, rope, x_ND.dtype)
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
        return self._params
