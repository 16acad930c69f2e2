"""The steps in a run folder: which there are, and the newest one that counts."""

import math
from pathlib import Path

from ...core.errors import CheckpointError, DamagedCheckpoint
from ..files import lookup
from ..format.manifest import MANIFEST
from ..format.step_names import is_misnamed, step_name, step_of
from .step_folder import StepFolder


def list_steps(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every step folder by its name, oldest first, whether it counts or not."""
    numbers = {name: step_of(name) for name in lookup.list_names(run)}
    return sorted((number, run / name) for name, number in numbers.items() if number is not None)


def newest_step(run: Path, before: float = math.inf) -> tuple[StepFolder | None, dict[int, str]]:
    """The newest step with whole metadata and files of the right sizes; checksums are checked on reading.

    Only damaged steps are passed over. One that cannot be read now, or is whole and not the step of its name, leaves
    open which step is meant.

    Args:
        before: only steps older than this one are looked at.

    Returns:
        The step, None if none counts; and why each newer one was skipped, by its number.

    Raises:
        CheckpointError: a folder holds another step than its name says, or one of a newer tk.
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
                f"{run / name} holds a step and is not named as a run names one (step 7 is {step_name(7)}): "
                "rename it, or move it out of the run."
            )
