"""Constraints as masks: a grammar that was built for a vocabulary, and its state along the tokens of one sample.

The grammar library is of the extra `structured`; this module needs it only for types.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ....core.errors import InvalidRequest
from ....core.integers import ceil_div
from .spelled_tokens import mask_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "grammar"]
NO_TOKEN: Final = "NoExtension"  # the library's word for a text that must go on and that no token continues
# A token makes a state or two of a grammar whose texts differ much, of which 50,000 are allowed (see compiler.py).
_WORN_TOKENS: Final = 8192
# The library counts the work of steps from one mask to the next, of all samples together. Samples mostly need no mask.
_TOKENS_OF_MASK: Final = 64
_TOKENS_OF_START: Final = 256  # of a sample that begins, which may have many
ALL_TOKENS: Final = np.uint32(2**32 - 1)  # a word of a mask that allows its 32 tokens


@dataclass(frozen=True)
class Constraint:
    """The texts that a request allows: a JSON Schema, a regular expression or a Lark grammar, by the wire's name."""

    kind: Kind
    text: str

    @property
    def field(self) -> str:
        """The field of the wire."""
        return f"sampling.{self.kind}"


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


@dataclass
class Wear:
    """The use of a grammar's states, which all samples share: they are made as texts need them, up to a limit.

    Attributes:
        tokens: the tokens of all samples so far, with some for each sample that has begun.
    """

    tokens: int = 0

    @property
    def is_worn(self) -> bool:
        """Whether later samples need states of their own, so that none fails for those that others made."""
        return self.tokens >= _WORN_TOKENS


class Matcher:
    """The state of a grammar along one sample. Only the engine's thread uses it.

    Args:
        constraint: the constraint.
        state: the library's matcher, which this object owns.
        vocab_size: the number of tokens of the model's vocabulary.
        first: the state until a token has a text, which this object owns too; None if it is `state`.
        keep_special_tokens: whether texts show special tokens.
        wear: counts the tokens; None = a count of this sample alone.
    """

    def __init__(
        self,
        constraint: Constraint,
        state: "LLMatcher",
        vocab_size: int,
        first: FirstState | None = None,
        keep_special_tokens: bool = False,
        wear: Wear | None = None,
    ) -> None:
        self._constraint, self._wear = constraint, wear or Wear()
        self._first, self._inside, self._keep = first, state, keep_special_tokens
        self._state = state if first is None else first.state  # the one for the next token
        self._has_none = False  # whether a mask allowed no token
        self._forced: list[int] | None = None  # tokens of which the first alone may follow; None = they are not known
        self._vocab_size, self.num_words = vocab_size, ceil_div(vocab_size, 32)

    @property
    def is_complete(self) -> bool:
        """Whether no token but EOS may follow."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def error(self) -> InvalidRequest | None:
        """The reason why the grammar cannot go on, if it cannot; then every later mask is void."""
        if not (self._has_none or self._state.is_error()):
            return None
        why = first_line(self._state.get_error())
        if self._has_none or why.startswith(NO_TOKEN):
            return InvalidRequest(
                f"{self._constraint.field} came to a place where the text must go on and no token of the model's "
                "vocabulary does. Allow characters that the vocabulary has.",
                field=self._constraint.field,
            )
        return InvalidRequest(
            f"{self._constraint.field} became too complex in the middle of a sample ({why}). Simplify it: shorter "
            "bounds, fewer alternatives that begin alike.",
            field=self._constraint.field,
        )

    def take(self, token: int) -> None:
        """Takes the next token of the sample; `error` is set if the grammar does not allow it."""
        self._forced = None
        self._state.consume_token(token)
        self._count()
        if self._wear.tokens % _TOKENS_OF_MASK == 0 and not self._state.is_error():
            mask_of(self._state, self.num_words)
        if self._first is None or self._state.is_error():
            return
        self._inside.consume_tokens(self._first.spelled.get(token, [token]))
        if self._keep or token not in self._first.special_ids:  # else the next one is still the first of the text
            self._first, self._state = None, self._inside

    def look_ahead(self) -> None:
        """Finds out whether one token alone may follow, which takes longer than the rest of `first_allowed`."""
        if self._forced is None:
            self._forced = self._state.compute_ff_tokens()

    def first_allowed(self, candidates: Sequence[int]) -> int | None:
        """Returns the first of some tokens that may follow, or the only token that may; None if there is neither.

        The tokens that may follow are those of the mask, but to find one takes microseconds.

        Args:
            candidates: token ids, best first; those behind a negative one do not count.
        """
        if self._forced is None:
            self.look_ahead()
        if self._forced:
            return self._forced[0] if self._forced[0] < self._vocab_size else None  # one that only the library has
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
        self._wear.tokens += _WORN_TOKENS if self._state.is_error() else 1


class Grammar:
    """A constraint that was built for a vocabulary.

    Args:
        constraint: the constraint.
        start: the library's matcher before the first token; nothing changes it.
        vocab_size: the number of tokens of the model's vocabulary.
        first: the state until a token has a text, which nothing changes either; None if it is `start`.
    """

    def __init__(
        self, constraint: Constraint, start: "LLMatcher", vocab_size: int, first: FirstState | None = None
    ) -> None:
        self._constraint, self._start, self._vocab_size, self._first = constraint, start, vocab_size, first
        self._wear = Wear()

    @property
    def is_worn(self) -> bool:
        """Whether the states of the grammar have been used so much that the next sample should have another one's."""
        return self._wear.is_worn

    def start(self, keep_special_tokens: bool = False) -> Matcher:
        """Returns the state before the first token, of a sample of its own."""
        first = None if self._first is None else replace(self._first, state=self._first.state.deep_copy())
        self._wear.tokens += _TOKENS_OF_START
        state = self._start.deep_copy()
        return Matcher(self._constraint, state, self._vocab_size, first, keep_special_tokens, self._wear)


def first_line(message: str) -> str:
    """Returns the message of the library as one line without its dump of states."""
    return " ".join(re.split("<(?:state|non-verbose)", message)[0].split()).rstrip(".")
