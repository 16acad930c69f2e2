"""The planned size of buffers, against the allocations of a rank of native kernels."""

from dataclasses import replace
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.shared_read import ALONE
from tk.infer.engine.kernels.backend import CacheShape
from tk.infer.engine.kernels.native.binding.structures import NativeModel
from tk.infer.engine.kernels.native.state import State
from tk.infer.engine.planning.buffers import buffer_bytes
from tk.infer.engine.program.lower import Program, lower
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.model.stored_config import stored_config
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.tiny_llama import TINY_LLAMA


def allocated(program: Program, max_tokens: int, threads: int, weight_dtype: str) -> int:
    """Returns the bytes of a rank's buffers, without the cache."""
    state = State(program, CacheShape(1, 16, "fp32"), max_tokens, ALONE, weight_dtype)
    state.fill(NativeModel(head_dim=program.head_dim, hidden_size=program.hidden_size), threads)
    return sum(values.nbytes for values in state._kept) - state.kv_bytes


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(("max_tokens", "threads"), [(1, 1), (512, 3)])
@pytest.mark.parametrize("weight_dtype", ["auto", "int4"])
def test_the_plan_covers_all_allocations(
    tmp_path: Path, name: str, max_tokens: int, threads: int, weight_dtype: str
) -> None:
    ENTRIES[name].make(tmp_path)
    program = lower(decoder_spec(stored_config(Checkpoint.open(tmp_path))))
    used = allocated(program, max_tokens, threads, weight_dtype)
    planned = buffer_bytes(program, max_tokens, threads, weight_dtype)
    assert 0.4 * planned < used <= planned


def test_the_logits_of_a_large_vocabulary_count() -> None:
    config = ModelConfig(**TINY_LLAMA | {"vocab_size": 100_000}, max_position_embeddings=640)
    program = lower(decoder_spec(config))
    logits = 4 * 64 * 100_000
    assert logits < buffer_bytes(program, 512, 1) < 1.2 * logits
    assert buffer_bytes(program, 512, 2) - buffer_bytes(program, 512, 1) > 20 * 100_000, "the sampler's scratch"
    assert buffer_bytes(replace(program, tp=2), 512, 1) > 3.5 * logits, "of both ranks, and joined on the first"
