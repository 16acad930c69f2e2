"""llama.cpp for bench_serving.py, by bare `llama_decode` calls, in its own environment: FOLDER THREADS [Q8_0|Q4_0].

FOLDER.gguf is written from the folder's bf16 weights if it is missing, and FOLDER.Q8_0.gguf from that by llama.cpp's
own quantizer; keys and values are fp16.
"""

import ctypes
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from tk.benchmarks.peers.llamacpp_gguf import write_gguf
from tk.benchmarks.peers.serve_loop import Run, serve
from tk.benchmarks.peers.token_clock import Speeds, SpeedWorkload, speeds

llama_cpp: Any = import_module("llama_cpp")

MOST_TOKENS: Final = 2048  # of a call
Token = tuple[int, int, int, bool]  # id, position, sequence, whether its logits are computed


class LoadedModel:
    """A model with the context of the last workload.

    Args:
        path: a GGUF file.
        threads: the number of threads.

    Raises:
        RuntimeError: llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._random = np.random.default_rng()
        self._workload: SpeedWorkload | None = None
        self._context: Any = None

    def run(self, workload: SpeedWorkload) -> Speeds:
        """Runs a workload; sequences of a batch are computed together, prompts in calls of up to MOST_TOKENS."""
        if workload != self._workload:
            self._open(workload)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        batch, prompt = workload.batch, workload.prompt_tokens
        tokens = self._tokens(batch * prompt)
        prompts: list[Token] = [
            (tokens[i], i % prompt, i // prompt, i % prompt == prompt - 1) for i in range(len(tokens))
        ]
        start = time.perf_counter()
        for first in range(0, len(prompts), MOST_TOKENS):
            self._decode(prompts[first : first + MOST_TOKENS])
        times = [time.perf_counter()]
        for position in range(prompt, prompt + workload.new_tokens - 1):
            self._decode([(token, position, i, True) for i, token in enumerate(self._tokens(batch))])
            times.append(time.perf_counter())
        return speeds(workload, start, [times] * batch)

    def _open(self, workload: SpeedWorkload) -> None:
        """Makes a context for a workload, and computes a little to warm it up."""
        if self._context:
            llama_cpp.llama_free(self._context)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = (workload.prompt_tokens + workload.new_tokens + 255) // 256 * 256 * workload.batch
        options.n_seq_max = workload.batch
        options.n_batch, options.n_ubatch = MOST_TOKENS, 512
        options.n_threads = options.n_threads_batch = self._threads
        self._context, self._workload = llama_cpp.llama_init_from_model(self._model, options), workload
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context for {workload}")
        for _ in range(2):
            self._decode([(token, i, 0, True) for i, token in enumerate(self._tokens(64))])
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(3, self._vocab, count)]

    def _decode(self, tokens: Sequence[Token]) -> None:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, int(wanted)
        failed = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")


def converted(folder: Path, quantization: str, threads: int) -> Path:
    """Returns the GGUF file of a model, which is written if it is missing.

    Args:
        folder: a Hugging Face folder in bf16.
        quantization: the format of its weights, Q8_0 for example; "" = bf16.
        threads: the threads that quantize.

    Raises:
        RuntimeError: llama.cpp cannot quantize it.
    """
    path = folder.with_name(".".join(filter(None, (folder.name, quantization, "gguf"))))
    if path.exists():
        return path
    partial = path.with_suffix(".part")
    if not quantization:
        write_gguf(folder, partial)
    else:
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantization}"), threads
        source = converted(folder, "", threads)
        if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp cannot quantize {source} to {quantization}")
    return partial.rename(path)


def main() -> None:
    folder, threads, quantization = Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:])
    silent = llama_cpp.llama_log_callback(lambda *_: None)  # a name of its own: C keeps no reference to it
    llama_cpp.llama_log_set(silent, None)

    def load() -> Run:
        return LoadedModel(converted(folder, quantization, threads), threads).run

    serve(load)


if __name__ == "__main__":
    main()
