"""A clock that a test sets."""


class Clock:
    """Says the time that it was given, in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
