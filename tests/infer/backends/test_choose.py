"""The choice of a backend: native kernels where they can run, torch's operators elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer.backends.native.binding.library import instruction_sets
from tk.infer.planning.job import Job
from tk.infer.workers.worker import load


@pytest.fixture
def job(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Job(str(model_folder("grouped")), "auto", "fp32", "fp32", 4, 0, block_size=16, max_batched_tokens=64)


def test_auto_takes_native_kernels_where_they_can_run(job: Job) -> None:
    assert load(job).kernels.startswith("native " if instruction_sets() else "aten")
    assert load(replace(job, block_size=8)).kernels == "aten", "native kernels need blocks of 16 tokens"


def test_a_backend_that_is_asked_for_is_taken_or_refused(job: Job, model_folder: Callable[[str], Path]) -> None:
    assert load(replace(job, kernels="aten")).kernels == "aten"
    with pytest.raises(ConfigError, match="head_dim = 520 is more than 512 with int8 keys"):
        load(replace(job, checkpoint=str(model_folder("long heads")), kernels="native", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="native kernels cannot run this model: block_size = 8"):
        load(replace(job, kernels="native", block_size=8))
