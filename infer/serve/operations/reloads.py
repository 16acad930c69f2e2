"""The interface through which the server changes its weights; model_switch.py implements it."""

from pathlib import Path
from typing import Protocol

from ...engine.request.events import ModelInfo


class Reloads(Protocol):
    """Changes the weights that a server answers with."""

    def reload(self, checkpoint: Path) -> ModelInfo:
        """Serves another checkpoint of the model from now on, and describes it; the thread of the caller waits.

        Raises CannotReload, StorageError or WorkerDied if the weights of before serve on; Draining after `end_reloads`.
        """

    def end_reloads(self) -> None:
        """Ends a reload that is under way, and refuses later ones; waits for neither."""
