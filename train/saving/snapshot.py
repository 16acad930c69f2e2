"""Training state to and from a checkpoint: a rank saves the values that it owns, and loads those that it updates."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...checkpoint.read.read_plan import ReadRequest
from ...checkpoint.read.reader import Checkpoint
from ...checkpoint.read.shared_read import ALONE, Peers, read_all
from ...checkpoint.save.state_source import Segment
from ...core.buckets import Shard
from ...core.errors import CheckpointError
from ...core.geometry import Box
from ...core.local_params import Piece
from ...core.ownership import Owned, owned
from ...model.stored_tensors import check_tensors, check_ties
from ...parallel.torch_dtypes import format_of
from ..zero.sharded_adamw import ShardedAdamW

_HOST: Final = torch.device("cpu")


class Snapshot:
    """A rank's view of its training state by logical tensor, slot and range.

    Args:
        optimizer: the rank's optimizer.

    Attributes:
        table: the model's tensors, each with its slots.
    """

    def __init__(self, optimizer: ShardedAdamW) -> None:
        self.optimizer = optimizer
        self.buffers = optimizer.buffers
        self.table = optimizer.buffers.table
        self._runs: dict[tuple[str, Box], list[Shard]] = {}
        for shard in (*self.buffers.shards, *self.buffers.frozen_shards):
            self._runs.setdefault((shard.piece.tensor.name, shard.piece.box), []).append(shard)
        self._by_box = {
            (piece.tensor.name, piece.box): (local, piece, values)
            for local, values in self.buffers.unsharded_params()
            for piece in local.pieces
        }

    @property
    def weights(self) -> dict[Piece, torch.Tensor]:
        """The weights that the rank holds whole now, 1-D, by piece; at ZeRO stage 3 only those that are not sharded."""
        return {piece: self._now(tensor, box) for (tensor, box), (_, piece, _) in self._by_box.items()}

    def _now(self, tensor: str, box: Box) -> torch.Tensor:
        """Returns the elements of a box that is held whole, 1-D; after forward has replaced a buffer, the new one's."""
        self.optimizer.finish()
        local, piece, values = self._by_box[tensor, box]
        values = values if local.trainable else self.buffers.unsharded_tensor(local)
        return values.detach().reshape(-1)[piece.start : piece.start + box.size]

    def owned(self, rank: int) -> tuple[Owned, ...]:
        """Returns the items that a rank saves."""
        return owned(self.table, self.buffers.mesh.layout, rank)

    def values(self, item: Owned) -> npt.NDArray[np.generic]:
        """Returns the elements of `item`, 1-D, in the slot's dtype (bf16 as uint16); a view if possible."""
        values = self._elements(item)
        held_as: torch.dtype = getattr(torch, np.dtype(format_of(values.dtype).numpy).name)
        return self.buffers.copies.moved(values, _HOST).view(held_as).numpy()

    def copy(self, item: Owned, target: npt.NDArray[np.generic]) -> None:
        """Copies the elements of `item` to memory of the host, 1-D, with the dtype of `values`."""
        values = self._elements(item)
        self.buffers.copies.copy(torch.from_numpy(target).view(values.dtype), values)

    def start_copy(self, item: Owned, target: npt.NDArray[np.generic]) -> None:
        """Starts `copy` to pinned memory, on the present stream; no gather may be under way (`ShardedAdamW.finish`)."""
        values = self._elements(item)
        torch.from_numpy(target).view(values.dtype).copy_(values, non_blocking=True)

    def _elements(self, item: Owned) -> torch.Tensor:
        """Returns the elements of `item`, 1-D, where they are."""
        start, stop = item.flat or (0, item.box.size)
        if item.slot == "weight" and (item.tensor, item.box) in self._by_box:
            return self._now(item.tensor, item.box)[start:stop]
        if start == stop:  # an empty tensor: the optimizer has no run of it
            return torch.empty(0, dtype=self.buffers.dtype)
        return self.read(item.slot, self._run_of(item), start, stop).detach()

    def read(self, slot: str, shard: Shard, begin: int, end: int) -> torch.Tensor:
        """Returns elements [begin, end) of the box of a run that this rank holds, which lie within the run, 1-D."""
        if shard.piece.tensor.trainable:
            return self.optimizer.read(slot, shard, begin, end)
        return self.buffers.read_frozen(shard, begin, end)

    def segments(self, item: Owned) -> list[Segment]:
        """Returns the places of `item` in the optimizer's file, while it is pinned."""
        start, stop = item.flat or (0, item.box.size)
        return self.optimizer.segments(item.slot, self._run_of(item), start, stop)

    def _run_of(self, item: Owned) -> Shard:
        """Returns the run that holds an item."""
        start, stop = item.flat or (0, item.box.size)
        for shard in self._runs.get((item.tensor, item.box), ()):
            low, high = shard.flat
            if low <= start and stop <= high:
                return shard
        raise AssertionError(f"core.ownership says this rank owns {item}, but it does not hold it")

    def load(self, checkpoint: Checkpoint, peers: Peers = ALONE) -> None:
        """Reads the values that this rank updates from a checkpoint of any layout; `publish` completes the load.

        Tensors that no checkpoint of this model has, the base of an adapter, stay unchanged.
        fp32 values come from "master" if it is stored, else from "weight".

        Args:
            peers: the ranks of this host that load at the same time; together they read each block once.

        Raises:
            ShapeMismatch: the checkpoint is not of this model.
            CheckpointError: it has no optimizer states.
        """
        states = dict.fromkeys(slot for spec in self.table for slot in spec.states)
        elsewhere = frozenset(spec.name for spec in self.table if not spec.stored)
        self._fill(checkpoint, tuple(dict.fromkeys(("master", *states))), peers, elsewhere)

    def load_weights(self, checkpoint: Checkpoint, peers: Peers = ALONE, without: frozenset[str] = frozenset()) -> None:
        """Reads parameters only, of any stored dtype; optimizer states stay unchanged. `publish` completes the load.

        Args:
            peers: see `load`.
            without: tensors that are not read, and may be missing.

        Raises:
            ShapeMismatch: the checkpoint is not of this model.
        """
        self._fill(checkpoint, ("master",), peers, without)

    def publish(self) -> None:
        """Exchanges the parameters that were read; every rank calls it, once all have read theirs."""
        self.optimizer.publish()

    def _fill(
        self, checkpoint: Checkpoint, slots: Sequence[str], peers: Peers, without: frozenset[str] = frozenset()
    ) -> None:
        check_tensors([spec for spec in self.table if (spec.alias or spec.name) not in without], checkpoint)
        check_ties(self.table, checkpoint)
        requests: list[ReadRequest] = []
        places: list[Callable[[torch.Tensor], object]] = []
        for slot in slots:
            for shard in self.buffers.shards:
                if (slot != "master" and slot not in shard.piece.tensor.states) or shard.piece.tensor.name in without:
                    continue
                name = shard.piece.tensor.alias or shard.piece.tensor.name
                stored = checkpoint.tensors[name].slots
                source = "weight" if slot == "master" and slot not in stored else slot
                if source not in stored:
                    raise CheckpointError(_cannot_resume(checkpoint, name, slot))
                requests.append(ReadRequest(name, shard.piece.box, source, shard.flat))
                places.append(partial(self.optimizer.write, slot, shard))
        for shard in self.buffers.frozen_shards:
            tensor = shard.piece.tensor
            if tensor.name not in without:
                requests.append(ReadRequest(tensor.alias or tensor.name, shard.piece.box, flat=shard.flat))
                places.append(partial(self.buffers.write_frozen, shard))
        for local in self.buffers.unsharded:
            if all(piece.tensor.name in without for piece in local.pieces):
                continue
            whole = self.buffers.unsharded_tensor(local)
            whole.data = whole.data.contiguous()  # elements of an expanded tensor share memory
            for piece in local.pieces:
                requests.append(ReadRequest(piece.tensor.alias or piece.tensor.name, piece.box))
                place = whole.data.view(-1)[piece.start : piece.start + piece.box.size]
                places.append(partial(self.buffers.copies.copy, place))
        read_all(checkpoint, requests, lambda index, read: places[index](read.torch().reshape(-1)), peers)


def _cannot_resume(checkpoint: Checkpoint, name: str, slot: str) -> str:
    kept = ", ".join(other for other in checkpoint.tensors[name].slots if other != "weight")
    if kept:
        reason = f"another optimizer saved it, with {kept}"
    elif any(len(other.slots) > 1 for other in checkpoint.tensors.values()):
        reason = "its run had frozen that tensor"
    else:
        reason = "it holds weights only"
    return (
        f"{checkpoint.path} has no {slot} of {name}, so it cannot be resumed: {reason}. To train from its weights, "
        "name it in [model] init."
    )
