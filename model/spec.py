"""The description of an architecture for the decoder and for `ModelConfig`: plain data without torch.

The table lists the parameters: a bias, a norm of heads or a position table exists if the table has it. The other
fields describe their use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ..core.tensors import TensorSpec
from .rope_scaling import Scaling
from .shape import ModelShape

EMBEDDING = "model.embed_tokens.weight"  # names of the decoder's parameters, which may be stored under others
POSITIONS = "model.embed_positions.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary position embedding of every query and key head.

    Attributes:
        theta: the base of the wavelengths.
        scaling: the scaling for texts beyond the context of pretraining; None without it.
        share: the share of a head's dims that are rotated, its first ones.
    """

    theta: float
    scaling: Scaling | None = None
    share: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """Returns the number of dims of a head that are rotated."""
        return int(head_dim * self.share)

    @property
    def attention_scaling(self) -> float:
        """The factor of all cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.attention_scaling


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense feed-forward block.

    Attributes:
        inner: the intermediate size, which tensor parallelism splits.
        activation: "swiglu", which gates one half of the first product by the other, or "gelu_new", GELU's tanh form.
    """

    inner: int
    activation: Literal["swiglu", "gelu_new"] = "swiglu"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of SwiGLU experts, which drops no token.

    Attributes:
        inner: the intermediate size of each expert, which tensor parallelism splits.
        num_experts: the number of experts, among which the router chooses.
        top_k: the number of experts per token.
        normalize: whether the weights of the chosen experts are scaled to sum to 1.
        shared: the shared expert, which every token passes beside its own ones; None without one. Its output is
            weighted if the table has a `shared_expert_gate`.
        scoring: the function that makes weights of scores. Experts are chosen by weight, or by weight plus a bias if
            the table has an `e_score_correction_bias`.
        num_groups: the number of equal groups of neighbouring experts.
        top_groups: the number of groups, best by the sum of their two best experts, to which a token's experts belong.
        scale: the factor of the weights.
    """

    inner: int
    num_experts: int
    top_k: int
    normalize: bool
    shared: DenseSpec | None = None
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        feed_forward: the feed-forward block.
        window: the number of positions that a query sees, its own included; None for all before it.
    """

    feed_forward: DenseSpec | ExpertsSpec
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A low-rank adapter of one weight W: y = W x + scale B A x.

    Attributes:
        rank: the number of rows of A and of columns of B.
        scale: the factor of the adapter's product.
        dropout: the share of A's inputs that a training step leaves out.
    """

    rank: int
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder: its tensors and their use.

    Attributes:
        table: the tensors, in forward order.
        layers: the decoder layers.
        norm_eps: the epsilon of norms.
        norm: "rms" for RMSNorm, or "layer" for LayerNorm with bias.
        rope: the rotary embedding, or None if positions are learned (the table then has `POSITIONS`).
        transposed: whether linear weights are stored [in, out], as in GPT-2.
        adapters: the adapters, by the names of their weights; the table has their factors, too.
        base_bits: the bits of the codes in which training keeps the frozen weights of linear layers; 0 for no codes.
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
    adapters: Mapping[str, AdapterSpec] = field(default_factory=lambda: MappingProxyType({}))
    base_bits: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture, as its file declares it.

    Attributes:
        name: the `model_type` in config.json and the `architecture` in `[model]`.
        hugging_face_class: the class in config.json's `architectures`.
        options: the fields of ModelShape that the architecture has beyond those of every architecture.
        decoder: a function that makes the decoder's description from a config.
        requires: keys of config.json with the only value that tk implements; a file without the key has it.
        defaults: the keys of config.json that make the model, all of them, with the values of files that lack them:
            those of the architecture's config class in `transformers`, except that ids of tokens are the tokenizer's.
        nullable: those of them that may be null.
        ignored: keys of config.json that change nothing in the model.
        keys: the names in config.json of ModelShape's fields, if they differ; the first one is written.
        read: a function that resolves the architecture's own values, by the names of fields; it raises ValueError for
            values that tk does not implement.
        write: a function that returns keys of config.json beyond the fields and `requires`.
        unused: a function that returns, from a config.json and the number of layers, the beginnings of the names of
            tensors that files hold and the model does not use.
    """

    name: str
    hugging_face_class: str
    options: frozenset[str]
    decoder: Callable[[ModelShape], DecoderSpec]
    requires: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    nullable: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    read: Callable[[dict[str, Any]], dict[str, Any]] = dict
    write: Callable[[ModelShape], dict[str, Any]] = lambda config: {}
    unused: Callable[[Mapping[str, Any], int], tuple[str, ...]] = lambda data, num_layers: ()
