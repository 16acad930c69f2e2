"""One sample of a request in the scheduler: its known tokens, its computed tokens and its blocks."""

import collections.abc
import enum
import sys
from dataclasses import dataclass, field
from typing import Final

from ...grammar.grammar import Matcher
from ...request.sampling_params import SamplingParams
from .prefix_keys import BlockKey
from .speculation import Speculation

UNKNOWN: Final = -1  # a token that the worker has sampled, or will have before this token's step


class Status(enum.Enum):
    """The state of a sequence. Only a running one holds blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated after it.

    Attributes:
        request_id: the name of the request.
        index: the number of the sample among the request's n samples.
        arrival: the request's number in the engine's order of submission.
        params: the sampling options of the request.
        seed: the seed of the noise, the same for all samples of a request.
        prompt: the tokens of the prompt, which all samples of a request share.
        max_tokens: the largest number of tokens of prompt and output together.
        priority: the priority; sequences with higher values run first.
        principal: the name of the caller on whose share of the engine the sequence runs.
        weight: the principal's weight, above 0: twice the weight, twice the share.
        deadline: the value of time.monotonic() at which the sequence ends, or None.
        root: the root of the chain of its blocks' keys; only sequences with equal roots share blocks.
        prompt_keys: the keys of the prompt's full blocks, which all samples of a request share; made when first needed.
        is_private: whether no other request has this root, so that blocks are useless after the end.
        max_reused: how many leading tokens need not be computed if the cache has them; the logits of others are wanted.
        output: the tokens after the prompt.
        num_prompt: the number of prompt tokens.
        status: the state of the sequence.
        num_computed: the number of leading tokens whose keys and values are in the cache.
        blocks: the block table; token i lies in blocks[i // block_size].
        num_published: the number of leading blocks that were published under their keys.
        first_twin: the index of the first block but 0 that may have a twin.
        stop_twin: the index after the last block that may have one.
        twins: blocks and their new twins, in turn, that workers do not know of yet.
        shares_last: whether others hold or may find the block of the prompt's last token, which is not full.
        fork: the place of a block that it shared, that block, and its own instead, until workers know of it; or None.
        output_keys: the keys of the full blocks that end in the output.
        num_charged: how many leading tokens it had when it was preempted: its principal is not charged for them again.
        admitted: the seconds of steps after which it was admitted last.
        caught_up: the seconds of steps after which it had again all tokens of before; None: it has yet to.
        preemptions: the number of times that the scheduler took its blocks away.
        matcher: the state of its constraint after its known tokens; None without one.
        is_asked: whether its constraint may choose among candidates, so that most of its rows need no mask.
        speculation: makes proposals for its next tokens; None if there are none.
        num_proposed, num_accepted: how many proposals were computed, and how many of them came true.
    """

    request_id: str
    index: int
    arrival: int
    params: SamplingParams
    seed: int
    prompt: collections.abc.Sequence[int]
    max_tokens: int
    priority: int = 0
    principal: str = ""
    weight: float = 1.0
    deadline: float | None = None
    root: bytes = b""
    prompt_keys: list[BlockKey] = field(default_factory=list)
    is_private: bool = False
    max_reused: int = sys.maxsize
    output: list[int] = field(default_factory=list)
    num_prompt: int = field(init=False)
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    first_twin: int = 1
    stop_twin: int = 0
    twins: list[int] = field(default_factory=list)
    shares_last: bool = False
    fork: tuple[int, int, int] | None = None
    output_keys: list[BlockKey] = field(default_factory=list)
    num_charged: int = 0
    admitted: float = 0.0
    caught_up: float | None = None
    preemptions: int = 0
    matcher: Matcher | None = None
    is_asked: bool = False
    speculation: Speculation | None = None
    num_proposed: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.num_prompt = len(self.prompt)

    @property
    def key(self) -> tuple[str, str]:
        """The principal and the name of the request, which no other live request has."""
        return self.principal, self.request_id

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key: lower sequences are served first and preempted last."""
        return (-self.priority, self.arrival, self.index)

    @property
    def has_begun(self) -> bool:
        """Whether it has run, or begins with a prompt that another sample of its request has computed."""
        return self.index > 0 or self.preemptions > 0

    @property
    def num_new(self) -> int:
        """The number of output tokens so far."""
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens, of prompt and output together."""
        return self.num_prompt + len(self.output)

    @property
    def num_uncomputed(self) -> int:
        """The number of known tokens that are not in the cache; 1 while decoding."""
        return self.num_prompt + len(self.output) - self.num_computed

    @property
    def num_known(self) -> int:
        """The number of leading tokens that are not UNKNOWN: all, or all but the last."""
        return self.num_tokens - (bool(self.output) and self.output[-1] == UNKNOWN)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the tokens at positions [start, stop)."""
        first, last = max(0, start - self.num_prompt), max(0, stop - self.num_prompt)
        return [*self.prompt[start:stop], *self.output[first:last]]

    def append(self, token: int) -> None:
        """Appends a new output token."""
        self.output.append(token)
