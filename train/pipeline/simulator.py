"""Simulates a schedule: its duration, the activations that ranks keep in memory, and whether it deadlocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...core.errors import ParallelError
from .actions import Action, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Costs:
    """The time that one micro-batch takes in each global stage, in seconds or any other unit.

    Attributes:
        forward, backward_input, backward_weight: for each stage, the time of that computation.
        communication: the time from the end of an action to the moment at which another rank has its result.
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
        """Returns equal costs for all stages. By default each computation takes 1, as in a matrix product."""
        return Costs(
            [forward] * num_stages, [backward_input] * num_stages, [backward_weight] * num_stages, communication
        )

    def of(self, action: Action) -> float:
        """Returns the duration of an action."""
        if action.kind is Kind.FORWARD:
            return self.forward[action.stage]
        if action.kind is Kind.BACKWARD_INPUT:
            return self.backward_input[action.stage]
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self.backward_weight[action.stage]
        return self.backward_input[action.stage] + self.backward_weight[action.stage]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        ends: the time at which each action ends.
        makespan: the time at which the last action ends.
        busy: for each rank, the time during which it computes.
        peak_in_flight: for each rank, the largest number of (micro-batch, stage) pairs at one time whose forward has
            begun and whose last backward has not ended. Each keeps one stage's activations of one micro-batch, which
            are 1 / (pp x virtual_stages) of the model's.
        peak_deferred: for each rank, the largest number of pairs at one time whose weight gradients wait: the backward
            of their inputs has begun, and that of their weights has not ended.
    """

    ends: dict[Action, float]
    makespan: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_deferred: tuple[int, ...]

    @property
    def rank_bubbles(self) -> tuple[float, ...]:
        """For each rank, the share of the makespan during which it waits."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the time of all ranks that they spend waiting."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulates a schedule in which every action begins as soon as its rank and its inputs are ready.

    Args:
        costs: the durations of actions; None = `Costs.uniform`.

    Raises:
        ParallelError: the schedule deadlocks. The message names each waiting rank, its action, and the missing one.
    """
    costs = costs or Costs.uniform(schedule.num_stages)
    ends: dict[Action, float] = {}
    ready = [0.0] * schedule.pp
    turns = [0] * schedule.pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while turns[rank] < len(actions) and all(
                need in ends for need in schedule.dependencies(actions[turns[rank]])
            ):
                action = actions[turns[rank]]
                ready[rank] = max([ready[rank], *_arrivals(schedule, action, ends, costs)]) + costs.of(action)
                ends[action] = ready[rank]
                turns[rank] += 1
                moved = True
    if any(turn < len(actions) for turn, actions in zip(turns, schedule.ranks, strict=True)):
        raise ParallelError(_deadlock(schedule, turns, ends))
    busy = tuple(sum(map(costs.of, actions)) for actions in schedule.ranks)
    return Simulation(
        ends, max(ready), busy, *(tuple(map(peak, schedule.ranks)) for peak in (_peak_in_flight, _peak_deferred))
    )


def _arrivals(schedule: Schedule, action: Action, ends: dict[Action, float], costs: Costs) -> Iterator[float]:
    """Yields the times at which the inputs of an action are on its rank."""
    rank = schedule.rank_of(action.stage)
    for need in schedule.dependencies(action):
        yield ends[need] + (costs.communication if schedule.rank_of(need.stage) != rank else 0)


def _peak_in_flight(actions: tuple[Action, ...]) -> int:
    """Returns a rank's peak from its order of actions alone, since it computes one action at a time."""
    if all(action.kind is Kind.FORWARD for action in actions):
        return min(1, len(actions))  # an evaluation keeps no activations after a stage
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    return _peak(actions, Kind.FORWARD, Kind.BACKWARD_WEIGHT if splits else Kind.BACKWARD)


def _peak_deferred(actions: tuple[Action, ...]) -> int:
    return _peak(actions, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _peak(actions: tuple[Action, ...], begin: Kind, end: Kind) -> int:
    """Returns the largest number of pairs for which an action of one kind has begun and of another has not ended."""
    now = peak = 0
    for action in actions:
        now += (action.kind is begin) - (action.kind is end)
        peak = max(peak, now)
    return peak


def _deadlock(schedule: Schedule, turns: list[int], ends: dict[Action, float]) -> str:
    """Returns the message for a deadlock; `turns` are the indices of the actions at which ranks wait."""
    lines = []
    for rank, (turn, actions) in enumerate(zip(turns, schedule.ranks, strict=True)):
        if turn == len(actions):
            continue
        missing = next(each for each in schedule.dependencies(actions[turn]) if each not in ends)
        owner = schedule.rank_of(missing.stage)
        why = f"of rank {owner}" if missing in schedule.ranks[owner] else f"which rank {owner} lacks"
        lines.append(f"rank {rank}, at {actions[turn]}, waits for {missing} {why}")
    return (
        f"Schedule {schedule.name!r} (pp {schedule.pp}, virtual stages {schedule.virtual_stages}, "
        f"{schedule.num_micro_batches} micro-batches) deadlocks: {'; '.join(lines)}. "
        "A forward must come before its backward, and all ranks must have the same order of micro-batches."
    )
