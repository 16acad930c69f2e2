"""Norms and gates against torch's."""

import pytest
import torch
import torch.nn.functional as F

from tk.infer.engine.kernels.triton.rows.norms import OwnVectors, add_norm, gate
from tk.infer.engine.kernels.triton.step.step_adapters import LINE
from tk.model.norm import rms_norm
from tk.tests.infer.engine.kernels.triton.where import CLOSE, DEVICE

pytestmark = pytest.mark.triton
ROWS, COLUMNS = 5, 96


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_the_norm_is_that_of_the_sum(dtype: torch.dtype, has_added: bool, has_bias: bool, kind: str) -> None:
    hidden_TD, weight_D, shift_D = drawn(dtype, ROWS, COLUMNS), drawn(dtype, COLUMNS) + 1, drawn(dtype, COLUMNS) * 2
    added_TD, bias_D = (drawn(dtype, ROWS, COLUMNS) * 3, drawn(dtype, COLUMNS) - 2) if has_added else (None, None)
    bias_D = bias_D if has_bias else None
    sum_TD = hidden_TD
    if added_TD is not None:
        sum_TD = hidden_TD + (added_TD if bias_D is None else added_TD + bias_D)
    if kind == "rms":
        expected = rms_norm(sum_TD, weight_D, 1e-5)
    else:
        expected = F.layer_norm(sum_TD.float(), (COLUMNS,), weight_D.float(), shift_D.float(), 1e-5)
    found = add_norm(hidden_TD, (added_TD, bias_D), weight_D, shift_D if kind == "layer" else None, 1e-5)
    assert torch.equal(hidden_TD, sum_TD), "hidden is the sum, rounded as torch rounds it"
    torch.testing.assert_close(found.float(), expected.float(), rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_take_the_vectors_of_their_adapters(kind: str) -> None:
    hidden_TD, vectors = drawn(torch.float16, ROWS, COLUMNS), drawn(torch.float16, 3, 2, COLUMNS) + 1
    lines = torch.zeros(3, LINE, dtype=torch.int64, device=DEVICE)
    lines[:, :2] = torch.tensor([[each.data_ptr() for each in pair] for pair in vectors], device=DEVICE)
    numbers = torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    shift_D = vectors[0, 1] if kind == "layer" else None
    found = add_norm(hidden_TD, (None, None), vectors[0, 0], shift_D, 1e-5, OwnVectors(numbers, lines))
    for row, number in enumerate(numbers.tolist()):
        weight_D, own_shift_D = vectors[number]
        shift_D = own_shift_D if kind == "layer" else None
        alone = add_norm(hidden_TD[row : row + 1], (None, None), weight_D, shift_D, 1e-5)
        assert torch.equal(found[row], alone[0])


@pytest.mark.parametrize("dtype", CLOSE)
def test_gates_are_those_of_torch(dtype: torch.dtype) -> None:
    inner_TF = drawn(dtype, ROWS, 2 * COLUMNS) * 4
    first, up = inner_TF.float().chunk(2, dim=-1)
    expected = F.silu(first).to(dtype).float() * up
    torch.testing.assert_close(gate(inner_TF, "swiglu").float(), expected, rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])
    expected = F.gelu(inner_TF.float(), approximate="tanh")
    torch.testing.assert_close(gate(inner_TF, "gelu_new").float(), expected, rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])
    assert torch.isfinite(gate(torch.full((1, 8), -1e4, dtype=dtype, device=DEVICE), "gelu_new")).all()
