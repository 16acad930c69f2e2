"""The graphs of buckets: a recorder that repeats operations alone finds what the function must not do."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.triton.run.graphs import CudaGraphs, RepeatedRuns
from tk.infer.engine.step.running_plan import RunningPlan
from tk.tests.infer.engine.kernels.triton.pretended_graphs import PretendedGraphs
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import ENTRIES


def single(rows: int) -> RunningPlan:
    """Returns the first step of some sequences of one token."""
    blocks = np.arange(1, 1 + rows, dtype=np.int32)
    return RunningPlan(
        tokens=blocks + 3,
        positions=np.zeros(rows, np.int32),
        slots=blocks * 16,
        span_length=np.ones(rows, np.int32),
        block_tables=blocks[:, None],
        rows=pack([SamplingRow(row) for row in range(rows)]),
    )


def test_every_number_of_rows_has_the_logits_of_aten(tmp_path: Path) -> None:
    """Beside fewer rows than its bucket has, padding changes nothing, and its rows store nothing."""
    ENTRIES["qwen3"].make(tmp_path)
    ours, theirs, graphs = runners(tmp_path, num_blocks=12, max_running=10)
    assert graphs.num_graphs == 5, "1, 2, 4, 8 and 16"
    for rows in (10, 1, 3, 2, 7):
        np.testing.assert_allclose(ours.logits(single(rows)), theirs.logits(single(rows)), atol=1e-4)
    assert graphs.num_replays == 5
    ours.logits(single(11))
    assert graphs.num_replays == 6, "the last bucket has room for 16"


def test_a_graph_that_reads_numbers_is_refused() -> None:
    with pytest.raises(AssertionError, match="waits for the device"):
        PretendedGraphs().record(lambda: torch.ones(2) * torch.ones(1).item())


def test_all_graphs_run_first_and_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps memory for each stream on which it has multiplied."""
    cuda, present = MagicMock(), list[object]()
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.stream.side_effect = lambda stream: nullcontext(present.append(stream))
    recorder = CudaGraphs()
    for _ in range(3):
        replay, output = recorder.record(lambda: torch.ones(2))
        assert output.tolist() == [1.0, 1.0]
        assert replay is cuda.CUDAGraph.return_value.replay
    (stream,) = {*present, *(call.kwargs["stream"] for call in cuda.graph.call_args_list)}
    assert cuda.Stream.call_count == 1
    assert stream is cuda.Stream.return_value


def test_a_graph_does_not_see_what_changes_on_the_host() -> None:
    numbers, values = [1.0], torch.ones(2)
    replay, output = PretendedGraphs().record(lambda: values * 2 + numbers[0])
    again, same = RepeatedRuns().record(lambda: values * 2 + numbers[0])
    numbers[0], values[:] = 5.0, 3.0
    replay()
    again()
    assert (output.tolist(), same.tolist()) == ([7.0, 7.0], [11.0, 11.0])
