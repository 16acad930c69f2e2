"""Activation recomputation (arXiv 1604.06174): parts of the model keep only their inputs, and backward runs them again.

Selective recomputation follows arXiv 2205.05198, section 5.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: Any) -> T:
    """Returns function(*args), keeps only `args` for backward, and computes the function again there.

    The function must not draw random numbers.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    result: T = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
