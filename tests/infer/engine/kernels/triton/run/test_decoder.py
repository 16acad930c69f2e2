"""The operations of a rank: each has its rows of the table, and its part of sums over ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tk.parallel.mesh import Group
from tk.tests.infer.engine.kernels.triton.run.test_model_runner import decoding, prompts
from tk.tests.infer.engine.kernels.triton.runners import runners
from tk.tests.infer.sampling_row import SamplingRow
from tk.tests.model.architectures import ENTRIES

ROWS = [SamplingRow(row) for row in range(3)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("gpt2", marks=pytest.mark.matrix)])
def test_a_tensor_parallel_rank_has_the_logits_of_aten(
    name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is not there: each exchange gives what it would if that one had the same values."""

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        for part in parts:
            part.copy_(tensor)

    def all_reduce(tensor: torch.Tensor, group: object, async_op: bool) -> None:
        tensor.mul_(2)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ENTRIES[name].make(tmp_path)
    ours, theirs, graphs = runners(tmp_path, tp=Group(None, rank, 2), max_running=4)
    for backend in (ours, theirs):
        backend.step(prompts())
    np.testing.assert_allclose(ours.logits(decoding(ROWS)), theirs.logits(decoding(ROWS)), atol=1e-4)
    assert graphs.num_replays == 1
    assert ours.step(decoding(ROWS)).token_ids.shape == (3,), "every rank samples"


def test_fixed_sums_add_the_parts_of_ranks_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ATen's backend does; the other rank has the same values. Embeddings are one rank's, so their sum is exact."""
    reduced = []

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        for part in parts:
            part.copy_(tensor)

    def all_reduce(tensor: torch.Tensor, group: object, async_op: bool) -> None:
        reduced.append(tensor.mul_(2))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ENTRIES["qwen2_moe"].make(tmp_path)
    ours, theirs, _ = runners(tmp_path, tp=Group(None, 1, 2), max_running=1, is_fixed=True)
    for backend in (ours, theirs):
        backend.step(prompts())
    reduced.clear()
    found = ours.logits(decoding(ROWS))
    assert len(reduced) == 1, "the embedding's"
    np.testing.assert_allclose(found, theirs.logits(decoding(ROWS)), atol=1e-4)


def test_a_table_of_positions_has_no_place_for_padding(tmp_path: Path) -> None:
    """Padding has the position -1, which learned positions and the rotary table must not read."""
    for name in ("gpt2", "llama3"):
        (tmp_path / name).mkdir()
        ENTRIES[name].make(tmp_path / name)
        ours, theirs, _ = runners(tmp_path / name, max_running=4)
        for backend in (ours, theirs):
            backend.step(prompts())
        np.testing.assert_allclose(ours.logits(decoding(ROWS)), theirs.logits(decoding(ROWS)), atol=1e-4)
