"""The options of commands that serve adapters, and the base of a checkpoint that is an adapter itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ..core.errors import ConfigError
from .common import PATH, PathType
from .invocation import say

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..infer.engine.options import EngineOptions

_PATH: Final = PathType(path_type=Path)
# The name of the only adapter of a command that answers one caller.
OWN: Final = "adapter"

base_option = click.option(
    "--base", metavar="CKPT", type=PATH, help="Base of CKPT, if that is an adapter; default: the one that it records."
)


class NamedPath(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """The type of an option with a value like NAME=CKPT, which the command receives as a pair."""

    name = "name=ckpt"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, sign, path = str(value).partition("=")
        if not name or not sign:
            self.fail(f"{value!r} is not NAME=CKPT, for example sql=runs/sql.", param, ctx)
        return name, Path(str(_PATH.convert(path, param, ctx)))


@dataclass(frozen=True)
class AdaptedModel:
    """A model and the adapter that a command was given instead of it, or beside it.

    Attributes:
        path: the checkpoint of the model.
        adapter: the folder of the adapter; None = there is none.
        rank: the largest rank of its factors.
    """

    path: Path
    adapter: Path | None = None
    rank: int = 1

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of an engine that serves the model with the adapter alone."""
        return {} if self.adapter is None else {"adapters": {OWN: self.adapter}, "max_adapter_rank": self.rank}

    @property
    def request_adapter(self) -> str:
        """The adapter that requests to this engine ask for."""
        return "" if self.adapter is None else OWN


_OF_SERVE: Final = (
    click.option(
        "--adapter",
        "adapters",
        metavar="NAME=CKPT",
        multiple=True,
        type=NamedPath(),
        help="Adapter to load at start, and the name by which requests ask for it; repeat it for more.",
    ),
    click.option(
        "--max-adapters",
        metavar="N",
        type=click.IntRange(0),
        help="Most adapters that may be loaded at a time; default: as many as --adapter names.",
    ),
    click.option(
        "--max-adapter-rank", metavar="N", type=click.IntRange(1), help="Largest rank of an adapter; default: 64."
    ),
    click.option(
        "--max-adapter-heads",
        metavar="N",
        type=click.IntRange(0),
        help="Most of them that may have a head of their own (modules_to_save); default: all if an --adapter has one.",
    ),
    click.option(
        "--max-adapter-experts",
        metavar="N",
        type=click.IntRange(0),
        help="Most of them that may have factors of experts; default: all if an --adapter has some.",
    ),
    click.option(
        "--adapter-root",
        metavar="FOLDER",
        type=PATH,
        help="Folder below which callers of the role admin may load adapters over HTTP; default: none.",
    ),
    base_option,
)
C = TypeVar("C", bound=Callable[..., Any])


def serving_options(command: C) -> C:
    """Adds the options of `tk serve` about adapters to a command."""
    for option in reversed(_OF_SERVE):
        command = option(command)
    return command


def adapted_model(checkpoint: Path, base: Path | None, adapter: Path | None = None) -> AdaptedModel:
    """Returns what to load for a CKPT, which is a model or an adapter.

    Args:
        checkpoint: the CKPT.
        base: the base of an adapter; None = the one that it records.
        adapter: the adapter for a CKPT that is a model; None = there is none.

    Raises:
        ConfigError: a base is given for a model, or an adapter for an adapter; or an adapter does not say what its base
            is, and none is given.
        CheckpointError: a checkpoint, or the recorded base, does not open.
    """
    from ..checkpoint import Checkpoint
    from ..model.merged_adapter import open_base
    from ..model.stored_adapter import StoredAdapter

    opened = Checkpoint.open(checkpoint)
    if opened.manifest.adapter is None:
        if base is not None:
            raise ConfigError(f"--base is for adapters, and {opened.path} holds a model.")
        return AdaptedModel(checkpoint) if adapter is None else _with(checkpoint, Checkpoint.open(adapter), adapter)
    if adapter is not None:
        raise ConfigError(f"--adapter is for a model, and {opened.path} is an adapter itself. Name its base instead.")
    open_base(StoredAdapter.of(opened), base)
    return _with(base or Path(opened.manifest.adapter.base.path), opened, checkpoint)


def _with(model: Path, opened: "Checkpoint", adapter: Path) -> AdaptedModel:
    from ..model.stored_adapter import StoredAdapter

    options = StoredAdapter.of(opened).options
    return AdaptedModel(model, adapter, max(options.rank, *options.rank_pattern.values(), 1))


def with_base(options: "EngineOptions", base: Path | None) -> "EngineOptions":
    """Returns the options for a checkpoint that may be an adapter: then its base is the model, and it has a name.

    Raises:
        ConfigError: see `adapted_model`; or there is no room for the adapter.
    """
    from ..infer.engine.planning.model_source import checkpoint_name

    model, adapters = adapted_model(options.checkpoint, base), dict(options.adapters)
    if model.adapter is not None:
        name = checkpoint_name(model.adapter)
        adapters = {name: model.adapter, **adapters}
        say(f"base      {model.path}\nadapter   {name}: {model.adapter}")
    changed = replace(options, checkpoint=model.path, adapters=adapters)
    changed.validate()
    return changed
