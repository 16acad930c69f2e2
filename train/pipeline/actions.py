"""The parts of a pipeline schedule, as plain values that can be printed, checked and simulated before a run.

Stage s of pp x virtual_stages is on pipeline rank s % pp (`core.layout.stages`). Sends and receives are not actions:
`Schedule.transfer_of` derives them from the stages' ranks, and communication.py plans when they are posted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The computation of an action."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights together
    BACKWARD_INPUT = "I"  # zero bubble: the gradient of the input, for which another rank waits
    BACKWARD_WEIGHT = "W"  # zero bubble: the gradients of the weights, for which no rank waits

    @property
    def label(self) -> str:
        """The kind's name in errors and progress reports."""
        return self.name.lower().replace("_", " ")


GRADIENT_SENDERS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Action:
    """The computation of one micro-batch in one stage, forward or backward.

    Attributes:
        stage: the global index of the stage, below pp x virtual_stages.
        micro_batch: the index of the micro-batch in its step.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.label} stage {self.stage} micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one rank computes and another one waits for: an activation or its gradient.

    Attributes:
        producer: the action that computes the tensor.
        consumer: the action that needs it.
        source, destination: their pipeline ranks.
    """

    producer: Action
    consumer: Action
    source: int
    destination: int

    def __str__(self) -> str:
        tensor = "activation" if self.producer.kind is Kind.FORWARD else "gradient"
        return f"the {tensor} of micro-batch {self.producer.micro_batch} from stage {self.producer.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every pipeline rank, in the order in which it computes them.

    Attributes:
        pp: the number of pipeline ranks.
        virtual_stages: the number of stages per rank.
        ranks: for each pipeline rank, its actions.
    """

    name: str
    pp: int
    virtual_stages: int
    num_micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward, as in an evaluation."""
        return all(action.kind is Kind.FORWARD for actions in self.ranks for action in actions)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own (zero bubble)."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.ranks for action in actions)

    def rank_of(self, stage: int) -> int:
        """Returns the pipeline rank of a stage."""
        return stage % self.pp

    def transfer_of(self, action: Action) -> Transfer | None:
        """Returns the transfer of an action's result to another rank.

        It is None for weight gradients, at the ends of the pipeline, and if the same rank has the next stage.
        """
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

    def dependencies(self, action: Action) -> Iterator[Action]:
        """Yields the actions whose results this one needs. The order of its rank is not counted."""
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
