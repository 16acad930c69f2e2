"""Number formats as torch's dtypes."""

import pytest
import torch

from tk.core.dtypes import DTYPES, DType
from tk.core.errors import ConfigError
from tk.parallel.torch_dtypes import format_of, has_format, torch_dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_format_goes_there_and_back(dtype: DType) -> None:
    found = torch_dtype(dtype)
    assert found.itemsize == dtype.itemsize
    assert (not found.is_floating_point) == dtype.is_integer
    assert has_format(found)
    assert format_of(found) == dtype


def test_names_are_those_of_weights() -> None:
    assert torch_dtype("bf16") == torch.bfloat16
    with pytest.raises(ConfigError, match="use one of fp32, bf16, fp16"):
        torch_dtype("int8")


def test_complex_numbers_have_no_format() -> None:
    assert not has_format(torch.complex64)
