"""What a run starts from: its own newest good step, or a checkpoint that was asked for, older steps forked off."""

import sys
from collections.abc import Callable
from pathlib import Path

from ...checkpoint.reader import Checkpoint
from ...checkpoint.run_folder import LockedRun, step_name
from ...core.errors import CheckpointError, ConfigError


def choose(
    run: LockedRun | None, folder: Path, resume: str, fork: bool, from_rank_0: Callable[[int], int]
) -> Checkpoint | None:
    """The checkpoint to resume, None to start at step 0. Every rank calls it; `run` is rank 0's hold on the folder.

    Steps of the folder that are newer than its newest good one are set aside first, with the reason printed.

    Args:
        resume: "auto", "never", or a checkpoint (see Trainer).
        fork: move steps newer than the given checkpoint to forked-ATTEMPT/ instead of refusing.
        from_rank_0: gives every rank rank 0's number.

    Raises:
        ConfigError: "never" was asked for and the folder has steps.
        CheckpointError: the checkpoint cannot be used, or newer good steps are in the way.
    """
    newest = from_rank_0(_recover(run) if run else 0)
    if resume in ("auto", "never"):
        if newest < 0:
            return None
        if resume == "never":
            raise ConfigError(
                f"{folder} holds step {newest} of an earlier run and --resume never was asked for: use another "
                "[checkpoint] dir, or --resume auto."
            )
        return Checkpoint.open_step(folder / step_name(newest))
    checkpoint = Checkpoint.open(Path(resume))
    if checkpoint.step < newest:
        if not fork:
            raise CheckpointError(
                f"{folder} holds step {newest}, newer than step {checkpoint.step} of {checkpoint.path} that you ask to "
                "resume: steps are never overwritten. Continue in another [checkpoint] dir, or add --fork, which moves "
                "the newer steps to a folder of their own."
            )
        moved = run.fork(checkpoint.step) if run else None
        if moved:
            print(f"steps after {checkpoint.step} are now in {moved}", file=sys.stderr)
    return checkpoint


def _recover(run: LockedRun) -> int:
    """The newest good step, -1 if there is none."""
    found = run.set_aside_bad()
    for reason in found.skipped:
        print(f"{reason} It is kept as .bad-{run.attempt}.", file=sys.stderr)
    return found.checkpoint.step if found.checkpoint else -1
