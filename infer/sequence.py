"""One sample of one request, as the scheduler sees it: tokens known, tokens computed, blocks held."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


class Status(enum.Enum):
    """Where a sequence is. Waiting ones hold no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what has been generated after it.

    Attributes:
        index: which of the request's n samples.
        arrival: order of submission over the whole engine.
        tokens: prompt and output.
        num_prompt: how many of them are the prompt.
        max_tokens: prompt and output at most.
        seed: of the noise, the same for all samples of a request.
        num_computed: leading tokens whose keys and values are in the cache.
        blocks: block table; token i lies in blocks[i // block_size].
        preemptions: how often its blocks were taken away.
    """

    request_id: str
    index: int
    arrival: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    priority: int = 0
    deadline: float | None = None
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    preemptions: int = 0
    output_counts: Counter[int] = field(default_factory=Counter)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: who is served first and preempted last."""
        return (-self.priority, self.arrival, self.index)

    @property
    def num_new(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are not in the cache; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    def append(self, token: int) -> None:
        """Takes a newly chosen token."""
        self.tokens.append(token)
        self.output_counts[token] += 1
