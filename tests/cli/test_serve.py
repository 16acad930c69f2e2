"""`tk serve`: options reach the server and the engine, and wrong ones are refused before anything starts."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tk.cli.main import main
from tk.infer.engine import Engine
from tk.infer.options import EngineOptions
from tk.infer.server import app
from tk.infer.server.options import ServerOptions
from tk.infer.workers import processes


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a worker starts."""

    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(processes, "start_module", start)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines"),
        (["--port", "65536"], "--port"),
        (["--tp", "0"], "--tp"),
        (["--max-running", "0"], "--max-running"),
        (["--max-step-ms", "0"], "--max-step-ms"),
        (["--kv-blocks", "4", "--kv-memory", "1MiB"], "kv_blocks and kv_memory both set"),
        (["--kv-dtype", "fp4"], "--kv-dtype"),
        (["--default-max-new-tokens", "0"], "--default-max-new-tokens"),
        (["--drain-timeout", "-1"], "--drain-timeout"),
    ],
)
def test_wrong_options_are_refused_before_a_worker_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "model", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err


@pytest.mark.usefixtures("never")
def test_a_port_in_use_is_named_before_a_worker_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "model", "--port", str(port)]) == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(("orderly", "code"), [(True, 0), (False, 130)])
def test_options_reach_the_server_and_the_engine(
    orderly: bool,
    code: int,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[tuple[EngineOptions, ServerOptions]] = []

    def serve(engine: Engine, options: ServerOptions, ready: Callable[[str], Any]) -> bool:
        seen.append((engine.options, options))
        ready("127.0.0.1:7")
        return orderly

    monkeypatch.setattr(app, "serve_until_signal", serve)
    folder = model_folder("grouped")
    arguments = ["--max-model-len", "64", "--kv-blocks", "9", "--no-prefix-cache", "--max-queued", "0"]
    server = ["--port", "0", "--drain-timeout", "1.5", "--default-max-new-tokens", "7"]
    assert main(["serve", str(folder), *arguments, *server]) == code
    [(engine, options)] = seen
    assert (engine.checkpoint, engine.max_model_len, engine.kv_blocks, engine.max_queued) == (folder, 64, 9, 0)
    assert not engine.prefix_cache
    assert options == ServerOptions(port=0, drain_timeout=1.5, default_max_new_tokens=7)
    output = capsys.readouterr()
    assert output.out == "ready 127.0.0.1:7\n"
    assert "64 tokens per request" in output.err
    assert "kernels   " in output.err
