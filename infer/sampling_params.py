"""How a request wants its tokens chosen and where it stops: the wire's field names and defaults, without the wire."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import InvalidRequest

MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and output options of one request; docs/wire.md has their order of application.

    Attributes:
        temperature: 0 is greedy (argmax, ties to the lowest id).
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probabilities sum to at least this.
        min_p: drop tokens less probable than this share of the most probable one.
        repetition_penalty: divides (or multiplies, if negative) logits of tokens seen in prompt or output.
        presence_penalty: subtracted from logits of tokens seen in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: token id -> value added to its logit.
        seed: of the counter-based noise; drawn by the engine if None.
        n: samples of the same prompt.
        max_new_tokens: None is "up to the model's length".
        min_new_tokens: masks EOS and stop tokens, and delays stop strings, until that many tokens.
        stop: strings that end the text; cut from it unless include_stop.
        stop_token_ids: ids that end the sample.
        ignore_eos: do not stop at the model's own EOS ids.
        logprobs: None for none, else how many top alternatives to return beside the sampled token's.
        prompt_logprobs: the same for the prompt's tokens.
        keep_special_tokens: leave special tokens in the text.
        include_stop: leave the matched stop string in the text.
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
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    keep_special_tokens: bool = False
    include_stop: bool = False

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest, naming the wire's field, for the first value that cannot be served."""
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
                raise _bad("stopping.stop", repr(text), f"1 to {MAX_STOP_BYTES} bytes each")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise _bad("stopping.stop_token_ids", token, f"ids below the vocabulary's {vocab_size}")


def _bad(name: str, value: object, right: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {right}.", field=name)
