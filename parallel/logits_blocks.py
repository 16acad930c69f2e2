"""The rows of logits that are computed at once, in plain numbers for plans, too (no torch)."""

from typing import Final

ELEMENTS: Final = 2**24
FEWEST_ROWS: Final = 512  # fewer would make products of a weight bound by the memory that it is read from


def rows_at_once(num_columns: int) -> int:
    """Returns the rows of a block of logits with `num_columns` columns: 2^24 elements, or more for few rows."""
    return max(FEWEST_ROWS, ELEMENTS // max(1, num_columns))


def logits_blocks(num_rows: int, num_columns: int) -> list[slice]:
    """Returns slices that cover `num_rows` rows of logits, in order."""
    step = rows_at_once(num_columns)
    return [slice(start, start + step) for start in range(0, num_rows, step)]
