"""Signals while an engine starts: a quiet and quick end that leaves no process behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tk.tests.infer.server.serving import Command
from tk.tests.infer.server.tiny_model import write_tiny_model

SECONDS = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama"))


def runs(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(goal: str, seconds: float, condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, goal
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 1, ""), (signal.SIGKILL, -signal.SIGKILL, "")],
)
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_signal_while_workers_load(
    model: str, command: str, number: int, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared_memory = set(os.listdir("/dev/shm"))
    arguments = (model, "--tp", "2", "--port", "0") if command == "serve" else (model, "hi")
    started = Command(command, *arguments)
    try:
        wait_until("no workers", SECONDS, lambda: len(started.worker_ids()) == (2 if command == "serve" else 1))
        workers = started.worker_ids()
        sent_at = time.monotonic()
        exit_code, stdout, stderr = started.end(number)
        wait_until(f"left behind: {workers}", 2.0, lambda: not any(map(runs, workers)))
        assert time.monotonic() - sent_at < 4.0  # torch alone takes workers longer where machines are busy
    finally:
        started.close()
    assert (exit_code, stdout) == (code, ""), stderr
    assert number == signal.SIGKILL or not list(tmp_path.iterdir())
    assert set(os.listdir("/dev/shm")) <= shared_memory
    _, table, rest = stderr.partition("on each of 2 ranks\n")  # the table may not be there yet
    said = [line for line in (rest if table else stderr).splitlines() if not line.startswith("listening on ")]
    assert "\n".join(said).strip() == words.strip()


def test_two_signals_while_workers_load(model: str) -> None:
    started = Command("serve", model, "--tp", "2", "--port", "0")
    try:
        wait_until("no workers", SECONDS, lambda: len(started.worker_ids()) == 2)
        workers = started.worker_ids()
        started.process.send_signal(signal.SIGTERM)
        sent_at = time.monotonic()
        exit_code, _, stderr = started.end(signal.SIGTERM)
        assert time.monotonic() - sent_at < 10
    finally:
        started.close()
    assert exit_code in (1, 130), stderr  # the second may come too late
    wait_until(f"left behind: {workers}", 2.0, lambda: not any(map(runs, workers)))
