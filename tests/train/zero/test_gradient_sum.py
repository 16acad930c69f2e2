"""Sums of gradients in a store have the bits of sums in memory, through every order of calls of a step."""

from pathlib import Path

import pytest
import torch

from tk.train.zero.gradient_sum import SLOT, GradientSum, ResidentSum, StoredSum
from tk.train.zero.states.disk_states import DiskStates
from tk.train.zero.states.memory_states import MemoryStates
from tk.train.zero.states.pinned_copies import PinnedCopies

SIZES, OWN = [64, 320], slice(128, 256)
CPU = torch.device("cpu")


def parts(count: int, size: int) -> list[torch.Tensor]:
    """Values whose sum depends on the order of additions."""
    return list(
        torch.randn(count, size, generator=torch.Generator().manual_seed(size)) * 10.0 ** torch.arange(count)[:, None]
    )


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_sum_of_parts_has_the_bits_of_one_in_memory(tier: str, tmp_path: Path) -> None:
    dtypes = [{SLOT: torch.float32}] * len(SIZES)
    store = MemoryStates(dtypes, SIZES, CPU) if tier == "cpu" else DiskStates(dtypes, SIZES, tmp_path, 3, pinned=False)
    sums: list[GradientSum] = [ResidentSum(torch.zeros(128)), StoredSum(store, 1, OWN, CPU, PinnedCopies())]
    for _ in range(2):
        for each in sums:
            each.clear()
        assert all(not each.read(0, 128).any() for each in sums)
        for part in parts(4, 128):
            for each in sums:
                each.add(part)
        assert torch.equal(*(each.read(0, 128) for each in sums))
        assert torch.equal(*(each.read(31, 99) for each in sums))
        for each in sums:
            each.put(parts(1, 128)[0])
        assert torch.equal(*(each.read(0, 128) for each in sums))
    store.close()


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_a_whole_bucket_comes_back_as_it_was_stashed_and_once_per_step(tier: str, tmp_path: Path) -> None:
    dtypes = [{SLOT: torch.float32}] * len(SIZES)
    store = MemoryStates(dtypes, SIZES, CPU) if tier == "cpu" else DiskStates(dtypes, SIZES, tmp_path, 3, pinned=False)
    kept = StoredSum(store, 1, OWN, CPU, PinnedCopies())
    assert kept.unstash() is None
    first, second = parts(2, 320)
    kept.stash(first)
    back = kept.unstash()
    assert back is not None
    back += second
    kept.stash(back)
    again = kept.unstash()
    assert again is not None
    assert torch.equal(again, first + second)
    kept.put(again[OWN])
    assert torch.equal(kept.read(0, 128), (first + second)[OWN])
    kept.clear()
    assert kept.unstash() is None
    store.close()
