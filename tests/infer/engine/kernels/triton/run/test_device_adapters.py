"""Steps whose rows have adapters, against ATen's: by graphs and without, while adapters come and go."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.triton.run.model_runner import TritonRunner
from tk.infer.engine.step.running_plan import NO_ADAPTER, RunningPlan
from tk.parallel.mesh import Group
from tk.tests.infer.adapters import OWN, make_adapter
from tk.tests.infer.engine.kernels.adapted import JOB, put
from tk.tests.infer.engine.kernels.aten.test_devices import exchange_with_itself
from tk.tests.infer.engine.kernels.triton.run.test_model_runner import BLOCK, decoding, prompts
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.sampling_row import SamplingRow
from tk.tests.model.architectures import ENTRIES

MATRIX = pytest.mark.matrix
ROWS = [SamplingRow(0), SamplingRow(1, temperature=0.8, seed=3), SamplingRow(2)]
SLOTS = {"adapter_slots": 2, "max_adapter_rank": 20, "adapts_experts": True, "max_running": 4}
BOTH, FIRST = (0, NO_ADAPTER, 1), (0, NO_ADAPTER, 0)


def make(folder: Path, name: str) -> tuple[Path, list[Path]]:
    """Returns the folders of a model and of two adapters, the second one with what was trained whole."""
    base = folder / "base"
    ENTRIES[name].make(base)
    ranks = [(3, {}), (20, OWN[name])]
    return base, [make_adapter(folder / str(r), base, seed=r, rank=r, rslora=True, **more) for r, more in ranks]


def serving(
    base: Path, adapters: list[Path], dtype: str = "fp32", weight_dtype: str = "auto", **options: Any
) -> tuple[TritonRunner, Backend, Any]:
    """Returns both backends with adapters in their slots, and the graphs."""
    ours, theirs, graphs = runners(base, dtype, "fp32", weight_dtype, **SLOTS | options)
    for backend in (ours, theirs):
        for slot, path in enumerate(adapters):
            put(backend, slot, path, base, job_of(dtype, options))
    return ours, theirs, graphs


def job_of(dtype: str, options: dict[str, Any]) -> Job:
    """Returns the job by which a rank reads adapters."""
    tp: Group = options.get("tp", Group(None, 0, 1))
    return replace(JOB, dtype=dtype, tp=tp.size, rank=tp.rank)


def with_adapters(plan: RunningPlan, slots: tuple[int, ...]) -> RunningPlan:
    """Returns a plan whose spans have adapters in some slots."""
    return replace(plan, adapters=np.array(slots, np.int32))


def decoded(backend: Backend, slots: tuple[int, ...], count: int = 3) -> tuple[Array, Array]:
    """Returns the tokens of some steps behind the prompts, and the logits of one more."""
    backend.step(with_adapters(prompts(), slots))
    plan, found = with_adapters(decoding(ROWS), slots), []
    for _ in range(count):
        output = backend.step(plan)
        assert output is not None
        assert output.finite.all()
        found.append(output.token_ids)
        plan.advance(output.token_ids, BLOCK)
    return np.stack(found), backend.logits(plan)


def check(ours: Backend, theirs: Backend, slots: tuple[int, ...], close: float = 1e-4) -> Array:
    """Compares tokens and logits of both backends; returns the logits."""
    (found, logits_RV), (expected, expected_RV) = (decoded(each, slots) for each in (ours, theirs))
    if close < 0.01:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(logits_RV, expected_RV, atol=close * np.abs(expected_RV).max())
    return logits_RV


@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    [
        ("gpt2", "fp32", "auto"),
        pytest.param("qwen3_moe", "bf16", "int4", marks=MATRIX),
        *(pytest.param(each, "fp32", "auto", marks=MATRIX) for each in OWN if each != "gpt2"),
        *(pytest.param(each, "bf16", "auto", marks=MATRIX) for each in ("llama3", "gpt2", "mixtral", "glm4_moe")),
    ],
)
def test_steps_with_adapters_have_the_tokens_of_aten(name: str, dtype: str, weight_dtype: str, tmp_path: Path) -> None:
    base, adapters = make(tmp_path, name)
    ours, theirs, graphs = serving(base, adapters, dtype, weight_dtype)
    assert graphs.num_graphs == 6, "two of each bucket"
    has_head = "lm_head" in OWN[name].get("modules_to_save", ())
    close = 1e-4 if dtype == "fp32" else 0.05
    adapted = check(ours, theirs, BOTH, close)
    assert graphs.num_replays == (0 if has_head else 4), "a head of an adapter's own is multiplied without a graph"
    others = check(ours, theirs, FIRST, close)
    assert graphs.num_replays == (4 if has_head else 8)
    assert not np.allclose(adapted[2], others[2], atol=1e-3)


def test_adapters_come_and_go_between_steps_of_the_same_graphs(tmp_path: Path) -> None:
    """The graphs are captured before there is an adapter, and a slot gets one of another rank, with other targets."""
    base, adapters = make(tmp_path, "qwen3")
    adapters[1] = make_adapter(tmp_path / "norms", base, seed=5, rank=9, modules_to_save=("q_norm", "norm"))
    narrow = make_adapter(tmp_path / "narrow", base, rank=2, targets=("o_proj", "v_proj"))
    ours, theirs, graphs = serving(base, [])
    plain = check(ours, theirs, (NO_ADAPTER,) * 3)
    for slot, path in ((1, adapters[1]), (0, narrow)):
        for backend in (ours, theirs):
            put(backend, slot, path, base, JOB)
        both = check(ours, theirs, (NO_ADAPTER, NO_ADAPTER, 1) if slot else BOTH)
        assert not np.allclose(both[2], plain[2], atol=1e-3)
        np.testing.assert_array_equal(both[1], plain[1], "a row without an adapter")
    ours.drop_adapter(0)
    np.testing.assert_allclose(decoded(ours, FIRST)[1][0], plain[0], atol=1e-4 * np.abs(plain).max())
    assert graphs.num_graphs == 6
    assert not ours._adapters.held.keys() - {1}  # type: ignore[union-attr]


@MATRIX
def test_steps_without_adapters_take_the_graphs_of_an_engine_without_slots(tmp_path: Path) -> None:
    base, adapters = make(tmp_path, "llama3")
    ours, _, graphs = serving(base, adapters, "bf16")
    plain, _, _ = runners(base, "bf16", max_running=4)
    found, expected = (decoded(each, ()) for each in (ours, plain))
    assert graphs.num_replays == 4
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("llama3", 1), *(pytest.param(each, r, marks=MATRIX) for each in ("gpt2", "mixtral") for r in (0, 1))],
)
def test_a_tensor_parallel_rank_with_adapters_has_the_logits_of_aten(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_with_itself(monkeypatch)
    base, adapters = make(tmp_path, name)
    ours, theirs, _ = serving(base, adapters, tp=Group(None, rank, 2))
    for backend in (ours, theirs):
        backend.step(with_adapters(prompts(), BOTH))
    found, expected = (each.logits(with_adapters(decoding(ROWS), BOTH)) for each in (ours, theirs))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
