"""The memory of tensors that live at once, as a mode that sees each operator's results: exact on every machine."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Sums the bytes of the memory that operators make, until it is freed.

    Attributes:
        peak: the most that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._live: int = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch need not import its compiler, to hide this from it

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operator."""
        given = {_address(each) for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)}
        result = operation(*arguments, **(keywords or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _address(each) not in (*given, *self._sizes):
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, storage._cdata)  # torch keeps the object as long as the memory

    def _free(self, address: int) -> None:
        self._live -= self._sizes.pop(address)


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
