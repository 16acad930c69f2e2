"""The steps in a run folder, and the newest usable one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, DamagedCheckpoint, StorageError
from ..files import lookup
from ..format.manifest import MANIFEST
from ..format.step_names import is_misnamed, step_name, step_of
from .step_folder import StepFolder

_TRIES: Final = 20


def list_steps(run: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every folder with a step's name, oldest first, usable or not."""
    numbers = {name: step_of(name) for name in lookup.list_names(run)}
    return sorted((number, run / name) for name, number in numbers.items() if number is not None)


def newest_step(
    run: Path, before: float = math.inf, open_step: Callable[[Path], StepFolder] = StepFolder.open_checked
) -> tuple[StepFolder | None, dict[int, str]]:
    """Opens the newest step with whole metadata and files of the right sizes; checksums are checked on reading.

    Only damaged steps are passed over. A step that cannot be read now, or that does not fit its name, may be the newest
    good one, so it is an error instead. If a step vanishes while it is opened, the run is pruned, has a newer step, and
    is looked at again.

    Args:
        run: the run folder.
        before: only steps older than this one are considered.
        open_step: opens a step folder; a test may open it in another way.

    Returns:
        The step, None if no step is usable; and the reason why each newer step was skipped, by its number.

    Raises:
        CheckpointError: a folder holds another step than its name says, or a newer tk wrote it.
        StorageError: a file cannot be opened or read.
    """
    for _ in range(_TRIES):
        _refuse_misnamed(run)
        skipped: dict[int, str] = {}
        listed = list_steps(run)
        for step, path in reversed(listed):
            if step >= before:
                continue
            try:
                return open_step(path), skipped
            except (CheckpointError, StorageError) as error:
                if not lookup.exists(path):
                    break
                if not isinstance(error, DamagedCheckpoint):
                    raise
                skipped[step] = f"{path.name} skipped: {error}"
        else:
            if listed == list_steps(run):
                return None, skipped
    raise CheckpointError(f"{run}: each step that was found there vanished while it was opened, {_TRIES} times.")


def _refuse_misnamed(run: Path) -> None:
    for name in lookup.list_names(run):
        if is_misnamed(name) and lookup.exists(run / name / MANIFEST):
            raise CheckpointError(
                f"{run / name} holds a step and is not named as a run names one (step 7 is {step_name(7)}). "
                "Rename it, or move it out of the run folder."
            )
