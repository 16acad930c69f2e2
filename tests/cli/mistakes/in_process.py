"""Launchers of `tk train` for one rank, in the test's process: errors of ranks, without the seconds of a start."""

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tk.tests.train.run_training import run_training
from tk.train.launch.rank_report import ERROR_FOLDER_VARIABLE, read_reports, write_error


class Exhausted:
    """Takes the place of `Launcher`; its rank asks torch for more memory than there is, and reports the error."""

    def __init__(self, *_arguments: Any) -> None:
        """Starts nothing."""

    def run(self) -> int:
        """Raises what the launcher raises of the rank's report."""
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setenv(ERROR_FOLDER_VARIABLE, folder)
            try:
                torch.empty(1 << 60)
            except RuntimeError as error:
                write_error(error, 0, peers_lost=False)
            [report] = read_reports(Path(folder))
        assert report.kind == "known"
        raise report.error


class InProcess:
    """Takes the place of `Launcher`; the configuration of its run must have one rank."""

    def __init__(self, _module: str, arguments: Sequence[str], num_ranks: int, *_rest: Any) -> None:
        assert num_ranks == 1
        self._config, self._resume = json.loads(arguments[0]), arguments[1]

    def run(self) -> int:
        """Trains; returns the exit code."""
        run_training(self._config, resume=self._resume)
        return 0
