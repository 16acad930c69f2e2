"""`echo` of /v1/completions: the text of a choice begins with its prompt, and so do its log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace

from ...engine.request.completion import Choice
from ...engine.request.events import TokenLogprob


class Echo:
    """The prompt of one request, before what its samples say.

    Tokens of the prompt get their places as they come. One that is not in the text where it would begin, as a special
    token that the tokenizer adds, takes no room there.

    Args:
        text: the prompt as text.
        is_all: whether the answer has the prompt alone, and nothing new.

    Attributes:
        text: the prompt as text.
        is_all: see above.
    """

    def __init__(self, text: str, is_all: bool) -> None:
        self.text, self.is_all = text, is_all
        self._place, self._part = 0, b""

    def entries(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Returns the next tokens of the prompt at their places in the text."""
        return tuple(entry.at(self._next_place(entry.token)) for entry in logprobs)

    def later(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """Returns tokens of a sample at their places behind the prompt."""
        return tuple(entry.at(entry.text_offset + len(self.text)) for entry in logprobs)

    def before(self, choice: Choice, prompt: Sequence[TokenLogprob]) -> Choice:
        """Returns a complete sample with the prompt before it.

        Args:
            choice: the sample.
            prompt: the entries of all tokens of the prompt, at their places; none if they were not asked for.
        """
        if self.is_all:
            return replace(choice, text=self.text, logprobs=tuple(prompt))
        return replace(choice, text=self.text + choice.text, logprobs=(*prompt, *self.later(choice.logprobs)))

    def _next_place(self, token: bytes) -> int:
        """Returns the place of a token, and goes on behind it; characters may have several tokens."""
        place, self._part = self._place, self._part + token
        try:
            said = self._part.decode()
        except UnicodeDecodeError:
            return place
        self._part = b""
        # Some tokenizers put a space before the first word that the text has not.
        for known in (said, said.removeprefix(" ")) if place == 0 else (said,):
            if self.text.startswith(known, place):
                self._place += len(known)
                break
        return place
