"""The choice between two ways to compute chains of elementwise operators, which give the same up to rounding.

A GPU needs few kernels, since each one reads and writes all of its memory: torch's fused ones, or functions with a
backward of their own. A CPU computes such chains block by block in its cache, or torch's compiler fuses them.
"""

import torch


def has_few_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's device is one that needs few kernels: every one but a CPU."""
    return tensor.device.type != "cpu"
