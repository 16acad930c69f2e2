"""What an architecture's file hands to the decoder and to `ModelConfig`: plain data without torch.

The table says which parameters there are (a bias, a norm of heads, a position table exist if the table has them); the
other fields say how they are used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ..core.tensors import TensorSpec
from .shape import ModelShape, RopeScaling

EMBEDDING = "model.embed_tokens.weight"  # parameter names of the decoder's own
POSITIONS = "model.embed_positions.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of every query and key head."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward block that every token goes through.

    Attributes:
        inner: its intermediate size, which tensor parallelism splits.
        activation: "swiglu" gates one half of the first product by the other, "gelu_new" is GELU's tanh form.
    """

    inner: int
    activation: Literal["swiglu", "gelu_new"] = "swiglu"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of SwiGLU experts; no token is dropped.

    Attributes:
        inner: intermediate size of each expert, which tensor parallelism splits.
        top_k: experts per token.
        normalize: whether the probabilities of the chosen experts are scaled to sum to 1.
    """

    inner: int
    num_experts: int
    top_k: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        window: positions that a query sees, its own included; None = all before it.
    """

    feed_forward: DenseSpec | ExpertsSpec
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder: its tensors and how they are used.

    Attributes:
        norm: "rms", or "layer" for LayerNorm with bias.
        rope: None where positions are learned (the table then holds `POSITIONS`).
        transposed: whether linear weights are stored [in, out], as GPT-2's are.
    """

    table: tuple[TensorSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    rope: Rope | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture, as its file declares it.

    Attributes:
        name: `model_type` of config.json and `architecture` of `[model]`.
        hugging_face_class: `architectures` of config.json.
        options: fields of ModelShape that it has beyond those of every architecture.
        decoder: from a config to the decoder.
        requires: keys of config.json and the only value that tk implements; absent or null is that value.
        absent: what a key means that config.json lacks, where ModelShape's default is another.
        keys: config.json's names of ModelShape's fields, where they differ; the first is the one that is written.
        read: config.json, keys translated -> the same with this architecture's particularities resolved. Raises
            ValueError for what tk does not implement.
        write: keys of config.json beyond the fields and `requires`.
    """

    name: str
    hugging_face_class: str
    options: frozenset[str]
    decoder: Callable[[ModelShape], DecoderSpec]
    requires: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    absent: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict
    write: Callable[[ModelShape], dict[str, Any]] = lambda config: {}
