"""Copies between a GPU and the host through two stages of pinned memory: the next part is filled while one is read."""

import pytest
import torch

from tk.tests.pretend_gpu import GPU, pretend_gpu
from tk.train.zero.states import pinned_copies
from tk.train.zero.states.pinned_copies import PinnedCopies

PART = 10  # elements of a stage


@pytest.fixture(autouse=True)
def _small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_copies, "STAGE_BYTES", 4 * PART)


def test_a_copy_to_the_device_waits_for_the_stage_before_the_last() -> None:
    source = torch.arange(5.0 * PART - 3)
    expected = source.clone()
    with pretend_gpu(pageable=()) as gpu:
        there = torch.zeros(len(source), device=GPU)
        copies = PinnedCopies()
        copies.copy(there, source)
        assert len(gpu.waits) == 3, "five parts in two stages; two are still being read"
        source.zero_()  # a file's memory is used again
        copies.copy(there[:PART], torch.full((PART,), 7.0))
        assert len(gpu.waits) == 4
        found = copies.moved(there, torch.device("cpu"))
    assert torch.equal(found, torch.cat((torch.full((PART,), 7.0), expected[PART:])))


def test_values_come_to_the_host_in_parts() -> None:
    values = torch.arange(3.0 * PART + 1)
    with pretend_gpu(pageable=()):
        there = PinnedCopies().moved(values, GPU)
        parts = [(begin, part.tolist()) for begin, part in PinnedCopies().parts_on_host(there)]
    assert [begin for begin, _ in parts] == [0, 10, 20, 30]
    assert [value for _, part in parts for value in part] == values.tolist()


def test_on_one_device_nothing_is_pinned() -> None:
    target, source = torch.zeros(25), torch.arange(25.0)
    PinnedCopies().copy(target, source)
    assert torch.equal(target, source)
