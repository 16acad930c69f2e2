"""A rank's line to the engine, with which a backend goes on by itself: other steps than the next are the worker's."""

from collections.abc import Callable
from dataclasses import dataclass

from ..step.step_plan import Array, SamplerOutput


@dataclass(frozen=True, slots=True)
class EngineLine:
    """A rank's socket to the engine, for a backend that goes on by itself.

    Attributes:
        descriptor: the socket's file descriptor; the socket blocks.
        next_step: the message of a step that computes the next token of each sequence, and has no new blocks.
        encode: returns the message of a step's results. Without log-probabilities it ends with the token of each row,
            whether its logits are finite, and its candidates: int32 [R], uint8 [R], int32 [R, C].
        encode_tokens: returns the engine's message of the tokens that it chose among candidates; they are its end:
            int32 [R].
        again: the beginning of the engine's message with masks with which rows are sampled again. Behind it come the
            bytes of the rest, uint32, and the rest: M and W, int32; the masks, uint32 [M, W]; the rows, int32 [M].
        answers: whether this rank sends the results.
    """

    descriptor: int
    next_step: bytes
    encode: Callable[[SamplerOutput], bytes]
    encode_tokens: Callable[[Array], bytes]
    again: bytes
    answers: bool


@dataclass(frozen=True, slots=True)
class WentOn:
    """The state in which a backend that goes on by itself leaves the last step.

    Attributes:
        tokens: its tokens, int32 [R]; None: the engine chooses them, and has not yet.
        has_next: whether `EngineLine.next_step` was taken from the socket, which follows it when its tokens are known.
    """

    tokens: Array | None
    has_next: bool = False
