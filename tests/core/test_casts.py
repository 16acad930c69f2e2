"""Casts without torch, bit-equal to torch's."""

import numpy as np
import pytest
import torch

from tk.core import dtypes
from tk.core.casts import Array, cast
from tk.core.dtypes import BF16, FP16, FP32
from tk.core.errors import CheckpointError

TORCH = {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}


def as_torch(values: Array, dtype: dtypes.DType) -> torch.Tensor:
    return torch.from_numpy(values.view(f"i{dtype.itemsize}")).view(TORCH[dtype])


def hard_fp32() -> Array:
    """Returns random bit patterns and the neighbours of every rounding boundary, without NaN payloads."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (np.arange(2**16, dtype=np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    return np.concatenate([bits, ties.reshape(-1)]).view(np.float32)


def test_fp32_to_bf16_for_every_kind_of_value() -> None:
    values = hard_fp32()
    found = as_torch(cast(values, FP32, BF16), BF16)
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


def test_fp32_to_fp16_where_it_fits() -> None:
    values = hard_fp32()
    values = values[np.isnan(values) | np.isinf(values) | (np.abs(values) <= 65504)]
    found = as_torch(cast(values, FP32, FP16), FP16)
    wanted = torch.from_numpy(values).to(torch.float16)
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found[~nan].view(torch.int16), wanted[~nan].view(torch.int16))


@pytest.mark.parametrize("source", [BF16, FP16])
@pytest.mark.parametrize("target", [BF16, FP32])
def test_every_16_bit_value(source: dtypes.DType, target: dtypes.DType) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(source.numpy)
    values = values[~torch.isnan(as_torch(values, source)).numpy()]
    found = as_torch(cast(values, source, target), target)
    wanted = as_torch(values, source).to(TORCH[target])
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("value", [65520.0, 1e30, -70000.0])
def test_overflow_to_fp16_names_the_tensor(value: float) -> None:
    with pytest.raises(CheckpointError, match=r"model\.norm.*65504"):
        cast(np.array([1.0, value], np.float32), FP32, FP16, "model.norm")


def test_infinity_is_no_overflow() -> None:
    assert np.isinf(cast(np.array([np.inf], np.float32), FP32, FP16)).all()


def test_an_integer_is_not_cast() -> None:
    with pytest.raises(CheckpointError, match="tk cannot cast ids from I64 to F32"):
        cast(np.array([1]), dtypes.by_code("I64"), FP32, "ids")
