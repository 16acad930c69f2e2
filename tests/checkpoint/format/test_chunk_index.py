"""Finding chunks by region: all of them, with work that does not grow with the others."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.checkpoint.format.chunk import Chunk
from tk.checkpoint.format.chunk_index import TensorChunks
from tk.checkpoint.format.region import Region, shared_span
from tk.core.dtypes import FP32
from tk.core.errors import ManifestError
from tk.core.geometry import Box
from tk.core.tensors import Split, TensorSpec, split_boxes
from tk.tests.call_count import count_calls
from tk.tests.example_counts import examples


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Chunk]]:
    """A tensor cut by tensor parallelism along one dim, each box by flat ranges."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim, tp = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    chunks = []
    for rank in range(tp):
        (box,) = split_boxes(TensorSpec("t", shape, Split(dim, rule="pad")), tp, rank)
        cuts = sorted({0, box.size, *draw(st.lists(st.integers(0, box.size), max_size=4))})
        chunks += [Chunk("t", "weight", box, (a, b), "f", 0, 4 * (b - a), (0,)) for a, b in pairwise(cuts)]
    return shape, draw(st.permutations(chunks))


@examples(80)
@given(cut_tensors(), st.data())
def test_a_region_finds_every_chunk_that_it_meets(
    tensor: tuple[tuple[int, ...], list[Chunk]], data: st.DataObject
) -> None:
    shape, chunks = tensor
    index = TensorChunks("t", chunks, shape, FP32)
    assert sorted(index, key=repr) == sorted(chunks, key=repr)
    low = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    high = [data.draw(st.integers(a + 1, extent)) for a, extent in zip(low, shape, strict=True)]
    region = Region.of(Box.from_bounds(list(zip(low, high, strict=True))))
    wanted = {chunk for chunk in chunks if shared_span(chunk.region, region)}
    found = list(index.find(region))
    assert wanted <= set(found)
    assert len(found) == len(set(found))
    boxes = {chunk.box for chunk in wanted}
    assert {chunk.box for chunk in found} == boxes  # at most the runs between the first and last shared element


def test_twice_as_many_boxes_of_a_tensor_take_twice_the_work() -> None:
    """The index of the chunks of a grid."""

    def calls(columns: int) -> int:
        grid = [Box((2 * row, 3 * column), (2, 3)) for row in range(20) for column in range(columns)]
        chunks = [Chunk("t", "weight", box, None, "f", 0, 4 * box.size, (0,)) for box in grid]
        return count_calls(lambda: TensorChunks("t", chunks, (40, 3 * columns), FP32))

    assert calls(80) < 2.1 * calls(40)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([((0, 4), None), ((3, 8), None)], r"\(9 elements\) do not hold each of 8 exactly once"),
        ([((0, 4), None), ((5, 8), None)], r"\(7 elements\) do not hold each of 8 exactly once"),
        ([((0, 8), (0, 4)), ((0, 8), (3, 8))], "exactly once"),
        ([((0, 9), None)], r"box \[\[0, 9\]\] in f lies outside shape \[8\]"),
        ([((0, 4), (0, 4)), ((4, 8), (0, 4))], ""),
        ([((0, 8), (4, 8)), ((0, 8), (0, 4))], ""),
    ],
)
def test_chunks_hold_each_element_once(runs: list[tuple[Any, Any]], message: str) -> None:
    chunks = []
    for bounds, flat in runs:
        low, high = flat or bounds
        chunks.append(Chunk("a", "weight", Box.from_bounds([bounds]), flat, "f", 0, 4 * (high - low), ()))
    if not message:
        assert [chunk.start + chunk.box.offset[0] for chunk in TensorChunks("a", chunks, (8,), FP32)] == [0, 4]
        return
    with pytest.raises(ManifestError, match=message):
        TensorChunks("a", chunks, (8,), FP32)


def test_a_chunk_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ManifestError, match="a chunk in f has 30 bytes; its 8 elements take 32"):
        TensorChunks("a", [Chunk("a", "weight", Box.whole((8,)), None, "f", 0, 30, ())], (8,), FP32)
