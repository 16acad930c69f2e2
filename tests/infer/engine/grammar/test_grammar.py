"""The state of a grammar along a sample, over a library's matcher that follows a script."""

import ctypes
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from tk.infer.engine.grammar.grammar import Constraint, FirstState, Grammar, Matcher, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

CONSTRAINT = Constraint("regex", "a+")


class Script:
    """A library's matcher that takes any token until `limit`, and fails with a message."""

    def __init__(self, limit: int = 99, message: str = "") -> None:
        self.limit, self.message = limit, message
        self.taken: list[int] = []
        self.asked: list[int] = []
        self.forced: list[int] = []
        self.looked_ahead = 0
        self.mask_byte = 255

    def deep_copy(self) -> "Script":
        return self

    def consume_token(self, token: int) -> None:
        self.taken.append(token)

    def is_stopped(self) -> bool:
        return len(self.taken) >= self.limit

    def is_error(self) -> bool:
        return bool(self.message)

    def get_error(self) -> str:
        return self.message

    def compute_ff_tokens(self) -> list[int]:
        self.looked_ahead += 1
        return self.forced

    def validate_tokens(self, tokens: list[int]) -> int:
        self.asked += tokens
        return int(tokens[0] % 2)

    def consume_tokens(self, tokens: list[int]) -> None:
        self.taken += tokens

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        ctypes.memset(address, self.mask_byte, num_bytes)


class Copied(Script):
    """A script whose copies are others, as the library's are."""

    def deep_copy(self) -> "Script":
        return Copied(self.limit, self.message)


def matcher(script: Script, vocab_size: int = 65) -> Matcher:
    return Grammar(CONSTRAINT, cast("LLMatcher", script), vocab_size).start()


def test_a_mask_has_a_bit_for_every_token() -> None:
    script = Script()
    assert [matcher(script, size).num_words for size in (1, 32, 33, 65)] == [1, 1, 2, 3]
    mask = np.zeros(3, np.uint32)
    matcher(script).write_mask(mask)
    assert mask.tolist() == [2**32 - 1] * 3
    assert script.num_bytes == 12 + 256 // 8, "the library has a token for each byte too"


def test_a_mask_without_a_token_of_the_model_is_an_error() -> None:
    script = Script()
    script.mask_byte = 0
    state = matcher(script)
    assert state.error is None
    state.write_mask(np.zeros(3, np.uint32))
    assert "no token of the model's vocabulary does" in str(state.error)


def test_a_token_of_the_library_alone_is_no_candidate() -> None:
    script = Script()
    script.forced = [65]
    assert matcher(script).first_allowed([7]) is None


@pytest.mark.parametrize(("keep", "then"), [(False, [[9, 5], [9, 1, 2]]), (True, [[9], [9, 5]])])
def test_the_first_token_with_a_text_may_have_other_bytes(keep: bool, then: list[list[int]]) -> None:
    first, inside = Script(), Script()
    state = FirstState(cast("LLMatcher", first), {5: [1, 2]}, frozenset({9}))
    made = Grammar(CONSTRAINT, cast("LLMatcher", inside), 65, state).start(keep)
    made.take(9)  # a special token, which may have no text
    made.take(5)
    assert [first.taken, inside.taken] == then
    made.take(5)
    assert [first.taken, inside.taken] == [then[0], [*then[1], 5]]


@pytest.mark.parametrize(
    ("candidates", "found", "asked"), [([4, 6, 7, 9], 7, [4, 6, 7]), ([4, -1, 5], None, [4]), ([], None, [])]
)
def test_the_first_candidate_that_may_follow_is_found(
    candidates: list[int], found: int | None, asked: list[int]
) -> None:
    script = Script()
    assert matcher(script).first_allowed(candidates) == found
    assert script.asked == asked


def test_where_one_token_alone_may_follow_no_candidate_counts() -> None:
    script = Script()
    script.forced = [8, 5]
    state = matcher(script)
    state.look_ahead()
    assert [state.first_allowed([7]), state.first_allowed([])] == [8, 8]
    assert (script.asked, script.looked_ahead) == ([], 1)
    script.forced = []
    state.take(8)
    assert state.first_allowed([7]) == 7
    assert script.looked_ahead == 2


class Phrase(Script):
    """A script that forces the tokens of a text, of which it names some at once, but for those that are 0."""

    def __init__(self, text: list[int], at_once: int = 3, taken: tuple[int, ...] = ()) -> None:
        super().__init__(len(text))
        self.text, self.at_once, self.taken = text, at_once, list(taken)

    def deep_copy(self) -> "Script":
        return Phrase(self.text, self.at_once, tuple(self.taken))

    def is_error(self) -> bool:
        return any(token not in (0, taken) for token, taken in zip(self.text, self.taken, strict=False))

    def compute_ff_tokens(self) -> list[int]:
        rest = self.text[len(self.taken) :][: self.at_once]
        return rest[: rest.index(0)] if 0 in rest else rest


@pytest.mark.parametrize("at_once", [1, 3, 9])
def test_a_chain_goes_on_while_one_token_alone_may_follow(at_once: int) -> None:
    state = matcher(Phrase([1, 2, 3, 4, 0, 5, 6, 70, 7], at_once))
    assert state.forced_chain(9) == [1, 2, 3, 4]
    assert state.forced_chain(2) == [1, 2]
    assert state.forced_chain(0) == []
    for token in (1, 2, 3, 4, 9):
        state.take(token)
    assert state.forced_chain(9) == [5, 6], "70 is a token of the library alone"
    assert matcher(Phrase([1, 2], at_once)).forced_chain(9) == [1, 2], "the text is complete then"


def test_states_ahead_change_nothing_before_and_are_taken_up() -> None:
    state = matcher(Phrase([1, 0, 3]))
    ahead = state.after(1)
    assert ahead is state.after(1)
    assert [state.look_ahead(), ahead.look_ahead(), ahead.after(8).look_ahead()] == [[1], [], [3]]
    assert state.after(2).error is not None
    assert state.error is None
    state.after(1).after(8)
    state.take(1)
    after = state.after(8)
    assert [state.look_ahead(), after.look_ahead()] == [[], [3]]
    state.take(7)  # another one than was looked at
    assert state.look_ahead() == [3]
    state.take(3)
    assert state.is_complete
    assert not after.is_complete


def test_states_ahead_have_the_first_token_of_a_text_too() -> None:
    first, inside = Phrase([0, 0, 0]), Phrase([9, 1, 2])
    state = FirstState(cast("LLMatcher", first), {5: [1, 2]}, frozenset({9}))
    made = Grammar(CONSTRAINT, cast("LLMatcher", inside), 65, state).start()
    ends = [made.is_complete, made.after(9).after(5).is_complete]
    for token in (9, 5):
        made.take(token)
        ends.append(made.is_complete)
    assert ends == [False, True, False, True]
    assert made.error is None


def test_a_sample_is_complete_when_the_grammar_stops_without_an_error() -> None:
    script = Script(limit=2)
    state = matcher(script)
    for token in (5, 6):
        assert not state.is_complete
        state.take(token)
    assert script.taken == [5, 6]
    assert state.is_complete
    assert state.error is None
    script.message = "too many states"
    assert not state.is_complete


def test_a_grammar_that_cannot_go_on_says_why() -> None:
    error = matcher(Script(message="too many states\n<state>\n a dump of many lines")).error
    assert error is not None
    assert error.field == "regex"
    assert "became too complex in the middle of a sample (too many states)" in str(error)


def test_every_sample_has_a_state_of_its_own() -> None:
    start = Copied()
    grammar = Grammar(CONSTRAINT, cast("LLMatcher", start), 65)
    one, two = grammar.start(), grammar.start()
    one.take(5)
    assert start.taken == []
    assert one is not two
    assert not two.is_complete


def test_the_librarys_message_is_one_line_without_its_states() -> None:
    assert first_line("lexer\n  error.\n<non-verbose>x</non-verbose>") == "lexer error"
    assert first_line("plain") == "plain"
