"""Tensor-parallel layers on plain local tensors, with the group passed in (Megatron-LM, arXiv 1909.08053).

Every layer holds only its rank's part of the weight, uninitialised; model/init.py or model/loading.py fills it.
With `sequence_parallel` (arXiv 2205.05198), hidden states outside of a pair of column- and row-parallel layers are
split over ranks along dim -2 instead of replicated. The bias of a row-parallel layer is then added to a split output,
so the gradient of that bias is a partial sum.
Letters: N any leading dims, D in features, F out features of this rank.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ..core.layout import Layout
from .adapters import AdapterFactors, AdapterProduct
from .coded_weight import CodedWeight
from .functions import leave_block
from .head_loss import PLAIN, HeadLoss, head_loss
from .linear import Activation, ParallelProduct
from .mesh import Group, Mesh
from .token_noise import TokenNoise
from .weight_grads import WeightGradQueue
from .wide_sums import embedding


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks among which experts are dealt.

    Attributes:
        ep: the ranks that hold different experts.
        expert_tp: the ranks that share an expert.
        layout: the layout of one pipeline stage.
        rank: this rank's number in it.
    """

    ep: Group
    expert_tp: Group
    layout: Layout
    rank: int

    @staticmethod
    def of(mesh: Mesh) -> "ExpertRanks | None":
        """Returns those of a mesh; None if every tensor-parallel rank has its part of every expert."""
        layout = mesh.layout
        if (layout.experts.ep, layout.experts.tp) == (1, layout.tp):
            return None
        stage = replace(layout, pp=1, virtual_stages=1)
        return ExpertRanks(mesh.ep, mesh.expert_tp, stage, mesh.world.rank % layout.stage_size)


@dataclass(frozen=True)
class LayerContext:
    """The settings that all layers of a model on one rank share.

    Attributes:
        tp: the tensor-parallel group.
        dtype: the dtype of the parameters.
        device: the device of the parameters.
        sequence_parallel: whether hidden states are split over `tp` outside of column- and row-parallel pairs.
        weight_grads: the queue that takes the gradients of linear layers' weights while it is enabled.
        experts: the ranks among which experts are dealt; None if experts are split over `tp` as other layers are.
    """

    tp: Group
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False
    weight_grads: WeightGradQueue | None = None
    experts: ExpertRanks | None = None

    def empty(self, *shape: int) -> nn.Parameter:
        """Creates an uninitialised parameter."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))


class ColumnParallelLinear(nn.Module):
    """A linear layer y_NF = x_ND W_FD^T + b_F whose output features, the rows of W and b, are split over ranks.

    Args:
        in_features: D, the number of features of the whole input.
        out_features: F, the number of rows that this rank holds.
        num_transposed: 0 stores the weight as [F, D]; n stores it as n blocks [D, F / n], one below the other.
        adapter: the adapters of the weight.

    Attributes:
        codes: the frozen weight in codes, of which `weight` then has the shape alone; None if it is not in codes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: LayerContext,
        *,
        bias: bool = False,
        num_transposed: int = 0,
        adapter: AdapterFactors | None = None,
    ) -> None:
        super().__init__()
        self.product = ParallelProduct(
            "column", context.tp, num_transposed, context.sequence_parallel, context.weight_grads
        )
        n = num_transposed
        shape = (n * in_features, out_features // n) if n else (out_features, in_features)
        self.weight = context.empty(*shape)
        self.bias = context.empty(out_features) if bias else None
        self.out_features = out_features
        self.adapter = adapter
        self.codes: CodedWeight | None = None

    def forward(self, x_ND: torch.Tensor, noise: TokenNoise | None = None) -> torch.Tensor:
        """Maps [..., D], replicated (or split along dim -2), to [..., F], split along dim -1.

        Args:
            x_ND: the input.
            noise: the random numbers of all its tokens, those of other ranks too, for dropout of adapters.
        """
        adapter = adapter_call(self.adapter, self.out_features, noise)
        return self.product(x_ND, self.codes or self.weight, self.bias, adapter=adapter)


class VocabParallelHead(ColumnParallelLinear):
    """A language model's head: a column-parallel layer whose output are logits, or their loss without them.

    Attributes:
        loss_steps: the steps of a block of the loss, which `train.compile` compiles.
    """

    loss_steps = PLAIN

    def forward(self, x_ND: torch.Tensor, loss: HeadLoss | None = None) -> torch.Tensor:  # type: ignore[override]
        """Maps [..., D], replicated (or split along dim -2), to this rank's logits [..., F], or to their loss."""
        if loss is None:
            return self.product(x_ND, self.weight)
        return head_loss(x_ND, self.weight, self.product, loss, self.loss_steps)


class RowParallelLinear(nn.Module):
    """A linear layer y_NF = x_ND W_FD^T + b_F whose input features, the columns of W, are split over ranks.

    Args:
        in_features: D, the number of columns that this rank holds.
        out_features: F, the number of features of the whole output.
        transposed: whether the weight is stored as [D, F].
        recompute_activation: whether backward computes the activation before the product again instead of keeping it.
        adapter: the adapter of the weight.

    Attributes:
        codes: the frozen weight in codes, of which `weight` then has the shape alone; None if it is not in codes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: LayerContext,
        *,
        bias: bool = False,
        transposed: bool = False,
        recompute_activation: bool = False,
        adapter: AdapterFactors | None = None,
    ) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        self.product = ParallelProduct(
            "row", context.tp, int(transposed), context.sequence_parallel, context.weight_grads
        )
        shape = (in_features, out_features) if transposed else (out_features, in_features)
        self.weight = context.empty(*shape)
        self.bias = context.empty(out_features) if bias else None
        self.out_features = out_features
        self.adapter = adapter
        self.codes: CodedWeight | None = None

    def forward(
        self, x_ND: torch.Tensor, activation: Activation | None = None, noise: TokenNoise | None = None
    ) -> torch.Tensor:
        """Maps [..., D], split along dim -1, to [..., F], replicated (or split along dim -2).

        Args:
            x_ND: this rank's input features.
            activation: a function that is applied to `x_ND` first.
            noise: the random numbers of the input's tokens, for dropout of the adapter.
        """
        if activation is not None and not self.recompute_activation:
            x_ND, activation = activation(x_ND), None
        adapter = adapter_call(self.adapter, self.out_features, noise)
        return self.product(x_ND, self.codes or self.weight, self.bias, activation, adapter)


def adapter_call(
    factors: AdapterFactors | None, num_features: int, noise: TokenNoise | None = None
) -> AdapterProduct | None:
    """Returns the call of a layer's adapters; None without any."""
    return None if factors is None else factors.product(num_features, noise)


class VocabParallelEmbedding(nn.Module):
    """An embedding table whose rows are split over ranks in equal, padded ranges.

    Args:
        num_rows: the number of rows that each rank holds, padding included; rank r holds ids
            [r * num_rows, (r + 1) * num_rows).
        features: D, the number of features of a row.
    """

    def __init__(self, num_rows: int, features: int, context: LayerContext) -> None:
        super().__init__()
        self.tp = context.tp
        self.sequence_parallel = context.sequence_parallel
        self.weight = context.empty(num_rows, features)

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Maps int64 ids [...], the same on every rank, to [..., D], replicated (or split along dim -2)."""
        if self.tp.size == 1:
            return embedding(ids_N, self.weight)
        rows = self.weight.shape[0]
        local_N = ids_N - self.tp.rank * rows
        outside_N = (local_N < 0) | (local_N >= rows)
        partial_ND = embedding(local_N.masked_fill(outside_N, 0), self.weight)
        return leave_block(partial_ND.masked_fill(outside_N.unsqueeze(-1), 0.0), self.tp, self.sequence_parallel)
