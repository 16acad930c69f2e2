"""Adapters by name: each keeps its slot until nothing holds it, and the errors name those that are loaded."""

from dataclasses import replace

import pytest

from tk.core.errors import Overloaded, UnknownAdapter
from tk.infer.engine.planning.adapter_source import AdapterSource
from tk.infer.engine.planning.adapter_table import AdapterTable

FIRST, SECOND = (AdapterSource(f"/{name}", "", name, 4) for name in ("first", "second"))


def test_a_slot_is_free_when_its_name_and_its_last_request_are_gone() -> None:
    table = AdapterTable(2)
    table.give("x", table.reserve(FIRST))
    leases = [table.hold("x") for _ in range(2)]
    table.give("x", table.reserve(SECOND))
    assert table.in_slots == {0: FIRST, 1: SECOND}
    assert (table.loaded, table.hold("x").slot) == ({"x": SECOND}, 1)
    with pytest.raises(Overloaded, match=r"All 2 places for adapters are taken \(loaded: x;"):
        table.reserve(FIRST)
    leases[0].release()
    leases[0].release()
    assert list(table.in_slots) == [0, 1]
    leases[1].release()
    assert table.in_slots == {1: SECOND}
    assert table.reserve(FIRST).slot == 0


def test_a_name_that_is_not_loaded_is_an_error_with_those_that_are() -> None:
    table = AdapterTable(2)
    with pytest.raises(UnknownAdapter, match=r"Adapter 'x' is not loaded; loaded are: none\."):
        table.hold("x")
    table.give("a", table.reserve(FIRST))
    with pytest.raises(UnknownAdapter, match=r"Adapter 'x' is not loaded; loaded are: 'a'\."):
        table.remove("x")
    table.remove("a")
    assert not table.in_slots


@pytest.mark.parametrize(
    ("table", "special", "message"),
    [
        (
            AdapterTable(3, num_heads=1),
            [replace(each, has_head=True) for each in (FIRST, SECOND)],
            "All 1 places for adapters with a head of their own are taken.* max_adapter_heads",
        ),
        (
            AdapterTable(3, num_experts=1),
            [replace(each, has_experts=True) for each in (FIRST, SECOND)],
            "All 1 places for adapters with experts are taken.* max_adapter_experts",
        ),
    ],
)
def test_only_so_many_adapters_have_a_head_or_experts(
    table: AdapterTable, special: list[AdapterSource], message: str
) -> None:
    held = table.reserve(special[0])
    with pytest.raises(Overloaded, match=message):
        table.reserve(special[1])
    assert table.reserve(SECOND).slot == 1
    table.drop(held)
    assert table.reserve(special[1]).slot == 0


def test_a_load_that_failed_leaves_its_slot() -> None:
    table = AdapterTable(1)
    table.drop(table.reserve(FIRST))
    assert not table.in_slots
