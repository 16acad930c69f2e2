"""One sample of a request in the scheduler: its known tokens, its computed tokens and its blocks."""

import enum
from dataclasses import dataclass, field
from typing import Final

from ...grammar.grammar import Matcher
from ...request.request import Request
from ...step.running_plan import NO_ADAPTER
from .block_table import BlockTable
from .draft_record import DraftRecord
from .proposer import Proposer

UNKNOWN: Final = -1  # a token that the worker has sampled, or will have before this token's step


class Source(enum.Enum):
    """Where proposals come from: the sample's text, a draft model, or a constraint that allows no other token."""

    TEXT = "text"
    DRAFT = "draft"
    CONSTRAINT = "constraint"


class Status(enum.Enum):
    """The state of a sample. Only a running one holds blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Output:
    """The tokens after a prompt.

    Attributes:
        max_tokens: the largest number of tokens of prompt and output together.
        tokens: the tokens so far; the last one may be UNKNOWN.
        stopping: the token ids that end the sample.
        matcher: the state of the constraint after the known ones; None without one.
        has_candidates: whether the constraint may choose among candidates, so that most rows need no mask.
        num_proposed, num_accepted: how many proposals for its tokens were computed, and how many of them came true;
            those that a constraint forces are not among them.
        draft: the record of a draft model's proposals; None if there are none.
    """

    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    stopping: frozenset[int] = frozenset()
    matcher: Matcher | None = None
    has_candidates: bool = False
    num_proposed: int = 0
    num_accepted: int = 0
    draft: DraftRecord | None = None


@dataclass(slots=True)
class Quantum:
    """What `FairPlaces` knows of a sample.

    Attributes:
        num_charged: how many leading tokens it had when it was preempted: its principal is not charged for them again.
        admitted: the seconds of steps after which it was admitted last.
        caught_up: the seconds of steps after which it had again all tokens of before; None: it has yet to.
    """

    num_charged: int = 0
    admitted: float = 0.0
    caught_up: float | None = None


@dataclass(eq=False, slots=True)
class Sample:
    """A prompt and the tokens generated after it.

    Attributes:
        request: the request, which all of its samples share.
        index: the number of the sample among the request's n samples.
        arrival: the request's number in the engine's order of submission.
        seed: the seed of the noise, the same for all samples of a request.
        output: the tokens after the prompt.
        table: the blocks.
        proposer: makes proposals for the next tokens; None if there are none.
        status: the state.
        num_computed: the number of leading tokens whose keys and values are in the cache.
        preemptions: the number of times that the scheduler took its blocks away.
        quantum: its time among the running ones.
        num_prompt: the number of prompt tokens.
    """

    request: Request
    index: int
    arrival: int
    seed: int
    output: Output
    table: BlockTable = field(default_factory=BlockTable)
    proposer: Proposer | None = None
    status: Status = Status.WAITING
    num_computed: int = 0
    preemptions: int = 0
    quantum: Quantum = field(default_factory=Quantum)
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.token_ids)

    @property
    def adapter(self) -> int:
        """The slot of its adapter; NO_ADAPTER without one."""
        return NO_ADAPTER if self.request.lease is None else self.request.lease.slot

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key: lower samples are served first and preempted last."""
        return (-self.request.priority, self.arrival, self.index)

    @property
    def has_begun(self) -> bool:
        """Whether it has run, or begins with a prompt that another sample of its request has computed."""
        return self.index > 0 or self.preemptions > 0

    @property
    def num_new(self) -> int:
        """The number of output tokens so far."""
        return len(self.output.tokens)

    @property
    def num_tokens(self) -> int:
        """The number of known tokens, of prompt and output together."""
        return self.num_prompt + len(self.output.tokens)

    @property
    def num_uncomputed(self) -> int:
        """The number of known tokens that are not in the cache; 1 while decoding."""
        return self.num_prompt + len(self.output.tokens) - self.num_computed

    @property
    def num_known(self) -> int:
        """The number of leading tokens that are not UNKNOWN: all, or all but the last."""
        return self.num_tokens - (self.output.tokens[-1:] == [UNKNOWN])

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the tokens at positions [start, stop)."""
        first, last = max(0, start - self.num_prompt), max(0, stop - self.num_prompt)
        return [*self.request.token_ids[start:stop], *self.output.tokens[first:last]]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + length) of a sample, which one step computes; the last of them may be proposals.

    Proposals of a draft are UNKNOWN until it has made them.
    """

    sample: Sample
    start: int
    length: int
    proposals: tuple[int, ...] = ()
    source: Source = Source.TEXT  # of the proposals

    @property
    def stop(self) -> int:
        """The end of the sample's own tokens, where the proposals begin."""
        return self.start + self.length - len(self.proposals)

    @property
    def sure(self) -> tuple[int, ...]:
        """The proposals if nothing depends on logits before the last of them; then no others are computed.

        A constraint forces them, and neither log-probabilities nor counts of tokens are wanted of them.
        """
        is_sure = self.source is Source.CONSTRAINT and self.sample.output.has_candidates
        return self.proposals if is_sure and not self.sample.request.params.has_penalties else ()

    @property
    def is_last(self) -> bool:
        """Whether the step reaches the sample's last token, after which a new one is chosen."""
        return self.stop == self.sample.num_tokens
