"""Signals while an engine starts: a quiet and quick end that leaves no process behind."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tk.tests.child_processes import has_ended
from tk.tests.infer.serve.serving import WAIT_SECONDS, Command, Serving, shared_memory
from tk.tests.infer.serve.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama"))


def wait_until(goal: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, goal
        time.sleep(0.005)


def signalled(words: Sequence[str], num_workers: int, numbers: Sequence[int]) -> tuple[int, str, str]:
    """Sends signals to a command that has its workers; returns its exit code and output when all have ended."""
    started = Command(*words)
    try:
        wait_until("no workers", lambda: len(started.worker_ids()) == num_workers)
        workers = started.worker_ids()
        for number in numbers[:-1]:
            started.process.send_signal(number)
        ended = started.end(numbers[-1])
        wait_until(f"left behind: {workers}", lambda: all(map(has_ended, workers)))
        return ended
    finally:
        started.close()


def signalled_in_time(words: Sequence[str], num_workers: int, numbers: Sequence[int]) -> tuple[int, str]:
    """Does so while the workers load; returns the exit code and stderr.

    On a machine that does other work, the model may be loaded before a signal arrives: then it tries again.
    """
    for _ in range(6):
        exit_code, stdout, stderr = signalled(words, num_workers, numbers)
        if stdout == "":
            return exit_code, stderr
    raise AssertionError("it waits until the model is loaded")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 1, ""), (signal.SIGKILL, -signal.SIGKILL, "")],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_signal_while_workers_load(
    model: str, command: str, number: int, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = shared_memory()
    arguments = (model, "--tp", "2", "--port", "0") if command == "serve" else (model, "hi")
    exit_code, stderr = signalled_in_time([command, *arguments], 2 if command == "serve" else 1, [number])
    assert exit_code == code, stderr
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())
    wait_until("left behind in memory", lambda: shared_memory() <= before)
    _, table, rest = stderr.partition("on each of 2 ranks\n")  # the table may not be there yet
    said = [line for line in (rest if table else stderr).splitlines() if not line.startswith("listening on ")]
    assert "\n".join(said).strip() == words.strip()


@pytest.mark.matrix
@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_first_build_shows_its_progress_and_why_it_failed(
    model: str, log_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo cc 1.0 && exit\necho no space >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("PATH", str(tmp_path))  # no other compiler
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    serving = Serving(model, "--tp", "2", "--kv-blocks", "64", "--log-format", log_format).wait_ready()
    code, _, stderr = serving.end(signal.SIGTERM)
    serving.close()
    assert code == 0
    lines = [line for line in stderr.splitlines() if line.startswith(("{", "compiling", "The native"))]
    if log_format == "json":
        lines = [json.loads(line).get("message", "") for line in lines]
    units = [line for line in lines if line.startswith("compiling native kernels: ")]
    assert units, stderr
    assert len(units) == len(set(units)), "one rank shows it"
    assert any("no space" in line for line in lines)


def test_two_signals_while_workers_load(model: str) -> None:
    words = ["serve", model, "--tp", "2", "--port", "0"]
    exit_code, stderr = signalled_in_time(words, 2, [signal.SIGTERM, signal.SIGTERM])
    assert exit_code in (1, 130), stderr  # the second may come too late
