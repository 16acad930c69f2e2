"""The runs that `tk serve --follow` follows: that of the model, and those of its adapters."""

from functools import partial
from pathlib import Path

from ....core.errors import CheckpointError, ConfigError
from ...engine.engine import Engine
from ...engine.request.events import AdapterInfo
from ..engine_protocol import AdaptersProtocol
from ..errors import CannotReload
from .model_switch import ModelSwitch
from .run_watcher import RunWatcher


def watchers_of(engine: Engine, switch: ModelSwitch[Engine]) -> list[RunWatcher]:
    """Returns a watcher for the model's run, and one for each adapter that was given as a run folder.

    Raises:
        ConfigError: neither the model nor an adapter was given as a run folder.
    """
    source = engine.source
    given = source.options.adapters
    watchers = [
        RunWatcher(Path(given[name]), each.step, partial(_load, switch.adapters, name))
        for name, each in source.adapters.items()
        if _is_run(Path(given[name]), Path(each.path))
    ]
    named = source.options.checkpoint
    if _is_run(named, source.checkpoint.path):
        watchers.append(RunWatcher(named.resolve(), engine.info.step, switch.reload))
    if not watchers:
        raise ConfigError(f"--follow needs a run folder, and {named} is a checkpoint itself. Name the run folder.")
    return watchers


def _is_run(named: Path, step: Path) -> bool:
    """Returns whether the folder that was named is that of the run whose step was opened."""
    return step.resolve().parent == named.resolve()


def _load(adapters: AdaptersProtocol, name: str, step: Path) -> AdapterInfo:
    """Gives an adapter's name to a newer step of its run.

    Raises:
        CannotReload: the step is no adapter of the base, or the name has been unloaded.
        TkError: it cannot be loaded now.
    """
    if all(each.name != name for each in adapters.infos):
        raise CannotReload(f"Adapter {name!r} was unloaded.")
    try:
        return adapters.load(name, step)
    except CheckpointError as error:
        raise CannotReload(f"Adapter {name!r} stays as it is: {error}") from error
