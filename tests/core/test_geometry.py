"""Boxes, compared with numpy's indexing."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.geometry import Box, covers_exactly, flat_to_boxes
from tk.tests.call_count import count_calls
from tk.tests.example_counts import examples

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = [draw(st.integers(0, extent - 1)) for extent in shape]
    high = [draw(st.integers(start + 1, extent)) for start, extent in zip(low, shape, strict=True)]
    return Box.from_bounds(list(zip(low, high, strict=True)))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def elements(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the flat indexes, in the whole tensor, of the box's elements in the box's order."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)[box.slices].reshape(-1)


@given(box_pairs())
def test_intersection_is_the_shared_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, two = case
    shared = set(elements(one, shape)) & set(elements(two, shape))
    common = one.intersect(two)
    assert (set(elements(common, shape)) if common else set()) == shared
    assert one.contains(two) == (set(elements(two, shape)) <= set(elements(one, shape)))


@given(box_pairs())
def test_flat_range_is_given_where_the_elements_are_one_run(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, outer, other = case
    inner = outer.intersect(other)
    if inner is None:
        return
    positions = np.flatnonzero(np.isin(elements(outer, shape), elements(inner, shape)))
    is_run = positions[-1] - positions[0] + 1 == len(positions)
    assert outer.flat_range(inner) == ((positions[0], positions[-1] + 1) if is_run else None)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_in(shape))), st.data())
def test_flat_to_boxes_cuts_the_run_in_order(case: tuple[tuple[int, ...], Box], data: st.DataObject) -> None:
    shape, box = case
    start = data.draw(st.integers(0, box.size))
    stop = data.draw(st.integers(start, box.size))
    parts = list(flat_to_boxes(box, start, stop))
    found = np.concatenate([elements(part, shape) for part in parts]) if parts else np.empty(0, int)
    assert found.tolist() == elements(box, shape)[start:stop].tolist()
    assert len(parts) <= max(2 * len(shape) - 1, 1)
    assert all(box.flat_range(part) is not None for part in parts)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_cover_holds_for_a_cut_tensor_and_for_no_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = Box.whole(shape)
    cuts = sorted(data.draw(st.sets(st.integers(0, whole.size), max_size=5)) | {0, whole.size})
    parts = [part for a, b in itertools.pairwise(cuts) for part in flat_to_boxes(whole, a, b)]
    data.draw(st.randoms()).shuffle(parts)
    assert covers_exactly(parts, whole)
    assert not covers_exactly(parts[1:], whole)
    assert not covers_exactly([*parts, parts[0]], whole)


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """Cuts a box in two repeatedly at random places; some of the pieces are then moved, doubled or left out."""
    whole = Box.whole(draw(st.lists(st.integers(0, 5), max_size=3)))
    pieces = [whole]
    for _ in range(draw(st.integers(0, 8)) if whole.shape else 0):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(whole.shape) - 1))
        (low, high), bounds = piece.bounds()[dim], piece.bounds()
        cut = draw(st.integers(low, high))
        pieces += [Box.from_bounds([*bounds[:dim], part, *bounds[dim + 1 :]]) for part in ([low, cut], [cut, high])]
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(pieces) - 1))
        moved = [draw(st.integers(0, 6 - extent)) for extent in pieces[index].shape]
        pieces[index : index + 1] = draw(
            st.sampled_from([[], [pieces[index]] * 2, [Box(tuple(moved), pieces[index].shape)]])
        )
        if not pieces:
            break
    return whole, draw(st.permutations(pieces))


@examples(300)
@given(cut_up())
def test_cover_equals_the_count_of_every_element(case: tuple[Box, list[Box]]) -> None:
    whole, boxes = case
    count = np.zeros([6] * len(whole.shape), int)
    wanted = count.copy()
    wanted[whole.slices] = 1
    for box in boxes:
        count[box.slices] += 1
    assert covers_exactly(boxes, whole) == np.array_equal(count, wanted)


@pytest.mark.parametrize("rows", [1, 40])
def test_the_cover_of_twice_as_many_boxes_takes_twice_the_steps(rows: int) -> None:
    """An earlier version compared each box of a grid with all boxes of its row."""

    def calls(columns: int) -> int:
        boxes = [Box((3 * row, 2 * column), (3, 2)) for row in range(rows) for column in range(columns)]
        whole = Box.whole((3 * rows, 2 * columns))
        return count_calls(lambda: covers_exactly(boxes, whole))

    assert calls(800 // rows * 2) < 2.1 * calls(800 // rows)


def test_a_cover_must_stay_inside() -> None:
    assert not covers_exactly([Box((0,), (3,)), Box((4,), (1,))], Box.whole((4,)))


def test_bounds_round_trip() -> None:
    box = Box((1, 2), (3, 4))
    assert box.bounds() == [[1, 4], [2, 6]]
    assert Box.from_bounds(box.bounds()) == box
    assert box.relative_to(Box((1, 1), (9, 9))) == Box((0, 1), (3, 4))


@pytest.mark.parametrize(("box", "size"), [(Box((), ()), 1), (Box((2,), (0,)), 0), (Box((0, 0), (2, 3)), 6)])
def test_size(box: Box, size: int) -> None:
    assert box.size == size
