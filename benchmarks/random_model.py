"""The model of benchmarks: a Hugging Face folder of a Llama with 135 M random parameters in bf16."""

from pathlib import Path
from typing import Final

VOCAB_SIZE: Final = 32000


def random_model(folder: Path) -> Path:
    """Writes the model into `folder`, unless an earlier benchmark did, and returns the folder."""
    if not (folder / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        )
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
