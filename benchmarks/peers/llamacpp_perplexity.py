"""llama.cpp's loss of tokens, for bench_quality.py, in its own environment: FOLDER KIND THREADS.

FOLDER.gguf is written from the folder's bf16 weights if it is missing, and FOLDER.KIND.gguf from that by llama.cpp's
own quantizer with its defaults. Keys and values are fp16. Reads a JSON list of windows, each a list of token ids, from
stdin, and prints the list of their mean losses, in nats per token; a window's first token has none.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from tk.benchmarks.peers.llamacpp_gguf import write_gguf

llama_cpp: Any = import_module("llama_cpp")

KINDS: Final = MappingProxyType({"Q8_0": 7, "Q4_0": 2, "Q4_1": 3})  # llama.cpp's numbers of file types
ROWS: Final = 256  # logits that are read at a time


def quantized(folder: Path, kind: str, threads: int) -> Path:
    """Returns the GGUF file of a kind, which is written if it is missing.

    Raises:
        RuntimeError: llama.cpp cannot quantize the model.
    """
    base, path = (folder.with_name(f"{folder.name}{suffix}.gguf") for suffix in ("", f".{kind}"))
    if not base.exists():
        partial = base.with_suffix(".part")
        write_gguf(folder, partial)
        partial.rename(base)
    if not path.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = KINDS[kind], threads
        partial = path.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(base).encode(), str(partial).encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp cannot quantize {base} to {kind}")
        partial.rename(path)
    return path


def sum_of_losses(context: Any, num_vocab: int, window: Sequence[int]) -> float:
    """Returns the sum of the losses of a window's tokens but the first.

    Raises:
        RuntimeError: llama.cpp cannot compute it.
    """
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(len(window), 0, 1)
    batch.n_tokens = len(window)
    for i, token in enumerate(window):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    failed = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_batch_free(batch)
    if failed:
        raise RuntimeError(f"llama_decode returned {failed}")
    found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (len(window), num_vocab))
    total, following = 0.0, np.array(window[1:])
    for start in range(0, len(following), ROWS):
        targets = following[start : start + ROWS]
        logits = found[start : start + len(targets)].astype(np.float64)
        highest = logits.max(1)
        sums = np.exp(logits - highest[:, None]).sum(1)
        total += float((highest + np.log(sums) - logits[np.arange(len(targets)), targets]).sum())
    return total


def main() -> None:
    folder, kind, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # a name of its own: C keeps no reference to it
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    path, windows = quantized(folder, kind, threads), json.load(sys.stdin)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = max(map(len, windows))
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context for {path}")
    print(json.dumps([sum_of_losses(context, num_vocab, one) / (len(one) - 1) for one in windows]))


if __name__ == "__main__":
    main()
