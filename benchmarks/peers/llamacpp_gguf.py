"""A Llama of a Hugging Face folder as a GGUF file in bf16, for llama.cpp, in whose environment it is written."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

gguf: Any = import_module("gguf")
Floats = npt.NDArray[np.float32]

NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """Returns the name in a GGUF file of a tensor of a Hugging Face folder."""
    name = name.removesuffix(".weight")
    if name in WHOLE:
        return f"{WHOLE[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleaved(weight: Floats, heads: int) -> Floats:
    """Reorders the rows of a query or key projection: llama.cpp rotates neighbours, Hugging Face halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Floats]]:
    """Yields the name in GGUF and the fp32 values of every tensor."""
    for file in sorted(folder.glob("*.safetensors")):
        stored = file.read_bytes()
        start = 8 + int.from_bytes(stored[:8], "little")
        for name, entry in json.loads(stored[8:start]).items():
            if name == "__metadata__":
                continue
            low, high = entry["data_offsets"]
            halves = np.frombuffer(stored[start + low : start + high], "<u2").reshape(entry["shape"])
            values = (halves.astype("<u4") << 16).view(np.float32)  # bf16
            if "q_proj" in name:
                values = interleaved(values, config["num_attention_heads"])
            if "k_proj" in name:
                values = interleaved(values, config["num_key_value_heads"])
            yield gguf_name(name), values


def write_gguf(folder: Path, path: Path) -> None:
    """Writes the model with bf16 matrices and without a tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    kind = gguf.GGMLQuantizationType.BF16
    for name, values in tensors(folder, config):
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
