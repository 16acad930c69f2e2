"""Llama's tensors (arXiv 2302.13971; grouped-query attention as in Llama 2, arXiv 2307.09288)."""

from ...core.layout import Split, TensorSpec
from ..config import ModelConfig

_VOCAB = Split(0, 1, "pad", of="vocab_size")
_INTERMEDIATE_ROWS = Split(0, of="intermediate_size")
_INTERMEDIATE_COLUMNS = Split(1, of="intermediate_size")


def tensor_table(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of the model's files, in forward order; q, k, v and gate, up share a parameter as stacked rows."""
    hidden = config.hidden_size
    specs = [TensorSpec("model.embed_tokens.weight", (config.vocab_size, hidden), _VOCAB)]
    for layer in range(config.num_hidden_layers):
        specs += _layer(config, layer)
    specs.append(TensorSpec("model.norm.weight", (hidden,), layer="last", init="ones"))
    tied = "model.embed_tokens.weight" if config.tie_word_embeddings else ""
    specs.append(TensorSpec("lm_head.weight", (config.vocab_size, hidden), _VOCAB, "last", alias=tied))
    return tuple(specs)


def _layer(config: ModelConfig, layer: int) -> list[TensorSpec]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    query = Split(0, head, of="num_attention_heads")
    key_value = Split(0, head, "replicate", of="num_key_value_heads")
    prefix = f"model.layers.{layer}"
    qkv, gate_up = f"{prefix}.self_attn.qkv_proj.weight", f"{prefix}.mlp.gate_up_proj.weight"

    def spec(name: str, shape: tuple[int, ...], split: Split, param: str = "") -> TensorSpec:
        return TensorSpec(f"{prefix}.{name}.weight", shape, split, layer, param)

    def norm(name: str) -> TensorSpec:
        return TensorSpec(f"{prefix}.{name}.weight", (hidden,), layer=layer, init="ones")

    return [
        norm("input_layernorm"),
        spec("self_attn.q_proj", (num_heads * head, hidden), query, qkv),
        spec("self_attn.k_proj", (num_kv_heads * head, hidden), key_value, qkv),
        spec("self_attn.v_proj", (num_kv_heads * head, hidden), key_value, qkv),
        spec("self_attn.o_proj", (hidden, num_heads * head), Split(1, head, of="num_attention_heads")),
        norm("post_attention_layernorm"),
        spec("mlp.gate_proj", (inner, hidden), _INTERMEDIATE_ROWS, gate_up),
        spec("mlp.up_proj", (inner, hidden), _INTERMEDIATE_ROWS, gate_up),
        spec("mlp.down_proj", (hidden, inner), _INTERMEDIATE_COLUMNS),
    ]
