"""A Hugging Face folder of a Llama with random weights and a byte tokenizer, small enough to load in a blink."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 4, 2, 8
MAX_LENGTH = 512


def byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with a token for each byte, and the end of text behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def write_tiny_model(
    folder: Path, max_length: int = MAX_LENGTH, tokenizer: Tokenizer | None = None, end: int = 256
) -> Path:
    """Writes config.json, model.safetensors and tokenizer.json, by default of `byte_tokenizer`; `end` ends a text."""
    tokenizer = tokenizer or byte_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size() + 7  # room that no token uses, as trained vocabularies have
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random_weights(vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random_weights(vocab_size: int) -> dict[str, npt.NDArray[np.float32]]:
    shapes = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "lm_head.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (HIDDEN,),
            f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    random = np.random.default_rng(0)
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[1]))
        for name, shape in shapes.items()
    }
