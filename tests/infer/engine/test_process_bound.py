"""Objects of the API in other processes: threads and other folders are free, forks and copies are refused by name."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.infer import LLM
from tk.infer.engine.request.events import Done, Event
from tk.infer.engine.request.request import Request
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread, delta, finished, started
from tk.tests.other_processes import check_outcomes


def outcomes(*words: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tk.tests.infer.engine.process_bound", *words]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize(
    "name",
    ["LLM", pytest.param("LLM.stream", marks=pytest.mark.matrix), pytest.param("AsyncLLM", marks=pytest.mark.matrix)],
)
def test_a_model_serves_the_process_that_loaded_it(name: str, model_folder: Callable[[str], Path]) -> None:
    """In a fork `generate` waited for ever for the engine's thread."""
    check_outcomes(outcomes(name, str(model_folder("grouped"))), name.partition(".")[0])


@pytest.mark.parametrize("name", ["Client", pytest.param("AsyncClient", marks=pytest.mark.matrix)])
def test_a_client_works_in_the_process_that_made_it(name: str, engine: FakeEngine, server: ServerThread) -> None:
    """In a fork of a process that called the server from another thread, calls waited for ever."""

    def echo(request: Request) -> list[Event]:
        return [started(request), delta(bytes(request.token_ids[1:]).decode()), finished(), Done()]

    engine.script = echo
    check_outcomes(outcomes(name, server.target), name)


def test_workers_start_again_after_a_change_of_the_folder(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path was looked up in the folder of the moment: no worker found the model any more."""
    folder = model_folder("grouped")
    monkeypatch.chdir(folder.parent)
    with LLM(folder.name, kv_blocks=8) as llm:
        monkeypatch.chdir("/")
        assert llm.engine.source.job().checkpoint == str(folder)
