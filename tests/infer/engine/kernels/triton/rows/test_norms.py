"""Norms and gates against torch's."""

import pytest
import torch
import torch.nn.functional as F

from tk.infer.engine.kernels.triton.rows.norms import add_norm, gate
from tk.model.norm import rms_norm

pytestmark = pytest.mark.triton
CLOSE = {torch.float32: 1e-6, torch.float16: 1e-3}
ROWS, COLUMNS = 5, 96


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


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


@pytest.mark.parametrize("dtype", CLOSE)
def test_gates_are_those_of_torch(dtype: torch.dtype) -> None:
    inner_TF = drawn(dtype, ROWS, 2 * COLUMNS) * 4
    first, up = inner_TF.float().chunk(2, dim=-1)
    expected = F.silu(first).to(dtype).float() * up
    torch.testing.assert_close(gate(inner_TF, "swiglu").float(), expected, rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])
    expected = F.gelu(inner_TF.float(), approximate="tanh")
    torch.testing.assert_close(gate(inner_TF, "gelu_new").float(), expected, rtol=CLOSE[dtype], atol=4 * CLOSE[dtype])
    assert torch.isfinite(gate(torch.full((1, 8), -1e4, dtype=dtype), "gelu_new")).all()
