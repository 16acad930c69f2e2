"""The transform is an orthogonal product with a matrix of signs, in blocks, and its own inverse."""

import numpy as np
import pytest
import torch

from tk.infer.engine.kernels.aten.kv_cache import hadamard
from tk.tests.infer.engine.kernels.stored import hadamard as reference


@pytest.mark.parametrize("head_dim", [1, 5, 8, 24, 64, 80, 128])
def test_it_is_a_product_and_its_own_inverse(head_dim: int) -> None:
    x = torch.randn(7, 3, head_dim, generator=torch.Generator().manual_seed(0))
    found = hadamard(x)
    np.testing.assert_allclose(found.numpy(), reference(x.numpy()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(found), x, rtol=1e-5, atol=1e-5)
    assert torch.equal(hadamard(x[2:3, 1]), found[2:3, 1]), "a vector's bits do not depend on the others"


def test_an_outlier_is_spread_over_its_block() -> None:
    x = torch.zeros(24)
    x[10] = 8.0
    assert hadamard(x).square().round(decimals=4).tolist() == [*[0.0] * 8, *[8.0] * 8, *[0.0] * 8]
