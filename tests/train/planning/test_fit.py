"""The least offload that fits: with each limit the cheapest places, and an honest answer where none is enough."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.sections import OffloadSection
from tk.train.config.train_config import TrainConfig
from tk.train.planning.fit import Fit, MemoryLimit, least_offload
from tk.train.planning.machines import Machines
from tk.train.planning.planned_run import PlannedRun, prepare_run

HUGE = 2**50


@pytest.fixture
def run(configure: Configure) -> PlannedRun:
    """A run at stage 3 on four ranks."""
    model = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    sections: dict[str, Any] = {"model": model, "zero": {"stage": 3}, "precision": {"params": "bf16"}}
    config = configure(**sections, offload={"buffers": 3, "folder": "/fast"}, recompute={"mode": "full"})
    config["train"] |= {"global_batch_size": 8, "micro_batch_size": 2}
    return prepare_run(parse(config, TrainConfig, "test"), 4)


def places(found: Fit) -> tuple[str, str, str, str]:
    offload = found.run.config.offload
    assert (offload.buffers, offload.folder) == (3, "/fast"), "they stay as they are given"
    return offload.optimizer, offload.gradients, offload.parameters, offload.activations


def needed(run: PlannedRun, **offload: str) -> int:
    """Returns the bytes of a device with these places."""
    changed = run.with_offload(run.config.offload.model_copy(update=offload))
    return max(placed.on_device for placed in changed.memory())


def test_on_gpus_the_host_takes_what_it_can_and_the_disk_the_rest(run: PlannedRun) -> None:
    def fit(rank: int, host: int = HUGE) -> tuple[str, str, str, str]:
        found = least_offload(run, MemoryLimit(rank, host, on_gpu=True), Machines())
        assert found.fits
        return places(found)

    without, passes, states = needed(run), needed(run, activations="cpu"), needed(run, optimizer="cpu")
    both = needed(run, optimizer="cpu", gradients="cpu")
    everything = needed(run, optimizer="cpu", gradients="cpu", parameters="cpu")
    least = needed(run, optimizer="cpu", gradients="cpu", parameters="cpu", activations="cpu")
    assert without > passes > states > both > everything > least
    assert fit(without) == ("none", "none", "none", "none")
    assert fit(without - 1) == fit(passes) == ("none", "none", "none", "cpu"), "they take the least time here"
    assert fit(passes - 1) == fit(states) == ("cpu", "none", "none", "none")
    assert fit(both)[0] == "cpu"
    assert fit(everything) == ("cpu", "cpu", "cpu", "none")
    assert fit(least) == ("cpu", "cpu", "cpu", "cpu")
    on_host = 4 * max(placed.on_host for placed in run.with_offload(OffloadSection(optimizer="cpu")).memory())
    assert fit(states, on_host) == ("cpu", "none", "none", "none")
    assert fit(states, on_host - 1) == ("disk", "none", "none", "none")


def test_on_cpus_only_the_disk_makes_room(run: PlannedRun) -> None:
    def fit(rank: int) -> Fit:
        return least_offload(run, MemoryLimit(rank, HUGE, on_gpu=False), Machines())

    whole = max(run.cpu_memory(run.memory()))
    assert places(fit(whole)) == ("none", "none", "none", "none")
    found = fit(whole - 1)
    assert found.fits
    assert "cpu" not in places(found)
    assert max(found.run.cpu_memory(found.run.memory())) <= whole - 1


def test_where_nothing_fits_the_largest_part_that_is_left_is_named(run: PlannedRun) -> None:
    found = least_offload(run, MemoryLimit(1000, HUGE, on_gpu=True), Machines())
    assert not found.fits
    [device, *_] = [placed.device for placed in found.run.memory()]
    largest = max(device, key=lambda name: device[name])
    assert found.text.startswith("Nothing fits into 1000 B of a GPU")
    assert f"the largest part left is {largest}" in found.text
    found = least_offload(run, MemoryLimit(HUGE, 1000, on_gpu=True), Machines())
    assert places(found) == ("none", "none", "none", "none"), "it needs no memory of the host"
    run = run.with_offload(OffloadSection(buffers=3, folder="/fast"))
    found = least_offload(run, MemoryLimit(needed(run, activations="cpu") - 1, 1000, on_gpu=True), Machines())
    assert not found.fits
    assert "of a host. With" in found.text
    assert "the largest part left is buffers of files" in found.text


def test_a_slow_disk_or_link_changes_what_is_cheapest(run: PlannedRun) -> None:
    room = MemoryLimit(needed(run, optimizer="cpu"), HUGE, on_gpu=True)
    assert places(least_offload(run, room, Machines(disk=(1e15, 1e15), link=1e3)))[0] == "cpu", "no place moves less"
    slow = least_offload(
        run, MemoryLimit(needed(run, optimizer="cpu", gradients="cpu"), HUGE, True), Machines(link=1e3)
    )
    assert slow.fits
