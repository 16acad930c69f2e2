"""The operations of a program on a GPU, over rows of any number: what graphs capture, and what prompts run.

A sum over ranks and its bias wait for the norm that follows, whose kernel adds them. Letters: T tokens, R rows of
logits, D hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ......model.rope import Rotation, rotation
from ......parallel.collectives import all_gather, all_reduce, tree_sum
from ......parallel.wide_sums import embedding
from ....program.lower import Program
from ....program.operations import (
    AttendToCache,
    Embed,
    Gate,
    Head,
    Multiply,
    Norm,
    Operation,
    Reduce,
    RotateAndAppend,
    Route,
    RunExperts,
    SampleTokens,
)
from ...aten.adapted_products import AdaptedRange, multiply_by_own_heads
from ...aten.experts import Routing, choose_experts, sigmoid
from ...aten.prepared_weights import AnyProduct, CodedProduct, PreparedProduct, PreparedWeights
from ..step.device_tables import StepOnDevice
from .experts import run_experts
from .kernels import GpuKernels
from .loaded_rank import LoadedRank


@dataclass(slots=True)
class _RowsUnderway:
    """The rows of a step on their way.

    Attributes:
        rotary: the rotation of each token's position; None without rotary embedding.
        buffers: the buffers of `program/operations.py` by name.
        added: what hidden still lacks: rows, and the bias of a Reduce.
        routing: the experts that the latest Route has chosen.
    """

    step: StepOnDevice
    rotary: Rotation | None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    added: tuple[torch.Tensor, str] | None = None
    routing: Routing | None = None


class GpuDecoder:
    """A program with its weights and kernels.

    Args:
        loaded: what the rank computes with.
        kernels: the operations that have kernels of their own.
        max_positions: the largest number of tokens of a sequence.
    """

    def __init__(self, loaded: LoadedRank, kernels: GpuKernels, max_positions: int) -> None:
        program, weights = loaded.program, loaded.weights
        self._program, self._weights, self._kernels, self._tp = program, weights, kernels, loaded.tp
        self._is_fixed = loaded.is_fixed
        self._products = weights.products(program)
        self._adapters = loaded.adapters
        names = {each.gate for each in program.operations if isinstance(each, Reduce) and each.gate}
        self._gates = {name: PreparedProduct((weights[name].float().view(1, -1),), 0, None) for name in names}
        self._rotary = _rotary_tables(program, weights, max_positions)
        self._before_swiglu = frozenset(
            first.matrix.name
            for first, second in pairwise(program.operations)
            if isinstance(first, Multiply) and isinstance(second, Gate) and second.kind == "swiglu"
        )

    def forward(self, step: StepOnDevice) -> torch.Tensor:
        """Runs the operations before the head; stores keys and values, and returns normed hidden states [T, D]."""
        places_T = step.positions.long().clamp_min(0)
        rotary = None if self._rotary is None else (self._rotary[0][places_T], self._rotary[1][places_T])
        rows = _RowsUnderway(step, rotary)
        for operation in self._program.operations:
            self._run(operation, rows)
        return rows.buffers["normed"]

    def head(
        self, normed_RD: torch.Tensor, logits_RV: torch.Tensor, adapted: Sequence[AdaptedRange] = ()
    ) -> torch.Tensor:
        """Writes the logits of rows, without padding of the vocabulary, on every rank: fp32 [R, vocab_size].

        Rows of `adapted` take the heads of their adapters, if these have some of their own.
        """
        (head,) = (operation for operation in self._program.operations if isinstance(operation, Head))
        own_RV = self._multiply(head.matrix.name, normed_RD)
        multiply_by_own_heads(head.matrix.name, own_RV, normed_RD, adapted)
        whole_RV = torch.cat(all_gather(own_RV, self._tp), dim=-1)
        return logits_RV.copy_(whole_RV[:, : self._program.vocab_size])

    def _run(self, operation: Operation, rows: _RowsUnderway) -> None:
        buffers = rows.buffers
        match operation:
            case Embed():
                buffers["hidden"] = self._embed(operation, rows.step)
            case Norm():
                added, bias = rows.added or (None, "")
                buffers["normed"] = self._kernels.add_norm(
                    buffers["hidden"], added, bias, operation, rows.step.adapters
                )
                rows.added = None
            case Multiply():
                self._multiply_to(operation, rows)
            case RotateAndAppend():
                buffers["query"] = self._kernels.rotate_and_append(operation, buffers["qkv"], rows.rotary, rows.step)
            case AttendToCache():
                buffers["attended"] = self._kernels.attend(operation, buffers["query"], rows.step)
            case Gate():
                if "gated" not in buffers:
                    buffers["gated"] = self._kernels.gate(buffers.pop("inner"), operation.kind)
            case Route():
                scores_TE = self._multiply(operation.matrix.name, buffers["normed"])
                bias_E = self._weights[operation.bias] if operation.bias else None
                rows.routing = choose_experts(scores_TE, operation, bias_E)
            case RunExperts():
                buffers["partial"] = self._run_experts(operation, rows)
            case Reduce():
                self._reduce(operation, rows)
            case Head() | SampleTokens():
                pass  # these follow for the wanted rows

    def _embed(self, operation: Embed, step: StepOnDevice) -> torch.Tensor:
        local_T = step.tokens.long()
        if self._tp.size == 1:
            hidden_TD = self._weights.lookup(operation.table, local_T)
        else:
            local_T = local_T - self._tp.rank * operation.num_rows
            outside_T = (local_T < 0) | (local_T >= operation.num_rows)
            own_TD = self._weights.lookup(operation.table, local_T.masked_fill(outside_T, 0))
            hidden_TD = all_reduce(own_TD.masked_fill(outside_T.unsqueeze(-1), 0.0), self._tp)
        if operation.positions:
            positions_T = step.positions.long().clamp_min(0)
            hidden_TD = hidden_TD + embedding(positions_T, self._weights[operation.positions])
        return hidden_TD

    def _multiply_to(self, operation: Multiply, rows: _RowsUnderway) -> None:
        """Multiplies rows into a buffer; gate and up in codes may go into gated at once."""
        buffers = rows.buffers
        name, source = operation.matrix.name, buffers[operation.source]
        if operation.source == "gated":
            del buffers["gated"]
        product = self._products[name]
        if rows.step.adapters is not None:
            sums_TF = self._unrounded(product, source)
            buffers[operation.target] = self._kernels.add_adapters(name, source, sums_TF, rows.step.adapters.tiles)
            return
        if name in self._before_swiglu and isinstance(product, CodedProduct) and product.bias is None:
            gated = self._kernels.gated_coded_product(source, product.weight)
            if gated is not None:
                buffers["gated"] = gated
                return
        buffers[operation.target] = self._multiply(name, source)

    def _multiply(self, name: str, x_TD: torch.Tensor) -> torch.Tensor:
        product = self._products[name]
        if isinstance(product, CodedProduct):
            return self._kernels.coded_product(x_TD, product.weight, product.bias)
        return self._kernels.product(x_TD, product)

    def _unrounded(self, product: AnyProduct, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns a product in fp32, to which adapters add theirs before it is rounded."""
        if isinstance(product, CodedProduct):
            return self._kernels.coded_product(x_TD, product.weight, product.bias, False)
        return self._kernels.product(x_TD, product, False)

    def _run_experts(self, operation: RunExperts, rows: _RowsUnderway) -> torch.Tensor:
        assert rows.routing is not None
        normed_TD, adapters, numbers = rows.buffers["normed"], None, 1
        if self._adapters is not None and operation.gate_up in self._adapters.ranks:
            adapters, numbers = rows.step.adapters, len(self._adapters.lines(operation.gate_up))
        weights = self._weights.rows(operation.gate_up), self._weights.rows(operation.down)
        return run_experts(normed_TD, rows.routing, *weights, operation, self._kernels, adapters, numbers)

    def _reduce(self, operation: Reduce, rows: _RowsUnderway) -> None:
        """Sums partial over ranks, and leaves the addition to the norm that follows."""
        if rows.added is not None:  # of the experts beside which a shared one runs
            self._add(rows)
        partial_TD = rows.buffers.pop("partial")
        # NCCL chooses the order of a sum by its size.
        sum_TD = tree_sum(all_gather(partial_TD, self._tp)) if self._is_fixed else all_reduce(partial_TD, self._tp)
        if operation.gate:
            scores_T1 = self._kernels.product(rows.buffers["normed"], self._gates[operation.gate])
            sum_TD = (sum_TD.float() * sigmoid(scores_T1)).to(sum_TD.dtype)
        rows.added = sum_TD, operation.bias

    def _add(self, rows: _RowsUnderway) -> None:
        assert rows.added is not None
        added_TD, bias = rows.added
        rows.buffers["hidden"] += added_TD + self._weights[bias] if bias else added_TD
        rows.added = None


def _rotary_tables(program: Program, weights: PreparedWeights, max_positions: int) -> Rotation | None:
    """Returns cosines and sines of all positions, each [positions, rotated dims]; None without rotary embedding."""
    if program.rope is None:
        return None
    positions = torch.arange(max_positions, device=weights.device)
    cosines, sines = rotation(positions, program.head_dim, program.rope, weights.dtype)
    return cosines.squeeze(1).contiguous(), sines.squeeze(1).contiguous()
