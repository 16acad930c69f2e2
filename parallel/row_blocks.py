"""Runs of rows for chains of elementwise operators: on a CPU, few enough that every pass but the first is in cache."""

from typing import Final

import torch

CPU_ELEMENTS: Final = 2**18
DEVICE_ELEMENTS: Final = 2**24  # there they only bound what is allocated


def row_blocks(x_TD: torch.Tensor) -> list[slice]:
    """Slices of dim 0 that together are all of [T, D], 64 MiB in fp32 at most; one under torch.compile, which fuses
    the operators instead."""
    num_rows = x_TD.shape[0]
    if torch.compiler.is_compiling():
        return [slice(0, num_rows)]
    elements = CPU_ELEMENTS if x_TD.device.type == "cpu" else DEVICE_ELEMENTS
    step = max(1, elements // max(1, x_TD.shape[1]))
    return [slice(start, start + step) for start in range(0, num_rows, step)]
