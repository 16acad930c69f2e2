"""The launcher of `tk train` for one rank, in the test's process: errors of ranks, without the seconds of a start."""

import json
from collections.abc import Sequence
from typing import Any

from tk.tests.train.run_training import run_training


class InProcess:
    """Takes the place of `Launcher`; the configuration of its run must have one rank."""

    def __init__(self, _module: str, arguments: Sequence[str], num_ranks: int, *_rest: Any) -> None:
        assert num_ranks == 1
        self._config, self._resume = json.loads(arguments[0]), arguments[1]

    def run(self) -> int:
        """Trains; returns the exit code."""
        run_training(self._config, resume=self._resume)
        return 0
