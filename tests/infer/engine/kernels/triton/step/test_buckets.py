"""The buckets of rows."""

import pytest

from tk.infer.engine.kernels.triton.step.buckets import MOST_ROWS, bucket_of, bucket_sizes


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (5, (1, 2, 4, 8)), (17, (1, 2, 4, 8, 16, 24))],
)
def test_buckets_are_1_2_4_and_steps_of_8(most: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(most) == sizes


@pytest.mark.parametrize("most", [1, 3, 6, 64, 100, 256, 1000])
def test_every_number_of_rows_has_the_smallest_bucket_that_holds_it(most: int) -> None:
    sizes = bucket_sizes(most)
    for rows in range(1, min(most, MOST_ROWS) + 1):
        found = bucket_of(rows, sizes)
        assert found == min(size for size in sizes if size >= rows)
        assert found - rows < 8
    assert bucket_of(sizes[-1] + 1, sizes) is None
