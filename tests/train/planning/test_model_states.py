"""The bytes of model states by place are those that stores and buffers of a rank really take."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tk.core.buckets import all_buckets, buckets
from tk.tests.train.planning.small_states import small_run
from tk.train.planning.model_states import model_state_bytes, state_parts
from tk.train.planning.placed_bytes import TRANSFERS
from tk.train.zero.states.disk_states import DiskStates

DISK, HOST = (dict.fromkeys(("optimizer", "gradients"), tier) for tier in ("disk", "cpu"))


@pytest.mark.parametrize(
    ("zero", "params", "offload", "device", "host", "disk"),
    [
        (0, "bf16", {}, 2 + 4 + 12, 0, 0),
        (0, "bf16", {"optimizer": "cpu"}, 2 + 4, 12, 0),
        (1, "bf16", {"optimizer": "disk"}, 2 + 4, 0, 12 / 4),
        (1, "fp32", {"optimizer": "disk"}, 4 + 4, 0, 8 / 4),
        (1, "bf16", HOST, 2, 4 + 12 / 4, 0),
        (2, "bf16", DISK, 2, 0, (4 + 12) / 4),
        (3, "bf16", {}, (4 + 12) / 4, 0, 0),
        (3, "bf16", {"optimizer": "cpu"}, (2 + 4) / 4, 12 / 4, 0),
        (3, "fp32", {"optimizer": "cpu"}, (4 + 4) / 4, 8 / 4, 0),
        (3, "bf16", {**DISK, "parameters": "cpu"}, 0, 2 / 4, (4 + 12) / 4),
        (3, "fp32", {**HOST, "parameters": "disk"}, 0, (4 + 8) / 4, 4 / 4),
    ],
)
def test_a_parameter_has_these_bytes_in_each_place(
    zero: int, params: str, offload: dict[str, Any], device: float, host: float, disk: float
) -> None:
    config, layout, ranks = small_run(4, zero, params, **offload)
    placed = model_state_bytes(config, layout, ranks, 1)
    total = sum(param.size for param in ranks)
    parts = ("parameters", "gradients", "optimizer")
    found = [sum(place.get(part, 0) for part in parts) for place in (placed.device, placed.host, placed.disk)]
    assert found == [pytest.approx(each * total, rel=0.04) for each in (device, host, disk)]


@pytest.mark.parametrize(
    ("zero", "params", "offload", "device", "host", "disk"),
    [
        (0, "bf16", {}, 2, 0, 0),
        (2, "bf16", DISK, 2, 0, 0),
        (3, "bf16", {}, 2 / 4, 0, 0),
        (3, "fp32", {}, 4 / 4, 0, 0),
        (3, "bf16", {**DISK, "parameters": "cpu"}, 0, 2 / 4, 0),
        (3, "bf16", {**DISK, "parameters": "disk"}, 0, 0, 2 / 4),
    ],
)
def test_a_frozen_parameter_has_no_states_and_is_sharded_at_stage_3(
    zero: int, params: str, offload: dict[str, Any], device: float, host: float, disk: float
) -> None:
    config, layout, ranks = small_run(4, zero, params, ["model.layers"], **offload)
    placed, free = model_state_bytes(config, layout, ranks, 1), model_state_bytes(*small_run(4, zero, params), 1)
    frozen = sum(param.size for param in ranks if not param.trainable)
    found = [place.get("frozen parameters", 0) for place in (placed.device, placed.host, placed.disk)]
    assert found == [pytest.approx(each * frozen, rel=0.04) for each in (device, host, disk)]
    assert placed.device.get("gathered parameters") == free.device.get("gathered parameters")
    parts = state_parts(config, layout, all_buckets(ranks, layout))
    trained = sum(param.size for param in ranks if param.trainable)
    assert sum(parts["gradients"].sizes) == pytest.approx(trained / (4 if zero >= 2 else 1), rel=0.04)


def test_frozen_parameters_on_disk_share_the_file_and_the_buffers_of_trained_ones() -> None:
    def buffers(tier: str, freeze: list[str]) -> int:
        placed = model_state_bytes(*small_run(2, 3, "bf16", freeze, **DISK, parameters=tier), 1)
        return placed.host["buffers of files"]

    of_parameters = [buffers("disk", freeze) - buffers("cpu", freeze) for freeze in ([], ["model.layers"])]
    assert of_parameters[0] == of_parameters[1] > 0


def test_the_file_and_the_buffers_are_those_of_the_store(tmp_path: Path) -> None:
    config, layout, ranks = small_run(4, 3, "bf16", optimizer="disk", buffers=5)
    parts = state_parts(config, layout, buckets(ranks, layout))
    placed = model_state_bytes(config, layout, ranks, 1)
    dtypes = [dict.fromkeys(slots, torch.float32) for slots in parts["optimizer"].slots]
    store = DiskStates(dtypes, parts["optimizer"].sizes, tmp_path, 5, pinned=False)
    descriptor = store._file.fd
    assert placed.disk == {"optimizer": Path(f"/proc/self/fd/{descriptor}").stat().st_size}
    assert placed.host["buffers of files"] == sum(len(buffer.memory) for buffer in store._free)
    store.close()


def test_each_part_on_disk_has_buffers_of_its_own() -> None:
    alone = model_state_bytes(*small_run(2, 3, "bf16", optimizer="disk"), 1).host["buffers of files"]
    all_three = dict.fromkeys(("optimizer", "gradients", "parameters"), "disk")
    together = model_state_bytes(*small_run(2, 3, "bf16", **all_three), 1).host["buffers of files"]
    assert together == pytest.approx(alone * (12 + 4 + 2) / 12, rel=0.1)


@pytest.mark.parametrize(("passes", "whole"), [(1, False), (2, True)])
def test_below_stage_2_offloaded_gradients_are_whole_in_passes_before_the_last(passes: int, whole: bool) -> None:
    config, layout, ranks = small_run(2, 1, "bf16", **HOST)
    sizes = sorted((bucket.size for bucket in buckets(ranks, layout)), reverse=True)
    held = model_state_bytes(config, layout, ranks, passes).device["buckets"]
    assert len(sizes) > 3
    assert held == 4 * sum(sizes if whole else sizes[:3])


def test_only_transfers_to_gpus_are_not_counted_on_cpus() -> None:
    placed = model_state_bytes(*small_run(2, 2, "bf16", optimizer="cpu"), 1)
    assert placed.host[TRANSFERS] > 0
    assert placed.on_cpu == placed.on_device + placed.on_host - placed.host[TRANSFERS]
    assert TRANSFERS not in model_state_bytes(*small_run(2, 2, "bf16"), 1).host
