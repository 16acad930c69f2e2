"""The table of number formats."""

from typing import get_args

import numpy as np
import pytest

from tk.core import dtypes
from tk.core.dtypes import COMPUTE_NAMES, DTYPES, DType, Precision
from tk.core.errors import CheckpointError, ConfigError


def test_names_and_codes() -> None:
    assert [dtypes.by_name(name).name for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]
    assert dtypes.by_code("I64").name == "i64"
    with pytest.raises(ConfigError, match="use one of fp32, bf16, fp16"):
        dtypes.by_name("float32")
    with pytest.raises(CheckpointError, match=r"^model\.safetensors: bias has the unknown dtype 'F4'; tk knows BF16"):
        dtypes.by_code("F4", "model.safetensors: bias")


def test_a_configuration_has_the_names_of_the_table() -> None:
    assert get_args(Precision) == COMPUTE_NAMES


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_numpy_holds_as_many_bytes(dtype: DType) -> None:
    assert np.dtype(dtype.numpy).itemsize == dtype.itemsize
    assert dtype.is_integer == (np.dtype(dtype.numpy).kind in "iub" and "float" not in dtype.torch)


def test_no_name_stands_for_two_formats() -> None:
    for key in ("name", "code", "torch"):
        assert len({getattr(dtype, key) for dtype in DTYPES}) == len(DTYPES)
