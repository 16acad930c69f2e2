"""The bytes that offload moves in a step, counted by hand for one element, and at a store of files."""

from dataclasses import astuple
from typing import Any

import pytest

from tk.core.buckets import all_buckets, buckets
from tk.tests.train.planning.small_states import small_run
from tk.train.planning.model_states import state_parts
from tk.train.planning.moved_bytes import Moved, in_all, moved_bytes

SUMS_ON_DISK = {"optimizer": "cpu", "gradients": "disk"}


def moved(zero: int, params: str, passes: int, offload: dict[str, str], shard_size: int = 0) -> dict[str, Any]:
    """Returns what each part moves per element that a rank updates: down, up, read, written."""
    config, layout, ranks = small_run(4, zero, params, **offload)
    config = config.model_copy(update={"zero": config.zero.model_copy(update={"shard_size": shard_size})})
    layout = config.layout(None)
    plans = buckets(ranks, layout)
    parts = state_parts(config, layout, plans)
    own = sum(parts["optimizer"].sizes)
    return {
        each.part: pytest.approx([size / own for size in astuple(each)[1:]], rel=0.03)  # pages are padded
        for each in moved_bytes(layout, plans, parts, passes, gathered_twice=0.5)
    }


def test_nothing_moves_without_offload() -> None:
    assert moved(2, "bf16", 3, {}) == {}


@pytest.mark.parametrize(
    ("tier", "files"), [("cpu", [0, 0]), ("disk", [12.0, 12.0])], ids=("states on the host", "states on disk")
)
def test_an_update_takes_gradients_and_parameters_and_returns_these(tier: str, files: list[float]) -> None:
    assert moved(3, "bf16", 3, {"optimizer": tier}) == {
        "parameters": [2, 2, 0, 0],
        "gradients": [4, 0, 0, 0],
        "optimizer": [0, 0, *files],
    }


def test_gradients_go_down_in_every_pass_and_the_norm_and_the_update_read_them() -> None:
    found = moved(2, "bf16", 3, SUMS_ON_DISK)
    assert found["gradients"] == [3 * 4, 0, (2 + 2) * 4, 3 * 4], "two additions, the norm, the update"
    replicated = moved(2, "bf16", 3, SUMS_ON_DISK, shard_size=2)
    assert replicated["gradients"] == [4 * 4, 4, 5 * 4, 4 * 4], "the sum over replicas"


def test_below_stage_2_whole_buckets_go_down_and_come_back_for_the_next_pass() -> None:
    found = moved(1, "bf16", 3, SUMS_ON_DISK)
    assert found["gradients"] == [2 * 16 + 4, 2 * 16, 2 * 16 + 8, 3 * 16], "16 bytes of four ranks' elements"


def test_frozen_parameters_go_up_for_every_gather_and_nothing_writes_them() -> None:
    everything = dict.fromkeys(("optimizer", "gradients", "parameters"), "disk")
    config, layout, ranks = small_run(4, 3, "bf16", ["model.layers"], **everything)
    parts = state_parts(config, layout, all_buckets(ranks, layout))
    own = sum(parts["frozen parameters"].sizes)
    found = {each.part: each for each in moved_bytes(layout, buckets(ranks, layout), parts, 3, gathered_twice=0.5)}
    assert found["frozen parameters"] == Moved("frozen parameters", up=9 * own, read=9 * own), "2 bytes, 3 x 1.5 times"
    assert set(found) == {"parameters", "frozen parameters", "gradients", "optimizer"}


def test_parameters_go_up_for_every_gather() -> None:
    everything = dict.fromkeys(("optimizer", "gradients", "parameters"), "disk")
    assert moved(3, "fp32", 2, everything)["parameters"] == [0, 2 * 1.5 * 4, 2 * 1.5 * 4 + 4, 4]


def test_all_parts_together_are_their_sum() -> None:
    assert in_all((Moved("a", 1, 2, 3, 4), Moved("b", down=10))) == Moved("in all", 11, 2, 3, 4)
