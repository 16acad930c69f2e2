"""Division that rounds up."""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Integers = TypeVar("_Integers", int, "NDArray[np.int64]")


def ceil_div(number: _Integers, divisor: int) -> _Integers:
    """Returns the smallest integer that is at least number / divisor; of an array, for each of its numbers."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple
