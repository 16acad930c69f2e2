"""The perplexity of texts under a model, measured through `LLM.score_pairs` in windows of a limited context."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from ...core.errors import ConfigError
from .llm import LLM

# The tokens of the windows that the engine gets at once: enough to fill steps, few enough for progress.
_BATCH_TOKENS: Final = 8192


@dataclass(frozen=True, eq=False)
class EvalText:
    """One text to measure; attention never reaches from one text into another.

    Attributes:
        tokens: the token ids, int64 [n].
        counted: bool [n], whether the mean counts a token; None = all. It never counts the first token, which has
            nothing before it.
    """

    tokens: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens [start, stop) of text number `text`, of which [first, stop) are scored after those before them."""

    text: int
    start: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class Perplexity:
    """A measurement.

    Attributes:
        logprobs: the natural-log probability of each counted token, float64 [T].
        greedy: the most probable token at each of their places, int64 [T].
        num_windows: the number of windows that were computed.
        seconds: the time of the measurement, without the start of the engine.
    """

    logprobs: npt.NDArray[np.float64]
    greedy: npt.NDArray[np.int64]
    num_windows: int
    seconds: float

    @property
    def loss(self) -> float:
        """The mean of the negative log-probabilities, in nats per token."""
        return -float(self.logprobs.mean())

    @property
    def perplexity(self) -> float:
        """The exponential of `loss`; infinity if a float64 cannot hold it."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    def num_changed(self, other: "Perplexity") -> int:
        """Returns at how many places another measurement of the same texts has another most probable token."""
        return int(np.count_nonzero(self.greedy != other.greedy))


def plan_windows(lengths: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Yields windows in which every token but the first of each text is scored once.

    A window has at most `context` tokens and ends at most `stride` tokens after the window before it, so a token is
    scored after at least `context - stride` tokens, if its text has them.

    Args:
        lengths: the number of tokens of each text.
        context: the largest number of tokens of a window, at least 2.
        stride: the largest number of tokens that a window scores after a text's first one, at least 1.

    Raises:
        ConfigError: context or stride are out of range.
    """
    if context < 2:
        raise ConfigError(f"context = {context}; it must be 2 or more: a token and one before it.")
    if not 1 <= stride <= context:
        raise ConfigError(f"stride = {stride}; it must be 1 to context = {context}.")
    step = min(stride, context - 1)
    for text, length in enumerate(lengths):
        start, first = 0, 1
        while first < length:
            stop = min(length, start + context)
            yield Window(text, start, first, stop)
            start, first = start + step, stop


def measure_perplexity(
    llm: LLM,
    texts: Sequence[EvalText],
    context: int,
    stride: int,
    advance: Callable[[int], None] = lambda tokens: None,
    adapter: str = "",
) -> Perplexity:
    """Scores texts in windows.

    Args:
        llm: the model; its `max_model_len` must be at least `context`.
        texts: no token is predicted from another text than its own.
        context, stride: see `plan_windows`.
        advance: is called with numbers of further tokens that are scored, counted or not.
        adapter: the name of a loaded adapter; "" = none.

    Raises:
        ConfigError: context or stride are out of range, or the texts have no token to count.
        TkError: see `LLM.score`.
    """
    masks = [np.ones(len(text.tokens), np.bool_) if text.counted is None else text.counted for text in texts]
    windows = plan_windows([len(text.tokens) for text in texts], context, stride)
    needed = [window for window in windows if masks[window.text][window.first : window.stop].any()]
    if not needed:
        raise ConfigError("The data has no token to score: a text needs at least two tokens. Give longer text.")
    logprobs: list[npt.NDArray[np.float64]] = []
    greedy: list[npt.NDArray[np.int64]] = []
    begun = time.monotonic()
    for batch in _batches(needed):
        scores = llm.score_pairs((_pair(texts[window.text].tokens, window) for window in batch), adapter)
        for window, score in zip(batch, scores, strict=True):
            counted = masks[window.text][window.first : window.stop]
            logprobs.append(np.array(score.logprobs)[counted])
            greedy.append(np.array(score.greedy_token_ids)[counted])
            advance(window.stop - window.first)
    return Perplexity(np.concatenate(logprobs), np.concatenate(greedy), len(needed), time.monotonic() - begun)


def num_scored(texts: Iterable[EvalText]) -> int:
    """Returns the number of tokens of texts that have a token before them."""
    return sum(max(0, len(text.tokens) - 1) for text in texts)


def _pair(tokens: npt.NDArray[np.int64], window: Window) -> tuple[list[int], list[int]]:
    """Returns the token ids of a window's text that come before those that it scores, and these."""
    return tokens[window.start : window.first].tolist(), tokens[window.first : window.stop].tolist()


def _batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    """Yields the windows in lists of about `_BATCH_TOKENS` tokens."""
    begins = accumulate((window.stop - window.start for window in windows), initial=0)  # and the end of the last
    for _, batch in groupby(zip(begins, windows, strict=False), lambda each: each[0] // _BATCH_TOKENS):
        yield [window for _, window in batch]
