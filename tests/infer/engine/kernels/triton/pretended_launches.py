"""Launches on a pretended GPU: kernels run in Triton's interpreter on the values of its tensors, and take no others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from tk.tests.pretend_gpu import OnGpu, pretend_gpu


@contextmanager
def pretended_launches() -> Iterator[Any]:
    """A context with a pretended GPU (see `pretend_gpu`), whose tensors kernels take; yields that GPU.

    Addresses are those of the values, as tables of adapters hold them.
    """
    launch = GridExecutor.__call__

    def launched(grid: GridExecutor, *arguments: Any, **options: Any) -> None:
        tensors = [each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
        assert all(isinstance(each, OnGpu) for each in tensors), f"{grid.fn.__name__} takes a tensor of the host"
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            launch(grid, *(tree_map(_held, each) for each in arguments), **options)

    with torch.inference_mode(), pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        patch.setattr(OnGpu, "data_ptr", lambda tensor: tensor.held.data_ptr())
        yield gpu


def _held(each: Any) -> Any:
    return each.held if isinstance(each, OnGpu) else each
