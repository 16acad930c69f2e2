"""The section about constrained output, on a tiny model with a byte tokenizer."""

from pathlib import Path

import pytest

from tk.benchmarks.serving import structured
from tk.benchmarks.serving.setup import Setup
from tk.tests.infer.serve.tiny_model import write_tiny_model


def test_it_compares_speeds_and_counts_accepted_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "NUM_SCHEMAS", 6)
    monkeypatch.setattr(structured, "random_schema", lambda seed: {"enum": [seed, "a"]})
    shown: list[str] = []
    setup = Setup(write_tiny_model(tmp_path / "model"), False, 1, 1, (8,), 8, 24, shown.append)
    promises = structured.structured(setup)
    assert [promise.bound for promise in promises] == [1.15, 0.97, 6]
    assert promises[-1].found == 6
    assert all(promise.found > 0 for promise in promises)
    assert "schema" in shown[-1]


def test_a_model_without_a_tokenizer_is_left_out(tmp_path: Path) -> None:
    shown: list[str] = []
    assert structured.structured(Setup(tmp_path, False, 1, 1, (8,), 8, 24, shown.append)) == []
    assert "no tokenizer.json" in shown[0]
