"""Number formats as torch's dtypes and back."""

import torch

from ..core.dtypes import DTYPES, DType, by_name


def torch_dtype(dtype: DType | str) -> torch.dtype:
    """torch's dtype of a format, given as it is or by its name; ConfigError for a name that no weights have."""
    found = getattr(torch, (by_name(dtype) if isinstance(dtype, str) else dtype).torch)
    assert isinstance(found, torch.dtype)
    return found


def has_format(dtype: torch.dtype) -> bool:
    """Whether a checkpoint can hold values of torch's dtype; of complex numbers, for example, it cannot."""
    return any(getattr(torch, known.torch, None) == dtype for known in DTYPES)


def format_of(dtype: torch.dtype) -> DType:
    """The format of torch's dtype, which must have one (see `has_format`)."""
    return next(known for known in DTYPES if getattr(torch, known.torch, None) == dtype)
