"""The interpreter of a program on torch's operators: one method per operation, on one tile of rows at a time.

Letters: T rows of a tile, R rows whose logits are wanted, D hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from .....model.activation import gelu_new, swiglu
from .....model.norm import rms_norm
from .....model.rope import Rotation, rotate, rotation
from .....parallel.collectives import all_gather, all_reduce, tree_sum
from .....parallel.mesh import Group
from .....parallel.wide_sums import embedding, layer_norm
from ...program.adapters import RankAdapter
from ...program.lower import Program
from ...program.operations import (
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
from .adapted_products import AdaptedRange, PreparedAdapter, by_own, multiply, multiply_by_own_heads
from .expert_products import ExpertWeights
from .experts import Routing, choose_experts, run_experts, sigmoid
from .paged_attention import PagedAttention
from .prepared_weights import PreparedWeights


@dataclass(slots=True)
class TileState:
    """One tile of rows on its way through the operations.

    Attributes:
        tokens, positions: int64 [T], padding included.
        attention: the attention of the tile's tokens.
        rotary: the rotation of the positions; None without rotary embedding.
        buffers: the buffers of `program/operations.py` by name, except routing and logits.
        routing: the experts that the latest Route has chosen.
        adapted: the rows with an adapter.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PagedAttention
    rotary: Rotation | None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    routing: Routing | None = None
    adapted: Sequence[AdaptedRange] = ()


class Interpreter:
    """A program with its weights.

    Args:
        program: the rank's program.
        weights: its parameters.
        tp: the tensor-parallel group.

    Attributes:
        program: as above.
        windows: the windows of its layers' attention.
    """

    def __init__(self, program: Program, weights: PreparedWeights, tp: Group) -> None:
        self.program, self._weights, self._tp = program, weights, tp
        self.windows = {each.window for each in program.operations if isinstance(each, AttendToCache)}
        self._products = weights.products(program)
        self._group = program.num_heads // program.num_kv_heads

    def prepared(self, adapter: RankAdapter) -> PreparedAdapter:
        """Copies an adapter, of the weights' dtype, to their device."""
        return PreparedAdapter.of(adapter, self.program, self._weights)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: PagedAttention,
        adapted: Sequence[AdaptedRange] = (),
    ) -> torch.Tensor:
        """Runs the operations before the head; stores keys and values, and returns normed hidden states [T, D]."""
        program, rotary = self.program, None
        if program.rope is not None:
            rotary = rotation(positions_T, program.head_dim, program.rope, self._weights.dtype)
        state = TileState(tokens_T, positions_T, attention, rotary, adapted=adapted)
        for operation in program.operations:
            self._run(operation, state)
        return state.buffers["normed"]

    def head(self, normed_RD: torch.Tensor, adapted: Sequence[AdaptedRange] = ()) -> torch.Tensor:
        """Maps normed hidden states to this rank's logits [R, V], padding of the vocabulary included."""
        (head,) = (operation for operation in self.program.operations if isinstance(operation, Head))
        logits_RV = self._products[head.matrix.name](normed_RD)
        multiply_by_own_heads(head.matrix.name, logits_RV, normed_RD, adapted)
        return logits_RV

    def _run(self, operation: Operation, state: TileState) -> None:
        buffers = state.buffers
        match operation:
            case Embed():
                buffers["hidden"] = self._embed(operation, state)
            case Norm():
                buffers["normed"] = self._norm(operation, state)
            case Multiply():
                name = operation.matrix.name
                buffers[operation.target] = multiply(
                    name, self._products[name], buffers[operation.source], state.adapted
                )
            case RotateAndAppend():
                self._rotate_and_append(operation, state)
            case AttendToCache():
                attended = state.attention.attend(operation.layer, operation.window, buffers["query"])
                buffers["attended"] = attended.flatten(-2)
            case Gate():
                activation = swiglu if operation.kind == "swiglu" else gelu_new
                buffers["gated"] = activation(buffers["inner"])
            case Route():
                scores_TE = self._products[operation.matrix.name](buffers["normed"])
                bias_E = self._weights[operation.bias] if operation.bias else None
                state.routing = choose_experts(scores_TE, operation, bias_E)
            case RunExperts():
                buffers["partial"] = self._run_experts(operation, state)
            case Reduce():
                buffers["hidden"] = buffers["hidden"] + self._reduce(operation, buffers)
            case Head() | SampleTokens():
                pass  # these follow for the wanted rows of all tiles together

    def _embed(self, operation: Embed, state: TileState) -> torch.Tensor:
        local_T = state.tokens - self._tp.rank * operation.num_rows
        outside_T = (local_T < 0) | (local_T >= operation.num_rows)
        own_TD = self._weights.lookup(operation.table, local_T.masked_fill(outside_T, 0))
        hidden_TD = all_reduce(own_TD.masked_fill(outside_T.unsqueeze(-1), 0.0), self._tp)
        if operation.positions:
            hidden_TD = hidden_TD + embedding(state.positions, self._weights[operation.positions])
        return hidden_TD

    def _norm(self, operation: Norm, state: TileState) -> torch.Tensor:
        hidden_TD, eps = state.buffers["hidden"], operation.eps
        if operation.kind == "rms":
            return self._rms_norm(operation.weight, hidden_TD, eps, state)
        compute = partial(layer_norm, hidden_TD, eps=eps)
        return by_own((operation.weight, operation.bias), self._weights, state.adapted, compute)

    def _rms_norm(self, weight: str, x_ND: torch.Tensor, eps: float, state: TileState) -> torch.Tensor:
        return by_own((weight,), self._weights, state.adapted, partial(rms_norm, x_ND, eps=eps))

    def _rotate_and_append(self, operation: RotateAndAppend, state: TileState) -> None:
        program = self.program
        heads = state.buffers["qkv"].unflatten(-1, (-1, program.head_dim))
        query, key, value = heads.split((program.num_heads, program.num_kv_heads, program.num_kv_heads), dim=-2)
        if operation.q_norm:
            query = self._rms_norm(operation.q_norm, query, operation.eps, state)
            key = self._rms_norm(operation.k_norm, key, operation.eps, state)
        if state.rotary is not None:
            query, key = rotate(query, state.rotary), rotate(key, state.rotary)
        if (factors_KE := self._weights.key_factors.get(operation.layer)) is not None:  # exact, up to fp16's range
            query, key = query * factors_KE.repeat_interleave(self._group, dim=0), key / factors_KE
        state.attention.append(operation.layer, key, value)
        state.buffers["query"] = query

    def _run_experts(self, operation: RunExperts, state: TileState) -> torch.Tensor:
        assert state.routing is not None
        gate_up, down = self._weights.rows(operation.gate_up), self._weights.rows(operation.down)
        weights = ExpertWeights(gate_up, down, operation)
        return run_experts(state.buffers["normed"], state.routing, weights, state.adapted)

    def _reduce(self, operation: Reduce, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        sum_TD = tree_sum(all_gather(buffers["partial"], self._tp))
        if operation.gate:
            # A sum per row, as in norms, so that its bits do not depend on the number of rows.
            scores_T1 = (buffers["normed"].float() * self._weights[operation.gate].float()).sum(dim=-1, keepdim=True)
            sum_TD = (sum_TD.float() * sigmoid(scores_T1)).to(sum_TD.dtype)
        return sum_TD + self._weights[operation.bias] if operation.bias else sum_TD
