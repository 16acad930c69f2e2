"""The engine that loads another step beside a running one."""

import logging
from pathlib import Path
from typing import Final

from ....core.errors import ConfigError
from ...engine.engine import Engine
from ...engine.job import threads_per_rank
from ...engine.planning.model_source import open_beside
from ...engine.worker.processes import WorkerProcesses

_LOG: Final = logging.getLogger(__name__)


def begin_beside(running: Engine, checkpoint: Path) -> Engine | None:
    """Begins to load a checkpoint in workers of its own; returns None if the running engine serves it.

    Raises:
        CheckpointError: it cannot be used.
        ConfigError: it is another model, or the memory is too small for both.
    """
    source = open_beside(running.source, checkpoint, running.worker_process_ids)
    if source.checkpoint.manifest_sha256 == running.info.manifest_sha256:
        return None
    _LOG.info("loading step %d\n%s", source.info.step, source.memory.table_beside(running.source.memory))
    options = source.options
    processes = WorkerProcesses(options.tp, threads_per_rank(options.tp, options.threads))
    return Engine(source, processes)


def run_of(engine: Engine) -> Path:
    """Returns the run folder whose step an engine serves; raises ConfigError if its checkpoint was no run folder."""
    named, step = engine.source.options.checkpoint.resolve(), engine.source.checkpoint.path.resolve()
    if step.parent != named:
        raise ConfigError(f"--follow needs a run folder, and {named} is a checkpoint itself. Name the run folder.")
    return named
