"""The sizes of tests: all examples of a property in `make test-all`, a third of them in `make test`."""

import os
from typing import TypeVar

from hypothesis import settings

EVERY_EXAMPLE = "TK_EVERY_EXAMPLE"  # the environment variable that `make test-all` sets
SHARE = 3
T = TypeVar("T", bound=int | tuple[int, ...])


def sized(whole: T, choice: T) -> T:
    """Returns a size, such as a number of tokens, or sizes: `whole` in `make test-all`, `choice` in `make test`."""
    return whole if os.environ.get(EVERY_EXAMPLE) else choice


def examples(count: int) -> settings:
    """Decorates a property test that tries `count` examples in `make test-all`; no example has a deadline."""
    return settings(max_examples=sized(count, -(-count // SHARE)))
