"""Where and how a rank builds its part of a decoder: group, shapes of its parameters, dtype, device."""

from dataclasses import dataclass
from typing import Self

import torch

from ..core.layout import Layout, LocalParam, Stage, local_params
from ..parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from ..parallel.mesh import Group
from .norm import LayerNorm, RMSNorm
from .spec import EMBEDDING, HEAD, DecoderSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank's part. Layers are asked for by name, without ".weight"; a bias comes with them if the table has one.

    Attributes:
        stage: the layers and ends that are built.
        params: what the stage's parameters on this rank hold, in forward order (`core.layout`).
        sequence_parallel: whether hidden states are split over `tp` between its blocks (see parallel/layers.py).
        num_slices: see RowParallelLinear.
        row_tile: see MixtureOfExperts.
    """

    spec: DecoderSpec
    stage: Stage
    tp: Group
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool
    num_slices: int
    row_tile: int
    params: tuple[LocalParam, ...]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        tp: Group,
        dtype: torch.dtype,
        device: torch.device,
        *,
        stage: Stage | None,
        sequence_parallel: bool,
        num_slices: int,
        row_tile: int,
    ) -> Self:
        """Works out the shapes of this rank's parameters; ParallelError if tp does not divide the model."""
        stage = stage or Stage(range(len(spec.layers)))
        params = local_params([tensor for tensor in spec.table if stage.holds(tensor)], Layout(tp=tp.size), 0, tp.rank)
        shapes = {param.name: param.shape for param in params}
        return cls(spec, stage, tp, dtype, device, sequence_parallel, num_slices, row_tile, params, shapes)

    def column(self, name: str) -> ColumnParallelLinear:
        """A column-parallel layer on hidden states."""
        rows, columns = self.shapes[f"{name}.weight"]
        hidden = self.spec.hidden_size
        num_transposed = rows // hidden if self.spec.transposed else 0
        return ColumnParallelLinear(
            hidden,
            num_transposed * columns or rows,
            self.tp,
            dtype=self.dtype,
            device=self.device,
            bias=f"{name}.bias" in self.shapes,
            num_transposed=num_transposed,
            sequence_parallel=self.sequence_parallel,
        )

    def row(self, name: str) -> RowParallelLinear:
        """A row-parallel layer that gives hidden states."""
        rows, columns = self.shapes[f"{name}.weight"]
        return RowParallelLinear(
            rows if self.spec.transposed else columns,
            self.spec.hidden_size,
            self.tp,
            dtype=self.dtype,
            device=self.device,
            num_slices=self.num_slices,
            bias=f"{name}.bias" in self.shapes,
            transposed=self.spec.transposed,
            sequence_parallel=self.sequence_parallel,
        )

    def norm(self) -> RMSNorm | LayerNorm:
        """A norm over the hidden size."""
        kind = RMSNorm if self.spec.norm == "rms" else LayerNorm
        return kind(self.spec.hidden_size, self.spec.norm_eps, dtype=self.dtype, device=self.device)

    def head_norm(self, name: str) -> RMSNorm | None:
        """A norm over each head, if there is one of that name."""
        if f"{name}.weight" not in self.shapes:
            return None
        return RMSNorm(self.spec.head_dim, self.spec.norm_eps, dtype=self.dtype, device=self.device)

    def embedding(self) -> VocabParallelEmbedding:
        """The token embedding."""
        rows, features = self.shapes[EMBEDDING]
        sequence = self.sequence_parallel
        return VocabParallelEmbedding(
            rows, features, self.tp, dtype=self.dtype, device=self.device, sequence_parallel=sequence
        )

    def head(self, embedding: VocabParallelEmbedding | None) -> ColumnParallelLinear:
        """The output head, which no architecture transposes; on the weight of `embedding` where it is tied to it and
        they are on one stage."""
        tied = None if HEAD in self.shapes or embedding is None else embedding.weight
        rows, features = self.shapes[HEAD] if tied is None else tied.shape
        device = self.device if tied is None else torch.device("meta")
        sequence = self.sequence_parallel
        head = ColumnParallelLinear(
            features, rows, self.tp, dtype=self.dtype, device=device, sequence_parallel=sequence
        )
        head.weight = head.weight if tied is None else tied
        return head

    def empty(self, name: str) -> torch.nn.Parameter:
        """The uninitialised parameter of that full name."""
        return torch.nn.Parameter(torch.empty(self.shapes[name], dtype=self.dtype, device=self.device))
