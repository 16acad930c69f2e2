"""The noise against the paper's known answers and the Gumbel distribution."""

from typing import Any

import numpy as np
import pytest

from tk.infer.engine.kernels.sampler.philox import gumbel, philox4x32, uniform

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(  # kat_vectors of Random123, the paper's own library
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    words = philox4x32([np.array([word], np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in words) == expected


def test_four_tokens_share_a_draw() -> None:
    counter = [np.array([word], np.uint64) for word in (3, 9, 1234, 0)]
    words = [int(word[0]) for word in philox4x32(counter, (5, 7))]
    drawn = uniform(7 << 32 | 5, 3, 9, np.arange(4936, 4940))
    assert drawn.tolist() == [(word + 0.5) / 2**32 for word in words]


def test_noise_is_gumbel_and_each_tokens_own() -> None:
    numbers = uniform(5, 0, 3, np.arange(50000))
    noise = gumbel(numbers)
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.02
    some = np.array([3, 7, 8, 11, 40000])
    assert np.array_equal(uniform(5, 0, 3, some), numbers[some])
    for other in ((6, 0, 3), (5, 1, 3), (5, 0, 4), (5 + 2**32, 0, 3)):
        assert not np.isin(uniform(*other, some), numbers[some]).any()
