"""The matrix of layouts: its members and reasons, and the default set among them."""

from itertools import product

import pytest

from tk.parity.layout import ParityLayout
from tk.parity.matrix import AXES, REPEATS, LayoutSpace, Matrix, matrix, rejection
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


def test_every_combination_is_a_layout_or_left_out_for_a_reason(everything: Matrix) -> None:
    foreign = 3 * 4 * 3 * 3  # dp, ZeRO stages, shard sizes, places of states
    assert everything.num_combinations == 3 * 3 * 3 * 4 * 4 * 3 * 2 * 3 * 2 * 3 * 3 + foreign
    assert len(AXES) == 12
    # By hand. (tp, pp, dp) up to 8 ranks: 3 schedules at pp = 1, 4 beyond; ZeRO 1 only where dp > 1, and from it on as
    # many shard sizes as dp has divisors; at tp = 1 neither sequence parallelism nor fewer kv heads than tp. The rest:
    # 3 kinds of recomputation, tied or not, and 3 places of states.
    spread = {1: 1 + 2 * 1, 2: 1 + 3 * 2, 4: 1 + 3 * 3}
    expected = sum(spread.values())  # foreign modules
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if tp * pp * dp <= 8:
            schedules, kv = (3 if pp == 1 else 4), (2 if tp == 1 else 3)
            expected += schedules * spread[dp] * kv * (1 if tp == 1 else 2) * 3 * 2
    assert everything.num_layouts == 3 * expected == 23_172
    assert everything.left_out()["tp x pp x dp is more than 8 ranks"] > 0
    assert everything.num_layouts + everything.left_out().total() == everything.num_combinations


@pytest.mark.parametrize("stride", [301, pytest.param(1, marks=pytest.mark.matrix)])
def test_rules_on_few_axes_leave_out_what_the_check_of_a_whole_layout_refuses(
    everything: Matrix, subject: Subject, stride: int
) -> None:
    for space in everything.spaces:
        rows = set(space.rows())
        for row in list(product(*space.axes.values()))[::stride]:
            named = dict(zip(space.axes, row, strict=True))
            repeats = any(rule.reason(*map(named.get, rule.axes)) for rule in REPEATS)
            assert (row in rows) == (not repeats and not rejection(space.layout(row), subject, 8)), named


def test_the_default_set_has_every_shard_size_and_foreign_modules_at_every_stage(
    covering: tuple[ParityLayout, ...],
) -> None:
    for foreign, zero in product((False, True), (1, 2, 3)):
        found = [layout for layout in covering if (layout.foreign, layout.zero) == (foreign, zero)]
        assert {layout.shard_size for layout in found} == {0, 1, 2}, (foreign, zero)
        assert {layout.dp for layout in found} >= {2, 4}, (foreign, zero)
        assert {layout.offload for layout in found} == {"none", "cpu", "disk"}, (foreign, zero)
    for zero in (2, 3):
        assert any(each.zero == zero and each.dp == 4 and each.shard_size == 2 for each in covering)


def test_the_default_set_is_small_and_distinct(everything: Matrix, covering: tuple[ParityLayout, ...]) -> None:
    assert len(set(covering)) == len(covering) <= 110
    assert sum(layout.num_ranks for layout in covering) <= 720
    assert covering == everything.covering()


def test_layouts_cover_all_triples_of_axes_that_rules_bind(subject: Subject) -> None:
    axes = {axis: AXES[axis] for axis in ("tp", "pp", "dp", "schedule", "zero", "shard_size", "offload")}
    space = LayoutSpace(subject, 8, axes)
    kept = [tuple(getattr(layout, axis) for axis in axes) for layout in space.covering()]
    assert tuples(kept, 3) == tuples(list(space.rows()), 3)


@pytest.mark.matrix
def test_the_default_layouts_cover_all_triples(everything: Matrix, covering: tuple[ParityLayout, ...]) -> None:
    layouts = tuple(everything.layouts())
    assert set(covering) <= set(layouts)
    rows, kept = ([tuple(getattr(one, axis) for axis in AXES) for one in some] for some in (layouts, covering))
    assert tuples(kept, 3) == tuples(rows, 3)
    decoders = [[row for row in some if not row[-1]] for some in (rows, kept)]
    assert tuples(decoders[0], 3) == tuples(decoders[1], 3), "none is left to foreign modules"


def test_a_configuration_of_the_users_keeps_its_model(subject: Subject) -> None:
    theirs = matrix(Subject.of(subject.base, 10, None), 2)
    assert theirs.num_layouts > 0
    assert {(layout.tied, layout.kv_heads, layout.foreign) for layout in theirs.layouts()} == {(None, None, False)}
    heads = subject.base.model_copy(update={"model": subject.base.model.model_copy(update={"intermediate_size": 49})})
    odd = matrix(Subject.of(heads, 10, None), 2)
    assert {layout.tp for layout in odd.layouts()} == {1}
    assert any("49 % 2 = 1" in reason for reason in odd.left_out())
