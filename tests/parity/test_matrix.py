"""The matrix of layouts: its members and reasons, and the default set among them."""

from collections.abc import Iterable
from itertools import product
from random import Random

import pytest

from tk.parity.axes import AXES, FOREIGN_AXES
from tk.parity.layout import ParityLayout
from tk.parity.matrix import LayoutSpace, Matrix, matrix, rejection
from tk.parity.space import bits
from tk.parity.subject import Subject
from tk.tests.parity.test_covering import tuples


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject.built_in(tmp_path_factory.mktemp("nothing is written"), 10, "fp32")


@pytest.fixture(scope="module")
def everything(subject: Subject) -> Matrix:
    return matrix(subject, 8)


@pytest.fixture(scope="module")
def covering(everything: Matrix) -> tuple[ParityLayout, ...]:
    """The default layouts."""
    return everything.covering()


def num_spreads(tp: int, data: int) -> int:
    """Returns in how many ways experts can be spread: over ep parts, each cut for tp ranks, 1 or 2."""
    sizes = {(ep, size) for ep in (1, 2, 4) for size in (tp if ep == 1 else 1, 1, 2)}
    return sum(tp * data % (ep * size) == 0 for ep, size in sizes)


def test_every_combination_is_a_layout_or_left_out_for_a_reason(everything: Matrix) -> None:
    places = 3**3 * 2  # of states, gradients and parameters; of activations
    foreign = 3 * 4 * 3 * places  # dp, ZeRO stages, shard sizes
    kinds = 4 * 2 * 2 * 2 * 2 * 3  # with experts, documents, windows, answers, rows of an odd length, adapters
    assert (
        everything.num_combinations
        == 3 * 3 * 3 * 3 * 2 * 4 * 4 * 3 * 2 * 3 * 2 * 3 * kinds * 2 * places * 3 * 3 + foreign
    )
    assert len(AXES) == 25
    # By hand. (tp, pp, dp, cp) up to 8 ranks: 3 schedules at pp = 1, 4 beyond; 2 modes where cp > 1; ZeRO 1 only where
    # dp x cp > 1, and from it on as many shard sizes as that has divisors, up to 3; at tp = 1 neither sequence
    # parallelism nor fewer kv heads than tp, and without cp no sequence parallelism in rows of an odd length. The rest:
    # 3 kinds of recomputation, tied or not, with adapters or not; dense models below stage 3 also with adapters on a
    # base in codes. States on the device, or in 2 other places, then gradients in any of 3, and at stage 3 parameters
    # in any of 3. Activations in any of 2, whatever the rest is. Dense MLPs are computed whole or in blocks; experts of
    # 3 architectures, of which one has no windows, are spread as the ranks of a stage allow.
    most, stage_3 = 1 + 2 * 3, 1 + 2 * 3 * 3
    spread = {1: 2 * most + stage_3, 2: 1 * most + 2 * (2 * most + stage_3), 4: 1 * most + 3 * (2 * most + stage_3)}
    expected = sum(spread.values())  # foreign modules
    spread[8] = spread[4]
    coded = {1: 2 * most, 2: 1 * most + 2 * 2 * most, 4: 1 * most + 3 * 2 * most, 8: 1 * most + 3 * 2 * most}
    for tp, pp, dp, cp in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if tp * pp * dp * cp <= 8:
            schedules, kv, modes = (3 if pp == 1 else 4), (2 if tp == 1 else 3), (1 if cp == 1 else 2)
            rows = 2 if tp == 1 else 3 if cp == 1 else 4
            models = 2 * 2 + num_spreads(tp, dp * cp) * (2 * 2 + 1)
            cuts = schedules * modes * kv * rows * 3 * 2
            expected += cuts * (spread[dp * cp] * models * 2 * 2 * 2 + coded[dp * cp] * 2 * 2 * 2 * 2)
    assert everything.num_layouts == 2 * expected == 229_701_256
    assert everything.left_out()["tp x pp x dp x cp is more than 8 ranks"] > 0
    assert everything.num_layouts + everything.left_out().total() == everything.num_combinations


@pytest.mark.parametrize("count", [400, pytest.param(40_000, marks=pytest.mark.matrix)])
def test_rules_on_few_axes_leave_out_what_the_check_of_a_whole_layout_refuses(
    everything: Matrix, subject: Subject, count: int
) -> None:
    random, num_valid = Random(0), 0
    for space in everything.spaces:
        for _ in range(count):
            mask = sum(random.choice(list(bits(column))) for column in space.columns)
            row = space.row(mask)
            named = dict(zip(space.axes, row, strict=True))
            stated = any(
                rule.reason(*map(named.get, rule.axes))
                for axis in AXES.values()
                for rule in axis.rules
                if set(rule.axes) <= set(named)
            )
            valid = not stated and not rejection(space.layout(row), subject, 8)
            assert list(space.solutions(mask, space.in_order)) == ([mask] if valid else []), named
            num_valid += valid
    assert num_valid > count / 20


def test_the_default_set_has_every_shard_size_and_foreign_modules_at_every_stage(
    covering: tuple[ParityLayout, ...],
) -> None:
    for foreign, zero in product((False, True), (1, 2, 3)):
        found = [layout for layout in covering if (layout.foreign, layout.zero) == (foreign, zero)]
        assert {layout.shard_size for layout in found} == {0, 1, 2}, (foreign, zero)
        assert {layout.dp for layout in found} >= {2, 4}, (foreign, zero)
        assert {layout.offload_optimizer for layout in found} == {"none", "cpu", "disk"}, (foreign, zero)
    assert {layout.offload_parameters for layout in covering if layout.foreign} == {"none", "cpu", "disk"}
    assert {layout.offload_activations for layout in covering if layout.foreign} == {"none", "cpu"}
    for zero in (2, 3):
        assert any(each.zero == zero and each.dp == 4 and each.shard_size == 2 for each in covering)


def test_the_default_set_has_fewer_kv_heads_than_context_parallel_ranks(
    covering: tuple[ParityLayout, ...], subject: Subject
) -> None:
    for mode in ("gather", "ulysses"):
        layouts = [each for each in covering if each.cp_mode == mode and each.cp > 1]
        heads = {(each.cp, subject.config(each).model.num_key_value_heads // each.tp) for each in layouts}
        assert any(kv_heads < cp for cp, kv_heads in heads), mode


def test_the_default_set_is_small_and_distinct(covering: tuple[ParityLayout, ...]) -> None:
    assert len(set(covering)) == len(covering) <= 150
    assert sum(layout.num_ranks for layout in covering) <= 1100


@pytest.mark.matrix
def test_the_default_set_is_the_same_again(everything: Matrix, covering: tuple[ParityLayout, ...]) -> None:
    assert covering == everything.covering()


def values(layouts: Iterable[ParityLayout], axes: Iterable[str]) -> list[tuple[object, ...]]:
    return [tuple(getattr(layout, axis) for axis in axes) for layout in layouts]


def uncovered(kept: Iterable[ParityLayout], others: Iterable[ParityLayout], axes: Iterable[str]) -> set[object]:
    """Returns the triples and pairs of values that `others` have and `kept` lack, as far as their strength wants."""
    axes = list(axes)
    triples = [axis for axis in axes if AXES[axis].strength == 3]
    theirs, ours = tuple(others), tuple(kept)
    return set().union(
        *(
            tuples(values(theirs, some), strength) - tuples(values(ours, some), strength)
            for some, strength in ((triples, 3), (axes, 2))
        )
    )


@pytest.mark.matrix
def test_layouts_cover_all_triples_and_all_pairs_with_offload(subject: Subject) -> None:
    """Against a list of all layouts, so of fewer axes."""
    free = {"sequence_parallel", "recompute", "tied", "kv_heads", "experts", "packing", "window", "cp_mode"}
    free |= {"mlp_block", "targets", "seq_len", "lora"}
    space = LayoutSpace(subject, 8, {name: axis.values for name, axis in AXES.items() if name not in free})
    layouts, kept = list(map(space.layout, space.rows())), list(space.covering())
    assert set(kept) <= set(layouts)
    assert not uncovered(kept, layouts, space.axes)


@pytest.mark.parametrize("count", [100, pytest.param(3000, marks=pytest.mark.matrix)])
def test_no_layout_has_a_triple_that_the_default_set_lacks(
    everything: Matrix, covering: tuple[ParityLayout, ...], subject: Subject, count: int
) -> None:
    """Of all axes there are too many layouts to list, so with random ones."""
    random, (space, _) = Random(0), everything.spaces

    def branches(mask: int) -> list[int]:
        column = random.choice([column for column in space.columns if (mask & column).bit_count() > 1])
        parts = list(bits(mask & column))
        return [mask & ~column | part for part in random.sample(parts, len(parts))]

    found = [space.layout(space.row(next(space.solutions(space.all, branches)))) for _ in range(count)]
    kept = [layout for layout in covering if not layout.foreign]
    assert len(set(found)) > count * 0.9
    assert not any(rejection(layout, subject, 8) for layout in [*found, *kept])
    assert not uncovered(kept, found, space.axes)
    assert uncovered(kept[: len(kept) // 2], found, space.axes), "a smaller set would be seen"


def test_foreign_modules_cover_all_pairs(everything: Matrix, covering: tuple[ParityLayout, ...]) -> None:
    layouts, kept = (
        [each for each in some if each.foreign]
        for some in (map(everything.spaces[1].layout, everything.spaces[1].rows()), covering)
    )
    assert tuples(values(kept, FOREIGN_AXES), 2) == tuples(values(layouts, FOREIGN_AXES), 2)


def test_a_configuration_of_the_users_keeps_its_model(subject: Subject) -> None:
    theirs = matrix(Subject.of(subject.base, 10, None), 2)
    assert theirs.num_layouts > 0
    assert {(layout.tied, layout.kv_heads, layout.foreign) for layout in theirs.layouts()} == {(None, None, False)}
    assert {(layout.experts, layout.packing, layout.window) for layout in theirs.layouts()} == {(None, None, None)}
    heads = subject.base.model_copy(update={"model": subject.base.model.model_copy(update={"intermediate_size": 49})})
    odd = matrix(Subject.of(heads, 10, None), 2)
    assert {layout.tp for layout in odd.layouts()} == {1}
    assert any("49 % 2 = 1" in reason for reason in odd.left_out())
