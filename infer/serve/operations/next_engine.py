"""The engine that loads another step beside a running one."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from ....core.errors import ConfigError
from ...engine.engine import Engine
from ...engine.planning.model_source import open_beside
from ...engine.worker.processes import WorkerProcesses

_LOG: Final = logging.getLogger(__name__)


def begin_beside(running: Engine, checkpoint: Path) -> Engine | None:
    """Begins to load a checkpoint in workers of its own; returns None if the running engine serves it.

    The engine begins with the adapters that the running one has now.

    Raises:
        CheckpointError: it cannot be used, or is not the base of an adapter.
        ConfigError: it is another model, the memory is too small for both, or the files of an adapter have changed.
    """
    loaded = running.adapters.loaded
    paths = {name: each.path for name, each in loaded.items()}
    options = replace(running.source.options, adapters=paths, max_adapters=running.source.memory.max_adapters)
    source = open_beside(replace(running.source, options=options), checkpoint, running.worker_process_ids)
    for name, each in source.adapters.items():
        if each.digest != loaded[name].digest:
            raise ConfigError(
                f"The files of adapter {name!r} have changed since it was loaded. Load it again, or unload it."
            )
    if source.checkpoint.manifest_sha256 == running.info.manifest_sha256:
        return None
    _LOG.info("loading step %d\n%s", source.info.step, source.memory.table_beside(running.source.memory))
    options = source.options
    processes = WorkerProcesses(options.tp, options.threads_per_rank)
    return Engine(source, processes)
