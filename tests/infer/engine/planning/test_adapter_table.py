"""Adapters by name: each keeps its slot until nothing holds it, and the errors name those that are loaded."""

from dataclasses import replace

import pytest

from tk.core.errors import Overloaded, UnknownAdapter
from tk.infer.engine.planning.adapter_source import AdapterSource
from tk.infer.engine.planning.adapter_table import AdapterTable

FIRST, SECOND = (AdapterSource(f"/{name}", "", name, 4) for name in ("first", "second"))


def load(table: AdapterTable, name: str, source: AdapterSource) -> None:
    """Does what the engine does when the workers have loaded an adapter."""
    taken = table.reserve(name, source)
    taken.is_loaded = True
    table.give(name, taken)


def test_a_slot_is_free_when_its_name_and_its_last_request_are_gone() -> None:
    freed: list[int] = []
    table = AdapterTable(1, on_free=freed.append)
    load(table, "x", FIRST)
    leases = [table.hold("x") for _ in range(2)]
    load(table, "x", SECOND)
    assert table.in_slots == {0: FIRST, 1: SECOND}
    assert (table.loaded, table.hold("x").slot) == ({"x": SECOND}, 1)
    with pytest.raises(Overloaded, match=r"no room for adapter 'x': requests still use 1 earlier ones"):
        table.reserve("x", FIRST)
    leases[0].release()
    leases[0].release()
    assert (list(table.in_slots), freed) == ([0, 1], [])
    leases[1].release()
    assert (table.in_slots, freed) == ({1: SECOND}, [0])
    assert table.reserve("x", FIRST).slot == 0


def test_a_name_may_get_another_adapter_when_no_further_name_may() -> None:
    table = AdapterTable(2)
    for name in ("a", "b"):
        load(table, name, FIRST)
    with pytest.raises(Overloaded, match=r"All 2 places for adapters are taken \(loaded: a, b\)"):
        table.reserve("c", SECOND)
    for name in ("a", "b", "a"):
        load(table, name, SECOND)
    assert table.loaded == {"a": SECOND, "b": SECOND}


def test_a_name_that_is_not_loaded_is_an_error_with_those_that_are() -> None:
    table = AdapterTable(2)
    with pytest.raises(UnknownAdapter, match=r"Adapter 'x' is not loaded; loaded are: none\."):
        table.hold("x")
    load(table, "a", FIRST)
    with pytest.raises(UnknownAdapter, match=r"Adapter 'x' is not loaded; loaded are: 'a'\."):
        table.remove("x")
    table.remove("a")
    assert not table.in_slots


def test_a_version_is_held_again_after_its_name_was_given_away() -> None:
    table, other = AdapterTable(2), AdapterTable(1)
    table.give("x", table.reserve("x", FIRST))
    version = table.hold("x")
    table.give("x", table.reserve("x", SECOND))
    again = table.hold("x", version)
    version.release()
    assert (again.slot, again.digest) == (0, "first")
    other.give("x", other.reserve("x", SECOND))
    with pytest.raises(Overloaded, match="Adapter 'x' was loaded again while the call began"):
        other.hold("x", again)
    again.release()
    assert table.reserve("x", FIRST).slot == 0


def test_another_engine_has_a_version_by_its_digest() -> None:
    table, other = AdapterTable(1), AdapterTable(2)
    table.give("x", table.reserve("x", FIRST))
    other.give("y", other.reserve("y", SECOND))
    other.give("x", other.reserve("x", FIRST))
    assert other.hold("x", table.hold("x")).slot == 1


@pytest.mark.parametrize(
    ("table", "special", "message"),
    [
        (
            AdapterTable(3, max_heads=1),
            [replace(each, has_head=True) for each in (FIRST, SECOND)],
            "All 1 places for adapters with a head of their own are taken.* max_adapter_heads",
        ),
        (
            AdapterTable(3, max_experts=1),
            [replace(each, has_experts=True) for each in (FIRST, SECOND)],
            "All 1 places for adapters with experts are taken.* max_adapter_experts",
        ),
    ],
)
def test_only_so_many_adapters_have_a_head_or_experts(
    table: AdapterTable, special: list[AdapterSource], message: str
) -> None:
    held = table.reserve("a", special[0])
    held.is_loaded = True
    table.give("a", held)
    with pytest.raises(Overloaded, match=message):
        table.reserve("b", special[1])
    load(table, "b", SECOND)
    load(table, "a", special[1])
    table.remove("a")
    assert table.reserve("c", special[0]).slot == 0


def test_a_load_that_failed_leaves_its_slot_which_the_workers_never_filled() -> None:
    freed: list[int] = []
    table = AdapterTable(1, on_free=freed.append)
    taken = table.reserve("a", FIRST)
    assert not table.in_slots, "new workers must not load it"
    table.drop(taken)
    assert (table.reserve("a", FIRST).slot, freed) == (0, [])
