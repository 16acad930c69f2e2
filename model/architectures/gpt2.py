"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases everywhere, weights stored [in, out].

c_attn has the columns of q, k and v side by side, and a tensor-parallel rank holds one box of each.
"""

from collections.abc import Iterator
from typing import Any

from ...core.tensors import Split, TensorSpec
from ..shape import ModelShape
from ..spec import EMBEDDING, POSITIONS, Architecture, DecoderSpec, DenseSpec, LayerSpec

_VOCAB = Split(0, 1, "pad", of="vocab_size")
_DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_REQUIRES = {
    "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}  # fmt: skip
_SPELLINGS = {
    "hidden_size": ("n_embd", "hidden_size"), "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"), "num_attention_heads": ("n_head", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}  # fmt: skip


def _decoder(config: ModelShape) -> DecoderSpec:
    layer = LayerSpec(DenseSpec(config.intermediate_size, "gelu_new"))
    return DecoderSpec(
        table=tuple(_table(config)),
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        layers=(layer,) * config.num_hidden_layers,
        norm_eps=config.layer_norm_epsilon,
        norm="layer",
        transposed=True,
    )


def _table(config: ModelShape) -> Iterator[TensorSpec]:
    hidden, embedding = config.hidden_size, "transformer.wte.weight"
    yield TensorSpec(embedding, (config.vocab_size, hidden), _VOCAB, param=EMBEDDING)
    yield TensorSpec("transformer.wpe.weight", (config.max_position_embeddings, hidden), param=POSITIONS)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield TensorSpec("transformer.ln_f.weight", (hidden,), None, "last", "model.norm.weight", init="ones")
    yield TensorSpec("transformer.ln_f.bias", (hidden,), None, "last", "model.norm.bias", init="zeros")
    tied = embedding if config.tie_word_embeddings else ""
    yield TensorSpec("lm_head.weight", (config.vocab_size, hidden), _VOCAB, "last", alias=tied)


def _layer(config: ModelShape, layer: int) -> Iterator[TensorSpec]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    stored, own = f"transformer.h.{layer}", f"model.layers.{layer}"

    def norm(name: str, ours: str) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{stored}.{name}.weight", (hidden,), None, layer, f"{own}.{ours}.weight", init="ones")
        yield TensorSpec(f"{stored}.{name}.bias", (hidden,), None, layer, f"{own}.{ours}.bias", init="zeros")

    def linear(name: str, ours: str, shape: tuple[int, int], unit: int, of: str, cut: int) -> Iterator[TensorSpec]:
        """`cut` is the number of sections of the columns; 0 splits the rows instead, and not the bias."""
        split = Split(1, unit, of=of, sections=cut) if cut else Split(0, unit, of=of)
        bias = Split(0, unit, of=of, sections=cut) if cut else None
        yield TensorSpec(f"{stored}.{name}.weight", shape, split, layer, f"{own}.{ours}.weight")
        yield TensorSpec(f"{stored}.{name}.bias", shape[1:], bias, layer, f"{own}.{ours}.bias", init="zeros")

    heads, inside = "num_attention_heads", "intermediate_size"
    yield from norm("ln_1", "input_layernorm")
    yield from linear("attn.c_attn", "self_attn.qkv_proj", (hidden, 3 * hidden), head, heads, 3)
    yield from linear("attn.c_proj", "self_attn.o_proj", (hidden, hidden), head, heads, 0)
    yield from norm("ln_2", "post_attention_layernorm")
    yield from linear("mlp.c_fc", "mlp.up_proj", (hidden, inner), 1, inside, 1)
    yield from linear("mlp.c_proj", "mlp.down_proj", (inner, hidden), 1, inside, 0)


def _read(values: dict[str, Any]) -> dict[str, Any]:
    absent = values["intermediate_size"] is None and isinstance(values["hidden_size"], int)
    return values | {"intermediate_size": 4 * values["hidden_size"]} if absent else values


ARCHITECTURE = Architecture(
    name="gpt2",
    hugging_face_class="GPT2LMHeadModel",
    options=frozenset({"layer_norm_epsilon"}),
    decoder=_decoder,
    requires=_REQUIRES,
    defaults=_DEFAULTS,
    nullable=frozenset({"n_inner", "bos_token_id", "eos_token_id"}),
    ignored=frozenset(
        {"attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "reorder_and_upcast_attn", "summary_activation"}
        | {"summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"}
    ),
    keys=_SPELLINGS,
    read=_read,
)
