"""The sampling options of a request, with the wire's field names and defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ...core.argument_types import (
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
from ...core.errors import InvalidRequest
from ..constraints.grammar import Constraint, Kind

MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
_CONSTRAINTS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "grammar")
# The types of fields by the part of the wire's request that they are in.
_TYPES: Final[Mapping[str, Mapping[str, ArgumentType]]] = MappingProxyType(
    {
        "sampling": {
            **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), NUMBER),
            **dict.fromkeys(("presence_penalty", "frequency_penalty"), NUMBER),
            **dict.fromkeys(("top_k", "n"), INTEGER),
            "seed": INTEGER | None,
            "logit_bias": NUMBERS_BY_INTEGER,
            **dict.fromkeys(_CONSTRAINTS, TEXT | None),
        },
        "stopping": {
            "max_new_tokens": INTEGER | None,
            "min_new_tokens": INTEGER,
            "stop": TEXTS,
            "stop_token_ids": INTEGERS,
            "ignore_eos": FLAG,
        },
        "output": {
            **dict.fromkeys(("logprobs", "prompt_logprobs"), INTEGER | None),
            **dict.fromkeys(("keep_special_tokens", "include_stop"), FLAG),
        },
    }
)


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
        InvalidRequest: a value has the wrong type; the error names the field as on the wire.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    keep_special_tokens: bool = False
    include_stop: bool = False

    def __post_init__(self) -> None:
        for part, types in _TYPES.items():
            if (wrong := wrong_type(self, types)) is not None:
                name, why = wrong
                raise InvalidRequest(f"{part}.{name} is {why}", field=f"{part}.{name}")

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the text, if there is one."""
        for kind in _CONSTRAINTS:
            if (text := getattr(self, kind)) is not None:
                return Constraint(kind, text)
        return None

    def validate(self, vocab_size: int) -> None:
        """Checks all values for a model of that vocabulary.

        Raises:
            InvalidRequest: a value cannot be served; the error names the first wrong field, as on the wire.
        """
        for name, low, high in (
            ("temperature", 0.0, math.inf),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -math.inf, math.inf),
            ("frequency_penalty", -math.inf, math.inf),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise _bad(f"sampling.{name}", value, f"a finite number in [{low:g}, {high:g}]")
        if not 0.0 < self.top_p <= 1.0:
            raise _bad("sampling.top_p", self.top_p, "a number in (0, 1]")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise _bad("sampling.repetition_penalty", self.repetition_penalty, "a finite number above 0")
        if self.top_k < 0:
            raise _bad("sampling.top_k", self.top_k, "0 (off) or more")
        if not 1 <= self.n <= MAX_SAMPLES:
            raise _bad("sampling.n", self.n, f"1 to {MAX_SAMPLES}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise _bad("sampling.seed", self.seed, "an unsigned 64-bit integer")
        self._validate_bias(vocab_size)
        self._validate_stopping(vocab_size)
        self._validate_constraint()
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
                raise _bad(f"output.{name}", count, f"0 to {MAX_TOP_LOGPROBS}")

    def _validate_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise _bad("sampling.logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise _bad("sampling.logit_bias", f"token id {token}", f"ids below the vocabulary's {vocab_size}")
            if not math.isfinite(bias):
                raise _bad("sampling.logit_bias", bias, "finite values")

    def _validate_constraint(self) -> None:
        given = [kind for kind in _CONSTRAINTS if getattr(self, kind) is not None]
        for kind in given[1:]:
            raise _bad(f"sampling.{kind}", f"set beside {given[0]}", "the only one of json_schema, regex and grammar")
        for name in ("min_new_tokens", "ignore_eos"):
            if given and getattr(self, name):
                raise _bad(f"stopping.{name}", getattr(self, name), f"unset beside {given[0]}, which says where to end")

    def _validate_stopping(self, vocab_size: int) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise _bad("stopping.max_new_tokens", self.max_new_tokens, "1 or more, or unset")
        if self.min_new_tokens < 0:
            raise _bad("stopping.min_new_tokens", self.min_new_tokens, "0 or more")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _bad(
                "stopping.min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {self.max_new_tokens}"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _bad("stopping.stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            if not text or len(text.encode()) > MAX_STOP_BYTES:
                raise _bad("stopping.stop", repr(text[:100]), f"1 to {MAX_STOP_BYTES} bytes each", text)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stopping.stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise _bad("stopping.stop_token_ids", token, f"ids below the vocabulary's {vocab_size}")


def _bad(name: str, shown: object, right: str, given: object = None) -> InvalidRequest:
    return InvalidRequest(f"{name} is {shown}; it must be {right}.", field=name, given=given)
