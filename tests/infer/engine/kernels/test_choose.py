"""The choice of a backend: native kernels where they can run, torch's operators elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tk.core import cuda
from tk.core.errors import ConfigError
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.options import KERNELS, EngineOptions
from tk.infer.engine.planning import placement
from tk.infer.engine.planning.placement import on_gpus
from tk.infer.engine.worker.worker import load


@pytest.fixture
def job(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job on a machine without a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return Job(str(model_folder("grouped")), "auto", "fp32", "fp32", 4, 0, block_size=16, max_batched_tokens=64)


def test_auto_takes_native_kernels_where_they_can_run(job: Job) -> None:
    assert load(job).kernels.startswith("native " if instruction_sets() else "aten")
    assert load(replace(job, block_size=8)).kernels == "aten", "native kernels need blocks of 16 tokens"


def test_auto_takes_native_kernels_beside_gpus_without_triton(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's kernels are slower there than native ones, so they compute on GPUs only if they are asked for."""
    monkeypatch.setattr(placement, "count_gpus", lambda: 8)
    found = {kernels: on_gpus(EngineOptions(Path("m"), tp=8, kernels=kernels)) for kernels in KERNELS}
    assert found == {"auto": False, "native": False, "aten": True, "triton": True}
    assert not on_gpus(EngineOptions(Path("m"), tp=9, kernels="aten"))
    monkeypatch.setattr(cuda, "count_gpus", lambda: 8)
    assert load(job).kernels.startswith("native " if instruction_sets() else "aten")


def test_gpus_that_torch_cannot_use_are_an_error(job: Job) -> None:
    """The plan was made for GPUs of the driver; torch of the tests has none."""
    with pytest.raises(ConfigError, match=r"a GPU for each of 1 ranks, but torch .* cannot use them"):
        load(replace(job, kernels="aten", on_gpus=True))


def test_a_backend_that_is_asked_for_is_taken_or_refused(job: Job, model_folder: Callable[[str], Path]) -> None:
    assert load(replace(job, kernels="aten")).kernels == "aten"
    with pytest.raises(ConfigError, match="head_dim = 520 is more than 512 with int8 keys"):
        load(replace(job, checkpoint=str(model_folder("long heads")), kernels="native", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="native kernels cannot run this model: block_size = 8"):
        load(replace(job, kernels="native", block_size=8))
