"""The message of one step: all that changed in the persistent batch since the step before, in a fixed binary layout.

Each running sequence has a slot, in which every worker keeps its block table, sampling options and token counts. A
`StepMessage` opens slots, extends their tables and says which tokens to compute. Most steps of decoding compute the
next token of each sequence of the step before, in the same order: their message, `NextTokens`, has only new blocks.
With proposals these sequences go on with tokens that the engine gives: then the message is `GivenTokens`.

A message is encoded once for all ranks: little-endian int32 numbers of items, one per section in the order of the
fields below, and the sections end to end. `NextTokens` has no spans, so it begins with 0, and its blocks follow.
`GivenTokens` begins with -1, and the numbers of spans and of tokens.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from ....core.casts import Array
from .sampling_rows import NO_MASK, OPTION_COLUMNS

# A row of `opened`; the names that SamplingRows has too mean the same. The adapter is that of the slot's spans.
OPENED: Final = np.dtype(
    [
        *((name, "<i4") for name in ("slot", "adapter", "num_top", "sample_index", "min_new_tokens")),
        *((name, "<i4") for name in ("num_bias", "num_banned", "num_counts")),
        *OPTION_COLUMNS.items(),
        ("seed", "<u8"),
    ]
)
_INT: Final = np.dtype("<i4")
_SECTIONS: Final = (
    ("spans", _INT, 8),
    ("tokens", _INT, 1),
    ("blocks", _INT, 1),
    ("twins", _INT, 2),
    ("forks", _INT, 4),
    ("opened", OPENED, 1),
    ("bias_token", _INT, 1),
    ("bias_value", np.dtype("<f4"), 1),
    ("banned", _INT, 1),
    ("counts", _INT, 2),
    ("scored", _INT, 3),
)
_HEADER_BYTES: Final = 4 * len(_SECTIONS)
_NO_SPANS: Final = bytes(4)
GIVEN: Final = -1  # with which `GivenTokens` begins
_GIVEN: Final = GIVEN.to_bytes(4, "little", signed=True)
_GIVEN_HEAD: Final = 3  # numbers before its sections


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The work of a step, at least one span, and the changes before it.

    Entries of `opened` have their lists end to end, in its order.

    Attributes:
        spans: per sequence its slot, first position, number of tokens, how many of them `tokens` holds (all, or all but
            the first if that is the token that the worker sampled last for the slot), the number of the first new token
            that it samples, the number of those that it samples (one after its own last token, and one after each of
            the proposals behind that), the number of its new blocks, and the number of the new token's mask among the
            step's masks (-1 = none; -2 = it has candidates), which follow in a frame of their own: int32 [S, 8].
        tokens: the given tokens of the spans, end to end: int32.
        blocks: the new blocks of the spans, end to end: int32.
        twins: blocks that get a twin, and the numbers of the twins: int32 [.., 2].
        forks: the sequences that get a block of their own instead of one that they shared: the slot, the place in its
            table, the shared block, whose content the other begins with, and the other: int32 [.., 4].
        opened: slots that begin anew, with an empty table: OPENED.
        bias_token, bias_value: token ids, and the numbers that are added to their logits: int32, float32.
        banned: token ids that are banned until the new token `min_new_tokens`: int32.
        counts: token ids under penalties and their occurrences in the output so far: int32 [.., 2].
        scored: further rows of logits, in order: the packed token, the token id to score, the number of alternatives
            to report: int32 [P, 3].
    """

    spans: Array
    tokens: Array
    blocks: Array
    twins: Array = field(default_factory=partial(np.empty, (0, 2), np.int32))
    forks: Array = field(default_factory=partial(np.empty, (0, 4), np.int32))
    opened: Array = field(default_factory=partial(np.empty, 0, OPENED))
    bias_token: Array = field(default_factory=partial(np.empty, 0, np.int32))
    bias_value: Array = field(default_factory=partial(np.empty, 0, np.float32))
    banned: Array = field(default_factory=partial(np.empty, 0, np.int32))
    counts: Array = field(default_factory=partial(np.empty, (0, 2), np.int32))
    scored: Array = field(default_factory=partial(np.empty, (0, 3), np.int32))

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        sections = [getattr(self, name) for name, _, _ in _SECTIONS]
        header = np.array([len(section) for section in sections], _INT)
        return b"".join((header.tobytes(), *(section.tobytes() for section in sections if len(section))))


@dataclass(frozen=True, slots=True)
class NextTokens:
    """A step that computes, for each sequence of the step before, the token that was sampled there.

    Attributes:
        blocks: the spans that go on in a new block, and the blocks: int32 [.., 2].
    """

    blocks: Array

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        return _NO_SPANS + self.blocks.tobytes()


NEXT_TOKENS: Final = NextTokens(np.empty((0, 2), np.int32))  # without a new block


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """A step that goes on with each sequence of the step before, in the same order, with tokens that the engine gives.

    Each samples, without a mask, a bias or counts.

    Attributes:
        spans: per sequence the first position, the number of tokens, the number of the first new token that it samples,
            and the number of those: int32 [S, 4].
        tokens: the tokens of the spans, end to end; a span may begin with -1, the token that was sampled for it in the
            step before: int32.
        blocks: the spans with a new block, its place in their tables, and the block, in order: int32 [.., 3].
    """

    spans: Array
    tokens: Array
    blocks: Array

    def encode(self) -> bytes:
        """Returns the message as bytes."""
        head = np.array([GIVEN, len(self.spans), len(self.tokens)], _INT)
        return b"".join(each.tobytes() for each in (head, self.spans, self.tokens, self.blocks))

    def of_slots(self, slot: Array) -> StepMessage:
        """Returns the message that says the same of the slots of these sequences: int32 [S]."""
        start, length, number, num_rows = self.spans.T
        is_fed = self.tokens[np.cumsum(length) - length] < 0
        num_added = np.bincount(self.blocks[:, 0], minlength=len(slot))
        masks = np.full(len(slot), NO_MASK)
        spans = np.stack([slot, start, length, length - is_fed, number, num_rows, num_added, masks], axis=1)
        return StepMessage(spans.astype(np.int32), self.tokens[self.tokens >= 0], self.blocks[:, 2])


Message = StepMessage | NextTokens | GivenTokens


def decode_message(data: bytes | bytearray) -> Message:
    """Returns the message that `encode` wrote; its arrays are views of `data`."""
    if data.startswith(_NO_SPANS):
        return NextTokens(np.frombuffer(data, _INT, offset=len(_NO_SPANS)).reshape(-1, 2))
    if data.startswith(_GIVEN):
        values = np.frombuffer(data, _INT)
        spans, tokens = _GIVEN_HEAD + 4 * values[1], _GIVEN_HEAD + 4 * values[1] + values[2]
        given = values[_GIVEN_HEAD:spans].reshape(-1, 4)
        return GivenTokens(given, values[spans:tokens], values[tokens:].reshape(-1, 3))
    lengths = np.frombuffer(data, _INT, len(_SECTIONS)).tolist()
    found, offset = [], _HEADER_BYTES
    for (_, dtype, width), length in zip(_SECTIONS, lengths, strict=True):
        section = np.frombuffer(data, dtype, length * width, offset)
        offset += section.nbytes
        found.append(section.reshape(length, width) if width > 1 else section)
    return StepMessage(*found)
