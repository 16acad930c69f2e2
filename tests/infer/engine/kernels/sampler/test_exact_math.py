"""exp and log made of IEEE operations against others, and sums that do not depend on their order."""

import math

import numpy as np
import pytest

from tk.infer.engine.kernels.sampler.exact_math import log, weights


def test_weights_are_exp() -> None:
    scores = np.concatenate([np.linspace(-18, 0, 100_001), [-np.inf, -1e30, -80, -200]]).astype(np.float32)
    found, expected = weights(scores, 1000), np.exp(scores.astype(np.float64))
    near = scores > -1
    np.testing.assert_allclose(found[near], expected[near], rtol=2.6e-7)
    np.testing.assert_allclose(found, expected, rtol=1.2e-6, atol=2.0**-42)
    assert found[scores == 0].tolist() == [1.0]
    assert not found[-4:].any()


@pytest.mark.parametrize("vocab_size", [1, 37, 32000, 2**18])
def test_sums_of_weights_do_not_depend_on_their_order(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    found = weights((-generator.random(vocab_size) * 3).astype(np.float32), vocab_size)
    expected = found.cumsum()[-1]
    for _ in range(5):
        assert generator.permutation(found).cumsum()[-1] == expected
    assert found[::-1].sum() == expected


def test_log_is_log() -> None:
    values = np.concatenate([10.0 ** np.linspace(-40, 40, 10001), 1 + np.linspace(-0.5, 0.5, 10001)])
    values = np.append(values, [1 - 2.0**-33, 2.0**-33, 1.0])
    expected = [math.log(value) for value in values]  # numpy's is less exact in some releases
    np.testing.assert_allclose(log(values), expected, rtol=3e-16, atol=0)
    assert log(values)[-1] == 0
