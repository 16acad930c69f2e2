"""The check that replicas are bit-equal: ranks compare checksums before a save is written, so drift is never saved."""

from collections.abc import Iterator, Sequence

import torch

from ...core.errors import TkError
from ...core.families import TensorFamily
from ...core.ownership import Owned
from ...core.replicas import any_replicated, replicated, run_key, sharded_slots, shared_by_axis, weight_key
from ...parallel.collectives import all_gather, all_reduce_max
from ...parallel.mesh import Mesh
from .snapshot import Snapshot

_ABSENT = torch.iinfo(torch.int64).min

Checksums = dict[Owned, torch.Tensor]


class ReplicaCheck:
    """Compares the values that this rank and others both hold, along each axis of the mesh.

    Args:
        snapshot: the rank's training state.
        mesh: the rank's groups.

    Attributes:
        needed: whether any two ranks hold the same value; the same on all ranks.
    """

    def __init__(self, snapshot: Snapshot, mesh: Mesh) -> None:
        self.snapshot = snapshot
        self.mesh = mesh
        self.needed = any_replicated(snapshot.table, mesh.layout)
        shared = shared_by_axis(snapshot.table, mesh.layout, mesh.layout.rank(mesh.coordinates))
        axes = [(mesh.embedding_group, shared.embedding)]
        for name, items in shared.families.items():
            family = TensorFamily(name, {})
            shard, replicate = mesh.sharers(family)
            axes += [(shard, items.shard), (replicate, items.replicate), (mesh.cutters(family), items.tp)]
        self._axes = [(group, items) for group, items in axes if items]
        self._compared = {item for _, items in self._axes for item in items}

    def check(self, step: int) -> None:
        """Compares the present values; see `compare`."""
        if self.needed:
            self.compare(step, self.checksums())

    def checksums(self) -> Checksums:
        """Returns the checksum of each value to compare, an int64 scalar.

        It makes no collective, so another thread may call it as long as nothing is updated.
        """
        return {item: checksum(values) for item, values in self._held()}

    def compare(self, step: int, mine: Checksums) -> None:
        """Compares checksums by one small all-reduce per axis and one over all ranks; every rank calls it.

        Args:
            step: the training step, for the error.
            mine: this rank's `checksums`.

        Raises:
            TkError: replicas differ; the message names a tensor and the ranks that hold each of its values. All ranks
                raise it.
        """
        drifted = torch.zeros((), dtype=torch.int64, device=self.snapshot.buffers.device)
        for group, items in self._axes:
            values = self._in_order(items, mine)
            inverted = torch.where(values == _ABSENT, values, ~values)
            highest, highest_inverted = all_reduce_max(torch.stack([values, inverted]), group)
            drifted |= (highest != ~highest_inverted).any()
        if all_reduce_max(drifted, self.mesh.world):
            raise TkError(self._describe(step, mine))

    def _in_order(self, items: Sequence[Owned], mine: Checksums) -> torch.Tensor:
        """Returns the checksums of `items`, int64 [items]; `_ABSENT` for those that this rank does not hold."""
        device = self.snapshot.buffers.device
        absent = torch.tensor(_ABSENT, device=device)
        return torch.stack([mine.get(item, absent).to(device) for item in items])  # those of offloaded values move

    def _held(self) -> Iterator[tuple[Owned, torch.Tensor]]:
        for piece, values in self.snapshot.weights.items():
            if weight_key(piece) in self._compared:
                yield weight_key(piece), values
        buffers = self.snapshot.buffers
        for shard in (*buffers.shards, *buffers.frozen_shards):
            for slot in sharded_slots(shard.piece, self.mesh.layout):
                key = run_key(slot, shard.piece, shard.flat)
                if key in self._compared:
                    yield key, self.snapshot.read(slot, shard, *shard.flat)

    def _describe(self, step: int, mine: Checksums) -> str:
        """Returns the error's message. Ranks gather all checksums: the time that it takes does not matter any more."""
        common = replicated(self.snapshot.table, self.mesh.layout)
        by_rank = torch.stack(all_gather(self._in_order(common, mine), self.mesh.world))
        holds = by_rank != _ABSENT
        lowest = torch.where(holds, by_rank, torch.iinfo(torch.int64).max).amin(0)
        drifted = (holds & (by_rank != lowest)).any(0).nonzero().flatten().tolist()
        first = drifted[0]
        item = common[first]
        holders: dict[int, list[int]] = {}
        for rank, value in enumerate(by_rank[:, first].tolist()):
            if value != _ABSENT:
                holders.setdefault(value, []).append(rank)
        camps = " / ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in holders.values()
        )
        others = len({common[index].tensor for index in drifted}) - 1
        return (
            f"Step {step} was not saved: replicas that must be bit-equal have drifted apart in {item.tensor}, slot "
            f"{item.slot}{f', and {others} more tensors' if others else ''}: {camps} differ from one another. The "
            "newest committed step is from before this one. Look for values that a script wrote into parameters or "
            "buffers on some ranks only, else for faulty memory or a device that computes wrongly."
        )


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the bits of a 1-D tensor, an int64 scalar that wraps.

    The sum is over 64-bit words from the first element on, and over the bytes that remain.
    """
    per_word = 8 // values.element_size()
    whole = values.numel() // per_word * per_word
    words = values[:whole] if values.storage_offset() % per_word == 0 else values[:whole].clone()
    return words.view(torch.int64).sum() + values[whole:].view(torch.uint8).sum()
