"""The names in a run folder: of steps and of temporary files, and checks that a folder's name fits its content."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError

_STEP: Final = re.compile(r"step-([0-9]{8,})")
_NUMBERED: Final = re.compile(r"step-([0-9]+)")
_TEMPORARY: Final = re.compile(r"(?P<of>.+)\.(tmp|trash)-(?P<attempt>[0-9a-f]+)")
_ATTEMPT: Final = re.compile(r"(?=[0-9]*[a-f])[0-9a-f]{8}")  # with a letter, so that no date in a user's name is one
LATEST: Final = "LATEST"  # a small file that names the newest step


def new_attempt() -> str:
    """Draws the random name of one start of a job, its attempt: 8 hex digits, of which one at least is a letter."""
    while not _ATTEMPT.fullmatch(drawn := os.urandom(4).hex()):
        pass
    return drawn


def step_name(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step-{step:08d}"


def pending_step(run: Path, step: int, attempt: str) -> Path:
    """Returns the folder in which all ranks of an attempt write a step until it is committed."""
    return run / f"{step_name(step)}.tmp-{attempt}"


def step_of(name: str) -> int | None:
    """Returns the step that a run keeps under a name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def is_misnamed(name: str) -> bool:
    """Returns whether a name looks like a step but is not a run's name for it, such as step-7 or step-000000007."""
    return _NUMBERED.fullmatch(name) is not None and step_of(name) is None


def attempt_of(name: str, files: Collection[str] = ()) -> str | None:
    """Returns the attempt in a temporary name of a step, LATEST or one of `files`; None for any other name."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or not _ATTEMPT.fullmatch(match["attempt"]):
        return None
    ours = _STEP.fullmatch(match["of"]) is not None or match["of"] in (LATEST, *files)
    return match["attempt"] if ours else None


def check_step_name(folder: Path, step: int) -> None:
    """Raises CheckpointError if a folder has the name of another step than `step`, which it holds or will hold."""
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != step:
        raise CheckpointError(
            f"{folder} is named as step {int(match[1])} and holds step {step}. Rename it to {step_name(step)}, or move "
            "it out of the run folder under another name."
        )


def check_target_name(target: Path, step: int | None) -> None:
    """Checks that no run mistakes a new folder for another step or a leftover, or removes it with the step around it.

    Args:
        target: the new folder.
        step: the step that the folder will hold; None for a plain Hugging Face folder, which is no step.

    Raises:
        ConfigError: the name is not safe.
    """
    if attempt_of(target.name) is not None:
        raise ConfigError(f"{target}: a run removes folders with names like this when it starts; choose another name.")
    for above in target.absolute().parents:
        if _STEP.fullmatch(above.name) or attempt_of(above.name) is not None:
            raise ConfigError(
                f"{target} lies inside {above}, which a run may remove with all its content; choose a folder outside."
            )
    right = None if step is None else step_name(step)
    if _STEP.fullmatch(target.name) and target.name != right:
        held = f"step {step}, whose name is {right}" if right else "no step of a run"
        raise ConfigError(f"{target} has the name of a step and would hold {held}; choose another name.")
