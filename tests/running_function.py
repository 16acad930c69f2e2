"""The function of the toolkit that runs at present, for messages of tests."""

import sys
from pathlib import Path
from types import FrameType
from typing import Final

A_TEST: Final = "a test"
_ROOT: Final = Path(__file__).resolve().parents[1]


def running_function() -> str:
    """Returns "folder/file.py function", or A_TEST where tests alone run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] not in ("tests", ".venv")
        if ours and not name.startswith("<"):  # as <listcomp>
            return f"{path.relative_to(_ROOT)} {name}"
        frame = frame.f_back
    return A_TEST
