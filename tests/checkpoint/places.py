"""A copy into a folder with a user's things in it, and everything that is there, to see that nothing of it moves."""

import os
from pathlib import Path

from tk.checkpoint import Checkpoint, Options, prepare_reshard
from tk.core.layout import Layout


def tree(folder: Path) -> dict[bytes, object]:
    """Everything beneath a folder: kind, content, where links lead; links are not followed."""
    found: dict[bytes, object] = {}
    for path, inner, files in os.walk(os.fsencode(folder)):
        for name in inner + files:
            each = os.path.join(path, name)
            content: object = os.readlink(each) if os.path.islink(each) else os.lstat(each).st_mode
            if os.path.isfile(each) and not os.path.islink(each):
                with open(each, "rb") as file:
                    content = (content, file.read())
            found[each] = content
    return found


def reshard(place: Path, target: Path | str, force: bool = True) -> Path:
    """Reshards the run in `place` to `target`, by default with `--force`; returns the new folder."""
    source = Checkpoint.open(place / "run")
    return prepare_reshard(source, target, Options(Layout(), force=force)).run()
