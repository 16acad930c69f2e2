"""From tokens to what a caller sees of one sample: text without half characters, stop strings cut, a reason to end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from ..text.tokenizer import DetokenizerStream, Tokenizer
from .events import Delta, FinishReason, TokenLogprob
from .sampling_params import SamplingParams


class StopStrings:
    """Finds the first of several strings in text that comes in pieces, holding back what may be the start of one.

    "First" is what a reader of single characters would meet first: the match that ends earliest, of these the longest.
    """

    def __init__(self, strings: Sequence[str], include: bool) -> None:
        self._strings = strings
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool) -> tuple[str, str | None]:
        """Takes a piece; returns text that is certain and the string found, if any, after which nothing may follow.

        Args:
            armed: whether a string that ends in this piece counts.
        """
        text, begin = self._held + text, len(self._held)
        found = self._find(text, begin) if armed else None
        if found is not None:
            end, string = found
            self._held = ""
            return text[: end if self._include else end - len(string)], string
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once no text follows."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, begin: int) -> tuple[int, str] | None:
        """The end of the first match that ends after `begin`."""
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
    """Why a sample is complete."""

    reason: FinishReason
    matched: str | int | None = None


class SampleOutput:
    """Builds the deltas of one sample.

    Args:
        index: of the sample.
        tokenizer: None where the checkpoint has none: texts are empty then.
        eos_token_ids: that end this sample.
        max_new_tokens: of this sample.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        max_new_tokens: int,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._max_new_tokens = max_new_tokens
        self._stream = DetokenizerStream(tokenizer, params.keep_special_tokens) if tokenizer else _NO_TEXT
        self._stop = StopStrings(params.stop, params.include_stop)

    def push(self, token: int, logprobs: tuple[TokenLogprob, ...]) -> tuple[Delta, Ending | None]:
        """Takes the next token, with its log-probability if asked for. Nothing may follow an ending."""
        self.num_tokens += 1
        armed = self.num_tokens >= self._params.min_new_tokens
        text, stop = self._stop.push(self._stream.push([token]), armed)
        ending = self._ending(token) if stop is None else None
        if ending is not None:
            rest, stop = self._stop.push(self._stream.flush(), armed)
            text += rest + ("" if stop else self._stop.flush())
        if stop is not None:
            ending = Ending(FinishReason.STOP_STRING, stop)
        return Delta(self.index, text, (token,), logprobs), ending

    def _ending(self, token: int) -> Ending | None:
        if token in self._eos_token_ids:
            return Ending(FinishReason.EOS)
        if token in self._params.stop_token_ids:
            return Ending(FinishReason.STOP_TOKEN, token)
        if self.num_tokens >= self._max_new_tokens:
            return Ending(FinishReason.LENGTH)
        return None


class _NoText:
    """Stands for a detokenizer where there is no tokenizer."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


_NO_TEXT: Final = _NoText()


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `string`."""
    return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
