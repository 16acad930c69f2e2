"""llama.cpp's prefill and decode speed on a Llama of a Hugging Face folder: FOLDER GGUF BATCH PROMPT NEW THREADS.

It runs in llama.cpp's environment. GGUF is written from the folder's bf16 weights if it is missing.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

gguf: Any = import_module("gguf")
llama_cpp: Any = import_module("llama_cpp")
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


def decode(
    context: Any, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: int
) -> None:
    """Runs one batch; the last `wanted` tokens give logits."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), int(position), 1
        batch.seq_id[i][0], batch.logits[i] = int(sequence), int(i >= len(tokens) - wanted)
    failed = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if failed:
        raise RuntimeError(f"llama_decode returned {failed}")


def main() -> None:
    folder, path = Path(sys.argv[1]), Path(sys.argv[2])
    batch, prompt, new, threads = map(int, sys.argv[3:])
    if not path.exists():
        aside = path.with_suffix(".part")
        write_gguf(folder, aside)
        aside.rename(path)
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # a name of its own: C keeps no reference to it
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_seq_max = (prompt + new) * batch + 256 * batch, batch
    options.n_batch, options.n_ubatch = 2048, 512
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options) if model else None
    if not context:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    memory, random = llama_cpp.llama_get_memory(context), np.random.default_rng(0)

    def prefill() -> None:
        for sequence in range(batch):
            decode(context, random.integers(3, 30000, prompt).tolist(), range(prompt), [sequence] * prompt, 1)

    prefill()  # warm-up
    llama_cpp.llama_memory_clear(memory, True)
    start = time.perf_counter()
    prefill()
    middle = time.perf_counter()
    for i in range(new):
        decode(context, random.integers(3, 30000, batch).tolist(), [prompt + i] * batch, range(batch), batch)
    end = time.perf_counter()
    print(json.dumps({"prefill": batch * prompt / (middle - start), "decode": batch * new / (end - middle)}))


if __name__ == "__main__":
    main()
