"""The models of benchmarks: Hugging Face folders of a Llama with random parameters in bf16."""

from pathlib import Path
from typing import Final

VOCAB_SIZE: Final = 32000


def random_model(folder: Path, vocab_size: int = VOCAB_SIZE, logit_scale: float = 1.0) -> Path:
    """Writes a model of 12 layers, 135 M parameters, into `folder`, unless an earlier benchmark did.

    Args:
        folder: the folder, which is returned.
        vocab_size: the size of the vocabulary; another one changes the number of parameters.
        logit_scale: the weight of the last norm. At 1 logits are flat: their standard deviation is 0.55.
    """
    return _write(
        folder,
        logit_scale,
        vocab_size=vocab_size,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def large_model(folder: Path) -> Path:
    """Writes a model of 22 layers, 1.1 B parameters and 2.2 GB, into a folder in `folder`, which it returns."""
    return _write(
        folder / "llama-1b",
        drawn_in="bfloat16",  # in fp32 it would take twice the memory
        vocab_size=VOCAB_SIZE,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def tiny_model(folder: Path, max_tokens: int) -> Path:
    """Writes a model of one small layer for `max_tokens` tokens into a folder in `folder`, which it returns."""
    return _write(
        folder / f"llama-tiny-{max_tokens}",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=max_tokens,
    )


def alike_pair(folder: Path, likeness: float) -> tuple[Path, Path]:
    """Writes a model of 12 layers, 79 M parameters, and a draft of 0.12 of its bytes; returns the folders of both.

    The draft is the model's first layer. The other layers add little to what it says: `likeness` is how much smaller
    their part is than it would be.
    """
    shape = {"vocab_size": 4096, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    shape |= {"num_key_value_heads": 4, "max_position_embeddings": 4096}
    model, draft = folder / f"llama-79m-{likeness:g}", folder / "llama-79m-draft"
    if not (model / "config.json").exists() or not (draft / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=12, tie_word_embeddings=True))
        torch.nn.init.constant_(made.model.norm.weight, 8.0)  # not flat
        for layer in made.model.layers[1:]:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.data /= likeness
        made.bfloat16().save_pretrained(model)
        made.model.layers, made.config.num_hidden_layers = made.model.layers[:1], 1
        made.save_pretrained(draft)
    return model, draft


def _write(folder: Path, logit_scale: float = 1.0, drawn_in: str = "float32", **shape: int) -> Path:
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=getattr(torch, drawn_in))
        torch.nn.init.constant_(model.model.norm.weight, logit_scale)
        model.bfloat16().save_pretrained(folder)
    return folder
