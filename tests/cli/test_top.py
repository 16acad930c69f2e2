"""`tk top` against a server whose engine says what the test wants."""

import io
import json
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from tk.cli.main import main
from tk.cli.top import view
from tk.infer.client.connection import LoadReader
from tk.infer.engine.schedule.statistics import EngineLoad
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread

LOAD = EngineLoad(
    running=3,
    waiting=2,
    queued_tokens=1234,
    blocks_total=80,
    blocks_used=20,
    blocks_cached=40,
    blocks_free=20,
    prefix_hit_rate=0.25,
    prefill_tokens_per_second=1500.0,
    decode_tokens_per_second=99.6,
)


@pytest.fixture
def target() -> Iterator[str]:
    engine = FakeEngine()
    engine.statistics.load_now = LOAD
    server = ServerThread(engine)
    yield server.target
    server.close()
    engine.close()


def test_one_look(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", target, "--once"]) == 0
    out = capsys.readouterr().out
    assert target in out
    for words in ("serving", "3 running, 2 waiting", "1,234", "1,500 of prompts, 100 new", "25% of prompt tokens"):
        assert words in out
    assert "█" * 10 + "▒" * 20 + "·" * 10 in out
    assert "proposals" not in out
    assert "draft" not in out


def test_a_draft_model_is_shown_with_its_memory_and_its_gain(target: str) -> None:
    with LoadReader(target, timeout=10) as reader:
        load = reader.read()
    load |= {"accepted_share": 0.625, "tokens_per_step": 2.414}
    load |= {"draft_weight_bytes": 3 << 20, "draft_kv_bytes": 1 << 30}
    out = io.StringIO()
    Console(width=100, file=out).print(view(target, load))
    assert "62% came true, 2.41 tokens per step of a sequence" in out.getvalue()
    assert "3 MiB of weights, 1 GiB of KV cache" in out.getvalue()


def test_json_has_the_fields_of_the_wire(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", target, "--once", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    assert look["state"] == "serving"
    assert (look["blocks_total"], look["prefix_hit_rate"]) == (80, 0.25)


def test_it_looks_again_until_ctrl_c(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["top", target, "--interval", "0.5"]) == 130
    assert pauses == [0.5] * 3
    assert "3 running, 2 waiting" in capsys.readouterr().out


def test_no_server_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "127.0.0.1:1", "--once"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
