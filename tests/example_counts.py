"""The number of examples that a property test tries: all in `make test-all`, a third of them in `make test`."""

import os

from hypothesis import settings

EVERY_EXAMPLE = "TK_EVERY_EXAMPLE"  # the environment variable that `make test-all` sets
SHARE = 3


def examples(count: int) -> settings:
    """Decorates a property test that tries `count` examples in `make test-all`; no example has a deadline."""
    return settings(max_examples=count if os.environ.get(EVERY_EXAMPLE) else -(-count // SHARE), deadline=None)
