"""Training state to and from a checkpoint: what a rank owns goes out as it lies, what a rank updates comes in."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..checkpoint.read_plan import Want
from ..checkpoint.reader import Checkpoint
from ..checkpoint.shared_read import ALONE, Peers, read_all
from ..core.dtypes import BF16, FP32
from ..core.errors import CheckpointError
from ..core.layout import Owned, TensorSpec, owned
from ..model.decoder import Decoder
from ..model.loading import check_tensors
from .sharded_adamw import ShardedAdamW


def slot_dtypes(optimizer: ShardedAdamW, parameter_dtype: torch.dtype) -> dict[str, str]:
    """Slot -> safetensors dtype code of what this optimizer saves."""
    weight = BF16 if parameter_dtype == torch.bfloat16 else FP32
    return {"weight": weight.code} | dict.fromkeys(sorted(optimizer.states), FP32.code)


class Snapshot:
    """A rank's view of its training state by logical tensor, slot and range."""

    def __init__(self, decoder: Decoder, optimizer: ShardedAdamW, table: Sequence[TensorSpec]) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self.table = table
        self.weights = {
            (piece.tensor.name, piece.box): decoder.get_parameter(local.name).data.view(-1)[
                piece.start : piece.start + piece.box.size
            ]
            for local in decoder.local_params()
            for piece in local.pieces
        }

    def owned(self, rank: int) -> tuple[Owned, ...]:
        """What this rank saves."""
        layout = self.optimizer.buffers.mesh.layout
        return owned(self.table, layout, rank, ("weight", *sorted(self.optimizer.states)))

    def values(self, item: Owned) -> npt.NDArray[np.generic]:
        """The elements of `item`, 1-D, as bytes of the slot's dtype (bf16 as uint16); a view where memory allows."""
        start, stop = item.flat or (0, item.box.size)
        if item.slot == "weight":
            return _to_numpy(self.weights[item.tensor, item.box][start:stop])
        for shard, values in self.optimizer.runs(item.slot):
            low, high = shard.flat
            held = (shard.piece.tensor.name, shard.piece.box)
            if held == (item.tensor, item.box) and low <= start and stop <= high:
                return _to_numpy(values[start - low : stop - low])
        raise AssertionError(f"core.layout says this rank owns {item}, but the optimizer does not hold it")

    def load(self, checkpoint: Checkpoint, peers: Peers = ALONE) -> None:
        """Reads what this rank updates from a checkpoint of any layout, then everybody's parameters.

        fp32 values come from "master" where it is stored, else from "weight".

        Args:
            peers: ranks of this host, which load now, too: each block is read once between them.

        Raises:
            ShapeMismatch: the checkpoint is not of this model.
            CheckpointError: it has no optimizer states.
        """
        check_tensors([spec for spec in self.table if not spec.alias], checkpoint)
        wants, places = [], []
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            for shard, values in self.optimizer.runs(slot):
                name = shard.piece.tensor.name
                stored = checkpoint.tensors[name].slots
                source = "weight" if slot == "master" and slot not in stored else slot
                if source not in stored:
                    raise CheckpointError(
                        f"{checkpoint.path} has no {slot} of {name}: it holds weights only and cannot be resumed."
                    )
                wants.append(Want(name, shard.piece.box, source, shard.flat))
                places.append(values)
        read_all(checkpoint, wants, lambda index, read: places[index].copy_(read.torch()), peers)
        self.optimizer.publish()


def _to_numpy(values: torch.Tensor) -> npt.NDArray[np.generic]:
    values = values.detach().cpu()
    if values.dtype == torch.bfloat16:
        return values.view(torch.uint16).numpy()
    return values.numpy()
