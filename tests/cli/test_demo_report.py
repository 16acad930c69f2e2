"""The demo's report from files written by hand: every figure can be recomputed from them."""

import json
import math
from pathlib import Path

import pytest

from tk.cli import demo_report
from tk.cli.demo_report import Stream, report
from tk.core.layout import Layout
from tk.core.progress import format_bytes
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, save_step

METRICS = [
    {"step": 1, "loss": 6.0, "tokens": 100, "tokens_per_second": 1.0},  # the first step is not typical
    {"step": 2, "loss": 5.0, "tokens": 200, "tokens_per_second": 3000.0},
    {"step": 2, "eval_loss": 5.5},
    {"step": 3, "loss": 4.5, "tokens": 300, "tokens_per_second": 1000.0},
    {"step": 4, "loss": 4.25, "tokens": 400, "tokens_per_second": 2000.0},
    {"step": 4, "eval_loss": 4.75},
]
STREAMS = [Stream("a", "b", 11, 0.5, 2.0), Stream("c", "d", 31, 0.25, 1.0), Stream("e", "f", 21, 0.75, 1.5)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A demo's folder: a run of four ranks, and the config.json of its resharded checkpoint."""
    files = {"config.json": json.dumps(LLAMA_CONFIG).encode()}
    save_step(tmp_path / "run", LLAMA, Layout(tp=2, dp=2, zero=1), side_files=files)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    (tmp_path / "tp1").mkdir()
    (tmp_path / "tp1" / "config.json").write_bytes(files["config.json"])
    return tmp_path


def test_every_row_is_computed_from_the_demos_files(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_report, "_unigram_entropy", lambda folder: 5.125)
    table, commands = report(out, 1.5, STREAMS, 75.0).split("\n\nNext:\n")
    rows = dict(line.strip().split("  ", 1) for line in table.splitlines())
    step = next((out / "run").glob("step-*"))
    size = sum(path.stat().st_size for path in step.rglob("*") if path.is_file())
    expected = {
        "training loss": "6.000 -> 4.250 nats per token",
        "held-out loss": "4.750 (unigram entropy 5.125)",
        "training speed": "2,000 tokens/s, 400 tokens",
        "parameters": f"{sum(math.prod(spec.shape) for spec in LLAMA):,}",
        "checkpoint": f"{format_bytes(size)} at tp 2, ZeRO-1",
        "resharded": f"{format_bytes((out / 'tp1' / 'config.json').stat().st_size)} at tp 1, in 1.5 s",
        "first token": "500 ms",
        "decode": "30 tokens/s over 3 streams",  # 10 + 30 + 20 tokens after the first ones, 2 seconds
        "KV cache": "160 bytes per token in int8, 256 in bf16 (62%)",  # 2 x 2 layers x 2 kv heads x (16 + 4), x 32
    }
    assert {name: rows[name].strip() for name in expected} == expected
    assert list(rows)[-1] == "whole demo"
    assert commands.splitlines()[0] == f"  tk generate {out}/tp1 'def main():' --max-new-tokens 60"
    assert len(commands.splitlines()) == 4
