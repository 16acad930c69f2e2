"""The update rule of AdamW: in C it has the same bits in every unit and however a range is cut, and torch's values."""

import logging
import math
import platform
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk.core.buckets import buckets, shards
from tk.core.cpu import read_cpu
from tk.core.geometry import Box
from tk.core.layout import Layout
from tk.core.local_params import Piece, local_params
from tk.core.native import load_library
from tk.core.tensors import TensorSpec
from tk.parallel.mesh import join_world
from tk.tests.core.layouts import layouts, tables
from tk.tests.example_counts import examples
from tk.tests.rank_pool import RankPool
from tk.train.zero import adamw_rule
from tk.train.zero.adamw_rule import AdamWFactors, AdamWRule, AdamWStreams, NativeRule, TorchRule
from tk.train.zero.element_index import ElementIndex, RandomBits
from tk.train.zero.native_adamw import SOURCE, AdamWUpdate, NativeAdamW, native_adamw
from tk.train.zero.random_rounding import round_randomly

ABLE = ("base", *read_cpu().instruction_sets)
UNITS = [unit.name for unit in SOURCE.units_for(platform.machine()) if unit.name in ABLE]
FACTORS = AdamWFactors(7, 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.37)
ODD = (0.0, -0.0, 1e-42, -1e-30, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
TORCH = TorchRule(torch.device("cpu"))
SLOTS = ("master", "exp_avg", "exp_avg_sq", "grad")
ROWS = RandomBits(0, "one", ElementIndex(2**32 - 1500, 170, 1000, 33))  # short, and across the border of 2^32


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


States = Callable[[AdamWStreams], AdamWStreams]


def wide(given: AdamWStreams) -> AdamWStreams:
    return given


def narrow(wide: AdamWStreams, bits: RandomBits = ROWS) -> AdamWStreams:
    """The same with bf16 states."""
    return replace(wide, exp_avg=wide.exp_avg.bfloat16(), exp_avg_sq=wide.exp_avg_sq.bfloat16(), bits=bits)


def part(whole: AdamWStreams, begin: int, end: int) -> AdamWStreams:
    rounded = None if whole.rounded is None else whole.rounded[begin:end]
    bits = whole.bits and whole.bits.from_element(begin)
    return AdamWStreams(**{slot: getattr(whole, slot)[begin:end] for slot in SLOTS}, rounded=rounded, bits=bits)


def bits(found: AdamWStreams) -> list[torch.Tensor]:
    """The bits of all that an update wrote; those of a NaN, whose sign and payload mean nothing, are one."""
    values = [found.master, found.exp_avg, found.exp_avg_sq, *([] if found.rounded is None else [found.rounded])]
    return [value.nan_to_num(nan=0.1, posinf=float("inf"), neginf=float("-inf")).contiguous() for value in values]


def assert_same_bits(found: AdamWStreams, expected: AdamWStreams) -> None:
    for ours, theirs in zip(bits(found), bits(expected), strict=True):
        kind = torch.int16 if ours.dtype.itemsize == 2 else torch.int32
        assert torch.equal(ours.view(kind), theirs.view(kind))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("states", [wide, narrow])
@given(count=st.integers(1, 5000), cuts=st.lists(st.integers(0, 5000), max_size=4), odd=st.booleans())
@settings(max_examples=40)
def test_every_unit_and_every_cut_give_the_same_bits(
    unit: str, states: States, count: int, cuts: list[int], odd: bool
) -> None:
    expected, found = states(streams(count, odd=odd)), states(streams(count, odd=odd))
    NativeRule(native("base"))(expected, FACTORS)
    places = sorted({0, count, *(cut for cut in cuts if cut < count)})
    rule = NativeRule(native(unit))
    for begin, end in pairwise(places):
        rule(part(found, begin, end), FACTORS)
    assert_same_bits(found, expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 300])
@pytest.mark.parametrize("count", [1 << 19, (1 << 19) + 77, 65])
@pytest.mark.parametrize("states", [wide, narrow])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, states: States, threads: int, count: int) -> None:
    expected, found = states(streams(count)), states(streams(count))
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
    TORCH(expected, factors)
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


# bf16 states


@pytest.mark.parametrize("unit", UNITS)
def test_bf16_states_are_rounded_as_torch_rounds_them(unit: str) -> None:
    """With betas of 0 a new moment is the gradient, and its square, both known in fp32."""
    count, factors = 4097, replace(FACTORS, betas=(0.0, 0.0), grad_scale=1.0)
    for rule in (NativeRule(native(unit)), TORCH):
        found = narrow(streams(count, odd=rule is not TORCH))  # 0 + (inf - 0) is NaN in torch's kernel
        found.exp_avg.zero_()
        rule(found, factors)
        square = round_randomly(found.grad * found.grad, ROWS, factors.step)
        assert torch.equal(found.exp_avg.nan_to_num(), found.grad.bfloat16().nan_to_num())
        assert torch.equal(found.exp_avg_sq.nan_to_num(), square.nan_to_num())
        assert torch.equal(found.exp_avg_sq.isnan(), found.grad.isnan())
        assert not torch.equal(square, (found.grad * found.grad).bfloat16()), "to the nearest would do, too"


@pytest.mark.parametrize("unit", UNITS)
def test_one_update_of_bf16_states_is_torchs_but_for_a_bf16_unit(unit: str) -> None:
    found, expected = narrow(streams(100_003)), narrow(streams(100_003))
    NativeRule(native(unit))(found, FACTORS)
    TORCH(expected, FACTORS)
    torch.testing.assert_close(found.master, expected.master, rtol=1e-5, atol=1e-9)
    for slot in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (getattr(each, slot).view(torch.int16).int() for each in (found, expected))
        assert ((ours - theirs).abs() <= 1).all()
        assert (ours == theirs).double().mean() > 0.999, slot


def test_torchs_rule_is_the_fused_optimizer_of_torch() -> None:
    found = streams(4097)
    parameter = torch.nn.Parameter(found.master.clone())
    rates: dict[str, Any] = {"lr": FACTORS.lr, "betas": FACTORS.betas, "eps": FACTORS.eps}
    optimizer = torch.optim.AdamW([parameter], fused=True, weight_decay=FACTORS.weight_decay, **rates)
    for moment in (found.exp_avg, found.exp_avg_sq):
        moment.zero_()
    for step in range(1, 4):
        parameter.grad = found.grad * step
        optimizer.step()
        TORCH(replace(found, grad=found.grad * step), replace(FACTORS, step=step, grad_scale=1.0))
    assert torch.equal(found.master, parameter)


def test_torchs_rule_cuts_long_runs_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = narrow(streams(3000)), narrow(streams(3000))
    TORCH(expected, FACTORS)
    monkeypatch.setattr(adamw_rule, "_CHUNK", 700)
    TORCH(found, FACTORS)
    assert_same_bits(found, expected)


def whole_tensor(spec: TensorSpec, name: str) -> AdamWStreams:
    """Values of a tensor, which a tied copy of it has, too."""
    generator = torch.Generator().manual_seed(len(name) + 100 * ord(name[0]))
    master, exp_avg, exp_avg_sq, grad = torch.randn(4, math.prod(spec.shape), generator=generator).unbind()
    values = AdamWStreams(master.clone(), exp_avg.clone(), exp_avg_sq.square(), grad.clone())
    return narrow(values, RandomBits.of(3, Piece(spec, Box.whole(spec.shape), 0, True), 0))


@examples(30)
@given(tables(), layouts())
def test_every_layout_gives_the_same_bits(table: tuple[TensorSpec, ...], layout: Layout) -> None:
    """Each run of each rank is updated by itself, and has the bits that the whole tensor got in one update."""
    rule = NativeRule(native(UNITS[-1]))
    before = {spec.name: whole_tensor(spec, spec.alias or spec.name) for spec in table}
    after = {spec.name: whole_tensor(spec, spec.alias or spec.name) for spec in table}
    for values in after.values():
        rule(values, FACTORS)
    for rank in range(layout.world_size):
        plans = buckets(local_params(table, layout, rank), layout)
        for shard in shards(plans, layout, rank):
            found, expected = (
                _run(values[shard.piece.tensor.name], shard.piece, shard.flat) for values in (before, after)
            )
            found = replace(found, bits=RandomBits.of(3, shard.piece, shard.flat[0]))
            rule(found, FACTORS)
            assert_same_bits(found, expected)


def _run(whole: AdamWStreams, piece: Piece, flat: tuple[int, int]) -> AdamWStreams:
    """Copies the values of a run of a box out of those of its tensor."""
    shape, place = piece.tensor.shape, piece.box.slices
    return AdamWStreams(
        **{slot: getattr(whole, slot).view(shape)[place].reshape(-1)[slice(*flat)].clone() for slot in SLOTS}
    )


def train(rule: AdamWRule, values: AdamWStreams, steps: int, to_nearest: bool = False) -> AdamWStreams:
    """Updates with gradients of size 1 that point at 0 in two of three steps."""
    generator = torch.Generator().manual_seed(0)
    factors = AdamWFactors(1, 1e-3, (0.9, 0.999), 1e-8, 0.0, 1.0)
    for step in range(1, steps + 1):
        away = torch.rand(values.grad.shape, generator=generator) < 1 / 3
        values.grad.copy_(values.master.sign() * torch.where(away, -1.0, 1.0))
        rule(values, replace(factors, step=step))
        if to_nearest:
            values.exp_avg_sq.copy_(values.exp_avg_sq.bfloat16())
    return values


def test_thousands_of_updates_follow_fp32_states_and_to_the_nearest_they_stall() -> None:
    """At beta2 = 0.999: the second moment, 1 after many gradients of size 1, and how far parameters have moved."""
    count, steps = 1024, 2500
    rule = NativeRule(native(UNITS[-1]))

    def start() -> AdamWStreams:
        exp_avg, exp_avg_sq, grad = torch.zeros(3, count).unbind()
        return AdamWStreams(torch.full((count,), 3.0), exp_avg, exp_avg_sq, grad)

    exact, stalled = train(rule, start(), steps), train(rule, start(), steps, to_nearest=True)
    found = train(rule, narrow(start()), steps)
    expected = 1 - 0.999**steps
    torch.testing.assert_close(exact.exp_avg_sq, torch.full((count,), expected), rtol=1e-3, atol=0)
    assert abs(found.exp_avg_sq.double().mean() / expected - 1) < 0.005
    assert stalled.exp_avg_sq.max() < 0.5 * expected
    moved = [(3.0 - each.master.double()).mean().item() for each in (exact, found, stalled)]
    assert abs(moved[1] / moved[0] - 1) < 0.01
    assert moved[2] / moved[0] > 1.2


# One rule on all ranks


class Lines(logging.Handler):
    """Keeps the messages of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def chosen_rule(lacking: list[int]) -> tuple[str, list[str]]:
    """Returns the name of this rank's rule, and the lines that it logs; ranks in `lacking` find no compiler."""
    world, log, said = join_world(), logging.getLogger(adamw_rule.__name__), Lines()
    log.addHandler(said)
    found = None if world.rank in lacking else native_adamw()
    with patch.object(adamw_rule, "native_adamw", lambda: found):
        rule = adamw_rule.adamw_rule(torch.device("cpu"), world)
    log.removeHandler(said)
    return "torch" if isinstance(rule, TorchRule) else type(rule).__name__, said.lines


@pytest.mark.parametrize(("lacking", "named"), [([], None), ([2], 2), ([0, 1, 2], 0)])
def test_a_rank_without_a_compiler_makes_all_ranks_use_torchs_rule(
    rank_pool: RankPool, lacking: list[int], named: int | None
) -> None:
    found = rank_pool.run(chosen_rule, 3, lacking=lacking)
    if named is None:
        assert found == [["NativeRule", []]] * 3
        return
    line = (
        f"Rank {named} has no native AdamW, and its log says why: all 3 ranks update with torch's, which takes longer."
    )
    assert found == [["torch", [line]], ["torch", []], ["torch", []]]
