"""Activation recomputation: parts of the model keep only their inputs for backward and are computed again there
(arXiv 1604.06174; what selective recomputation picks: 2205.05198, section 5)."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "selective", "full"]
T = TypeVar("T")


def recomputed(function: Callable[..., T], *args: Any) -> T:
    """function(*args), without randomness; backward computes it again from `args`, which is all that is kept."""
    if not torch.is_grad_enabled():
        return function(*args)
    result: T = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return result
