"""A run that is prepared once has a memory for each choice of places, and on a CPU what malloc holds free beside it."""

from dataclasses import astuple
from typing import Any

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.sections import OffloadSection
from tk.train.config.train_config import TrainConfig
from tk.train.planning.planned_run import PlannedRun, prepare_run


@pytest.fixture
def run(configure: Configure) -> PlannedRun:
    sections: dict[str, Any] = {"parallel": {"pp": 2}, "zero": {"stage": 1}, "checkpoint": {"every": 5}}
    return prepare_run(parse(configure(precision={"params": "bf16"}, **sections), TrainConfig, "test"), 4)


def test_another_place_changes_only_where_states_are(run: PlannedRun) -> None:
    moved = run.with_offload(OffloadSection(optimizer="cpu"))
    assert run.moved() == ()
    assert sum(sum(astuple(each)[1:]) for each in moved.moved()) > 0
    for before, after in zip(run.memory(), moved.memory(), strict=True):
        assert after.on_cpu == before.on_cpu, "on a CPU it is the same memory"
        assert after.device == {part: size for part, size in before.device.items() if part != "optimizer"}
        assert after.host["optimizer"] == before.device["optimizer"]
        assert after.host["copy for saves"] == before.host["copy for saves"]


def test_on_a_cpu_states_on_disk_make_room_and_malloc_takes_the_same(run: PlannedRun) -> None:
    on_disk = run.with_offload(OffloadSection(optimizer="disk", buffers=3))
    for each in (run, on_disk):
        for placed, whole in zip(each.memory(), each.cpu_memory(), strict=True):
            assert whole > placed.on_cpu
    free = [
        [whole - placed.on_cpu for placed, whole in zip(each.memory(), each.cpu_memory(), strict=True)]
        for each in (run, on_disk)
    ]
    assert free[0] == free[1]


def test_saves_copy_weights_only_and_states_on_disk_have_a_second_area(run: PlannedRun) -> None:
    on_disk = run.with_offload(OffloadSection(optimizer="disk"))
    for before, after in zip(run.memory(), on_disk.memory(), strict=True):
        assert after.host["copy for saves"] == pytest.approx(before.host["copy for saves"] * 2 / 14, rel=0.2), (
            "alignment"
        )
        assert after.disk["optimizer, for saves"] == after.disk["optimizer"]
        assert "optimizer, for saves" not in before.disk


def test_the_traffic_is_that_of_the_pipeline_rank_with_the_most_parameters(run: PlannedRun) -> None:
    sizes = [sum(param.size for param in params) for params in run.ranks]
    assert sum(param.size for param in run.fullest) == max(sizes)
    assert run.work().num_params >= max(sizes), "with padding"
