"""The tests of the backend on Triton's kernels: those that are marked need Triton, and a GPU or its interpreter."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tk.tests.infer.engine.kernels.triton.where import IS_INTERPRETED, IS_PRETENDED, ON_GPU

if importlib.util.find_spec("triton") is None:
    collect_ignore = [
        str(path) for path in Path(__file__).parent.rglob("test_*.py") if "pytest.mark.triton" in path.read_text()
    ]


@pytest.fixture(autouse=True)
def interpreter(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """Guards the interpreter: it refuses arithmetic in bf16, and rounds to it as GPUs do; yields the guard.

    On a GPU the same tests run the compiled kernels, and on a pretended one they launch what they would launch there.
    """
    with ExitStack() as stack:
        if request.node.get_closest_marker("triton") is not None:
            if IS_INTERPRETED:
                from tk.tests.infer.engine.kernels.triton.guard import guarded_interpreter

                stack.enter_context(guarded_interpreter())
                if IS_PRETENDED:
                    from tk.tests.infer.engine.kernels.triton.pretended_launches import pretended_launches

                    stack.enter_context(pretended_launches())
            elif not ON_GPU:
                pytest.skip("without a GPU kernels run in the interpreter, if TRITON_INTERPRET=1: see `make triton`")
        yield stack
