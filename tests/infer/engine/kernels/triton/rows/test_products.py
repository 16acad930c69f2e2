"""The constants of products."""

import pytest

from tk.infer.engine.kernels.triton.rows.products import ProductShape

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(("bits", "width"), [(0, 16), (8, 16), (4, 32)])
def test_a_byte_of_4_bits_has_two_columns(bits: int, width: int) -> None:
    assert ProductShape(8, 64, 2, bits, 32, 16, 16, 16, 4).width == width
