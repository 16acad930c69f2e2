"""Products with a weight in each form that a rank holds it in, against torch's."""

import pytest
import torch

from tk.core.quantization import Grouping
from tk.parallel import coded_weight
from tk.parallel.coded_weight import CodedWeight
from tk.parallel.held_weight import add_input_gradient, add_outputs, coded_input_gradient, coded_product


def matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a weight [12, 64], inputs [5, 64] and a gradient [5, 12]."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*shape, generator=generator) for shape in ((12, 64), (5, 64), (5, 12)))  # type: ignore[return-value]


@pytest.mark.parametrize("num_transposed", [0, 1, 3])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_product_joins_a_sum(num_transposed: int, fresh: bool) -> None:
    weight_FD, x_TD, grad_TF = matrices()
    held = torch.cat([block.t() for block in weight_FD.chunk(num_transposed)]) if num_transposed else weight_FD
    y_TF, total_TD = torch.full((5, 12), 2.0), torch.full((5, 64), 3.0)
    add_outputs(y_TF, x_TD, held, num_transposed, fresh=fresh)
    add_input_gradient(total_TD, grad_TF, held, num_transposed, fresh=fresh)
    torch.testing.assert_close(y_TF, x_TD @ weight_FD.t() + (0.0 if fresh else 2.0))
    torch.testing.assert_close(total_TD, grad_TF @ weight_FD + (0.0 if fresh else 3.0))


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_widened_in_blocks(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(coded_weight, "MOST_VALUES", 200)  # 3 rows, or one group of columns
    weight_FD, x_TD, grad_TF = matrices()
    codes = CodedWeight.of(weight_FD.numpy(), Grouping(bits, 16), torch.float32, torch.device("cpu"))
    wide_FD = codes[:]
    assert [rows.stop - rows.start for rows, _ in codes.row_blocks()] == [3] * 4
    assert [columns.stop - columns.start for columns, _ in codes.column_blocks()] == [16] * 4
    torch.testing.assert_close(wide_FD, weight_FD, rtol=0, atol={8: 0.02, 4: 0.3}[bits])
    torch.testing.assert_close(coded_product(x_TD, codes), x_TD @ wide_FD.t())
    torch.testing.assert_close(coded_input_gradient(grad_TF, codes), grad_TF @ wide_FD)
