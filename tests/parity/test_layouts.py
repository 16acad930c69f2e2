"""Layouts as data: the covering set, the matrix, files of layouts."""

import json
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ConfigError
from tk.parity.covering import covering_set
from tk.parity.layout import ParityLayout
from tk.parity.layouts import AXES, Matrix, matrix, read_layouts
from tk.parity.subject import Subject


def tuples(rows: list[tuple[int, ...]], strength: int) -> set[tuple[tuple[int, int], ...]]:
    """Returns every choice of `strength` (column, value) pairs of any row."""
    return {pairs for row in rows for pairs in combinations(enumerate(row), strength)}


@st.composite
def some_rows(draw: st.DrawFn) -> list[tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    everything = list(product(*map(range, sizes)))
    return draw(st.lists(st.sampled_from(everything), min_size=1, max_size=60, unique=True))


@given(some_rows(), st.integers(1, 3))
def test_a_covering_set_covers_and_leaves_nothing_out(rows: list[tuple[int, ...]], strength: int) -> None:
    chosen = covering_set(rows, strength)
    assert chosen == sorted(set(chosen)) == covering_set(rows, strength)
    kept = [rows[index] for index in chosen]
    for fewer in range(1, strength + 1):
        assert tuples(kept, fewer) == tuples(rows, fewer)


def test_a_covering_set_is_small_and_prefers_cheap_layouts() -> None:
    rows = list(product(range(3), repeat=4))
    assert 9 <= len(covering_set(rows, 2)) <= 15  # orthogonal arrays need 9
    assert covering_set([(0,), (0,), (0,)], 1, cost=lambda index: -index) == [2]


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
    foreign = 3 * 4 * 3  # dp, ZeRO stages, shard sizes
    assert everything.num_combinations == 3 * 3 * 3 * 4 * 4 * 3 * 2 * 3 * 2 * 3 + foreign
    assert len(AXES) == 11
    assert len(set(everything.layouts)) == len(everything.layouts)
    # By hand. (tp, pp, dp) up to 8 ranks: 3 schedules at pp = 1, 4 beyond; ZeRO 1 only where dp > 1, and from it on as
    # many shard sizes as dp has divisors; at tp = 1 neither sequence parallelism nor fewer kv heads than tp. The rest:
    # 3 kinds of recomputation, tied or not.
    spread = {1: 1 + 2 * 1, 2: 1 + 3 * 2, 4: 1 + 3 * 3}
    expected = sum(spread.values())  # foreign modules
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if tp * pp * dp <= 8:
            schedules, kv = (3 if pp == 1 else 4), (2 if tp == 1 else 3)
            expected += schedules * spread[dp] * kv * (1 if tp == 1 else 2) * 3 * 2
    assert len(everything.layouts) == expected == 7724
    assert everything.left_out["tp x pp x dp is more than 8 ranks"] > 0


def test_both_sets_have_every_shard_size_and_foreign_modules_at_every_stage(
    everything: Matrix, covering: tuple[ParityLayout, ...]
) -> None:
    for layouts in (everything.layouts, covering):
        for foreign, zero in product((False, True), (1, 2, 3)):
            found = {(each.dp, each.shard_size) for each in layouts if (each.foreign, each.zero) == (foreign, zero)}
            assert {shard for _, shard in found} == {0, 1, 2}, (foreign, zero)
            assert {dp for dp, _ in found} >= {2, 4}, (foreign, zero)
        for zero in (2, 3):
            assert any(each.zero == zero and each.dp == 4 and each.shard_size == 2 for each in layouts)


def test_the_default_layouts_cover_all_triples(everything: Matrix, covering: tuple[ParityLayout, ...]) -> None:
    rows = [tuple(getattr(layout, axis) for axis in AXES) for layout in everything.layouts]
    kept = [tuple(getattr(layout, axis) for axis in AXES) for layout in covering]
    assert tuples(kept, 3) == tuples(rows, 3)
    assert len(kept) < 110


def test_a_configuration_of_the_users_keeps_its_model(subject: Subject) -> None:
    theirs = matrix(Subject.of(subject.base, 10, None), 2)
    assert theirs.layouts
    assert {(layout.tied, layout.kv_heads) for layout in theirs.layouts} == {(None, None)}
    heads = subject.base.model_copy(update={"model": subject.base.model.model_copy(update={"intermediate_size": 49})})
    odd = matrix(Subject.of(heads, 10, None), 2)
    assert {layout.tp for layout in odd.layouts} == {1}
    assert any("49 % 2 = 1" in reason for reason in odd.left_out)


def test_the_json_output_is_a_file_of_layouts(
    covering: tuple[ParityLayout, ...], subject: Subject, tmp_path: Path
) -> None:
    layouts = covering[:20]
    path = tmp_path / "again.json"
    path.write_text(json.dumps({"layouts": [{"layout": layout.to_json(), "loss": 0.0} for layout in layouts]}))
    assert read_layouts(path, subject, 8) == layouts
    (tmp_path / "mine.toml").write_text("[[layouts]]\ntp = 2\n[[layouts]]\ntp = 2\n[[layouts]]\npp = 2\nzero = 3\n")
    assert read_layouts(tmp_path / "mine.toml", subject, 8) == (ParityLayout(tp=2), ParityLayout(pp=2, zero=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[layouts]]\ntpp = 2", "layout 1: unknown key 'tpp'; did you mean 'tp'"),
        ("[[layouts]]\ntp = 3", "layout 1: tp = 3 does not fit"),
        ("[[layouts]]\ntp = 8\npp = 2", "more than 8 ranks"),
        ('[[layouts]]\n[[layouts]]\nschedule = "interleaved"', 'layout 2: .*"interleaved" needs 2 or more'),
        ("[[layouts]]\nforeign = true\ntp = 2", "a foreign module supports only dp, zero and shard_size: leave out tp"),
        ("[[layouts]]\nforeign = true\ndp = 3", "4 micro-batches: dp = 3 must divide that"),
        ("layouts = [1]", "layout 1: 1 must be a table"),
        ("tp = 2", 'no list "layouts"'),
        ("[[", "is not valid TOML"),
    ],
)
def test_a_wrong_file_of_layouts_is_refused(subject: Subject, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "layouts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_layouts(path, subject, 8)
    assert str(path) in str(caught.value)
