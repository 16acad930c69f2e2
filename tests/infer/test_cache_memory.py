"""The private memory of a worker as its cache fills: what tokens and sequences of each KV dtype take, and samples."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.native.binding.library import instruction_sets

PR_SET_THP_DISABLE = 41  # <linux/prctl.h>
KV_HEADS, HEAD_DIM = 32, 64
NUM_SEQUENCES = 4
WHOLE = 1024  # tokens of a sequence
VOCAB = 256
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    """No large pages in workers, which inherit this: a cache would grow by 2 MiB at a time, too coarse to measure."""
    disable = partial(ctypes.CDLL(None, use_errno=True).prctl, PR_SET_THP_DISABLE)
    assert disable(1, 0, 0, 0) == 0
    yield
    assert disable(0, 0, 0, 0) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer whose cache takes far more memory than all else: 8 KiB per token in bf16."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2 * WHOLE,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def private(process: int) -> int:
    """Returns the bytes of memory that a process has written and shares with no other (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))


def growth(llm: LLM, work: Callable[[], object]) -> int:
    """Returns the bytes by which the worker's private memory grows through work."""
    [worker] = llm.engine.worker_process_ids
    before = private(worker)
    work()
    return private(worker) - before


def fill(llm: LLM, count: int, length: int, seed: int, samples: int = 1) -> None:
    """Computes prompts of `length` tokens, one after the other; their blocks stay cached."""
    params = SamplingParams(n=samples, max_new_tokens=1, ignore_eos=True)
    for prompt in np.random.default_rng(seed).integers(0, VOCAB, (count, length)).tolist():
        llm.generate(prompt, params)


@pytest.fixture(scope="module")
def taken(model: Path) -> Callable[[str], tuple[float, float]]:
    """The bytes of a token: after the first 1,024 of a sequence, and in a sequence of 1,024; means over 4 sequences."""
    found: dict[str, tuple[float, float]] = {}

    def measure(kv_dtype: str) -> tuple[float, float]:
        if kv_dtype not in found:
            options: dict[str, Any] = {"kernels": "native", "threads": 1, "max_batched_tokens": 512, "kv_blocks": 512}
            with LLM(model, kv_dtype=kv_dtype, **options) as llm:
                fill(llm, 1, 2 * WHOLE - 1, 0)  # touches the buffers
                whole, double = (
                    growth(llm, partial(fill, llm, NUM_SEQUENCES, length - 1, length)) / NUM_SEQUENCES
                    for length in (WHOLE, 2 * WHOLE)
                )
                found[kv_dtype] = (double - whole) / WHOLE, whole / WHOLE
        return found[kv_dtype]

    return measure


@pytest.mark.matrix
@pytest.mark.parametrize(("kv_dtype", "of_tokens", "of_a_sequence"), [("int8", 0.54, 0.54), ("int4", 0.32, 0.36)])
def test_memory_grows_by_the_promised_part_of_bf16(
    taken: Callable[[str], tuple[float, float]], kv_dtype: str, of_tokens: float, of_a_sequence: float
) -> None:
    tokens, sequence = (own / wide for own, wide in zip(taken(kv_dtype), taken("bf16"), strict=True))
    assert 0.9 * of_tokens < tokens <= of_tokens
    assert 0.9 * of_tokens < sequence <= of_a_sequence


@pytest.mark.matrix
def test_sixteen_samples_take_one_prompt_until_they_store_tokens_of_their_own(model: Path) -> None:
    length, samples = 1000, 16  # with one new token each, which is never stored
    options: dict[str, Any] = {"kernels": "native", "threads": 1, "max_batched_tokens": 512, "kv_blocks": 128}
    with LLM(model, **options) as llm:
        fill(llm, 1, length, 0, samples)  # touches the buffers
        one, many = (growth(llm, partial(fill, llm, 1, length, seed, seed)) for seed in (1, samples))
    assert one > length * 2 * KV_HEADS * HEAD_DIM * 2
    assert many == pytest.approx(one, rel=0.01)
