"""Stochastic rounding in torch: a published function's bits, either of two neighbours, and no bias that a test sees."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk.core.geometry import Box
from tk.core.local_params import Piece
from tk.core.tensors import TensorSpec
from tk.tests.example_counts import examples
from tk.train.zero.element_index import ElementIndex, RandomBits
from tk.train.zero.random_rounding import random_bits, round_randomly

COUNT = 1 << 16
SIGMAS = 4


def bits_of(count: int, tensor: str = "one", first: int = 0) -> RandomBits:
    return RandomBits(0, tensor, ElementIndex(first, count, count, 0))


def ups(step: int, count: int = COUNT, tensor: str = "one") -> torch.Tensor:
    """Returns which elements are rounded up, of values in the middle between two bf16 numbers."""
    return (round_randomly(torch.full((count,), 1 + 2**-8), bits_of(count, tensor), step) > 1).double()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@examples(100)
def test_random_bits_are_those_of_the_published_function(low: int, high: int, key: int) -> None:
    """triple32 of https://github.com/skeeto/hash-prospector in numpy, without its last line: of lower bits."""
    (x, word, first) = (np.array([each], np.uint32) for each in (low, high, key))
    x ^= first
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= word
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    assert random_bits(torch.tensor([low]), torch.tensor([high]), key).tolist() == (x >> np.uint32(16)).tolist()


def test_each_bit_of_a_counter_changes_each_random_bit_in_half_of_all_cases() -> None:
    low = torch.arange(COUNT)
    high, key = torch.full_like(low, 0x9E3779B9), 0x85EBCA6B
    before = random_bits(low, high, key)
    changed = [(random_bits(low ^ 1 << bit, high, key), 0.01) for bit in range(32)]
    changed += [(random_bits(low, high ^ 1 << bit, key), 0.02) for bit in range(32)]
    for other, bound in changed:
        for bit in range(16):
            share = ((before ^ other) >> bit & 1).double().mean().item()
            assert abs(share - 0.5) < bound


def test_a_value_becomes_one_of_its_neighbours_and_a_bf16_number_stays() -> None:
    values = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)) ** 3
    rounded = round_randomly(values, bits_of(COUNT), 1)
    lower = (values.view(torch.int32) >> 16 << 16).view(torch.float32)  # towards 0
    upper = ((values.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    assert ((rounded.float() == lower) | (rounded.float() == upper)).all()
    assert 0.4 < (rounded.float() == upper).double().mean() < 0.6
    assert torch.equal(round_randomly(rounded.float(), bits_of(COUNT), 2), rounded)


def test_infinities_stay_and_nan_stays_nan() -> None:
    most_bits = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(
        torch.float32
    )  # two NaN that carry into the sign
    odd = torch.cat((torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0]), most_bits))
    for step in range(20):
        rounded = round_randomly(odd, bits_of(len(odd)), step)
        assert rounded[:2].tolist() == [math.inf, -math.inf]
        assert rounded[[2, 5, 6]].isnan().all()
        assert rounded[3:5].view(torch.int16).tolist() == [0, -(2**15)]


@pytest.mark.parametrize("share", [0.5, 0.25, 0.9, 1 / 128])
@pytest.mark.parametrize("size", [1.0, 3e-9, 1e-38])
def test_the_mean_of_many_roundings_is_the_value(share: float, size: float) -> None:
    lower = torch.tensor(size).bfloat16().view(torch.int16)
    near = torch.stack((lower, lower + 1)).view(torch.bfloat16).double()
    value = (near[0] + share * (near[1] - near[0])).float()
    steps = 16
    drawn = [
        (round_randomly(value.expand(COUNT).clone(), bits_of(COUNT), step).double() > near[0]) for step in range(steps)
    ]
    found = torch.stack(drawn).double().mean().item()
    chance = ((value.double() - near[0]) / (near[1] - near[0])).item()
    assert abs(found - chance) < SIGMAS * math.sqrt(chance * (1 - chance) / (steps * COUNT))


def test_neighbours_steps_and_tensors_are_independent() -> None:
    """Pairs of roundings at 1/2: each of the four outcomes in a quarter of them, by Pearson's chi-squared."""
    first = ups(1)
    others = {f"the element {lag} further on": first.roll(-lag) for lag in (1, 2, 3, 4, 8, 32, 256, 4096)}
    others |= {f"step {step}": ups(step) for step in (2, 3, 257, 65537)}
    others |= {"another tensor": ups(1, tensor="two")}
    for name, other in others.items():
        counts = torch.bincount((2 * first + other).long(), minlength=4).double()
        assert ((counts - COUNT / 4).square() / (COUNT / 4)).sum() < 16.3, name  # 3 degrees of freedom: 1 in 1,000


def test_blocks_of_elements_and_of_steps_are_even() -> None:
    """The numbers rounded up in rows of 64 elements, and of 64 steps of one element, spread as binomials do."""
    grid = torch.stack([ups(step, 4096) for step in range(64)])
    for sums in (grid.view(-1, 64).sum(1), grid.T.reshape(-1, 64).sum(1)):
        assert len(sums) == 4096
        deviation = math.sqrt(2 / len(sums))  # of a variance's estimate, relative
        assert abs(sums.var().item() / 16 - 1) < SIGMAS * deviation
        assert abs(sums.mean().item() - 32) < SIGMAS * 4 / math.sqrt(len(sums))


def test_elements_beyond_4_billion_have_bits_of_their_own() -> None:
    values, count = torch.full((64,), 1 + 2**-8), 64
    rounded = [round_randomly(values, bits_of(count, first=place), 1) for place in (0, 1 << 32, (1 << 32) - 32, 32)]
    assert not torch.equal(rounded[0], rounded[1])
    assert torch.equal(rounded[2][32:], rounded[1][:32])
    assert torch.equal(rounded[3][:32], rounded[0][32:])


def test_a_cut_tensor_is_rounded_as_a_whole_one() -> None:
    spec = TensorSpec("one", (40, 24))
    values = torch.rand(spec.shape, generator=torch.Generator().manual_seed(1))
    whole = round_randomly(values.view(-1), RandomBits.of(5, Piece(spec, Box.whole(spec.shape), 0, True), 0), 3)
    for box in (Box((0, 8), (40, 8)), Box((7, 0), (11, 24))):
        part = values[box.slices].reshape(-1)[5:]
        found = round_randomly(part, RandomBits.of(5, Piece(spec, box, 0, True), 5), 3)
        assert torch.equal(found, whole.view(spec.shape)[box.slices].reshape(-1)[5:])
