"""Division that rounds up."""


def ceil_div(number: int, divisor: int) -> int:
    """Returns the smallest integer that is at least number / divisor."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple
