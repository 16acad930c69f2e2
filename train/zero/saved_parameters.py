"""What autograd saves of gathered parameters for backward: where it lay, not memory that comes and goes.

Whichever way a value leaves a module (returned, kept on the module, through a gradient inside the loss), backward asks
here for the parameter that it needs, and here it is gathered if it is not there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .flat_buffers import FlatBucket


@dataclass(frozen=True, slots=True)
class Saved:
    """A view of a unit's memory; stride and offset are in elements."""

    unit: int
    bucket: FlatBucket
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedParameters:
    """Hooks that keep no view of the units' memory.

    Args:
        units: the buckets of each.
        need: gathers a unit, if it is not there, and waits for it.
    """

    def __init__(self, units: Sequence[Sequence[FlatBucket]], need: Callable[[int], None]) -> None:
        self._need = need
        self._owners = {
            bucket.params.untyped_storage()._cdata: (number, bucket)
            for number, buckets in enumerate(units)
            for bucket in buckets
        }

    def hooks(self) -> saved_tensors_hooks:
        """A context for all that builds a graph."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # it has no storage to ask for
            return tensor
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            return tensor
        return Saved(*owner, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Saved):
            tensor: torch.Tensor = saved
            return tensor
        self._need(saved.unit)
        params = saved.bucket.params
        view = torch.empty(0, dtype=saved.dtype, device=params.device)
        return view.set_(params.untyped_storage(), saved.offset, saved.shape, saved.stride)
