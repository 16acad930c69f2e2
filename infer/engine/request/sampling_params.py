"""The sampling options of a request, with the wire's field names and defaults.

The fields of `SamplingParams` are the only table of options: from it come their validation, the columns of steps and of
the samplers, and the fields of the wire and of HTTP.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final, TypeVar

from ....core.argument_types import (
    FLAG,
    INTEGER,
    INTEGERS,
    NUMBER,
    NUMBERS_BY_INTEGER,
    TEXT,
    TEXTS,
    ArgumentType,
    wrong_type,
)
from ....core.errors import InvalidRequest
from ..grammar.grammar import Constraint, Kind

MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
INT32: Final = "<i4"
FLOAT32: Final = "<f4"
_KEY: Final = "option"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an option takes.

    Attributes:
        low: the lowest one.
        high: the highest one; inf = there is none.
        words: what they are, after "it must be".
        has_low: whether `low` itself is one.
    """

    low: float
    high: float
    words: str
    has_low: bool = True

    def has(self, value: float) -> bool:
        """Returns whether a number is one of them; NaN, infinity and integers that no float can hold never are."""
        with suppress(OverflowError):
            return math.isfinite(value) and self.low <= value <= self.high and (self.has_low or value != self.low)
        return False


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of an option beside its default.

    Attributes:
        part: the part of the wire's request that has it: "sampling", "stopping" or "output".
        kind: the type of its values.
        allowed: its numbers; None = all, or other checks.
        column: the type of its column in a step, from which the samplers read it; None = it has none.
    """

    part: str
    kind: ArgumentType
    allowed: Range | None = None
    column: str | None = None


def option(default: T, part: str, kind: ArgumentType, allowed: Range | None = None, column: str | None = None) -> T:
    """Returns the field of an option, whose objects have copies of a default that is a dict; see `Option`."""
    metadata = {_KEY: Option(part, kind, allowed, column)}
    value = {"default_factory": default.copy} if isinstance(default, dict) else {"default": default}
    made: T = field(**value, metadata=metadata)
    return made


_CONSTRAINTS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "grammar")
_FINITE: Final = Range(-math.inf, math.inf, "a finite number in [-inf, inf]")
_FROM_0: Final = Range(0.0, math.inf, "a finite number in [0, inf]")
_ABOVE_0: Final = Range(0.0, math.inf, "a finite number above 0", has_low=False)
_ALTERNATIVES: Final = Range(0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and output options of one request; docs/wire.md has their order of application.

    Attributes:
        temperature: the divisor of the logits; 0 = greedy (argmax, ties to the lowest id).
        top_k: the number of most probable tokens to keep; 0 = all.
        top_p: the sampler keeps the smallest set of tokens whose probabilities sum to at least this.
        min_p: the sampler drops tokens less probable than this share of the most probable one.
        repetition_penalty: divides positive, multiplies negative logits of tokens in the prompt or the output.
        presence_penalty: is subtracted from the logits of tokens in the output.
        frequency_penalty: is subtracted from a token's logit for each occurrence in the output.
        logit_bias: token id -> the value to add to its logit.
        seed: the seed of the counter-based noise; None = the engine draws one.
        n: the number of samples of the prompt.
        json_schema: a JSON Schema as JSON: the text is a document that it accepts, without free whitespace.
        regex: a regular expression that the whole text matches.
        grammar: a grammar in Lark's syntax, whose `start` the text is. At most one of these three may be set.
        max_new_tokens: the largest number of new tokens; None = up to the model's length.
        min_new_tokens: the number of tokens before which EOS and stop tokens are masked and stop strings ignored.
        stop: the strings that end the text; they are cut from it unless include_stop is set.
        stop_token_ids: the token ids that end the sample.
        ignore_eos: whether the sample continues after the model's own EOS tokens.
        logprobs: the number of alternatives to return with each new token's log-probability; None = return neither.
        prompt_logprobs: the same for the prompt's tokens.
        keep_special_tokens: whether the text keeps special tokens.
        include_stop: whether the text keeps the matched stop string.

    Raises:
        InvalidRequest: a value has the wrong type; the error names the field.
    """

    temperature: float = option(1.0, "sampling", NUMBER, _FROM_0, FLOAT32)
    top_k: int = option(0, "sampling", INTEGER, Range(0, math.inf, "0 (off) or more"), INT32)
    top_p: float = option(1.0, "sampling", NUMBER, Range(0.0, 1.0, "a number in (0, 1]", has_low=False), FLOAT32)
    min_p: float = option(0.0, "sampling", NUMBER, Range(0.0, 1.0, "a finite number in [0, 1]"), FLOAT32)
    repetition_penalty: float = option(1.0, "sampling", NUMBER, _ABOVE_0, FLOAT32)
    presence_penalty: float = option(0.0, "sampling", NUMBER, _FINITE, FLOAT32)
    frequency_penalty: float = option(0.0, "sampling", NUMBER, _FINITE, FLOAT32)
    logit_bias: Mapping[int, float] = option({}, "sampling", NUMBERS_BY_INTEGER)
    seed: int | None = option(None, "sampling", INTEGER | None, Range(0, 2**64 - 1, "an unsigned 64-bit integer"))
    n: int = option(1, "sampling", INTEGER, Range(1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"))
    json_schema: str | None = option(None, "sampling", TEXT | None)
    regex: str | None = option(None, "sampling", TEXT | None)
    grammar: str | None = option(None, "sampling", TEXT | None)
    max_new_tokens: int | None = option(None, "stopping", INTEGER | None, Range(1, math.inf, "1 or more, or unset"))
    min_new_tokens: int = option(0, "stopping", INTEGER, Range(0, math.inf, "0 or more"))
    stop: tuple[str, ...] = option((), "stopping", TEXTS)
    stop_token_ids: tuple[int, ...] = option((), "stopping", INTEGERS)
    ignore_eos: bool = option(False, "stopping", FLAG)
    logprobs: int | None = option(None, "output", INTEGER | None, _ALTERNATIVES)
    prompt_logprobs: int | None = option(None, "output", INTEGER | None, _ALTERNATIVES)
    keep_special_tokens: bool = option(False, "output", FLAG)
    include_stop: bool = option(False, "output", FLAG)

    def __post_init__(self) -> None:
        if (wrong := wrong_type(self, _KINDS)) is not None:
            name, why = wrong
            raise InvalidRequest(f"{name} is {why}", field=name)

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the text, if there is one."""
        for kind in _CONSTRAINTS:
            if (text := getattr(self, kind)) is not None:
                return Constraint(kind, text)
        return None

    @property
    def is_filtered(self) -> bool:
        """Whether only some tokens are kept, whatever their noise."""
        return self.top_k != 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens of the output so far change logits."""
        return self.has_prompt_penalty or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_prompt_penalty(self) -> bool:
        """Whether the tokens of the prompt change logits, too."""
        return self.repetition_penalty != 1

    def validate(self, vocab_size: int) -> None:
        """Checks all values for a model of that vocabulary.

        Raises:
            InvalidRequest: a value cannot be served; the error names the first wrong field.
        """
        for name, each in OPTIONS.items():
            value = getattr(self, name)
            if each.allowed is not None and value is not None and not each.allowed.has(value):
                raise _bad(name, value, each.allowed.words)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _bad("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise _bad("logit_bias", f"token id {token}", f"ids below the vocabulary's {vocab_size}")
            if not _FINITE.has(bias):
                raise _bad("logit_bias", bias, "finite values")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _bad("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {self.max_new_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _bad("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not text or len(text.encode()) > MAX_STOP_BYTES:
                raise _bad("stop", repr(text[:100]), f"1 to {MAX_STOP_BYTES} bytes each", text)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise _bad("stop_token_ids", token, f"ids below the vocabulary's {vocab_size}")
        given = [kind for kind in _CONSTRAINTS if getattr(self, kind) is not None]
        for kind in given[1:]:
            raise _bad(kind, f"set beside {given[0]}", "the only one of json_schema, regex and grammar")
        for name in ("min_new_tokens", "ignore_eos"):
            if given and getattr(self, name):
                raise _bad(name, getattr(self, name), f"unset beside {given[0]}, which says where to end")


# All options by name, in the order above.
OPTIONS: Final = MappingProxyType({each.name: each.metadata[_KEY] for each in fields(SamplingParams)})
_KINDS: Final = {name: each.kind for name, each in OPTIONS.items()}


def _bad(name: str, shown: object, right: str, given: object = None) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shown}; it must be {right}.", field=name, given=given)
