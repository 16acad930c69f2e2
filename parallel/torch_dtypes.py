"""The conversion between number formats and torch's dtypes."""

import torch

from ..core.dtypes import DTYPES, DType, by_name


def torch_dtype(dtype: DType | str) -> torch.dtype:
    """Returns torch's dtype of a format.

    Args:
        dtype: the format, or its name.

    Raises:
        ConfigError: weights cannot have a format of this name.
    """
    found = getattr(torch, (by_name(dtype) if isinstance(dtype, str) else dtype).torch)
    assert isinstance(found, torch.dtype)
    return found


def has_format(dtype: torch.dtype) -> bool:
    """Returns whether a checkpoint can hold values of a dtype of torch; complex numbers, for example, it cannot."""
    return any(getattr(torch, known.torch, None) == dtype for known in DTYPES)


def format_of(dtype: torch.dtype) -> DType:
    """Returns the format of a dtype of torch, which must have one (see `has_format`)."""
    return next(known for known in DTYPES if getattr(torch, known.torch, None) == dtype)
