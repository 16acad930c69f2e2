"""Plans when each rank posts its sends and receives, so that no backend can deadlock.

NCCL executes the messages of a rank in the order in which they are posted, and a send may block until its receive is
posted. So every transfer gets a stamp: the simulated time at which its producer ends. Both of its ranks post in the
order of stamps, and the transfers of a rank with equal stamps are one batch. This order is total, so there are no
cycles: the transfer with the lowest stamp that has not ended can always proceed, even if every transfer blocks its
rank. If the order allows it, a receive is posted one action before the action that needs it, and overlaps computation.
"""

from collections import defaultdict

from .actions import Action, Schedule, Transfer
from .simulator import Costs, simulate

Batch = tuple[Transfer, ...]
Posts = tuple[tuple[Batch, ...], ...]

# A backward takes twice as long as a forward, and a transfer is short. With these costs a tensor that is ready in the
# simulation is mostly ready in a run too.
FORWARD, COMMUNICATION = 16, 1


def plan_communication(schedule: Schedule) -> tuple[Posts, ...]:
    """Returns for each rank and action the batches to post before the action, in order.

    Each rank has one more entry, for the batches after its last action.

    Raises:
        ParallelError: the schedule deadlocks with any order of messages.
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
    """Distributes the batches of a rank, which are in order of stamps, over the slots before its actions."""
    turns = {action: turn for turn, action in enumerate(schedule.ranks[rank])}
    slots = [_latest_slot(batch, rank, turns) for batch in batches]
    for index in reversed(range(len(slots) - 1)):
        if all(transfer.destination == rank for transfer in batches[index]):
            slots[index] = min(slots[index], slots[index + 1])  # so that it does not delay the next batch
    posts: list[list[Batch]] = [[] for _ in range(len(turns) + 1)]
    slot = 0
    for batch, latest in zip(batches, slots, strict=True):
        slot = max(slot, latest)  # a receive must not be posted before a send with an earlier stamp
        posts[slot].append(batch)
    return tuple(map(tuple, posts))


def _latest_slot(batch: Batch, rank: int, turns: dict[Action, int]) -> int:
    """Returns the latest slot for a batch, other batches left out of account.

    A batch with a send goes right after the action that computes the tensor; a batch of receives goes one action before
    the first that needs one.
    """
    for transfer in batch:
        if transfer.source == rank:
            return turns[transfer.producer] + 1
    return max(0, min(turns[transfer.consumer] for transfer in batch) - 1)
