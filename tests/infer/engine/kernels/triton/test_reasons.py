"""Why Triton's kernels cannot compute, and who computes then."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.core.cuda import Gpu
from tk.core.errors import ConfigError
from tk.infer.engine.kernels.triton import reasons
from tk.infer.engine.kernels.triton.reasons import why_not_on
from tk.infer.engine.kernels.triton.rows.interpreted import INTERPRETER
from tk.infer.engine.options import KERNELS, EngineOptions
from tk.infer.engine.planning import memory_plan, placement
from tk.infer.engine.planning.memory_plan import plan_memory
from tk.infer.engine.planning.placement import on_gpus
from tk.model.stored_config import stored_config

H100, OLD = Gpu("NVIDIA H100", (9, 0)), Gpu("Tesla T4", (7, 5))


def machine(monkeypatch: pytest.MonkeyPatch, version: str, *gpus: Gpu) -> None:
    """Pretends a machine with some GPUs and that release of Triton."""
    monkeypatch.delenv(INTERPRETER, raising=False)
    monkeypatch.setattr(reasons, "triton_version", lambda: version)
    for module in (reasons, placement):
        monkeypatch.setattr(module, "count_gpus", lambda: len(gpus))
    monkeypatch.setattr(reasons, "read_gpus", lambda: gpus)


@pytest.mark.parametrize(
    ("version", "gpus", "reason"),
    [
        ("3.8.0", [H100], ""),
        ("unknown", [H100], ""),
        ("", [H100], "Triton is not installed"),
        ("3.5.1", [H100], "Triton 3.5.1 is older than 3.6"),
        ("3.8.0", [], "has 0 GPUs for 1 ranks"),
        ("3.8.0", [OLD], "Tesla T4 has compute capability 7.5, less than 8.0"),
    ],
)
def test_auto_takes_gpus_only_where_nothing_is_against_it(
    version: str, gpus: list[Gpu], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, version, *gpus)
    found = why_not_on(1)
    assert (found == "") if not reason else (reason in found)
    taken = {kernels for kernels in KERNELS if on_gpus(EngineOptions(Path("m"), kernels=kernels))}
    expected = {"aten", "triton"} if gpus else set()
    assert taken == (expected if reason else expected | {"auto"})


def test_every_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "3.8.0", H100, OLD)
    assert not why_not_on(1)
    assert "Tesla T4" in why_not_on(2)
    assert "2 GPUs for 3 ranks" in why_not_on(3)


def test_triton_needs_a_gpu_or_the_interpreter(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "3.8.0")
    with pytest.raises(ConfigError, match="this machine has 0 GPUs for 1 ranks"):
        plan(EngineOptions(tiny, kernels="triton"))
    monkeypatch.setenv(INTERPRETER, "1")
    assert plan(EngineOptions(tiny, kernels="triton", kv_blocks=4)).num_blocks == 4


def test_gpus_give_nine_tenths_to_the_cache(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside weights, graphs and CUDA itself, for which 1 GiB is left."""
    machine(monkeypatch, "3.8.0", H100)
    monkeypatch.setattr(memory_plan, "free_gpu_memory", lambda count: (3 << 30,) * count)
    found = plan(EngineOptions(tiny, kv_dtype="fp32", max_running=10**4, max_batched_tokens=10**4))
    left = (3 << 30) - found.weight_bytes - found.buffer_bytes
    assert found.buffer_bytes > 1 << 30
    assert 0.89 * left < found.kv_bytes <= 0.9 * left
    few = plan(EngineOptions(tiny, max_running=4))
    assert few.num_blocks == 4 * 20, "no more than its sequences can fill"


@pytest.fixture
def tiny(model_folder: "Callable[[str], Path]") -> Path:
    """A model whose sequences have up to 640 tokens."""
    return model_folder("grouped")


def plan(options: EngineOptions) -> memory_plan.MemoryPlan:
    config = stored_config(Checkpoint.open(options.checkpoint))
    return plan_memory(config, options, "fp32", "fp32")
