"""The tests of Triton's kernels: on this CPU, in Triton's interpreter; `make triton` runs them."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[ExitStack]:
    """Guards the interpreter: it refuses arithmetic in bf16, and rounds to it as GPUs do; yields the guard."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run in the interpreter if TRITON_INTERPRET=1: see `make triton`")
    from tk.tests.infer.engine.kernels.triton.guard import guarded_interpreter

    with ExitStack() as stack:
        stack.enter_context(guarded_interpreter())
        yield stack
