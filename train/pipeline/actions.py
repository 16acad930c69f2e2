"""What a pipeline schedule is made of: plain values, so that it can be printed, checked and simulated before a run.

Stage s of pp x virtual_stages lives on pipeline rank s % pp (`core.layout.stages`). Sending and receiving are no
actions: they follow from where stages live (`Schedule.transfer_of`), and communication.py says when they are posted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is computed."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights together
    BACKWARD_INPUT = "I"  # zero bubble: the gradient of the input, for which another rank waits
    BACKWARD_WEIGHT = "W"  # zero bubble: the gradients of the weights, for which nobody waits

    @property
    def words(self) -> str:
        """The kind as an error or a progress report says it."""
        return self.name.lower().replace("_", " ")


GRADIENT_SENDERS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one stage, in one direction.

    Attributes:
        stage: global, of pp x virtual_stages.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.words} stage {self.stage} micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one rank computes and another one waits for: the activation or the gradient `producer` ends with.

    Attributes:
        source, destination: pipeline ranks.
    """

    producer: Action
    consumer: Action
    source: int
    destination: int

    def __str__(self) -> str:
        what = "activation" if self.producer.kind is Kind.FORWARD else "gradient"
        return f"the {what} of micro-batch {self.producer.micro_batch} from stage {self.producer.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank, in their order.

    Attributes:
        ranks: one tuple of actions per pipeline rank.
    """

    name: str
    pp: int
    virtual_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def forward_only(self) -> bool:
        """Whether this is an evaluation."""
        return all(action.kind is Kind.FORWARD for actions in self.ranks for action in actions)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own (zero bubble)."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.ranks for action in actions)

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that a stage lives on."""
        return stage % self.pp

    def transfer_of(self, action: Action) -> Transfer | None:
        """What the action sends on; None for the ends of the pipeline, weight gradients and one rank alone."""
        if action.kind is Kind.FORWARD:
            kind, stage = Kind.FORWARD, action.stage + 1
        elif action.kind in GRADIENT_SENDERS:
            kind, stage = action.kind, action.stage - 1
        else:
            return None
        source, destination = self.rank_of(action.stage), self.rank_of(stage)
        if not 0 <= stage < self.num_stages or source == destination:
            return None
        return Transfer(action, Action(kind, stage, action.micro_batch), source, destination)

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must be over before this one begins, the rank's own order aside."""
        stage, micro_batch, last = action.stage, action.micro_batch, self.num_stages - 1
        if action.kind is Kind.FORWARD:
            if stage > 0:
                yield Action(Kind.FORWARD, stage - 1, micro_batch)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            yield Action(Kind.BACKWARD_INPUT, stage, micro_batch)
        else:
            yield Action(Kind.FORWARD, stage, micro_batch)
            if stage < last:
                yield Action(action.kind, stage + 1, micro_batch)
