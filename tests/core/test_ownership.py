"""Ownership: over any table and layout, every element of every slot has one owner, and the load is even."""

import math
import zlib

import pytest
from hypothesis import given

from tk.core import ownership
from tk.core.geometry import Box, covers_exactly, flat_to_boxes
from tk.core.layout import Layout
from tk.core.ownership import Owned, owned
from tk.core.tensors import Split, TensorSpec, with_slots
from tk.tests.checkpoint.saving import MIXED, llama_table, mixed_table
from tk.tests.core.layouts import CUTS, SLOTS, layouts, tables
from tk.tests.example_counts import examples


def item_size(item: Owned) -> int:
    return sum(math.prod(box.shape) for box in boxes_of(item))


def boxes_of(item: Owned) -> list[Box]:
    return list(flat_to_boxes(item.box, *(item.flat or (0, item.box.size))))


@examples(60)
@given(tables(), layouts())
def test_every_element_of_every_slot_has_one_owner(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    items = [item for rank in range(layout.world_size) for item in owned(table, layout, rank)]
    found: dict[tuple[str, str], list[Box]] = {}
    for item in items:
        found.setdefault((item.tensor, item.slot), []).extend(boxes_of(item))
    stored = [spec for spec in table if not spec.alias]
    assert set(found) == {(spec.name, slot) for spec in stored for slot in spec.slots}
    for spec in stored:
        for slot in spec.slots:
            assert covers_exactly(found[spec.name, slot], Box.whole(spec.shape)), (spec.name, slot)


@pytest.mark.parametrize(
    ("table", "recorded"),
    [
        (llama_table(), (880761208, 424405031, 2957506571, 1479675276, 2501466550)),
        (mixed_table(), (687694048, 2176398787, 944445236, 3093985556, 805658248)),
    ],
    ids=["llama", "mixed"],
)
def test_ranks_without_cp_and_ep_own_what_they_owned_before_there_were_these_axes(
    monkeypatch: pytest.MonkeyPatch, table: tuple[TensorSpec, ...], recorded: tuple[int, ...]
) -> None:
    """`recorded` has for each of CUTS the checksum of all ranks' elements, as text."""
    monkeypatch.setattr(ownership, "MIN_CUT_SIZE", 512)
    table = with_slots(table, MIXED)
    for layout, checksum in zip(CUTS, recorded, strict=True):
        found = [owned(table, layout, rank) for rank in range(layout.world_size)]
        assert zlib.crc32(repr(found).encode()) == checksum, layout


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_replicas_write_equal_parts(tp: int, zero: int) -> None:
    """Cut tensors: within 5 percent; whole ones at tp = 1: within the largest of them."""
    hidden = 1024
    declared = [
        spec
        for layer in range(4)
        for spec in (
            TensorSpec(f"{layer}.up", (4 * hidden, hidden), Split(0), layer),
            TensorSpec(f"{layer}.down", (hidden, 4 * hidden), Split(1), layer),
            TensorSpec(f"{layer}.norm", (hidden,), None, layer),
        )
    ]
    table = with_slots(declared, SLOTS)
    layout = Layout(tp=tp, dp=4, zero=zero)
    for slot in ("weight", "exp_avg"):
        for group in range(tp):
            loads = [
                sum(item_size(item) for item in owned(table, layout, rank) if item.slot == slot)
                for rank in range(layout.world_size)
                if layout.coordinates(rank).tp == group
            ]
            if tp == 1 and slot == "weight":
                assert max(loads) - min(loads) <= 4 * hidden * hidden
            else:
                assert max(loads) <= 1.05 * min(loads)


def test_weights_are_whole_tensors_at_tp_1() -> None:
    table = (TensorSpec("a", (2048, 1024), Split(0)), TensorSpec("b", (2048, 1024), Split(1)))
    for zero in (0, 1, 2):
        items = [item for rank in range(3) for item in owned(table, Layout(dp=3, zero=zero), rank)]
        assert sorted((item.tensor, item.flat) for item in items) == [("a", None), ("b", None)]
