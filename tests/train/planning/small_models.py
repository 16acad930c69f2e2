"""Small shapes of the architectures, for plans."""

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": {**SHAPE, "num_key_value_heads": 2, "intermediate_size": 160},
    "qwen3": {**SHAPE, "num_key_value_heads": 4, "intermediate_size": 96, "architecture": "qwen3"},
    "gpt2": {**SHAPE, "architecture": "gpt2", "intermediate_size": 256},
    "mixtral": {
        **SHAPE,
        "architecture": "mixtral",
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 4,
    },
    "qwen2_moe": {
        **SHAPE,
        "architecture": "qwen2_moe",
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 160,
    },
}
