"""Steps of the backend against ATen's: the same tokens and logits, by graphs and without."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.core.casts import Array
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.triton.run import decode_graphs, model_runner
from tk.infer.engine.kernels.triton.step.device_tables import send_columns
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampling_rows import WITH_CANDIDATES
from tk.tests.infer.engine.kernels.aten.test_devices import steps
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES

BLOCK = 16
LENGTHS = np.array([14, 5, 3], np.int32)
TABLES = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
TWINS = np.stack([np.arange(1, 7), np.arange(1, 7)], axis=1).astype(np.int32)
# Greedy, a filtered sample and one that only the host can choose: the first sequence enters a block meanwhile.
ROWS = [
    SamplingRow(0),
    SamplingRow(1, temperature=0.8, seed=2**63 + 5, top_k=40, top_p=0.9),
    SamplingRow(2, temperature=0.9, bias={5: -1.0}),
]
CHOICE = {("llama3", "fp32", "fp32", "auto"), ("qwen3_moe", "bf16", "k8v4", "int4"), ("gpt2", "fp16", "int8", "int8")}


def prompts() -> RunningPlan:
    """Returns the step of three prompts, which has no rows."""
    positions = [np.arange(length, dtype=np.int32) for length in LENGTHS]
    return RunningPlan(
        tokens=np.random.default_rng(0).integers(0, 101, int(LENGTHS.sum()), dtype=np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate([table[0] * BLOCK + at for table, at in zip(TABLES, positions, strict=True)]),
        span_length=LENGTHS,
        block_tables=TABLES,
        rows=pack([]),
        twins=TWINS,
    )


def decoding(rows: list[SamplingRow]) -> RunningPlan:
    """Returns the step behind the prompts; steps that follow have its generation."""
    return RunningPlan(
        tokens=np.array([7, 8, 9], np.int32),
        positions=LENGTHS.copy(),
        slots=TABLES[:, 0] * BLOCK + LENGTHS,
        span_length=np.ones(3, np.int32),
        block_tables=TABLES,
        rows=pack(rows),
        generation=1,
    )


def decoded(backend: Backend, rows: list[SamplingRow], count: int = 5) -> tuple[Array, Array]:
    """Returns the tokens of some steps behind the prompts, and the logits of one more."""
    backend.step(prompts())
    plan, found = decoding(rows), []
    for _ in range(count):
        output = backend.step(plan)
        assert output is not None
        assert output.finite.all()
        found.append(output.token_ids)
        plan.advance(output.token_ids, BLOCK)
    return np.array(found), backend.logits(plan)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "gpt2" else pytest.mark.matrix) for each in ENTRIES]
)
def test_mixed_steps_of_every_architecture_have_the_tokens_of_aten(name: str, tmp_path: Path) -> None:
    ENTRIES[name].make(tmp_path)
    ours, theirs, graphs = runners(tmp_path, max_running=1)
    for plan in steps():
        found, expected = ours.step(plan), theirs.step(plan)
        assert expected is not None
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)
    assert not graphs.num_replays, "no step has single tokens alone"


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype", "weight_dtype"),
    [
        pytest.param(*each, marks=() if each in CHOICE else pytest.mark.matrix)
        for each in (
            (name, dtype, kv_dtype, weight_dtype)
            for name in ENTRIES
            for dtype in ("fp32", "bf16", "fp16")
            for kv_dtype in KV_DTYPES
            for weight_dtype in ("auto", "int8", "int4")
            if sum((dtype != "fp32", kv_dtype != "fp32", weight_dtype != "auto")) <= 1
            or (name, dtype, kv_dtype, weight_dtype) in CHOICE
        )
    ],
)
def test_graphs_decode_the_tokens_of_aten(
    name: str, dtype: str, kv_dtype: str, weight_dtype: str, tmp_path: Path
) -> None:
    ENTRIES[name].make(tmp_path)
    ours, theirs, graphs = runners(tmp_path, dtype, kv_dtype, weight_dtype, max_running=4)
    (found, logits_RV), (expected, expected_RV) = decoded(ours, ROWS), decoded(theirs, ROWS)
    assert (graphs.num_graphs, graphs.num_replays) == (3, 6)
    if dtype == "fp32":
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(logits_RV, expected_RV, atol=1e-3 if dtype == "fp32" else 0.3)


def test_a_step_that_follows_needs_nothing_from_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ENTRIES["llama3"].make(tmp_path)
    ours, _, _ = runners(tmp_path, max_running=4)
    sent = []

    def observed(columns: Any, device: torch.device) -> Any:
        sent.append(set(columns))
        return send_columns(columns, device)

    for module in (model_runner, decode_graphs):
        monkeypatch.setattr(module, "send_columns", observed)
    plain = [SamplingRow(0), SamplingRow(1, temperature=0.8, seed=3, min_p=0.1), SamplingRow(2)]
    decoded(ours, plain)
    assert sent[2:] == [{"columns", "tables"}], "the first step, and none behind it"
    sent.clear()
    ours, _, _ = runners(tmp_path, max_running=4)
    decoded(ours, ROWS)
    assert sent[2:] == [{"columns", "tables"}, *[{"columns"}] * 5], "the host chooses one of the tokens"


def test_candidates_are_sampled_again(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    ours, theirs, _ = runners(tmp_path, max_running=4)
    rows = [SamplingRow(0), SamplingRow(1, temperature=0.8, mask=WITH_CANDIDATES), SamplingRow(2, mask=WITH_CANDIDATES)]
    masks = np.full((1, 4), 0x0F0F0F0F, np.uint32)
    for backend in (ours, theirs):
        backend.step(prompts())
    found, expected = ours.step(decoding(rows)), theirs.step(decoding(rows))
    assert expected is not None
    np.testing.assert_array_equal(found.candidates, expected.candidates)
    again = [each.sample_again(masks, np.array([2], np.int32)) for each in (ours, theirs)]
    assert again[0].token_ids[2] == again[1].token_ids[2]


def test_rows_with_masks_wait_for_them_once(tmp_path: Path) -> None:
    ENTRIES["llama3"].make(tmp_path)
    ours, theirs, _ = runners(tmp_path, max_running=4)
    asked = []

    def masks() -> Array:
        asked.append(True)
        return np.full((1, 4), 0x0F0F0F0F, np.uint32)

    rows = [SamplingRow(0), SamplingRow(1, mask=0), SamplingRow(2, num_top=3)]
    for backend in (ours, theirs):
        backend.step(prompts())
    found, expected = ours.step(decoding(rows), masks), theirs.step(decoding(rows), masks)
    assert expected is not None
    assert len(asked) == 2
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.top_ids[2].tolist() == expected.top_ids[2].tolist()
