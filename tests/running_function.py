"""The function of the toolkit that runs at present, for messages of tests."""

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

A_TEST: Final = "a test"
_ROOT: Final = Path(__file__).resolve().parents[1]


def running_function() -> str:
    """Returns "folder/file.py function", or A_TEST where tests alone run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module, name = _module(frame.f_code.co_filename), frame.f_code.co_name
        if module and not name.startswith("<"):  # as <listcomp>
            return f"{module} {name}"
        frame = frame.f_back
    return A_TEST


@cache
def _module(file: str) -> str:
    """Returns the path of a module of the toolkit in its folder, which links lead to, too; else ""."""
    path = Path(file).resolve()
    ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] not in ("tests", ".venv")
    return str(path.relative_to(_ROOT)) if ours else ""
