"""The decoder that Llama and its relatives share; their files in architectures/ list only the differences.

A layer is grouped-query attention (arXiv 2305.13245), then SwiGLU or a mixture of experts (arXiv 2401.04088), each
after an RMSNorm.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..core.tensors import Split, TensorSpec
from .shape import ModelShape
from .spec import EMBEDDING, DecoderSpec, DenseSpec, ExpertsSpec, LayerSpec, Rope
from .window_keys import windows

OPTIONS = frozenset({"num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps"})
WINDOW_OPTIONS = frozenset({"sliding_window", "max_window_layers", "layer_types"})
REQUIRES = MappingProxyType({"hidden_act": "silu"})
# The keys of config.json that the family shares, with the values that most of its files in architectures/ keep.
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072,
        "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": None, "rope_theta": 10000.0,
    }
)  # fmt: skip
QWEN_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **DEFAULTS,
        "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768,
        "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": None,
    }
)  # fmt: skip
NULLABLE = frozenset(
    {"num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "rope_theta", "sliding_window", "layer_types"}
)
CHANGE_NOTHING = frozenset({"attention_dropout"})

_VOCAB = Split(0, 1, "pad", of="vocab_size")


@dataclass(frozen=True, slots=True)
class Names:
    """The stored names of an architecture's mixture of experts.

    Attributes:
        block: the name of the feed-forward block.
        gate, up, down: the names of an expert's projections.
        shared: the name of the shared expert in the block.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


@dataclass(frozen=True, slots=True)
class Family:
    """The differences of one architecture from Llama.

    Attributes:
        qkv_bias: whether q, k and v have biases.
        head_norms: whether every query and key head passes an RMSNorm before it is rotated.
        correction_bias: whether routers choose experts by their weights plus a bias, which has no gradient.
        shared_gate: whether the output of shared experts is weighted by a sigmoid of a product with their input.
        expert_names: the stored names of a mixture of experts.
    """

    qkv_bias: bool = False
    head_norms: bool = False
    correction_bias: bool = False
    shared_gate: bool = False
    expert_names: Names = Names()

    def decoder(self, config: ModelShape, layers: Sequence[LayerSpec] = ()) -> DecoderSpec:
        """Returns the decoder with the given layers, or by default with dense ones in their windows."""
        dense = DenseSpec(config.intermediate_size)
        layers = tuple(layers) or tuple(LayerSpec(dense, window) for window in windows(config))
        return DecoderSpec(
            table=tuple(self._table(config, layers)),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            layers=layers,
            norm_eps=config.rms_norm_eps,
            rope=Rope(config.rope_theta, config.rope_scaling, config.partial_rotary_factor),
        )

    def _table(self, config: ModelShape, layers: Sequence[LayerSpec]) -> Iterator[TensorSpec]:
        """Yields every tensor in forward order; q, k, v, and gate, up are stacked along dim 0 in one parameter."""
        hidden = config.hidden_size
        yield TensorSpec(EMBEDDING, (config.vocab_size, hidden), _VOCAB)
        for index, layer in enumerate(layers):
            prefix = f"model.layers.{index}"
            yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), layer=index, init="ones")
            yield from self._attention(config, f"{prefix}.self_attn", index)
            yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), layer=index, init="ones")
            if isinstance(layer.feed_forward, ExpertsSpec):
                yield from self._experts(hidden, layer.feed_forward, prefix, index)
            else:
                gate_up, down = f"{prefix}.mlp.gate_up_proj.weight", f"{prefix}.mlp.down_proj.weight"
                inner, of = layer.feed_forward.inner, "intermediate_size"
                yield from _swiglu([(f"{prefix}.mlp", None)], Names(), (hidden, inner, of), index, gate_up, down)
        yield TensorSpec("model.norm.weight", (hidden,), layer="last", init="ones")
        tied = EMBEDDING if config.tie_word_embeddings else ""
        yield TensorSpec("lm_head.weight", (config.vocab_size, hidden), _VOCAB, "last", alias=tied)

    def _attention(self, config: ModelShape, prefix: str, layer: int) -> Iterator[TensorSpec]:
        hidden, head = config.hidden_size, config.head_dim
        query = Split(0, head, of="num_attention_heads")
        key_value = Split(0, head, "replicate", of="num_key_value_heads")
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        projections = (("q", num_heads, query), ("k", num_kv_heads, key_value), ("v", num_kv_heads, key_value))
        for name, count, split in projections:
            fused = f"{prefix}.qkv_proj.weight"
            yield TensorSpec(f"{prefix}.{name}_proj.weight", (count * head, hidden), split, layer, fused)
        for name, count, split in projections if self.qkv_bias else ():
            fused = f"{prefix}.qkv_proj.bias"
            yield TensorSpec(f"{prefix}.{name}_proj.bias", (count * head,), split, layer, fused, init="zeros")
        for name in ("q_norm", "k_norm") if self.head_norms else ():
            yield TensorSpec(f"{prefix}.{name}.weight", (head,), layer=layer, init="ones", partial_grad=True)
        columns = Split(1, head, of="num_attention_heads")
        yield TensorSpec(f"{prefix}.o_proj.weight", (hidden, num_heads * head), columns, layer)

    def _experts(self, hidden: int, experts: ExpertsSpec, prefix: str, layer: int) -> Iterator[TensorSpec]:
        names, of = self.expert_names, "intermediate size of an expert"
        stored, own = f"{prefix}.{names.block}", f"{prefix}.mlp"
        router = (experts.num_experts, hidden)
        yield TensorSpec(f"{stored}.gate.weight", router, None, layer, f"{own}.gate.weight", partial_grad=True)
        if self.correction_bias:
            bias, shape = "gate.e_score_correction_bias", (experts.num_experts,)
            yield TensorSpec(
                f"{stored}.{bias}",
                shape,
                None,
                layer,
                f"{own}.{bias}",
                init="zeros",
                trainable=False,
                dtype="F32",
                buffer=True,
            )
        gate_up, down = f"{own}.experts.gate_up_proj", f"{own}.experts.down_proj"
        places = [(f"{stored}.experts.{expert}", expert) for expert in range(experts.num_experts)]
        yield from _swiglu(places, names, (hidden, experts.inner, of), layer, gate_up, down)
        if experts.shared is not None:
            yield from self._shared(hidden, experts.shared, prefix, layer)

    def _shared(self, hidden: int, shared: DenseSpec, prefix: str, layer: int) -> Iterator[TensorSpec]:
        stored = f"{prefix}.{self.expert_names.block}.{self.expert_names.shared}"
        own, of = f"{prefix}.mlp.shared_expert", "intermediate size of the shared expert"
        gate_up, down = f"{own}.gate_up_proj.weight", f"{own}.down_proj.weight"
        yield from _swiglu([(stored, None)], Names(), (hidden, shared.inner, of), layer, gate_up, down)
        if self.shared_gate:
            gate = f"{own}_gate.weight"
            yield TensorSpec(f"{stored}_gate.weight", (1, hidden), None, layer, gate, partial_grad=True)


def _swiglu(
    places: Sequence[tuple[str, int | None]],
    names: Names,
    sizes: tuple[int, int, str],
    layer: int,
    gate_up: str,
    down: str,
) -> Iterator[TensorSpec]:
    """Yields the tensors of a layer's SwiGLUs of one size, each at a prefix, with the number of its expert."""
    hidden, inner, of = sizes
    rows, columns = Split(0, of=of), Split(1, of=of)
    parts = (
        (names.gate, (inner, hidden), rows, gate_up),
        (names.up, (inner, hidden), rows, gate_up),
        (names.down, (hidden, inner), columns, down),
    )
    for prefix, expert in places:
        for name, shape, split, param in parts:
            yield TensorSpec(f"{prefix}.{name}.weight", shape, split, layer, param, expert=expert)
