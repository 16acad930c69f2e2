"""When each rank posts its sends and receives, so that no backend can deadlock.

NCCL carries out what a rank posts in order, and a send may last until its receive is posted. So everything that is
sent gets a stamp, the simulated time at which its producer is over; both ends post in the order of stamps, and what a
rank sends and receives at one stamp is one batch. A total order has no circles: the exchange with the lowest stamp
that is not over can always go on, even if every one of them blocked its rank. Where the order leaves room, a receive
is posted one action before the one that needs it, and so overlaps computing.
"""

from collections import defaultdict

from .actions import Action, Schedule, Transfer
from .simulator import Costs, simulate

Batch = tuple[Transfer, ...]
Posts = tuple[tuple[Batch, ...], ...]

# A backward takes twice a forward, and a transfer little: what is ready in simulated time is ready in a run, mostly.
FORWARD, COMMUNICATION = 16, 1


def plan_communication(schedule: Schedule) -> tuple[Posts, ...]:
    """Per rank and action, the batches to post before it computes, in order; one more entry for after the last action.

    Raises:
        ParallelError: the schedule deadlocks by itself.
    """
    costs = Costs.uniform(schedule.num_stages, FORWARD, FORWARD, FORWARD, COMMUNICATION)
    ends = simulate(schedule, costs).ends
    stamped: list[dict[float, list[Transfer]]] = [defaultdict(list) for _ in range(schedule.pp)]
    for action in sorted(ends, key=lambda action: (ends[action], action.stage)):
        transfer = schedule.transfer_of(action)
        if transfer:
            stamped[transfer.source][ends[action]].append(transfer)
            stamped[transfer.destination][ends[action]].append(transfer)
    return tuple(
        _posts(schedule, rank, [tuple(batches[stamp]) for stamp in sorted(batches)])
        for rank, batches in enumerate(stamped)
    )


def _posts(schedule: Schedule, rank: int, batches: list[Batch]) -> Posts:
    turns = {action: turn for turn, action in enumerate(schedule.ranks[rank])}
    slots = [_latest_slot(batch, rank, turns) for batch in batches]
    for index in reversed(range(len(slots) - 1)):
        if all(transfer.destination == rank for transfer in batches[index]):
            slots[index] = min(slots[index], slots[index + 1])
    posts: list[list[Batch]] = [[] for _ in range(len(turns) + 1)]
    slot = 0
    for batch, latest in zip(batches, slots, strict=True):
        slot = max(slot, latest)  # a receive cannot come before a send of an earlier stamp
        posts[slot].append(batch)
    return tuple(map(tuple, posts))


def _latest_slot(batch: Batch, rank: int, turns: dict[Action, int]) -> int:
    """After the action that computes what is sent; of receives alone, one action before the first that needs one."""
    for transfer in batch:
        if transfer.source == rank:
            return turns[transfer.producer] + 1
    return max(0, min(turns[transfer.consumer] for transfer in batch) - 1)
