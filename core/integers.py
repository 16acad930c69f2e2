"""Division that rounds up."""


def ceil_div(number: int, divisor: int) -> int:
    """The least whole number that is not below number / divisor."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `number`."""
    return ceil_div(number, multiple) * multiple
