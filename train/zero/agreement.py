"""One order of collectives for ranks whose modules may call their parts in any order (ZeRO stage 3).

Ranks match collectives by their order alone. A rank that skips a block would take another block's values for its own,
or wait for ever. So before a rank starts a gather it sends the other ranks a message of 24 bytes: its act, the unit,
and its number of complete gradient buckets. A rank uses gathered values only after all ranks have announced the same
act. Messages go between CPUs, also if the data goes over NCCL, so that no message waits for a GPU.

Gradient exchanges are started between gathers. When a bucket is complete depends on the graph of a rank (an expert may
get no token), so the number of complete buckets differs between ranks. At the next announcement every rank starts the
exchanges of those buckets that were complete on all ranks at the last one.

    rank 0   announce C, 2 complete   gather C   ...   confirm   exchange bucket 1   announce B, 3 complete   gather B
    rank 1   announce C, 1 complete   gather C   ...   confirm   exchange bucket 1   announce B, 2 complete   gather B
"""

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from ...core.errors import TkError
from ...parallel.collectives import PendingResult, start_all_gather_flat
from ...parallel.mesh import Group


class Act(IntEnum):
    """An act that all ranks of a group must do together."""

    FORWARD = 0
    BACKWARD = 1
    READ = 2
    END_FORWARD = 3
    END_BACKWARD = 4
    UPDATE = 5


_DESCRIPTIONS = (  # by Act
    *("gathers {} for a forward pass", "gathers {} for a backward pass", "gathers {} to be read"),
    *("has ended a forward pass", "has ended a backward pass", "has reached an optimizer step"),
)


class Agreement:
    """Compares the acts of the ranks of a group, and starts gradient exchanges at the same point on each of them.

    Args:
        group: the ranks, with messages between CPUs.
        names: the names of the units, for messages.
        num_complete: returns the number of leading gradient buckets that are complete on this rank.
        start_exchanges: starts the exchange of that many leading buckets, those that are under way left out.
    """

    def __init__(
        self,
        group: Group,
        names: Sequence[str],
        num_complete: Callable[[], int] = lambda: 0,
        start_exchanges: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.group = group
        self.names = names
        self._num_complete, self._start_exchanges = num_complete, start_exchanges
        self._messages: PendingResult | None = None
        self._complete_everywhere = 0
        self._error = ""

    def announce(self, act: Act, unit: int = 0) -> None:
        """Confirms the last act, starts the exchanges that it allows, and sends this rank's next act to the others.

        Raises:
            TkError: the ranks' last acts differ.
        """
        if self.group.size == 1:
            self._start_exchanges(self._num_complete())
            return
        self.confirm()
        self._start_exchanges(self._complete_everywhere)  # between two messages, so at the same point on every rank
        mine = torch.tensor([act, unit, self._num_complete()])
        self._messages = start_all_gather_flat(mine.new_empty(self.group.size * len(mine)), mine, self.group)

    def confirm(self) -> None:
        """Waits for the other ranks' messages and compares their acts with this rank's.

        Raises:
            TkError: the acts differ. From then on every call raises it.
        """
        if self._error:
            raise TkError(self._error)
        if self._messages is None:
            return
        messages, self._messages = self._messages.wait().view(self.group.size, -1).tolist(), None
        self._complete_everywhere = min(num_complete for _, _, num_complete in messages)
        acts = [(act, unit) for act, unit, _ in messages]
        if len(set(acts)) > 1:
            self._error = self._describe(acts)
            raise TkError(self._error)

    def synchronize(self, act: Act) -> None:
        """Announces an act and returns once all ranks have announced it.

        Raises:
            TkError: another rank announced another act.
        """
        self.announce(act)
        self.confirm()
        self._complete_everywhere = 0  # the end of the pass exchanges them; a later one has other gradients

    def _describe(self, acts: Sequence[tuple[int, int]]) -> str:
        ranks = dist.get_process_group_ranks(self.group.process_group)
        ranks_by_act: dict[tuple[int, int], list[str]] = {}
        for rank, act in zip(ranks, acts, strict=True):
            ranks_by_act.setdefault(act, []).append(str(rank))
        acts_of_ranks = "; ".join(
            f"rank{'s' if len(who) > 1 else ''} {', '.join(who)} {_DESCRIPTIONS[act].format(self.names[unit])}"
            for (act, unit), who in ranks_by_act.items()
        )
        return (
            f"The ranks do not call the same parts of the model in the same order: {acts_of_ranks}. At ZeRO stage 3 "
            "a part is gathered from all ranks when it is called, so all ranks must call it. If ranks may skip a block "
            "or call it in another order (layer drop, experts, an early exit), name it in initialize(..., "
            'gather_together=["name or pattern"]): it is then gathered at every call of the model. '
            "No parameter was updated."
        )
