"""Replicas must be bit-equal: before a save is written their checksums are compared, so that drift is never saved."""

from collections.abc import Iterator

import torch

from ...core.errors import TkError
from ...core.ownership import Owned
from ...core.replicas import replicated, run_held, weight_held
from ...parallel.collectives import all_gather, all_reduce_max
from ...parallel.mesh import Group
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
        """`compare` of what is held now."""
        if self.common:
            self.compare(step, self.checksums())

    def checksums(self) -> torch.Tensor:
        """Of all that ranks hold in common, int64 [items]. No collective; may be called from another thread while
        nothing is updated."""
        found = {item: checksum(values) for item, values in self._held()}
        absent = torch.tensor(_ABSENT, device=next(iter(found.values())).device)
        return torch.stack([found.get(item, absent) for item in self.common])

    def compare(self, step: int, mine: torch.Tensor) -> None:
        """One small all-reduce over the world.

        Args:
            mine: this rank's `checksums`.

        Raises:
            TkError: replicas differ; names a tensor and who holds what. All ranks raise it.
        """
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
    """The bits of a 1-D tensor, added up as 64-bit words from its first element, the rest as bytes; int64 scalar,
    wraps."""
    per_word = 8 // values.element_size()
    whole = values.numel() // per_word * per_word
    words = values[:whole] if values.storage_offset() % per_word == 0 else values[:whole].clone()
    return words.view(torch.int64).sum() + values[whole:].view(torch.uint8).sum()
