"""The output of one sample: text without incomplete characters, cut at stop strings, and the reason for its end."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from .....text.detokenizer import NO_PROMPT, DetokenizerStream, PromptEnd
from .....text.tokenizer import Tokenizer
from ...grammar.grammar import Matcher
from ...request.events import Delta, FinishReason, TokenLogprob
from ...request.sampling_params import SamplingParams


class StopStrings:
    """Finds the first of several strings in text that arrives in pieces; holds text back that may begin a string.

    The first match is the one that ends earliest, and the longest of these.

    Args:
        strings: the strings to find.
        include: whether the text before the end includes the string.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings, self._include, self._held = strings, include, ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """Adds a piece of text.

        Args:
            text: the piece.
            armed: whether a string that ends in this piece counts.

        Returns:
            The text that is certain, and the string found, if any; after a string no call may follow.
        """
        if not self._strings:
            return text, None
        text, begin = self._held + text, len(self._held)
        found = self._find(text, begin) if armed else None
        if found is not None:
            end, string = found
            self._held = ""
            return text[: end if self._include else end - len(string)], string
        keep = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the text held back, when no more text follows."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, begin: int) -> tuple[int, str] | None:
        """Returns the end of the first match that ends after `begin`, and the string; None if nothing matches."""
        matches = []
        for string in self._strings:
            start = text.find(string, max(0, begin - len(string) + 1))
            if start >= 0:
                matches.append((start + len(string), -len(string), string))
        if not matches:
            return None
        end, _, string = min(matches)
        return end, string


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason for the end of a sample, and the stop string, stop token or EOS token that matched."""

    reason: FinishReason
    matched: str | int | None = None


class PlacedTokens:
    """The new tokens with log-probabilities, until their places in the text that the caller gets are certain.

    A later byte can make U+FFFD of bytes that were a character so far, and a stop string can cut off text that waits to
    be sent. A token whose place either could still change waits, so that a stream says of each what the whole answer
    does.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprob] = deque()
        self._offsets: deque[int] = deque()  # of the first ones that wait, in the text before it is cut
        self._num_sent = 0  # characters

    def add(self, token: TokenLogprob, offsets: list[int], text: str, is_end: bool) -> tuple[TokenLogprob, ...]:
        """Adds the next token; returns the tokens whose places have become certain, with them.

        Args:
            offsets: the places, in the uncut text, that have become known: of tokens in their order.
            text: the text that is sent with the tokens.
            is_end: whether no other text follows: tokens behind it begin at its end.
        """
        self._waiting.append(token)
        self._offsets += offsets
        self._num_sent += len(text)
        settled = list[TokenLogprob]()
        while self._offsets and (is_end or self._offsets[0] <= self._num_sent):
            offset = min(self._offsets.popleft(), self._num_sent)
            settled.append(self._waiting.popleft().at(offset))
        return tuple(settled)


class DeltaBuilder:
    """The builder of one sample's deltas.

    Attributes:
        index: the sample's number.
        num_tokens: the number of tokens so far.
        begun: the value of time.monotonic() when the first one came.

    Args:
        index: the sample's number.
        params: the sampling options of the request.
        tokenizer: the checkpoint's tokenizer; None = the checkpoint has none, and all texts are empty.
        eos_token_ids: the EOS tokens that end this sample.
        max_new_tokens: the largest number of new tokens of this sample.
        matcher: the state of the constraint, which this object moves on; None without one.
        end: the end of the prompt.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        max_new_tokens: int,
        matcher: Matcher | None = None,
        end: PromptEnd = NO_PROMPT,
    ) -> None:
        self.index, self.num_tokens, self.begun = index, 0, 0.0
        self._params, self._eos_token_ids, self._max_new_tokens = params, eos_token_ids, max_new_tokens
        self._matcher = matcher
        self._stream = DetokenizerStream(tokenizer, params.keep_special_tokens, end) if tokenizer else _NoText()
        self._placed = PlacedTokens()
        self._stop = StopStrings(params.stop, params.include_stop)

    @property
    def is_first(self) -> bool:
        """Whether no token so far, of the prompt or of the sample, has a text."""
        return self._stream.is_first

    def push(self, token: int, logprob: TokenLogprob | None) -> tuple[Delta, Ending | None]:
        """Adds the next token, with its log-probability if requested; returns what to send, and the ending, if any.

        The delta may be empty, and has several tokens if those before have waited: see `PlacedTokens`. After an ending
        no call may follow.
        """
        if not self.num_tokens:
            self.begun = time.monotonic()
        self.num_tokens += 1
        armed = self.num_tokens >= self._params.min_new_tokens
        text, stop = self._stop.push(self._stream.push([token]), armed)
        ending = self._ending(token) if stop is None else None
        if ending is not None:
            rest, stop = self._stop.push(self._stream.flush(), armed)
            text += rest + ("" if stop else self._stop.flush())
        if stop is not None:
            ending = Ending(FinishReason.STOP_STRING, stop)
        offsets = self._stream.take_offsets()
        if logprob is None:
            return Delta(self.index, text, (token,)), ending
        settled = self._placed.add(logprob, offsets, text, is_end=ending is not None)
        return Delta(self.index, text, tuple([each.token_id for each in settled]), settled), ending

    def _ending(self, token: int) -> Ending | None:
        if token in self._eos_token_ids:
            return Ending(FinishReason.EOS, token)
        if token in self._params.stop_token_ids:
            return Ending(FinishReason.STOP_TOKEN, token)
        if self._matcher is not None:
            self._matcher.take(token)
            if self._matcher.is_complete:
                return Ending(FinishReason.EOS)  # which alone could follow, and was not sampled
        if self.num_tokens >= self._max_new_tokens:
            return Ending(FinishReason.LENGTH)
        return None


class _NoText:
    """The detokenizer of a checkpoint without a tokenizer: all texts are empty."""

    is_first: Final = True

    def __init__(self) -> None:
        self._num_new = 0  # tokens since the last call of `take_offsets`

    def push(self, ids: Sequence[int]) -> str:
        self._num_new += len(ids)
        return ""

    def flush(self) -> str:
        return ""

    def take_offsets(self) -> list[int]:
        taken, self._num_new = [0] * self._num_new, 0
        return taken


def _overlap(text: str, string: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `string`."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
