"""`tk serve`: options reach the server and the engine, and wrong ones are refused before anything starts."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk.cli import adapter_options
from tk.cli.adapter_options import AdaptedModel
from tk.cli.main import main
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.worker import processes
from tk.infer.serve import app
from tk.infer.serve.app import End
from tk.infer.serve.options import ServerOptions
from tk.tests.infer.serve.fake_engine import INFO


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


class StartedEngine:
    """An engine without a model, which records that it was closed."""

    def __init__(self, options: EngineOptions) -> None:
        self.options, self.info, self.is_closed = options, INFO, False

    def wait_ready(self) -> None:
        """Does nothing: no worker loads a model."""

    def after_events(self, callback: object) -> None:
        """Does nothing: it sends none."""

    def watch(self, callback: object) -> None:
        """Does nothing: no worker dies."""

    def close(self) -> None:
        self.is_closed = True


class NoProcesses:
    """The processes of workers, without any process."""

    def __init__(self, tp: int, threads: int) -> None:
        assert (tp, threads) == (2, 3)

    def close(self) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("end", "code"), [(End.DRAINED, 0), (End.SECOND_SIGNAL, 130), (End.TERMINATED, 1), (End.INTERRUPTED, 130)]
)
def test_options_reach_the_server_and_the_engine(
    end: End, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines: list[StartedEngine] = []
    served: list[ServerOptions] = []

    def begin(options: EngineOptions, on_plan: Callable[..., None], processes: NoProcesses) -> StartedEngine:
        on_plan(INFO, SimpleNamespace(table=lambda: "a table of memory"))
        engines.append(StartedEngine(options))
        return engines[0]

    def serve(
        engine: Any,
        options: ServerOptions,
        ready: Callable[[str], Any],
        reloads: Any,
        ports: Sequence[Any],
        on_signal: Callable[[End], object],
    ) -> End:
        assert engine is reloads
        assert (list(ports), callable(on_signal)) == ([], True)
        assert not engines[0].is_closed
        served.append(options)
        ready("127.0.0.1:7")
        return end

    monkeypatch.setattr(processes, "WorkerProcesses", NoProcesses)
    monkeypatch.setattr(Engine, "begin", begin)
    monkeypatch.setattr(app, "serve_until_signal", serve)
    sizes = ["--tp", "2", "--threads", "3", "--max-model-len", "64", "--kv-blocks", "9", "--max-queued", "0"]
    server = ["--port", "0", "--drain-timeout", "1.5", "--default-max-new-tokens", "7"]
    monkeypatch.setattr(adapter_options, "adapted_model", lambda path, base: AdaptedModel(path))
    assert main(["serve", "model", "--no-prefix-cache", "--batch-invariant", *sizes, *server]) == code
    given = {
        "batch_invariant": True,
        "tp": 2,
        "threads": 3,
        "max_model_len": 64,
        "kv_blocks": 9,
        "max_queued": 0,
        "prefix_cache": False,
    }
    assert [engine.options for engine in engines] == [EngineOptions(Path("model"), **given)]  # type: ignore[arg-type]
    assert served == [ServerOptions(port=0, drain_timeout=1.5, default_max_new_tokens=7)]
    assert engines[0].is_closed
    output = capsys.readouterr()
    assert output.out == "ready 127.0.0.1:7\n"
    assert f"{INFO.max_model_len} tokens per request" in output.err
    assert "a table of memory" in output.err
    assert f"kernels   {INFO.kernels}\nthreads   3 on each of 2 ranks\n" in output.err
