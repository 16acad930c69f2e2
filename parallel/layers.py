"""Tensor-parallel layers on plain local tensors, with the group passed in (Megatron-LM, arXiv 1909.08053).

Every layer holds only its rank's part of the weight, uninitialised; model/init.py or model/loading.py fills it.
Letters: N any leading dims, D in features, F out features of this rank.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .collectives import all_gather, tree_sum
from .functions import copy_to_group, reduce_from_group
from .mesh import Group


class ColumnParallelLinear(nn.Module):
    """y_NF = x_ND W_FD^T where each rank holds rows of W: input replicated, output split over ranks.

    Args:
        in_features: D, of the whole input.
        out_features: F, rows held by this rank.
    """

    def __init__(
        self, in_features: int, out_features: int, tp: Group, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] replicated -> [..., F] split."""
        return F.linear(copy_to_group(x_ND, self.tp), self.weight)


class RowParallelLinear(nn.Module):
    """y_NF = sum over ranks of x_ND W_FD^T where each rank holds columns of W: input split, output replicated.

    Args:
        in_features: D, columns held by this rank.
        out_features: F, of the whole output.
        num_slices: 1 sums over ranks in whatever order is fastest. A power of two cuts the whole K into that many
            slices, each summed on its own and then added as one fixed binary tree, so that every tp that divides
            num_slices gives the same bits (inference in fp32).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_slices: int = 1,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.num_local_slices = max(1, num_slices // tp.size)
        self.fixed_tree = num_slices > 1
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """[..., D] split -> [..., F] replicated."""
        if not self.fixed_tree:
            return reduce_from_group(F.linear(x_ND, self.weight), self.tp)
        inputs = x_ND.chunk(self.num_local_slices, dim=-1)
        weights = self.weight.chunk(self.num_local_slices, dim=-1)
        partial = tree_sum([F.linear(x, w) for x, w in zip(inputs, weights, strict=True)])
        return tree_sum(all_gather(partial, self.tp))


class VocabParallelEmbedding(nn.Module):
    """Embedding lookup where each rank holds an equal, padded range of rows.

    Args:
        num_rows: rows held by this rank, padding included; rank r holds ids [r * num_rows, (r + 1) * num_rows).
        features: D.
    """

    def __init__(self, num_rows: int, features: int, tp: Group, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(num_rows, features, dtype=dtype, device=device))

    def forward(self, ids_N: torch.Tensor) -> torch.Tensor:
        """int64 ids [...] -> [..., D] replicated."""
        if self.tp.size == 1:
            return F.embedding(ids_N, self.weight)
        rows = self.weight.shape[0]
        local_N = ids_N - self.tp.rank * rows
        outside_N = (local_N < 0) | (local_N >= rows)
        partial_ND = F.embedding(local_N.masked_fill(outside_N, 0), self.weight)
        return reduce_from_group(partial_ND.masked_fill(outside_N.unsqueeze(-1), 0.0), self.tp)
