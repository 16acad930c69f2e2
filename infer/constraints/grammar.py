"""Constraints as masks: a grammar that was built for a vocabulary, and its state along the tokens of one sample.

The grammar library is of the extra `structured`; this module needs it only for types.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ...core.errors import InvalidRequest
from ...core.integers import ceil_div

if TYPE_CHECKING:
    from llguidance import LLMatcher

Kind = Literal["json_schema", "regex", "grammar"]
NO_TOKEN: Final = "NoExtension"  # the library's word for a text that must go on and that no token continues
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


class Matcher:
    """The state of a grammar along one sample. Only the engine's thread uses it.

    Args:
        constraint: the constraint.
        state: the library's matcher, which this object owns.
        vocab_size: the number of tokens of the model's vocabulary.
    """

    def __init__(self, constraint: Constraint, state: "LLMatcher", vocab_size: int) -> None:
        self._constraint, self._state = constraint, state
        self._forced: list[int] | None = None  # tokens of which the first alone may follow; None = they are not known
        self.num_words = ceil_div(vocab_size, 32)

    @property
    def is_complete(self) -> bool:
        """Whether no token but EOS may follow."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def error(self) -> InvalidRequest | None:
        """The reason why the grammar cannot go on, if it cannot; then every later mask is void."""
        if not self._state.is_error():
            return None
        why = first_line(self._state.get_error())
        if why.startswith(NO_TOKEN):
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
        self._state.consume_token(token)
        self._forced = None

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
            return self._forced[0]
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
        self._state.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)


class Grammar:
    """A constraint that was built for a vocabulary.

    Args:
        constraint: the constraint.
        start: the library's matcher before the first token; nothing changes it.
        vocab_size: the number of tokens of the model's vocabulary.
    """

    def __init__(self, constraint: Constraint, start: "LLMatcher", vocab_size: int) -> None:
        self._constraint, self._start, self._vocab_size = constraint, start, vocab_size

    def start(self) -> Matcher:
        """Returns the state before the first token, of a sample of its own."""
        return Matcher(self._constraint, self._start.deep_copy(), self._vocab_size)


def first_line(message: str) -> str:
    """Returns the message of the library as one line without its dump of states."""
    return " ".join(re.split("<(?:state|non-verbose)", message)[0].split()).rstrip(".")
