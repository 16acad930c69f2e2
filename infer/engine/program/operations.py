"""The operations of a lowered decoder, plain data.

An operation reads and writes named buffers with one row per token of the step (B rows; R rows where only the rows whose
logits are wanted count):

| buffer | columns on this rank | written by |
|---|---|---|
| hidden | D, the hidden size | Embed, Reduce (adds) |
| normed | D | Norm |
| qkv | (H + 2 K) E: query, key and value heads | Multiply |
| query | H E, rotated; keys and values go to the cache | RotateAndAppend |
| attended | H E | AttendToCache |
| inner | 2 I (gate, then up) or I | Multiply |
| gated | I | Gate |
| partial | D, this rank's part of a sum over ranks | Multiply, RunExperts |
| routing | the chosen experts and their weights | Route |
| logits | V, this rank's vocabulary rows, for R rows | Head |

Weights are named as the rank's parameters (`core/local_params.py`). A linear weight is stored as [out, in], or as
`num_transposed` blocks [in, out / num_transposed], one below the other.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["normed", "attended", "gated"]
Target: TypeAlias = Literal["qkv", "inner", "partial"]


@dataclass(frozen=True, slots=True)
class WeightMatrix:
    """The weight of a matrix product on this rank.

    Attributes:
        name: the parameter.
        in_features, out_features: the sizes of the product on this rank.
        num_transposed: the number of transposed blocks of the stored weight; 0 if it is [out, in].
        bias: the parameter of the bias; "" without one.
    """

    name: str
    in_features: int
    out_features: int
    num_transposed: int = 0
    bias: str = ""


@dataclass(frozen=True, slots=True)
class Embed:
    """Writes the rows of the token embedding to hidden, summed over ranks: each holds `num_rows` rows of the table.

    Attributes:
        table: the token embedding.
        num_rows: the rows of each rank, padding included; rank r holds the ids from r * num_rows on.
        positions: the table of learned positions, which is added; "" without one.
    """

    table: str
    num_rows: int
    positions: str = ""


@dataclass(frozen=True, slots=True)
class Norm:
    """Norms hidden to normed.

    Attributes:
        kind: "rms" for RMSNorm (arXiv 1910.07467), "layer" for LayerNorm (arXiv 1607.06450).
        weight, bias: the parameters; RMSNorm has no bias ("").
        eps: the epsilon.
    """

    kind: Literal["rms", "layer"]
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True, slots=True)
class Multiply:
    """Multiplies rows of `source` by a weight into `target`, and adds the bias.

    Attributes:
        source, target: the buffers.
        matrix: the weight. If the target is "partial", the bias belongs to the Reduce that follows.
        num_slices: the number of equal slices of `in_features` that are summed apart and added as a binary tree.
    """

    source: Source
    target: Target
    matrix: WeightMatrix
    num_slices: int = 1


@dataclass(frozen=True, slots=True)
class RotateAndAppend:
    """Norms and rotates the heads of qkv, writes query, and appends keys and values to the cache.

    Attributes:
        layer: the decoder layer, whose cache is written.
        q_norm, k_norm: the weights of RMSNorms of every query and key head; "" without them.
        eps: the epsilon of these norms.
    """

    layer: int
    q_norm: str
    k_norm: str
    eps: float


@dataclass(frozen=True, slots=True)
class AttendToCache:
    """Causal attention of query over the cache, to attended.

    Attributes:
        layer: the decoder layer, whose cache is read.
        window: the number of positions that a query sees, its own included; None for all before it.
    """

    layer: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Gate:
    """Applies the activation of a feed-forward block to inner, to gated.

    Attributes:
        kind: "swiglu" for silu(gate) * up, "gelu_new" for GELU in its tanh form.
        columns: the columns of gated on this rank.
    """

    kind: Literal["swiglu", "gelu_new"]
    columns: int


@dataclass(frozen=True, slots=True)
class Route:
    """Weighs the experts for every row of normed and chooses the `top_k` best, the lowest of equals first.

    Attributes:
        matrix: the router, [number of experts, D], whole on every rank.
        top_k: the number of experts per token.
        normalize: whether the weights of the chosen experts are scaled to sum to 1.
        scoring: the function that makes weights of scores, which are fp32.
        bias: the parameter [number of experts] in fp32 that is added to the weights for the choice alone; "" without.
        num_groups: the number of equal groups of neighbouring experts.
        top_groups: the number of groups, best by the sum of their two best experts, among which experts are chosen.
        scale: the factor of the weights.
    """

    matrix: WeightMatrix
    top_k: int
    normalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    bias: str = ""
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RunExperts:
    """Passes every row of normed through its experts (SwiGLU) and writes the weighted sum to partial.

    Attributes:
        gate_up: the parameter of all experts' gate and up, [experts * 2 I, D].
        down: the parameter of all experts' down, [experts * D, I].
        num_experts: those of the layer, on every rank.
        inner: I, the columns of an expert's intermediate size on this rank.
        num_slices: see Multiply; the slices are those of I.
    """

    gate_up: str
    down: str
    num_experts: int
    inner: int
    num_slices: int = 1


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sums partial over ranks, as a binary tree in rank order, and adds the sum and the bias to hidden.

    Attributes:
        bias: the parameter of the bias, whole on every rank; "" without one.
        gate: the parameter [1, D], whole on every rank, whose product with the row of normed gives, through a sigmoid,
            the weight of the row's sum; "" for a weight of 1.
    """

    bias: str = ""
    gate: str = ""


@dataclass(frozen=True, slots=True)
class Head:
    """Multiplies the wanted rows of normed by the output head into logits, in fp32.

    Attributes:
        matrix: this rank's rows of the head, padding included; rank r holds the ids from r * out_features on.
    """

    matrix: WeightMatrix


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Chooses a token for every wanted row from the logits of all ranks, without the padding of the vocabulary."""


Operation: TypeAlias = (
    Embed | Norm | Multiply | RotateAndAppend | AttendToCache | Gate | Route | RunExperts | Reduce | Head | SampleTokens
)
