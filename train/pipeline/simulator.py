"""A schedule played through without computing: how long it takes, what it keeps in memory, whether it ends at all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.errors import ParallelError
from .actions import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any unit) that one micro-batch takes, per global stage.

    Attributes:
        communication: from a rank that is done to one that may begin with the result.
    """

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    communication: float = 0

    @staticmethod
    def uniform(
        num_stages: int,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        communication: float = 0,
    ) -> "Costs":
        """The same for every stage; by default each of the three takes 1, as for layers of matrix products."""
        return Costs(
            [forward] * num_stages, [backward_input] * num_stages, [backward_weight] * num_stages, communication
        )

    def of(self, action: Action) -> float:
        """How long an action takes."""
        if action.kind is Kind.FORWARD:
            return self.forward[action.stage]
        if action.kind is Kind.BACKWARD_INPUT:
            return self.backward_input[action.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight[action.stage]
        return self.backward_input[action.stage] + self.backward_weight[action.stage]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came out.

    Attributes:
        ends: when each action is over.
        makespan: when the last one is.
        busy: time that each rank computes.
        peak_in_flight: per rank, the most micro-batches times stages whose forward has begun and whose last backward
            is not over. One is one stage's activations of one micro-batch, 1 / (pp x virtual_stages) of the model's.
    """

    ends: dict[Action, float]
    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]

    @property
    def rank_bubbles(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank waits."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is spent waiting."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Plays a schedule; every action begins as soon as its rank and its inputs are ready. `Costs.uniform` if None.

    Raises:
        ParallelError: ranks wait for each other; says which rank, with which action, for which.
    """
    costs = costs or Costs.uniform(schedule.num_stages)
    ends: dict[Action, float] = {}
    ready = [0.0] * schedule.pp
    turns = [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while turns[rank] < len(actions) and all(need in ends for need in schedule.needs(actions[turns[rank]])):
                action = actions[turns[rank]]
                ready[rank] = max([ready[rank], *_arrivals(schedule, action, ends, costs)]) + costs.of(action)
                ends[action] = ready[rank]
                turns[rank] += 1
                moved = True
    if any(turn < len(actions) for turn, actions in zip(turns, schedule.ranks, strict=True)):
        raise ParallelError(_deadlock(schedule, turns, ends))
    busy = tuple(sum(map(costs.of, actions)) for actions in schedule.ranks)
    return Simulation(ends, max(ready), busy, tuple(map(_peak_in_flight, schedule.ranks)))


def _arrivals(schedule: Schedule, action: Action, ends: dict[Action, float], costs: Costs) -> Iterator[float]:
    rank = schedule.rank_of(action.stage)
    for need in schedule.needs(action):
        yield ends[need] + (costs.communication if schedule.rank_of(need.stage) != rank else 0)


def _peak_in_flight(actions: tuple[Action, ...]) -> int:
    """A rank computes one action at a time, so its order alone decides."""
    over = Kind.BACKWARD_WEIGHT if any(a.kind is Kind.BACKWARD_WEIGHT for a in actions) else Kind.BACKWARD
    if all(action.kind is Kind.FORWARD for action in actions):
        return min(1, len(actions))  # an evaluation keeps nothing
    now = peak = 0
    for action in actions:
        now += (action.kind is Kind.FORWARD) - (action.kind is over)
        peak = max(peak, now)
    return peak


def _deadlock(schedule: Schedule, turns: list[int], ends: dict[Action, float]) -> str:
    lines = []
    for rank, (turn, actions) in enumerate(zip(turns, schedule.ranks, strict=True)):
        if turn == len(actions):
            continue
        missing = next(need for need in schedule.needs(actions[turn]) if need not in ends)
        owner = schedule.rank_of(missing.stage)
        why = f"of rank {owner}" if missing in schedule.ranks[owner] else f"which rank {owner} never does"
        lines.append(f"rank {rank}, at {actions[turn]}, waits for {missing} {why}")
    return (
        f"Schedule {schedule.name!r} (pp {schedule.pp}, virtual stages {schedule.virtual_stages}, "
        f"{schedule.num_micro_batches} micro-batches) never ends: {'; '.join(lines)}. "
        "A forward must come before its backward, and every rank must keep the same order of micro-batches."
    )
