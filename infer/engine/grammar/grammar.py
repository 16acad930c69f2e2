"""Constraints as masks: a grammar that was built for a vocabulary, and its state along the tokens of one sample.

The grammar library is of the extra `structured`; this module needs it only for types.
"""

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ....core.errors import InvalidRequest
from ....core.integers import ceil_div

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "grammar"]
NO_TOKEN: Final = "NoExtension"  # the library's word for a text that must go on and that no token continues
# A token makes a state or two of a grammar whose texts differ much, of which 50,000 are allowed (see compiler.py).
_WORN_TOKENS: Final = 8192
# The library counts the work of steps from one mask to the next, of all samples together. Samples mostly need no mask.
_TOKENS_OF_MASK: Final = 64
_TOKENS_OF_START: Final = 256  # of a sample that begins, which may have many
MASK_WORD: Final = 32  # tokens of a word of a mask
ALL_TOKENS: Final = np.uint32(2**MASK_WORD - 1)  # a word of a mask that allows its 32 tokens
NUM_BYTES: Final = 256  # the library has a token for each byte behind those of the model (see `SpelledTokens`)


@dataclass(frozen=True)
class Constraint:
    """The texts that a request allows: a JSON Schema, a regular expression or a Lark grammar, by the wire's name."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class FirstState:
    """The state before the first token of a text, if tokens have other bytes there than inside the text.

    Attributes:
        state: the library's matcher for the vocabulary of the first token.
        spelled: for each token that has other bytes there, tokens of the library with these bytes inside a text.
        special_ids: the tokens that texts show only if they are asked to.
    """

    state: "LLMatcher"
    spelled: Mapping[int, list[int]]
    special_ids: frozenset[int]


class Grammar:
    """A constraint that was built for a vocabulary.

    All samples share its states, which are made as texts need them, up to a limit.

    Attributes:
        constraint: what it was built from.
        inside: the library's matcher before the first token; nothing changes it.
        vocab_size: the number of tokens of the model's vocabulary.
        first: the state until a token has a text, which nothing changes either; None if it is `inside`.
        num_tokens: the tokens of all samples so far, with some for each sample that has begun.
    """

    def __init__(
        self, constraint: Constraint, inside: "LLMatcher", vocab_size: int, first: FirstState | None = None
    ) -> None:
        self.constraint, self.inside, self.vocab_size, self.first = constraint, inside, vocab_size, first
        self.num_tokens = 0

    @property
    def is_worn(self) -> bool:
        """Whether the next sample should have another one's states, so that none fails for those that others made."""
        return self.num_tokens >= _WORN_TOKENS

    def start(self, keep_special_tokens: bool = False) -> "Matcher":
        """Returns the state before the first token, of a sample of its own, whose text may show special tokens."""
        self.num_tokens += _TOKENS_OF_START
        return Matcher(self, keep_special_tokens)


class Matcher:
    """The state of a grammar along one sample. Only the engine's thread uses it.

    Args:
        grammar: the grammar, which counts the sample's tokens.
        keep_special_tokens: whether texts show special tokens.
    """

    def __init__(self, grammar: Grammar, keep_special_tokens: bool = False) -> None:
        self._grammar, self._first, self._keep = grammar, grammar.first, keep_special_tokens
        self._inside = grammar.inside.deep_copy()
        self._state = self._inside if self._first is None else self._first.state.deep_copy()  # for the next token
        self._has_none = False  # whether a mask allowed no token
        self._forced: list[int] | None = None  # tokens of which the first alone may follow; None = they are not known
        self._next: tuple[int, Matcher] | None = None  # the last answer of `after`, and its token
        self.num_words = ceil_div(grammar.vocab_size, MASK_WORD)

    @property
    def is_complete(self) -> bool:
        """Whether no token but EOS may follow."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def error(self) -> InvalidRequest | None:
        """The reason why the grammar cannot go on, if it cannot; then every later mask is void."""
        if not (self._has_none or self._state.is_error()):
            return None
        field, why = self._grammar.constraint.kind, first_line(self._state.get_error())
        if self._has_none or why.startswith(NO_TOKEN):
            return InvalidRequest(
                f"{field} came to a place where the text must go on and no token of the model's vocabulary does. Allow "
                "characters that the vocabulary has.",
                field=field,
            )
        return InvalidRequest(
            f"{field} became too complex in the middle of a sample ({why}). Simplify it: shorter bounds, fewer "
            "alternatives that begin alike.",
            field=field,
        )

    def take(self, token: int) -> None:
        """Takes the next token of the sample; `error` is set if the grammar does not allow it."""
        found, self._next = self._next, None
        if found is not None and found[0] == token:
            vars(self).update(vars(found[1]))  # it has taken the token already
            return
        self._forced = None
        self._state.consume_token(token)
        self._count()
        if self._grammar.num_tokens % _TOKENS_OF_MASK == 0 and not self._state.is_error():
            mask_of(self._state, self.num_words)
        if self._first is None or self._state.is_error():
            return
        self._inside.consume_tokens(self._first.spelled.get(token, [token]))
        if self._keep or token not in self._first.special_ids:  # else the next one is still the first of the text
            self._first, self._state = None, self._inside

    def after(self, token: int) -> "Matcher":
        """Returns the state that `take` of a token would lead to, where a later one goes on without more work."""
        if self._next is None or self._next[0] != token:
            other = copy(self)
            other._inside = self._inside.deep_copy()
            other._state = other._inside if self._first is None else self._state.deep_copy()
            other.take(token)
            self._next = token, other
        return self._next[1]

    def forced_chain(self, most: int) -> list[int]:
        """Returns the tokens that alone may follow, one after another.

        The library names several tokens at once. Behind each of them it may name others than before, which count: they
        are those of a step of their own.
        """
        chain, state = list[int](), self
        while len(chain) < most and not state.is_complete and (forced := state.look_ahead()):
            if forced[0] >= self._grammar.vocab_size or state.after(forced[0]).error is not None:
                break
            chain.append(forced[0])
            state = state.after(forced[0])
        return chain

    def look_ahead(self) -> list[int]:
        """Finds out whether one token alone may follow, which takes longer than the rest of `first_allowed`.

        Returns:
            Tokens of which the first alone may follow, or none.
        """
        if self._forced is None:
            self._forced = self._state.compute_ff_tokens()
        return self._forced

    def first_allowed(self, candidates: Sequence[int]) -> int | None:
        """Returns the first of some tokens that may follow, or the only token that may; None if there is neither.

        The tokens that may follow are those of the mask, but to find one takes microseconds.

        Args:
            candidates: token ids, best first; those behind a negative one do not count.
        """
        if forced := self.look_ahead():
            return forced[0] if forced[0] < self._grammar.vocab_size else None  # one that only the library has
        is_allowed = self._state.validate_tokens
        for token in candidates:
            if token < 0:
                return None
            if is_allowed([token]):
                return token
        return None

    def write_mask(self, mask_W: npt.NDArray[Any]) -> None:
        """Writes which tokens may follow: uint32 [num_words], contiguous, bit id % 32 of word id // 32.

        EOS may follow exactly where the text so far is one that the constraint allows. Other threads run meanwhile.
        """
        mask_W[:] = mask_of(self._state, len(mask_W))
        self._has_none = not mask_W.any()
        self._count()

    def _count(self) -> None:
        self._grammar.num_tokens += _WORN_TOKENS if self._state.is_error() else 1


def first_line(message: str) -> str:
    """Returns the message of the library as one line without its dump of states."""
    return " ".join(re.split("<(?:state|non-verbose)", message)[0].split()).rstrip(".")


def mask_of(state: "LLMatcher", num_words: int) -> npt.NDArray[Any]:
    """Returns which tokens of the model may follow: uint32 [num_words]; other threads run meanwhile."""
    mask = np.empty(num_words + NUM_BYTES // MASK_WORD, np.uint32)
    state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask[:num_words]
