"""The commit of a step by rank 0: waits for all parts, seals the folder and renames it."""

import logging
import time
from pathlib import Path
from typing import Final

from ...core.errors import CheckpointError, ShardMissing
from ..files import folders, lookup, small_files
from ..format.manifest import MAX_PART, PARTS
from ..format.step_names import LATEST, step_name
from ..run.locked_run import LockedRun
from .new_step import NewStep
from .seal import seal
from .writer import part_name

_MAX_POLL_SECONDS: Final = 0.5
_LOG_AFTER: Final = 30.0  # seconds of waiting

_log = logging.getLogger(__name__)


def commit(run: LockedRun, new: NewStep, timeout: float = 600.0) -> Path:
    """Completes a step that every rank of its layout writes (or has written) with `write_part`, and makes it visible.

    Args:
        run: the run, in which `begin_step` has made the step's temporary folder.
        new: the step's metadata.
        timeout: seconds to wait for the parts of other ranks.

    Returns:
        The step's folder under its final name.

    Raises:
        ShardMissing: some parts did not arrive in time; the message names them.
        ManifestError: the parts do not hold every element of every slot exactly once.
        CheckpointError: a folder of the final name exists, or another job has taken the run's lock.
    """
    folder, final = run.pending_step(new.step), run.path / step_name(new.step)
    manifest = new.manifest()
    parts = wait_for_parts(folder, new.layout.world_size, timeout)
    seal(folder, manifest, parts, new.side_files)
    run.require_lock()
    publish(folder, final)
    try:
        run.point_latest(new.step)
    except OSError as error:  # the step is committed, and LATEST is a hint
        _log.warning("%s is committed; %s still names an older step: %s", final, LATEST, error)
    return final


def wait_for_parts(folder: Path, num_writers: int, timeout: float) -> dict[str, bytes]:
    """Waits for every writer's part and returns their contents; ShardMissing, naming the missing ones, on timeout."""
    wanted = [part_name(writer) for writer in range(num_writers)]
    begun, pause, logged = time.monotonic(), 0.01, False
    while True:
        missing = set(wanted) - set(lookup.list_names(folder / PARTS))
        if not missing:
            return {name: small_files.read_small(folder / PARTS / name, MAX_PART) for name in wanted}
        waited, named = time.monotonic() - begun, ", ".join(sorted(missing)[:8])
        if waited > timeout:
            raise ShardMissing(
                f"{folder}: after {timeout:.0f} s {len(missing)} of {num_writers} writers have not finished: {named}. "
                f"The step is not committed; see the logs of those ranks."
            )
        if waited > _LOG_AFTER and not logged:
            logged = True
            _log.warning("%s: waiting for %d of %d writers: %s.", folder, len(missing), num_writers, named)
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_SECONDS)  # spares a shared file system


def publish(folder: Path, final: Path) -> None:
    """Renames a sealed folder to its final name, durably: this is the commit point."""
    if lookup.exists(final):
        raise CheckpointError(f"{final} exists and is not overwritten; {folder} holds the new step.")
    folders.rename(folder, final)
    folders.fsync_dir(final.parent)
