"""The index of an element in its logical tensor: numpy's numbers of the whole tensor, at every layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.buckets import buckets, shards
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.local_params import Piece, local_params
from tk.core.tensors import TensorSpec
from tk.tests.core.layouts import layouts, tables
from tk.tests.example_counts import examples
from tk.train.zero.element_index import ElementIndex, RandomBits


def places(index: ElementIndex, count: int) -> np.ndarray:
    number = np.arange(index.start, index.start + count)
    return index.first + number // index.run * index.stride + number % index.run


@examples(60)
@given(tables(), layouts())
def test_every_element_of_every_run_has_its_index_in_the_whole_tensor(
    table: tuple[TensorSpec, ...], layout: Layout
) -> None:
    whole = {spec.name: np.arange(np.prod(spec.shape)).reshape(spec.shape) for spec in table}
    for rank in range(layout.world_size):
        plans = buckets(local_params(table, layout, rank), layout)
        for shard in shards(plans, layout, rank):
            begin, end = shard.flat
            found = places(ElementIndex.of(shard.piece, begin), end - begin)
            expected = whole[shard.piece.tensor.name][shard.piece.box.slices].reshape(-1)[begin:end]
            assert np.array_equal(found, expected), shard


@examples(60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_box_may_be_cut_along_any_dim(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    low = data.draw(st.integers(0, shape[dim] - 1))
    high = data.draw(st.integers(low + 1, shape[dim]))
    bounds = [[0, extent] for extent in shape]
    bounds[dim] = [low, high]
    box = Box.from_bounds(bounds)
    start = data.draw(st.integers(0, box.size - 1))
    found = places(ElementIndex.of(Piece(TensorSpec("one", tuple(shape)), box, 7, True), start), box.size - start)
    assert np.array_equal(found, np.arange(np.prod(shape)).reshape(shape)[box.slices].reshape(-1)[start:])


def piece(name: str = "one", alias: str = "") -> Piece:
    return Piece(TensorSpec(name, (4, 3), alias=alias), Box.whole((4, 3)), 0, True)


def test_a_box_that_is_cut_twice_has_no_index() -> None:
    with pytest.raises(AssertionError, match="one: a box that is cut along 2 dims"):
        ElementIndex.of(Piece(TensorSpec("one", (4, 3)), Box((0, 1), (2, 2)), 0, True), 0)


def test_keys_differ_by_seed_tensor_and_step_and_a_tied_tensor_has_its_originals() -> None:
    bits = RandomBits.of(0, piece(), 0)
    assert (
        len({bits.key(1), bits.key(2), RandomBits.of(1, piece(), 0).key(1), RandomBits.of(0, piece("b"), 0).key(1)})
        == 4
    )
    assert RandomBits.of(0, piece("head", alias="one"), 5).key(1) == bits.key(1)
    assert all(0 <= word < 2**32 for word in bits.key(1))


def test_keys_are_those_of_every_version() -> None:
    """Another key would change the bits of a run that is resumed."""
    assert RandomBits.of(3, piece("model.norm.weight"), 0).key(1000) == (1012580885, 2326641572)


def test_random_bits_from_a_later_element_are_those_of_its_place() -> None:
    assert RandomBits.of(0, piece(), 2).from_element(3) == RandomBits.of(0, piece(), 5)
