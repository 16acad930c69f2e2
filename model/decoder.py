"""The decoder, written once for every architecture, for training and for inference.

An architecture's file says what it is made of (`spec.DecoderSpec`); what training and inference do differently,
attention over which keys, is passed in.

Letters: N any leading dims ([B, L] in training, packed [T] in inference), D hidden size, V padded vocabulary rows of
this rank.
"""

import torch
from torch import nn

from ..core.errors import ParallelError
from ..core.layout import LocalParam, Stage
from ..parallel.mesh import Group
from ..parallel.weight_grads import WeightGradQueue
from ..parallel.wide_sums import embedding
from .attention import Attend, Attention
from .balance import RouterBalance
from .config import ModelConfig
from .experts import MixtureOfExperts
from .mlp import GatedMLP, PlainMLP
from .placement import Placement
from .recompute import Recompute, recomputed
from .registry import decoder_spec
from .rope import Rotation, rotation
from .spec import POSITIONS, ExpertsSpec


class DecoderLayer(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.recompute_all = place.recompute == "full"
        self.input_layernorm = place.norm()
        self.self_attn = Attention(layer, place)
        self.post_attention_layernorm = place.norm()
        self.mlp = _feed_forward(layer, place)

    def forward(
        self, x_ND: torch.Tensor, turns: Rotation | None, attend: Attend, balance: RouterBalance | None = None
    ) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        if self.recompute_all:
            return recomputed(self.compute, x_ND, turns, attend, balance)
        return self.compute(x_ND, turns, attend, balance)

    def compute(
        self, x_ND: torch.Tensor, turns: Rotation | None, attend: Attend, balance: RouterBalance | None
    ) -> torch.Tensor:
        """As `forward`, everything kept for backward."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), turns, attend)
        routed = (balance,) if isinstance(self.mlp, MixtureOfExperts) else ()
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND), *routed)  # type: ignore[no-any-return]


def _feed_forward(layer: int, place: Placement) -> nn.Module:
    block = place.spec.layers[layer].feed_forward
    if isinstance(block, ExpertsSpec):
        return MixtureOfExperts(layer, block, place)
    return GatedMLP(layer, place) if block.activation == "swiglu" else PlainMLP(layer, place)


class PositionEmbedding(nn.Module):
    """A learned vector per position, replicated over tensor-parallel ranks."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = place.tp, place.sequence_parallel
        self.weight = place.empty(POSITIONS)

    def forward(self, positions_N: torch.Tensor) -> torch.Tensor:
        """int64 positions [...], all of them on every rank -> [..., D] replicated (or split along dim -2)."""
        if self.sequence_parallel:
            positions_N = positions_N.chunk(self.tp.size, dim=-1)[self.tp.rank]
        return embedding(positions_N, self.weight)


class Trunk(nn.Module):
    """Embeddings, layers and final norm, as far as the stage has them: the `model.` of the parameters' names."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        stage = place.stage
        self.embed_tokens = place.embedding() if stage.first else None
        self.embed_positions = PositionEmbedding(place) if POSITIONS in place.shapes else None
        self.layers = nn.ModuleDict({str(layer): DecoderLayer(layer, place) for layer in stage.layers})
        self.norm = place.norm() if stage.last else None


class Decoder(nn.Module):
    """A rank's part of the language model, or of one pipeline stage of it, its weights uninitialised.

    Parameters keep their names in the whole model: layer 7 is `model.layers.7` on every stage. A head tied to the
    embedding is its very parameter, `model.embed_tokens.weight`, except on a last stage that is not also the first: a
    parameter `lm_head.weight` there, whose gradient the two stages add.

    Gradients that are partial sums over `tp`: those of tensors with `partial_grad`, and under sequence parallelism of
    every tensor whose `split` is None, for it has seen this rank's part of the sequence only.

    Args:
        tp: tensor-parallel group.
        stage: what to build; None = the whole model.
        sequence_parallel: splits hidden states over `tp` along the sequence wherever no tensor-parallel block needs
            them whole (arXiv 2205.05198); not together with `num_slices`.
        weight_grads: where the gradients of linear layers' weights go while it is enabled, the head's among them;
            those of norms, biases, embeddings and experts never do.
        recompute: what backward computes again instead of keeping it: "full" whole layers; "selective" what is large
            and cheap, attention between its projections and the activations of feed-forward blocks.
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
        stage: Stage | None = None,
        sequence_parallel: bool = False,
        weight_grads: WeightGradQueue | None = None,
        recompute: Recompute = "none",
        num_slices: int = 1,
        row_tile: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = decoder_spec(config)
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        assert not (self.sequence_parallel and num_slices > 1)
        place = Placement(
            self.spec,
            tp,
            dtype,
            device,
            stage or Stage(range(len(self.spec.layers))),
            sequence_parallel=self.sequence_parallel,
            weight_grads=weight_grads,
            recompute=recompute,
            num_slices=num_slices,
            row_tile=row_tile,
        )
        self.stage = place.stage
        self._params = place.params
        self.model = Trunk(place)
        self.lm_head = place.head(self.model.embed_tokens) if self.stage.last else None

    def forward(
        self, x_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend, balance: RouterBalance | None = None
    ) -> torch.Tensor:
        """From what enters the stage to what leaves it.

        Args:
            x_N: int64 tokens [...] on the first stage, the hidden states [..., D] of the one before on the others.
            positions_N: int64 [...].
            balance: adds the load-balancing loss of the stage's routers to what backward differentiates.

        Returns:
            Hidden states [..., D]; those of the last stage have gone through the last norm.

        Under sequence parallelism hidden states, entering and leaving, are this rank's [..., L / tp, D]; tokens and
        positions are all [..., L].

        Raises:
            ParallelError: tp does not divide the sequence under sequence parallelism.
        """
        if self.sequence_parallel:
            self._check_length(positions_N.shape[-1])
        trunk = self.model
        x_ND = x_N if trunk.embed_tokens is None else trunk.embed_tokens(x_N)
        if trunk.embed_positions is not None:
            x_ND = x_ND + trunk.embed_positions(positions_N)
        rope = self.spec.rope
        turns = None if rope is None else rotation(positions_N, self.spec.head_dim, rope, x_ND.dtype)
        for layer in trunk.layers.values():
            x_ND = layer(x_ND, turns, attend, balance)
        return x_ND if trunk.norm is None else trunk.norm(x_ND)

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] -> this rank's columns of the logits [..., V]; columns beyond the vocabulary mean nothing.

        Only the last stage has a head. Under sequence parallelism it takes [..., L / tp, D], not flattened, and
        gives [..., L, V].
        """
        assert self.lm_head is not None
        return self.lm_head(x_ND)  # type: ignore[no-any-return]

    def local_params(self) -> tuple[LocalParam, ...]:
        """What the stage's parameters on this rank hold, in forward order (`core.layout`)."""
        return self._params

    def _check_length(self, length: int) -> None:
        size = self.tp.size
        if length % size:
            raise ParallelError(
                f"sequence_parallel splits sequences over tp: length % tp = {length} % {size} = {length % size}, and "
                f"it must be 0. Use a length (train.seq_len) that {size} divides, such as "
                f"{length + size - length % size}, or parallel.sequence_parallel = false."
            )
