"""The construction of a rank's part of a decoder: layers with the shapes that the rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..core.dtypes import by_code
from ..core.layout import Layout, Stage
from ..core.local_params import LocalParam, Piece, local_params
from ..parallel.adapters import AdaptedRows, AdapterFactors
from ..parallel.layers import (
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from ..parallel.token_noise import word_of
from ..parallel.torch_dtypes import torch_dtype
from .lora.table import factor_name, leaf
from .norm import LayerNorm, RMSNorm
from .recompute import Recompute
from .spec import EMBEDDING, HEAD, DecoderSpec


@dataclass(frozen=True)
class Placement:
    """One rank's place in the layout, which builds the rank's layers.

    Layers are built by name, without ".weight"; they have a bias if the table has one.

    Attributes:
        spec: the description of the decoder.
        context: see LayerContext.
        stage: the layers of this pipeline stage.
        recompute, mlp_block: see Decoder.
    """

    spec: DecoderSpec
    context: LayerContext
    stage: Stage
    recompute: Recompute = "none"
    mlp_block: int = 0

    @cached_property
    def params(self) -> tuple[LocalParam, ...]:
        """The stage's parameters on this rank with the parts of tensors that they hold, in forward order.

        Raises:
            ParallelError: tp does not divide the model, or ep its experts.
        """
        held = [tensor for tensor in self.spec.table if self.stage.holds(tensor)]
        experts, tp = self.context.experts, self.context.tp
        if experts is None:
            return local_params(held, Layout(tp=tp.size), tp.rank)
        return local_params(held, experts.layout, experts.rank)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name."""
        return {param.name: param.shape for param in self.params}

    def column(self, name: str) -> ColumnParallelLinear:
        """Builds a column-parallel layer, whose input are hidden states."""
        rows, columns = self.shapes[f"{name}.weight"]
        hidden = self.spec.hidden_size
        num_transposed = rows // hidden if self.spec.transposed else 0
        return ColumnParallelLinear(
            hidden,
            num_transposed * columns or rows,
            self.context,
            bias=f"{name}.bias" in self.shapes,
            num_transposed=num_transposed,
            adapter=self.adapter(f"{name}.weight"),
        )

    def row(self, name: str) -> RowParallelLinear:
        """Builds a row-parallel layer, whose output are hidden states."""
        rows, columns = self.shapes[f"{name}.weight"]
        return RowParallelLinear(
            rows if self.spec.transposed else columns,
            self.spec.hidden_size,
            self.context,
            bias=f"{name}.bias" in self.shapes,
            transposed=self.spec.transposed,
            recompute_activation=self.recompute == "selective",
            adapter=self.adapter(f"{name}.weight"),
        )

    def adapter(self, name: str) -> AdapterFactors | None:
        """Builds the factors of the adapters of a parameter, by its full name; None if it has none."""
        if factor_name(name, "A") not in self.shapes:
            return None
        parts = tuple(self._adapted_rows(name))
        b = {part.name: self.empty(factor_name(name, f"B.{part.name}")) for part in parts}
        return AdapterFactors(parts, self.empty(factor_name(name, "A")), b)

    def _adapted_rows(self, name: str) -> Iterator[AdaptedRows]:
        """Yields the adapters of a parameter of linear layers, in the order of the layers' rows."""
        pieces = self.pieces(name)
        tensors = list(dict.fromkeys(piece.tensor for piece in pieces))
        row = rank = 0
        for tensor in tensors:
            own = [piece.box for piece in pieces if piece.tensor is tensor]
            rows = sum(box.shape[int(self.spec.transposed)] for box in own)
            adapter = self.spec.adapters.get(tensor.name)
            if adapter is not None:
                yield AdaptedRows(
                    leaf(tensor.name),
                    slice(row, row + rows),
                    slice(rank, rank + adapter.rank),
                    adapter.scale,
                    adapter.dropout,
                    word_of(tensor.name),
                    own[0].offset[1 - int(self.spec.transposed)],
                )
                rank += adapter.rank
            row += rows

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Returns the parts of tensors that a parameter of a full name consists of."""
        return next(param for param in self.params if param.name == name).pieces

    def norm(self) -> RMSNorm | LayerNorm:
        """Builds a norm over the hidden size."""
        kind = RMSNorm if self.spec.norm == "rms" else LayerNorm
        return kind(self.spec.hidden_size, self.spec.norm_eps, dtype=self.context.dtype, device=self.context.device)

    def head_norm(self, name: str) -> RMSNorm | None:
        """Builds a norm over each head, or returns None if the table has none of that name."""
        if f"{name}.weight" not in self.shapes:
            return None
        return RMSNorm(self.spec.head_dim, self.spec.norm_eps, dtype=self.context.dtype, device=self.context.device)

    def embedding(self) -> VocabParallelEmbedding:
        """Builds the token embedding."""
        rows, features = self.shapes[EMBEDDING]
        return VocabParallelEmbedding(rows, features, self.context)

    def head(self, embedding: VocabParallelEmbedding | None) -> VocabParallelHead:
        """Builds the output head, which no architecture transposes.

        It has the weight of `embedding` if the two are tied and on one stage.
        """
        tied = None if HEAD in self.shapes or embedding is None else embedding.weight
        rows, features = self.shapes[HEAD] if tied is None else tied.shape
        device = self.context.device if tied is None else torch.device("meta")
        head = VocabParallelHead(features, rows, replace(self.context, device=device))
        head.weight = head.weight if tied is None else tied
        return head

    def empty(self, name: str) -> torch.nn.Parameter:
        """Creates the uninitialised parameter of a full name."""
        return self.context.empty(*self.shapes[name])

    def untrained(self, name: str) -> torch.nn.Parameter:
        """Creates the uninitialised parameter of a full name that has a dtype of its own and no gradient."""
        dtype = torch_dtype(by_code(self.pieces(name)[0].tensor.dtype))
        values = torch.empty(self.shapes[name], dtype=dtype, device=self.context.device)
        return torch.nn.Parameter(values, requires_grad=False)
