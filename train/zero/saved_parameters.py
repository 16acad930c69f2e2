"""Saved-tensor hooks for ZeRO stage 3: autograd saves the place of a gathered parameter and not its memory.

The memory of a unit is freed after its forward pass. When backward needs a parameter it calls these hooks, and they
gather the unit if it is free. This holds for every path from a module into the loss: values that it returns, values
that it keeps as attributes, and gradients inside the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ...core.errors import TkError
from .flat_bucket import ParameterBucket


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a bucket's memory.

    Attributes:
        unit: the index of the unit that the bucket belongs to.
        stride: for each dim, in elements.
        offset: of the view's first element in the bucket, in elements.
        version: the number of changes of parameters before the view was saved.
    """

    unit: int
    bucket: ParameterBucket
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


class SavedParameters:
    """Replaces views of units' memory that autograd would save by their places, and finds the values in backward.

    Args:
        units: the buckets of each unit.
        ensure_gathered: gathers the unit with the given index, if it is free, and waits for it.

    Attributes:
        version: the number of changes of parameters; backward through a graph from before a change is refused.
    """

    def __init__(self, units: Sequence[Sequence[ParameterBucket]], ensure_gathered: Callable[[int], None]) -> None:
        self.version = 0
        self._ensure_gathered = ensure_gathered
        # A storage is known by its address: freeing and allocating a bucket only changes the storage's size.
        self._owners = {
            bucket.params.untyped_storage()._cdata: (number, bucket)
            for number, buckets in enumerate(units)
            for bucket in buckets
        }

    def hooks(self) -> saved_tensors_hooks:
        """Returns the context manager within which autograd saves places."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the place of a view of a unit's memory; any other tensor as it is."""
        if tensor.layout is not torch.strided:  # a sparse tensor has no storage
            return tensor
        owner = self._owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            return tensor
        return SavedView(
            *owner, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), self.version
        )

    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor of what `pack` returned."""
        if not isinstance(saved, SavedView):
            tensor: torch.Tensor = saved
            return tensor
        if saved.version != self.version:
            raise TkError(
                "backward goes through a graph from before the parameters changed (a step, a load, or a write inside "
                "engine.full_parameters()), as torch refuses it, too: the values that its gradients need are gone. "
                "Run forward again after the change."
            )
        self._ensure_gathered(saved.unit)
        params = saved.bucket.params
        view = torch.empty(0, dtype=saved.dtype, device=params.device)
        return view.set_(params.untyped_storage(), saved.offset, saved.shape, saved.stride)
