"""The check that a loss reaches an adapter: its keys that never get a gradient would be saved as if trained."""

import logging
import re
from collections.abc import Mapping

import torch

from ...core.errors import ConfigError
from ...parallel.collectives import all_reduce_max
from ..engine.training_engine import TrainingEngine

_log = logging.getLogger(__name__)


class ReachedKeys:
    """The keys of an adapter that a gradient reached on some rank.

    One step need not reach every key: an expert may get no token, a layer be skipped. So the first step refuses a key
    only if it reached none of its kind, the keys whose names differ in numbers alone; a save names the others.

    Args:
        names: the keys by their names in the module, each with its name in a checkpoint; none without an adapter.
        engine: the rank's engine.
    """

    def __init__(self, names: Mapping[str, str], engine: TrainingEngine) -> None:
        self._engine = engine
        self._names = names
        self._left = tuple(names)  # those that no gradient had reached at the last look
        self._checked = not names

    def check(self) -> None:
        """Raises ConfigError if no pass of the first step reached a key or one of its kind; every rank calls it."""
        if self._checked:
            return
        left = self._look()
        reached = {_kind(name) for name in self._names if name not in left}
        idle = [name for name in left if _kind(name) not in reached]
        if idle:
            raise ConfigError(
                f"Nothing was updated: {idle[0]}{_more(idle)} got no gradient in the whole step, so the adapter would "
                "be saved with keys that were never trained. Leave modules that the loss does not use out of "
                "target_modules and modules_to_save."
            )
        self._checked = True

    def warn(self) -> None:
        """Logs the keys that no gradient has reached since `initialize`, once for a save; every rank calls it."""
        if self._checked and self._left:
            left = self._look()
            if left and self._engine.mesh.world.rank == 0:
                _log.warning(
                    "%s%s got no gradient since initialize; the adapter is saved with the values that they began with.",
                    self._names[left[0]],
                    _more(left),
                )

    def _look(self) -> tuple[str, ...]:
        """Returns the keys that no gradient has reached on any rank."""
        unreached = self._engine.exchange.unreached
        flags = torch.tensor([name not in unreached for name in self._left], dtype=torch.int32)
        reached = all_reduce_max(flags.to(self._engine.device), self._engine.mesh.world).tolist()
        self._left = tuple(name for name, found in zip(self._left, reached, strict=True) if not found)
        return self._left


def _kind(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _more(names: tuple[str, ...] | list[str]) -> str:
    return f" and {len(names) - 1} more of its keys" if len(names) > 1 else ""
