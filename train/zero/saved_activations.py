"""Saved-tensor hooks that keep on the host what autograd saves in a forward pass, until backward needs it.

A tensor's memory goes down whole, so that tensors that share it have one copy, and come back as they were: with the
same strides, over the same memory. It comes back once, when backward needs the first of them, and stays on the device
until the graph lets go of the last. What stays on the device is kept as autograd keeps it, with its check for changes
in place. A tensor that was copied has the values of the time when it was saved, whatever happens to it later.

Only the innermost hooks act. So tensors that a recomputed part of the model saves in backward stay on the device; its
inputs, which autograd saves in forward, go down.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from ...core.errors import TkError
from ...core.state_pieces import PAGE
from ...parallel.streams import copy_between
from .saved_parameters import SavedParameters, SavedView
from .states.host_pool import HostPool

PLAIN: Final = (torch.Tensor, nn.Parameter)
LEAST: Final = PAGE  # bytes: the host's memory has whole pages, and a copy takes as long as one of some 100 KiB


class _HostCopy:
    """A run of bytes of a device on the host and, once backward needs them, on the device again."""

    __slots__ = ("__weakref__", "_buffer", "_device", "_free", "_nbytes", "_pool", "_values", "_version")

    def __init__(self, values: torch.Tensor, pool: HostPool) -> None:
        self._device, self._nbytes, self._pool = values.device, values.numel(), pool
        self._buffer = pool.take(self._nbytes)
        self._free = weakref.finalize(self, pool.give_back, self._buffer)  # also if the graph is dropped
        self._free.atexit = False
        self._values: torch.Tensor | None = None
        self._version = 0
        copy_between(values, self._on_host, self._device)

    @property
    def _on_host(self) -> torch.Tensor:
        return self._buffer.view(0, self._nbytes, torch.uint8)

    def on_device(self) -> torch.Tensor:
        """Returns the bytes, uint8 [nbytes].

        Raises:
            TkError: a backward pass has changed them.
        """
        if self._values is None:
            self._values = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
            copy_between(self._on_host, self._values, self._device)
            self._version = self._values._version
            self._free()
        _check_unchanged(self._values, self._version)
        return self._values


@dataclass(frozen=True, slots=True)
class _MovedTensor:
    """A tensor whose memory went to the host; `offset` counts elements from the begin of the copy."""

    copy: _HostCopy
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _KeptTensor:
    """A tensor that stays on the device, with the number of changes in place before it was saved."""

    tensor: torch.Tensor
    version: int


class SavedActivations:
    """Moves saved tensors of a device to the host, through buffers of their exact size.

    Parameters, buffers and all that shares their memory stay where they are, and so do tensors of other devices, of
    other layouts or classes than torch's plain one, and those whose memory is smaller than LEAST.

    Args:
        kept: tensors whose memory lives as long as the run.

    Attributes:
        pool: the buffers.
    """

    def __init__(self, device: torch.device, kept: Iterable[torch.Tensor]) -> None:
        self.pool = HostPool(pinned=device.type != "cpu")
        self._device = device
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept)
        # By the tensor that owns the memory and counts the changes in place of all its views.
        self._copies = WeakTensorKeyDictionary()

    def hooks(self, parameters: SavedParameters | None = None) -> saved_tensors_hooks:
        """Returns the context manager of a forward pass.

        Args:
            parameters: at ZeRO stage 3, what keeps the places of gathered parameters.
        """

        def pack(tensor: torch.Tensor) -> Any:
            saved = tensor if parameters is None else parameters.pack(tensor)
            return self._pack(tensor) if saved is tensor else saved

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, SavedView) and parameters is not None:
                return parameters.unpack(saved)
            return _unpack(saved)

        return saved_tensors_hooks(pack, unpack)

    def free(self, tensor: torch.Tensor) -> None:
        """Frees the memory of a tensor after a pass that was the last to read it, if what is saved of it has moved.

        Shape and gradient stay.
        """
        if self._moves(tensor):
            tensor.untyped_storage().resize_(0)

    def _pack(self, tensor: torch.Tensor) -> _MovedTensor | _KeptTensor:
        if not self._moves(tensor):
            return _KeptTensor(
                tensor.detach(), tensor._version
            )  # detached: a node that saves its own output makes no cycle
        itemsize, begin = tensor.element_size(), 0
        first, end = int(tensor.storage_offset()) * itemsize, tensor.untyped_storage().nbytes()
        spread = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
        span = (spread + 1) * itemsize
        if span < end // 2:  # a small part of a large tensor, perhaps of all data
            begin, end = first, first + span
        copy = self._copy(tensor, begin, end)
        return _MovedTensor(copy, tensor.dtype, tensor.shape, tensor.stride(), (first - begin) // itemsize)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return False
        if tensor.device != self._device or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST and storage._cdata not in self._kept

    def _copy(self, tensor: torch.Tensor, begin: int, end: int) -> _HostCopy:
        """Returns the copy of bytes [begin, end) of a tensor's memory now; an earlier one, if it is the same."""
        owner = tensor if tensor._base is None else tensor._base
        copies: weakref.WeakValueDictionary[tuple[int, int, int], _HostCopy]
        copies = self._copies.setdefault(owner, weakref.WeakValueDictionary())
        key = (tensor._version, begin, end)
        found = copies.get(key)
        if found is None:
            values = torch.empty(0, dtype=torch.uint8, device=self._device)
            values = values.set_(tensor.untyped_storage(), begin, (end - begin,), (1,))
            found = copies[key] = _HostCopy(values, self.pool)
        return found


def _unpack(saved: _MovedTensor | _KeptTensor) -> torch.Tensor:
    if isinstance(saved, _KeptTensor):
        _check_unchanged(saved.tensor, saved.version)
        return saved.tensor
    values = saved.copy.on_device()
    whole = values[: len(values) // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
    return whole.as_strided(saved.shape, saved.stride, saved.offset)


def _check_unchanged(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise TkError(
            f"A tensor of {tensor.dtype} {list(tensor.shape)} that backward needs was changed in place after autograd "
            f"saved it (version {tensor._version} instead of {version}), as torch refuses it, too: gradients would be "
            "those of other values. Change a copy instead."
        )
