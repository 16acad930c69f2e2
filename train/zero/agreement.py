"""One order of collectives for ranks whose modules call their parts as they like (ZeRO stage 3).

A gather is matched with the others' by its place in the order alone: a rank that skips a block would take another
block's values for its own, or wait for ever. So each rank tells the others, in 24 bytes beside the data, what it is
about to begin; nothing that was gathered is used before all have told the same. The messages go between CPUs, also
where the data goes over NCCL: nothing waits for a GPU.

Gradients are exchanged in between. Which buckets are complete at a moment depends on what a rank's graph uses (experts
that got no token), so a rank also tells how many of its leading buckets are, and at the next message all exchange those
that all had.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from ...core.errors import TkError
from ...parallel.collectives import PendingResult, start_all_gather_flat
from ...parallel.mesh import Group


class Act(IntEnum):
    """What a rank begins."""

    FORWARD = 0
    BACKWARD = 1
    READ = 2
    END_FORWARD = 3
    END_BACKWARD = 4
    UPDATE = 5


_WORDS = (
    *("gathers {} for a forward pass", "gathers {} for a backward pass", "gathers {} to be read"),
    *("has ended a forward pass", "has ended a backward pass", "has come to an optimizer step"),
)


class Agreement:
    """The acts of a group's ranks, compared one by one.

    Args:
        group: passes messages between CPUs; alone, a rank agrees with itself.
        names: of the units that are gathered.
        complete: how many leading buckets of gradients are complete on this rank.
        exchange: begins to exchange that many.
    """

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        complete: Callable[[], int] = lambda: 0,
        exchange: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.group = group
        self.names = names
        self._complete, self._exchange = complete, exchange
        self._told: PendingResult | None = None
        self._agreed = 0
        self._broken = ""

    def begin(self, act: Act, unit: int = 0) -> None:
        """Tells the others what this rank begins now, and does with them what their last messages allow.

        Raises:
            TkError: their last messages did not say the same.
        """
        if self.group.size == 1:
            self._exchange(self._complete())
            return
        self.confirm()
        self._exchange(self._agreed)  # between two messages: the same place in every rank's order
        mine = torch.tensor([act, unit, self._complete()])
        self._told = start_all_gather_flat(mine.new_empty(self.group.size * len(mine)), mine, self.group)

    def confirm(self) -> None:
        """Returns once all have told the same as this rank told last.

        Raises:
            TkError: they have not. From then on nothing more can be gathered.
        """
        if self._broken:
            raise TkError(self._broken)
        if self._told is None:
            return
        told, self._told = self._told.wait().view(self.group.size, -1).tolist(), None
        self._agreed = min(complete for _, _, complete in told)
        acts = [(act, unit) for act, unit, _ in told]
        if len(set(acts)) > 1:
            self._broken = self._describe(acts)
            raise TkError(self._broken)

    def meet(self, act: Act) -> None:
        """`begin` and `confirm`: where all ranks must be before anything else is done.

        Raises:
            TkError: another rank does something else.
        """
        self.begin(act)
        self.confirm()

    def _describe(self, acts: Sequence[tuple[int, int]]) -> str:
        ranks = dist.get_process_group_ranks(self.group.process_group)
        doing: dict[tuple[int, int], list[str]] = {}
        for rank, act in zip(ranks, acts, strict=True):
            doing.setdefault(act, []).append(str(rank))
        said = "; ".join(
            f"rank{'s' if len(who) > 1 else ''} {', '.join(who)} {_WORDS[act].format(self.names[unit])}"
            for (act, unit), who in doing.items()
        )
        return (
            f"The ranks do not call the same parts of the model in the same order: {said}. ZeRO stage 3 gathers a part "
            "from all ranks when it is called. Where ranks may call or skip a block on their own (layer drop, experts, "
            'an early exit), name it in initialize(..., gather_together=["name or pattern"]): such blocks are gathered '
            "with what is always called. Nothing was updated."
        )
