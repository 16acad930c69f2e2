"""The steps in a run folder, and the newest usable one."""

import math
from pathlib import Path

from ...core.errors import CheckpointError, DamagedCheckpoint
from ..files import lookup
from ..format.manifest import MANIFEST
from ..format.step_names import is_misnamed, step_name, step_of
from .step_folder import StepFolder


def list_steps(run: Path) -> list[tuple[int, Path]]:
    """Returns (step, folder) of every folder with a step's name, oldest first, usable or not."""
    numbers = {name: step_of(name) for name in lookup.list_names(run)}
    return sorted((number, run / name) for name, number in numbers.items() if number is not None)


def newest_step(run: Path, before: float = math.inf) -> tuple[StepFolder | None, dict[int, str]]:
    """Opens the newest step with whole metadata and files of the right sizes; checksums are checked on reading.

    Only damaged steps are passed over. A step that cannot be read now, or that does not fit its name, may be the newest
    good one, so it is an error instead.

    Args:
        run: the run folder.
        before: only steps older than this one are considered.

    Returns:
        The step, None if no step is usable; and the reason why each newer step was skipped, by its number.

    Raises:
        CheckpointError: a folder holds another step than its name says, or a newer tk wrote it.
        StorageError: a file cannot be opened or read.
    """
    _refuse_misnamed(run)
    skipped: dict[int, str] = {}
    for step, path in reversed(list_steps(run)):
        if step >= before:
            continue
        try:
            return StepFolder.open_checked(path), skipped
        except DamagedCheckpoint as error:
            skipped[step] = f"{path.name} skipped: {error}"
    return None, skipped


def _refuse_misnamed(run: Path) -> None:
    for name in lookup.list_names(run):
        if is_misnamed(name) and lookup.exists(run / name / MANIFEST):
            raise CheckpointError(
                f"{run / name} holds a step and is not named as a run names one (step 7 is {step_name(7)}). "
                "Rename it, or move it out of the run folder."
            )
