"""The entries of slots: what is added to the logits of tokens, and how often tokens under penalties have occurred."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from ....core.casts import Array
from .sampling_rows import SampledRows, entries
from .step_message import StepMessage

_SPARE: Final = 64  # places for tokens that are new in the output
Columns = tuple[Array, Array]  # token ids, and a value of each
_NOTHING: Final[Columns] = (np.empty(0, np.int32), np.empty(0, np.int32))


class TokenCounts:
    """Token ids and their numbers of occurrences.

    Args:
        counts: token id -> its occurrences in the output so far; 0 for a token that only the prompt has.
    """

    def __init__(self, counts: Mapping[int, int] = MappingProxyType({})) -> None:
        self._place = {token: place for place, token in enumerate(counts)}
        self._pairs = np.zeros((2, len(counts) + _SPARE), np.int32)
        self._pairs[0, : len(counts)] = list(counts)
        self._pairs[1, : len(counts)] = list(counts.values())

    def __len__(self) -> int:
        return len(self._place)

    def add(self, tokens: Iterable[int]) -> None:
        """Counts one more occurrence of each token."""
        for token in tokens:
            place = self._place.setdefault(token, len(self))
            if place == self._pairs.shape[1]:
                self._pairs = np.concatenate([self._pairs, np.zeros_like(self._pairs)], axis=1)
            self._pairs[0, place] = token
            self._pairs[1, place] += 1

    def plus(self, tokens: Iterable[int]) -> "TokenCounts":
        """Returns other counts, with one more occurrence of each token."""
        found = TokenCounts(dict(self._pairs[:, : len(self)].T.tolist()))
        found.add(tokens)
        return found

    def columns(self) -> Columns:
        """Returns the token ids and their counts, int32 [N] each: views, which a later `add` may change."""
        return self._pairs[0, : len(self)], self._pairs[1, : len(self)]


class SlotEntries:
    """The slots whose rows have bias or counts; those of most requests have neither."""

    def __init__(self) -> None:
        # the new token before which the first of two columns counts, in which other tokens are banned, too
        self._bias: dict[int, tuple[int, Columns, Columns]] = {}
        self._counts: dict[int, TokenCounts] = {}

    def open(self, message: StepMessage) -> None:
        """Takes the entries of the slots that a message opens, in place of those that these had."""
        bias = banned = counts = 0
        for opened in message.opened:
            slot, num_counts = int(opened["slot"]), int(opened["num_counts"])
            own = slice(bias, bias := bias + int(opened["num_bias"]))
            early = message.banned[banned : (banned := banned + int(opened["num_banned"]))]
            tokens, values = message.bias_token[own], message.bias_value[own]
            keep, ban = ~np.isin(tokens, early), np.full(len(early), -np.inf, np.float32)
            both = (np.concatenate([tokens[keep], early]), np.concatenate([values[keep], ban]))
            self._bias.pop(slot, None)
            self._counts.pop(slot, None)
            if len(both[0]):
                self._bias[slot] = (int(opened["min_new_tokens"]), both, (tokens, values))
            if num_counts >= 0:
                pairs = message.counts[counts : (counts := counts + num_counts)]
                self._counts[slot] = TokenCounts(dict(pairs.tolist()))

    def count(self, slots: Array, tokens: Array) -> None:
        """Counts the tokens that slots sampled, in order."""
        if self._counts:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                if slot in self._counts:
                    self._counts[slot].add((token,))

    def columns(self, sampled: SampledRows, tokens: Array) -> dict[str, Array]:
        """Returns the columns of entries of `SamplingRows`.

        Args:
            sampled: the rows.
            tokens: the step's packed tokens.
        """
        slots = sampled.slot.tolist()
        if self._bias.keys().isdisjoint(slots) and self._counts.keys().isdisjoint(slots):
            return {**entries("bias", (), np.float32), **entries("count", (), np.int32)}
        bias = [self._biased(*row) for row in zip(slots, sampled.number.tolist(), strict=True)]
        places = zip(slots, sampled.token.tolist(), sampled.num_proposals.tolist(), strict=True)
        counts = [self._counted(slot, tokens[token + 1 - proposed : token + 1]) for slot, token, proposed in places]
        return {**entries("bias", bias, np.float32), **entries("count", counts, np.int32)}

    def _biased(self, slot: int, number: int) -> Columns:
        min_new, early, later = self._bias.get(slot, (0, _NOTHING, _NOTHING))
        return early if number < min_new else later

    def _counted(self, slot: int, proposals: Array) -> Columns:
        """Returns the counts of a slot, with proposals that a row takes for its output."""
        counts = self._counts.get(slot)
        if counts is None:
            return _NOTHING
        return (counts.plus(proposals.tolist()) if len(proposals) else counts).columns()
