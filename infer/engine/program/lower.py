"""The lowering of a decoder's description to the program of one rank."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ....core.casts import Array
from ....core.layout import Layout
from ....core.local_params import LocalParam, local_params
from ....model.row_slices import most_slices
from ....model.spec import EMBEDDING, HEAD, POSITIONS, DecoderSpec, DenseSpec, ExpertsSpec, Rope
from .operations import (
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
    WeightMatrix,
)


@dataclass(frozen=True, slots=True)
class Program:
    """The computation of a step on one rank.

    Attributes:
        operations: the operations, in order.
        params: the rank's parameters with the parts of tensors that they hold.
        tp, rank: the number of ranks and this rank's number.
        num_layers: the number of decoder layers, each with a cache.
        hidden_size: the size of hidden states.
        num_heads, num_kv_heads: the heads of this rank.
        head_dim: the size of a head.
        rope: the rotary embedding; None without one.
        vocab_size: the number of tokens, without padding.
        group_slices: the number of equal slices of a row-parallel weight's columns on this rank, which the groups of a
            quantized weight never cross.
    """

    operations: tuple[Operation, ...]
    params: tuple[LocalParam, ...]
    tp: int
    rank: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    vocab_size: int
    group_slices: int = 1

    @property
    def wide(self) -> frozenset[str]:
        """The parameters that are fp32 in a model of any dtype."""
        return frozenset(each.bias for each in self.operations if isinstance(each, Route) and each.bias)

    @property
    def row_widths(self) -> dict[str, int]:
        """The columns of each buffer of rows but logits (see operations.py), with the scores of experts for routing."""
        heads = self.num_heads * self.head_dim
        products = [each for each in self.operations if isinstance(each, Multiply) and each.target == "inner"]
        # Experts are chosen by other numbers than their weights if these have a bias or groups.
        routes = (2 * each.matrix.out_features for each in self.operations if isinstance(each, Route))
        return {
            "hidden": self.hidden_size,
            "normed": self.hidden_size,
            "qkv": heads + 2 * self.num_kv_heads * self.head_dim,
            "query": heads,
            "attended": heads,
            "inner": max((each.matrix.out_features for each in products), default=0),
            "gated": max((each.columns for each in self.operations if isinstance(each, Gate)), default=0),
            "partial": self.hidden_size,
            "scores": max(routes, default=0),
        }


def frequencies(rope: Rope, head_dim: int) -> Array:
    """Returns the radians per position of each pair (d, d + R / 2) of the R rotated dims of a head: fp64 [R / 2]."""
    rotated = rope.rotated(head_dim)
    pairs_P = np.arange(rotated // 2, dtype=np.float64)
    periods_P: Array = np.array([rope.theta ** (2 * pair / rotated) for pair in pairs_P.tolist()])
    return 1.0 / periods_P if rope.scaling is None else rope.scaling.frequencies(periods_P, pairs_P, rope.theta)


def serving_slices(spec: DecoderSpec, tp: int, dtype: str) -> int:
    """Returns the number of slices in which row-parallel sums are served: those of `most_slices` in fp32, else 1.

    In other dtypes the same bits at every tp are not promised, and fewer slices are faster.
    """
    slices = most_slices(spec)
    return slices if dtype == "fp32" and slices % tp == 0 else 1


def lower(spec: DecoderSpec, tp: int = 1, rank: int = 0, num_slices: int = 1) -> Program:
    """Lowers a decoder to the program of a rank.

    Args:
        spec: the description of the decoder.
        tp, rank: the number of tensor-parallel ranks, and the rank.
        num_slices: the slices of row-parallel sums over all ranks; 1, or a multiple of tp that `most_slices` allows.

    Raises:
        ParallelError: tp does not divide the model.
    """
    params = local_params(spec.table, Layout(tp=tp), rank)
    rank_of = _Rank(spec, {param.name: param for param in params}, max(1, num_slices // tp))
    return Program(
        operations=tuple(rank_of.operations()),
        params=params,
        tp=tp,
        rank=rank,
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        head_dim=spec.head_dim,
        rope=spec.rope,
        vocab_size=spec.table[0].shape[0],
        group_slices=math.lcm(most_slices(spec), tp) // tp,
    )


@dataclass(frozen=True, slots=True)
class _Rank:
    """The lowering for one rank: its description, parameters and local slices."""

    spec: DecoderSpec
    params: Mapping[str, LocalParam]
    num_slices: int

    def operations(self) -> Iterator[Operation]:
        yield Embed(EMBEDDING, self.params[EMBEDDING].shape[0], self._known(POSITIONS))
        for layer in range(len(self.spec.layers)):
            yield from self._layer(layer)
        yield self._norm("model.norm")
        head = HEAD if HEAD in self.params else EMBEDDING
        rows, columns = self.params[head].shape
        yield Head(WeightMatrix(head, columns, rows))
        yield SampleTokens()

    def _layer(self, layer: int) -> Iterator[Operation]:
        prefix, eps = f"model.layers.{layer}", self.spec.norm_eps
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        q_norm, k_norm = (self._known(f"{attention}.{name}.weight") for name in ("q_norm", "k_norm"))
        yield self._norm(f"{prefix}.input_layernorm")
        yield Multiply("normed", "qkv", self._column(f"{attention}.qkv_proj"))
        yield RotateAndAppend(layer, q_norm, k_norm, eps)
        yield AttendToCache(layer, self.spec.layers[layer].window)
        yield Multiply("attended", "partial", self._row(f"{attention}.o_proj"), self.num_slices)
        yield Reduce(self._known(f"{attention}.o_proj.bias"))
        yield self._norm(f"{prefix}.post_attention_layernorm")
        block = self.spec.layers[layer].feed_forward
        yield from self._experts(mlp, block) if isinstance(block, ExpertsSpec) else self._dense(mlp, block)

    def _dense(self, prefix: str, block: DenseSpec) -> Iterator[Operation]:
        first = "gate_up_proj" if block.activation == "swiglu" else "up_proj"
        down = self._row(f"{prefix}.down_proj")
        yield Multiply("normed", "inner", self._column(f"{prefix}.{first}"))
        yield Gate(block.activation, down.in_features)
        yield Multiply("gated", "partial", down, self.num_slices)
        yield Reduce(self._known(f"{prefix}.down_proj.bias"), self._known(f"{prefix}_gate.weight"))

    def _experts(self, prefix: str, block: ExpertsSpec) -> Iterator[Operation]:
        router, gate_up, down = f"{prefix}.gate.weight", f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
        rows, columns = self.params[router].shape
        yield Route(
            WeightMatrix(router, columns, rows),
            block.top_k,
            block.normalize,
            block.scoring,
            self._known(f"{prefix}.gate.e_score_correction_bias"),
            block.num_groups,
            block.top_groups,
            block.scale,
        )
        inner = self.params[down].shape[1]
        yield RunExperts(gate_up, down, block.num_experts, inner, self.num_slices)
        yield Reduce()
        if block.shared is not None:  # reads the same rows of normed
            yield from self._dense(f"{prefix}.shared_expert", block.shared)

    def _norm(self, name: str) -> Norm:
        return Norm(self.spec.norm, f"{name}.weight", self._known(f"{name}.bias"), self.spec.norm_eps)

    def _column(self, name: str) -> WeightMatrix:
        rows, columns = self.params[f"{name}.weight"].shape
        hidden, bias = self.spec.hidden_size, self._known(f"{name}.bias")
        if not self.spec.transposed:
            return WeightMatrix(f"{name}.weight", columns, rows, 0, bias)
        return WeightMatrix(f"{name}.weight", hidden, rows // hidden * columns, rows // hidden, bias)

    def _row(self, name: str) -> WeightMatrix:
        rows, columns = self.params[f"{name}.weight"].shape
        if not self.spec.transposed:
            return WeightMatrix(f"{name}.weight", columns, rows)
        return WeightMatrix(f"{name}.weight", rows, columns, 1)

    def _known(self, name: str) -> str:
        """Returns the name of a parameter, or "" if the model has none of that name."""
        return name if name in self.params else ""
