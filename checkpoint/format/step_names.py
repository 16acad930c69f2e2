"""The names in a run folder: its steps', those of what a job writes aside, and when a name and a manifest agree."""

import re
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ConfigError

_STEP: Final = re.compile(r"step-([0-9]{8,})")
_NUMBERED: Final = re.compile(r"step-([0-9]+)")
_ASIDE: Final = re.compile(r"(?P<of>.+)\.(tmp|trash)-(?P<attempt>[0-9a-z-]+)")
LATEST: Final = "LATEST"  # a small file that names the newest step


def new_attempt() -> str:
    """A name for one start of a job, unlike any other."""
    return secrets.token_hex(4)


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def pending_step(run: Path, step: int, attempt: str) -> Path:
    """Where every rank of an attempt writes a step until it is committed; a pure function, so that all ranks agree."""
    return run / f"{step_name(step)}.tmp-{attempt}"


def step_of(name: str) -> int | None:
    """The step that a run keeps under a name; None if a run names none so."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == step_name(int(match[1])) else None


def is_misnamed(name: str) -> bool:
    """Whether a name means a step and is not how a run names it, as step-7 or step-000000007."""
    return _NUMBERED.fullmatch(name) is not None and step_of(name) is None


def attempt_of(name: str, files: Collection[str] = ()) -> str | None:
    """The attempt that wrote aside, or was removing, a step, LATEST or one of `files` under a name; None for any other
    name."""
    match = _ASIDE.fullmatch(name)
    ours = match is not None and (_STEP.fullmatch(match["of"]) is not None or match["of"] in (LATEST, *files))
    return match["attempt"] if match and ours else None


def check_step_name(folder: Path, step: int) -> None:
    """Raises CheckpointError where a folder bears the name of another step than the one that it holds or will hold."""
    match = _STEP.fullmatch(folder.name)
    if match and int(match[1]) != step:
        raise CheckpointError(
            f"{folder} is named as step {int(match[1])} and holds step {step}: in a run it would pass for a step that "
            f"it is not. Name it {step_name(step)}, or keep it outside the run under another name."
        )


def check_target_name(target: Path, step: int | None) -> None:
    """Raises ConfigError where a run would take a new folder for what it is not, another step or a dead job's rest, or
    would remove it with the step that it lies in.

    Args:
        step: what the folder will hold; None for a plain one, which is no step.
    """
    if attempt_of(target.name) is not None:
        raise ConfigError(f"{target}: a run removes folders of such a name when it starts; name the target otherwise.")
    for above in target.absolute().parents:
        if _STEP.fullmatch(above.name) or attempt_of(above.name) is not None:
            raise ConfigError(f"{target} lies inside {above}, which a run removes whole one day; name one outside.")
    right = None if step is None else step_name(step)
    if _STEP.fullmatch(target.name) and target.name != right:
        held = f"step {step}, whose name is {right}" if right else "no step of a run"
        raise ConfigError(f"{target} has the name of a step and would hold {held}; name the target otherwise.")
