"""The update rule of AdamW: in C it has the same bits in every unit and however a range is cut, and torch's values."""

import platform
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk.core.cpu import read_cpu
from tk.core.native import load_library
from tk.train.zero.adamw_rule import AdamWFactors, AdamWStreams, NativeRule, torch_rule
from tk.train.zero.native_adamw import SOURCE, AdamWUpdate, NativeAdamW

ABLE = ("base", *read_cpu().instruction_sets)
UNITS = [unit.name for unit in SOURCE.units_for(platform.machine()) if unit.name in ABLE]
FACTORS = AdamWFactors(7, 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.37)
ODD = (0.0, -0.0, 1e-42, -1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
SLOTS = ("master", "exp_avg", "exp_avg_sq", "grad")


def native(unit: str) -> NativeAdamW:
    loaded = load_library(SOURCE)
    assert loaded is not None
    assert unit in loaded.units
    return NativeAdamW(loaded.library, unit)


def streams(count: int, dtype: torch.dtype | None = torch.bfloat16, odd: bool = False) -> AdamWStreams:
    """Random values, the same for every call with one count; some of them odd."""
    generator = torch.Generator().manual_seed(count)
    master, exp_avg, exp_avg_sq, grad = torch.randn(4, count, generator=generator).unbind()
    exp_avg, exp_avg_sq, grad = exp_avg * 1e-3, (exp_avg_sq * 1e-3).square(), grad * 1e-3
    if odd:
        for number, stream in enumerate((master, exp_avg, grad)):
            places = torch.randint(count, (len(ODD),), generator=generator) + number
            stream[places % count] = torch.tensor(ODD)
    rounded = None if dtype is None else torch.empty(count, dtype=dtype)
    return AdamWStreams(master.clone(), exp_avg.clone(), exp_avg_sq.clone(), grad.clone(), rounded)


def part(whole: AdamWStreams, begin: int, end: int) -> AdamWStreams:
    rounded = None if whole.rounded is None else whole.rounded[begin:end]
    return AdamWStreams(**{slot: getattr(whole, slot)[begin:end] for slot in SLOTS}, rounded=rounded)


def bits(found: AdamWStreams) -> list[torch.Tensor]:
    """The bits of all that an update wrote; those of a NaN, whose sign and payload mean nothing, are one."""
    values = [found.master, found.exp_avg, found.exp_avg_sq, *([] if found.rounded is None else [found.rounded])]
    return [value.nan_to_num(nan=0.1, posinf=float("inf"), neginf=float("-inf")).contiguous() for value in values]


def assert_same_bits(found: AdamWStreams, expected: AdamWStreams) -> None:
    for ours, theirs in zip(bits(found), bits(expected), strict=True):
        kind = torch.int16 if ours.dtype.itemsize == 2 else torch.int32
        assert torch.equal(ours.view(kind), theirs.view(kind))


@pytest.mark.parametrize("unit", UNITS)
@given(count=st.integers(1, 5000), cuts=st.lists(st.integers(0, 5000), max_size=4), odd=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_unit_and_every_cut_give_the_same_bits(unit: str, count: int, cuts: list[int], odd: bool) -> None:
    expected, found = streams(count, odd=odd), streams(count, odd=odd)
    NativeRule(native("base"))(expected, FACTORS)
    places = sorted({0, count, *(cut for cut in cuts if cut < count)})
    rule = NativeRule(native(unit))
    for begin, end in pairwise(places):
        rule(part(found, begin, end), FACTORS)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 300])
@pytest.mark.parametrize("count", [1 << 19, (1 << 19) + 77, 65])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, threads: int, count: int) -> None:
    expected, found = streams(count), streams(count)
    NativeRule(native("base"))(expected, FACTORS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    NativeRule(native(UNITS[-1]))(found, FACTORS)
    assert_same_bits(found, expected)


def test_few_elements_start_no_thread() -> None:
    given: list[int] = []
    update = NativeAdamW.__new__(NativeAdamW)
    update._update = lambda block, threads: given.append(threads)
    for count in (1, 100_000, 1 << 17, 1 << 30):
        update(AdamWUpdate(count=count), 4)
    assert given == [1, 1, 2, 4]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("step", "most"), [(1, 2), (2, 2), (100_000, 3)])
def test_one_update_is_torchs_but_for_units_in_the_last_place(unit: str, step: int, most: int) -> None:
    """Of the largest number in its sum: a sum of numbers of two signs can be small."""
    factors = AdamWFactors(step, 1e-2, (0.9, 0.999), 1e-8, 0.1, 0.37)
    before, found, expected = streams(100_003), streams(100_003), streams(100_003)
    NativeRule(native(unit))(found, factors)
    torch_rule(expected, factors)
    average = torch.maximum(before.exp_avg.abs(), before.grad.abs())
    root = (expected.exp_avg_sq / (1 - 0.999**step)).sqrt() + factors.eps
    change = factors.lr / (1 - 0.9**step) * average / root
    largest = {
        "master": torch.stack((before.master.abs(), expected.master.abs(), change)).amax(0),
        "exp_avg": average,
        "exp_avg_sq": torch.maximum(before.exp_avg_sq, expected.exp_avg_sq),
    }
    for slot, scale in largest.items():
        _, exponent = torch.frexp(scale)
        units = torch.ldexp(torch.ones_like(scale), exponent - 24)
        assert ((getattr(found, slot) - getattr(expected, slot)).abs() <= most * units).all(), slot


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_masters_are_rounded_as_torch_rounds_them(dtype: torch.dtype | None) -> None:
    found = streams(4097, dtype, odd=True)
    NativeRule(native(UNITS[-1]))(found, FACTORS)
    if found.rounded is not None and dtype is not None:
        assert torch.equal(found.rounded.nan_to_num(), found.master.to(dtype).nan_to_num())
        assert torch.equal(found.rounded.isnan(), found.master.isnan())
