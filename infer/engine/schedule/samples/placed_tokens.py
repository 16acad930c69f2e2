"""The new tokens of a sample with log-probabilities, until their places in the text that the caller gets are certain.

A later byte can make U+FFFD of bytes that were a character so far, and a stop string can cut off text that waits to be
sent. A token whose place either could still change waits, so that a stream says of each what the whole answer does.
"""

from collections import deque

from ...request.events import TokenLogprob


class PlacedTokens:
    """The tokens of one sample that have come and were not sent."""

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprob] = deque()
        self._offsets: deque[int] = deque()  # of the first ones that wait, in the text before it is cut
        self._num_sent = 0  # characters

    def add(self, token: TokenLogprob, offsets: list[int], text: str, is_end: bool) -> tuple[TokenLogprob, ...]:
        """Adds the next token; returns the tokens whose places have become certain, with them.

        Args:
            token: the token.
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
