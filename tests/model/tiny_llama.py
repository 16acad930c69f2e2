"""The sizes of a tiny Llama by the keys of config.json: those of `llama_table(layers=2)` in checkpoint/saving.py."""

from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # heads of 8; tp = 2 does not divide the vocabulary
