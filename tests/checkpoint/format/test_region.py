"""Regions against their definition: sets of elements in row-major order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tk.checkpoint.format.region import Region, copy_region, count_before, position_of, shared_span
from tk.core.geometry import Box


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    low = [draw(st.integers(0, extent - 1)) for extent in shape]
    high = [draw(st.integers(a + 1, extent)) for a, extent in zip(low, shape, strict=True)]
    box = Box.from_bounds(list(zip(low, high, strict=True)))
    start = draw(st.integers(0, box.size - 1))
    return Region(box, start, draw(st.integers(start + 1, box.size)))


@st.composite
def region_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], Region, Region]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(regions(shape)), draw(regions(shape))


def positions(region: Region, shape: tuple[int, ...]) -> np.ndarray:
    """The region's elements by their place in the whole tensor."""
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return whole[region.box.slices].reshape(-1)[region.start : region.stop]


@given(region_pairs())
def test_regions_share_the_elements_that_are_in_both(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, source, target = case
    here, there = positions(source, shape), positions(target, shape)
    into = np.full(len(there), -1)
    copy_region(into, target, here, source)
    assert into.tolist() == np.where(np.isin(there, here), there, -1).tolist()
    shared = np.flatnonzero(np.isin(here, there))
    span = (source.start + shared[0], source.start + shared[-1] + 1) if len(shared) else None
    assert shared_span(source, target) == span


@given(region_pairs())
def test_places_in_a_box_and_in_the_tensor(case: tuple[tuple[int, ...], Region, Region]) -> None:
    shape, region, _ = case
    whole = positions(Region.of(region.box), shape)
    assert [position_of(region.box, shape, i) for i in range(region.box.size)] == whole.tolist()
    for place in range(int(np.prod(shape)) + 1):
        assert count_before(region.box, shape, place) == (whole < place).sum()
