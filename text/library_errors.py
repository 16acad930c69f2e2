"""The border to libraries in Rust, `tokenizers` above all, whose failures, panics among them, become errors of ours."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..core.errors import TkError

_PANIC = "PanicException"  # pyo3's class of a Rust panic: a BaseException that no module exports


@contextmanager
def failing_as(error_of: Callable[[str], TkError]) -> Iterator[None]:
    """Turns what a library raises in the body into an error of ours.

    `tokenizers` raises bare Exception for what it cannot do. What it did not expect is a panic: a regular expression
    that takes more than the 10 million attempts of Oniguruma, for example. It stays usable after one.

    Args:
        error_of: returns the error for the library's reason.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split()).rstrip(".") or "it gives no reason"
        raise error_of(reason) from error
