"""The heap with removal at any place, against a plain sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.schedule.waiting.lazy_heap import LazyHeap


@given(st.lists(st.tuples(st.sampled_from(["push", "discard", "pop"]), st.integers(0, 9), st.integers(-3, 3))))
def test_it_has_the_order_of_a_sorted_list(actions: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    plain: dict[int, tuple[int, int]] = {}
    for number, (action, member, key) in enumerate(actions):
        if action == "push":
            heap.push(member, key)
            plain[member] = (key, number)
        else:
            gone = member if action == "discard" else heap.first()
            if gone is not None:
                heap.discard(gone)
                plain.pop(gone, None)
        expected = min(plain, key=plain.__getitem__, default=None)
        assert heap.first() == expected
        assert (len(heap), set(heap)) == (len(plain), set(plain))
        assert expected is None or heap.key(expected) == plain[expected][0]


def test_removed_members_do_not_pile_up_behind_the_first() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push(-1, -1)
    for member in range(10_000):
        heap.push(member, member)
        heap.discard(member)
    assert heap.first() == -1
    assert len(heap._heap) < 100
