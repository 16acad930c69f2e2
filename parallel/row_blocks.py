"""Blocks of rows for chains of elementwise operators: on a CPU, small enough to stay in cache from pass to pass."""

from typing import Final

import torch

CPU_ELEMENTS: Final = 2**18
DEVICE_ELEMENTS: Final = 2**24  # on a GPU, blocks only bound the memory of intermediate results


def row_blocks(x_TD: torch.Tensor) -> list[slice]:
    """Returns slices of dim 0 that cover [T, D], each of at most 64 MiB in fp32.

    Under torch.compile, which fuses the operators, it is one slice.
    """
    num_rows = x_TD.shape[0]
    if torch.compiler.is_compiling():
        return [slice(0, num_rows)]
    elements = CPU_ELEMENTS if x_TD.device.type == "cpu" else DEVICE_ELEMENTS
    step = max(1, elements // max(1, x_TD.shape[1]))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
