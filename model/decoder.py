"""The decoder of every architecture, for training and for inference.

An architecture's file describes its parts (`spec.DecoderSpec`). Training and inference differ only in the attention
over keys, which the caller passes in.

Letters: N any leading dims ([B, L] in training, packed [T] in inference), D hidden size, V padded vocabulary rows of
this rank.
"""

from dataclasses import replace

import torch
from torch import nn

from ..core.errors import ParallelError
from ..core.layout import Stage
from ..core.local_params import LocalParam
from ..parallel.head_loss import HeadLoss
from ..parallel.layers import LayerContext
from ..parallel.token_noise import TokenNoise
from ..parallel.wide_sums import embedding
from .attention import Attend, Attention
from .balance import RouterBalance
from .config import ModelConfig
from .experts.mixture import MixtureOfExperts
from .mlp import GatedMLP, PlainMLP
from .placement import Placement
from .recompute import Recompute, recomputed
from .registry import decoder_spec
from .rope import Rotation, rotation
from .spec import POSITIONS, DecoderSpec, ExpertsSpec


class DecoderLayer(nn.Module):
    """A pre-norm residual layer: attention, then a feed-forward block."""

    def __init__(self, layer: int, place: Placement) -> None:
        super().__init__()
        self.recompute_all = place.recompute == "full"
        self.input_layernorm = place.norm()
        self.self_attn = Attention(layer, place)
        self.post_attention_layernorm = place.norm()
        self.mlp = _feed_forward(layer, place)

    def forward(
        self,
        x_ND: torch.Tensor,
        rotary: Rotation | None,
        attend: Attend,
        balance: RouterBalance | None = None,
        noise: TokenNoise | None = None,
    ) -> torch.Tensor:
        """Maps hidden states [..., D] to [..., D]."""
        if self.recompute_all:
            return recomputed(self.compute, x_ND, rotary, attend, balance, noise)
        return self.compute(x_ND, rotary, attend, balance, noise)

    def compute(
        self,
        x_ND: torch.Tensor,
        rotary: Rotation | None,
        attend: Attend,
        balance: RouterBalance | None,
        noise: TokenNoise | None,
    ) -> torch.Tensor:
        """Computes `forward` without recomputation of the whole layer."""
        x_ND = x_ND + self.self_attn(self.input_layernorm(x_ND), rotary, attend, noise)
        routed = (balance,) if isinstance(self.mlp, MixtureOfExperts) else ()
        return x_ND + self.mlp(self.post_attention_layernorm(x_ND), *routed, noise)  # type: ignore[no-any-return]


def _feed_forward(layer: int, place: Placement) -> nn.Module:
    block = place.spec.layers[layer].feed_forward
    if isinstance(block, ExpertsSpec):
        return MixtureOfExperts(layer, block, place)
    return GatedMLP(layer, place) if block.activation == "swiglu" else PlainMLP(layer, place)


class PositionEmbedding(nn.Module):
    """A learned vector per position, replicated over tensor-parallel ranks."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = place.context.tp, place.context.sequence_parallel
        self.weight = place.empty(POSITIONS)

    def forward(self, positions_N: torch.Tensor) -> torch.Tensor:
        """Maps int64 positions [...], the same on every rank, to [..., D], replicated (or split along dim -2)."""
        if self.sequence_parallel:
            positions_N = positions_N.chunk(self.tp.size, dim=-1)[self.tp.rank]
        return embedding(positions_N, self.weight)


class Trunk(nn.Module):
    """The embeddings, layers and final norm of a stage: the `model.` in the names of parameters."""

    def __init__(self, place: Placement) -> None:
        super().__init__()
        stage = place.stage
        self.embed_tokens = place.embedding() if stage.first else None
        self.embed_positions = PositionEmbedding(place) if POSITIONS in place.shapes else None
        self.layers = nn.ModuleDict({str(layer): DecoderLayer(layer, place) for layer in stage.layers})
        self.norm = place.norm() if stage.last else None


class Decoder(nn.Module):
    """A rank's part of the language model, or of one pipeline stage of it, with uninitialised weights.

    Parameters have the names of the whole model: layer 7 is `model.layers.7` on every stage. A head that is tied to
    the embedding is the same parameter, `model.embed_tokens.weight`. If the first and the last stage are different
    ones, the last has its own parameter `lm_head.weight`, and the two stages add their gradients.

    Some gradients are partial sums over `tp`: those of tensors with `partial_grad`, and under sequence parallelism
    those of every tensor whose `split` is None, since a rank has seen only its part of the sequence.

    Args:
        config: the shape of the model.
        context: the tensor-parallel group, the parameters' dtype and device. `weight_grads` takes the weight gradients
            of linear layers and the head; gradients of norms, biases, embeddings and experts are not deferred.
        stage: the layers to build; None for the whole model.
        recompute: the activations that backward computes again: "none"; "selective" for large but cheap ones,
            attention between its projections and the activations of feed-forward blocks; "full" for whole layers.
        mlp_block: the positions of this rank that a dense feed-forward block computes at once, and again in backward;
            its weights' gradients are not deferred. 0 for all positions, which backward computes as `recompute` says.
        spec: the description of the decoder, if it has adapters; None for that of `config`.

    Raises:
        ParallelError: tp does not divide the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        *,
        stage: Stage | None = None,
        recompute: Recompute = "none",
        mlp_block: int = 0,
        spec: DecoderSpec | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = spec or decoder_spec(config)
        self.tp = context.tp
        self.sequence_parallel = context.sequence_parallel and context.tp.size > 1
        place = Placement(
            self.spec,
            replace(context, sequence_parallel=self.sequence_parallel),
            stage or Stage(range(len(self.spec.layers))),
            recompute=recompute,
            mlp_block=mlp_block,
        )
        self.stage = place.stage
        self._params = place.params
        self.model = Trunk(place)
        self.lm_head = place.head(self.model.embed_tokens) if self.stage.last else None

    def forward(
        self,
        x_N: torch.Tensor,
        positions_N: torch.Tensor,
        attend: Attend,
        balance: RouterBalance | None = None,
        noise: TokenNoise | None = None,
    ) -> torch.Tensor:
        """Computes this stage's layers.

        Under sequence parallelism the hidden states, given and returned, are this rank's part [..., L / tp, D]; tokens
        and positions are whole, [..., L].

        Args:
            x_N: int64 tokens [...] on the first stage; on others the hidden states [..., D] of the stage before.
            positions_N: int64 [...], the position of each token.
            attend: the attention over keys.
            balance: the load-balancing loss of the stage's routers, whose gradient joins backward; None without one.
            noise: the random numbers of the tokens, for dropout of adapters; None without dropout.

        Returns:
            Hidden states [..., D]; on the last stage they are normed.

        Raises:
            ParallelError: under sequence parallelism, tp does not divide the length of the sequence.
        """
        if self.sequence_parallel:
            self._check_length(positions_N.shape[-1])
        trunk = self.model
        x_ND = x_N if trunk.embed_tokens is None else trunk.embed_tokens(x_N)
        if trunk.embed_positions is not None:
            x_ND = x_ND + trunk.embed_positions(positions_N)
        rope = self.spec.rope
        rotary = None if rope is None else rotation(positions_N, self.spec.head_dim, rope, x_ND.dtype)
        for layer in trunk.layers.values():
            x_ND = layer(x_ND, rotary, attend, balance, noise)
        return x_ND if trunk.norm is None else trunk.norm(x_ND)

    def logits(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Maps hidden states [..., D] to this rank's columns of the logits [..., V]; the last stage only.

        Columns beyond the vocabulary are padding. Under sequence parallelism the hidden states are [..., L / tp, D],
        not flattened, and the logits [..., L, V].
        """
        assert self.lm_head is not None
        return self.lm_head(x_ND)  # type: ignore[no-any-return]

    def loss(
        self, x_BLD: torch.Tensor, targets_BL: torch.Tensor, factor: float = 1.0, backward_follows: bool = True
    ) -> torch.Tensor:
        """Returns the summed cross entropy of the logits, which are made block by block only; the last stage only.

        Args:
            x_BLD: the last stage's hidden states, as for `logits`.
            targets_BL: int64 [B, L], whole under sequence parallelism, too; IGNORED where there is none.
            factor: the factor of the sum.
            backward_follows: whether backward is the next pass; see parallel/head_loss.py.

        Returns:
            An fp64 scalar, the same on every tensor-parallel rank.
        """
        assert self.lm_head is not None
        loss = HeadLoss(targets_BL, self.config.vocab_size, factor, backward_follows)
        return self.lm_head(x_BLD, loss)  # type: ignore[no-any-return]

    def local_params(self) -> tuple[LocalParam, ...]:
        """Returns the stage's parameters on this rank with the parts of tensors that they hold, in forward order."""
        return self._params

    def _check_length(self, length: int) -> None:
        size = self.tp.size
        if length % size:
            raise ParallelError(
                f"sequence_parallel splits sequences over tp ranks, so tp must divide their length, but "
                f"length % tp = {length} % {size} = {length % size}. Use a length (train.seq_len) that {size} divides, "
                f"for example {length + size - length % size}, or parallel.sequence_parallel = false."
            )
