"""Counts of tokens that grow with an output, against collections.Counter."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.step.slot_entries import TokenCounts

tokens = st.lists(st.integers(0, 300), max_size=400)


@given(tokens, st.lists(tokens, max_size=4))
def test_counts_are_those_of_a_counter(prompt: list[int], outputs: list[list[int]]) -> None:
    counts, expected = TokenCounts(dict.fromkeys(prompt, 0)), Counter(dict.fromkeys(prompt, 0))
    for output in outputs:
        counts.add(output)
        expected.update(output)
        assert dict(zip(*(column.tolist() for column in counts.columns()), strict=True)) == expected
        assert len(counts) == len(expected)


@given(tokens, tokens, tokens)
def test_other_counts_leave_these_as_they_are(prompt: list[int], output: list[int], more: list[int]) -> None:
    counts, together = TokenCounts(dict.fromkeys(prompt, 0)), TokenCounts(dict.fromkeys(prompt, 0))
    counts.add(output)
    before = [column.tolist() for column in counts.columns()]
    together.add([*output, *more])
    assert [c.tolist() for c in counts.plus(more).columns()] == [c.tolist() for c in together.columns()]
    assert [column.tolist() for column in counts.columns()] == before


def test_no_tokens_are_empty_columns() -> None:
    assert [column.shape for column in TokenCounts().columns()] == [(0,), (0,)]
