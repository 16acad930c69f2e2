"""Decoding on one GPU: tk, transformers and vLLM with the same model, prompts and lengths of answers."""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from tk.benchmarks.gpu_model import CUDA, figure, stored_model, transformers_model
from tk.core.errors import TkError
from tk.infer.engine.options import KERNELS

PROMPT, ANSWER = 128, 128  # tokens
BATCHES: Final = (1, 32)
WEIGHT_BYTES: Final = 2 * 1_002_438_656  # in bf16, but the embedding's, of which a step reads a row


def _prompts(batch: int) -> list[list[int]]:
    return [[1 + (row * 7 + at) % 1000 for at in range(PROMPT)] for row in range(batch)]


def _report(name: str, batch: int, duration: float) -> None:
    read = WEIGHT_BYTES * ANSWER / duration / 1e12  # a step reads all weights once; the rest is KV and prompts
    rate = f"{batch * ANSWER / duration:,.0f} tokens/s, {read:.2f} TB/s of weights"
    figure(f"decoding with {name}, batch {batch}, prompts and answers of {PROMPT} tokens", rate)


def _timed(name: str, batch: int, generate: Callable[[list[list[int]]], object]) -> None:
    """Reports the second of two calls."""
    prompts = _prompts(batch)
    generate(prompts)
    start = time.perf_counter()
    generate(prompts)
    _report(name, batch, time.perf_counter() - start)


def decode_tk() -> None:
    """Decoding by each of tk's backends that computes on the GPU."""
    from tk.infer import LLM, SamplingParams

    folder = stored_model()
    sampling = SamplingParams(temperature=0, max_new_tokens=ANSWER, ignore_eos=True)
    for kernels in (each for each in KERNELS if each not in ("auto", "native")):
        try:
            with LLM(folder, kernels=kernels, kv_memory=8 << 30) as llm:
                for batch in BATCHES:
                    _timed(f"tk, --kernels {kernels}", batch, lambda prompts: llm.generate(prompts, sampling))
        except TkError as error:
            print(f"tk, --kernels {kernels}: {error}")


def decode_transformers() -> None:
    """Decoding by generate of transformers."""
    model = transformers_model().bfloat16().eval()
    lengths = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER}

    def generate(prompts: list[list[int]]) -> None:
        given = torch.tensor(prompts, device=CUDA)
        model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, pad_token_id=0, **lengths)
        torch.cuda.synchronize()

    for batch in BATCHES:
        _timed("generate of transformers", batch, generate)


def decode_vllm() -> None:
    """Decoding by vLLM, where it is installed."""
    if find_spec("vllm") is None:
        print("vLLM is not installed")
        return
    vllm = import_module("vllm")
    llm = vllm.LLM(str(stored_model()), skip_tokenizer_init=True, max_model_len=1024)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    for batch in BATCHES:
        _timed(
            "vLLM",
            batch,
            lambda prompts: llm.generate([{"prompt_token_ids": each} for each in prompts], sampling, use_tqdm=False),
        )
