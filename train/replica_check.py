"""Replicas must be bit-equal: before each save their checksums are compared, so that drift is never saved."""

from collections.abc import Iterator

import torch

from ..core.errors import TkError
from ..core.layout import Owned
from ..core.replicas import replicated, run_held, weight_held
from ..parallel.collectives import all_gather, all_reduce_max
from ..parallel.mesh import Group
from .snapshot import Snapshot

_ABSENT = torch.iinfo(torch.int64).min


class ReplicaCheck:
    """Compares what this rank holds in common with others; a no-op where nothing is held twice."""

    def __init__(self, snapshot: Snapshot, world: Group) -> None:
        self.snapshot = snapshot
        self.world = world
        self.slots = ("weight", *sorted(snapshot.optimizer.states))
        self.common = replicated(snapshot.table, snapshot.buffers.mesh.layout, self.slots)

    def check(self, step: int) -> None:
        """One small all-reduce over the world.

        Raises:
            TkError: replicas differ; names a tensor and who holds what. All ranks raise it.
        """
        if not self.common:
            return
        found = {item: checksum(values) for item, values in self._held()}
        absent = torch.tensor(_ABSENT, device=next(iter(found.values())).device)
        mine = torch.stack([found.get(item, absent) for item in self.common])
        inverted = torch.where(mine == _ABSENT, mine, ~mine)
        highest, highest_inverted = all_reduce_max(torch.stack([mine, inverted]), self.world)
        drifted = (highest != ~highest_inverted).nonzero().flatten().tolist()
        if drifted:
            raise TkError(self._describe(step, drifted, mine))

    def _held(self) -> Iterator[tuple[Owned, torch.Tensor]]:
        for piece, values in self.snapshot.weights.items():
            yield weight_held(piece), values
        for slot in self.slots if self.snapshot.buffers.zero == 3 else self.slots[1:]:
            for shard, values in self.snapshot.runs(slot):
                yield run_held(slot, shard.piece, shard.flat), values

    def _describe(self, step: int, drifted: list[int], mine: torch.Tensor) -> str:
        everybody = [values.tolist() for values in all_gather(mine, self.world)]
        first = drifted[0]
        item = self.common[first]
        holders: dict[int, list[int]] = {}
        for rank, values in enumerate(everybody):
            if values[first] != _ABSENT:
                holders.setdefault(values[first], []).append(rank)
        camps = " / ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in holders.values()
        )
        others = len({self.common[index].tensor for index in drifted}) - 1
        return (
            f"Step {step} was not saved: replicas that must be bit-equal have drifted apart in {item.tensor}, slot "
            f"{item.slot}{f', and {others} more tensors' if others else ''}: {camps} differ from one another. Look for "
            "faulty memory or a device that computes wrongly; the newest committed step is from before this one."
        )


def checksum(values: torch.Tensor) -> torch.Tensor:
    """The bits of a 1-D fp32 or bf16 tensor, added up as 32-bit words from its first element; int64 scalar."""
    tail = values[:0].view(torch.int16)
    if values.element_size() == 2:
        even = values.numel() // 2 * 2
        tail = values[even:].view(torch.int16)
        values = values[:even] if values.storage_offset() % 2 == 0 else values[:even].clone()
    words = values.view(torch.int32).sum(dtype=torch.int32)  # wraps; a wider sum is ten times slower
    return words.long() + tail.sum()
