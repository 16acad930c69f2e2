"""The sections about the formats of keys and values, on a tiny model."""

from pathlib import Path

import pytest

from tk.benchmarks.serving import cache_formats
from tk.benchmarks.serving.in_turn import Promise
from tk.benchmarks.serving.setup import Setup
from tk.tests.infer.serve.tiny_model import write_tiny_model

FORMATS = ("k8v4", "int4")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(write_tiny_model(tmp_path / "model"), False, 1, 1, (2,), 8, 16, lambda _: None)


def texts(promises: list[Promise]) -> list[str]:
    """Returns the texts of promises whose figures were measured."""
    assert all(promise.found > 0 for promise in promises)
    return [promise.text for promise in promises]


@pytest.mark.matrix
def test_each_format_is_compared_with_bf16(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*FORMATS, "bf16"} < set(cache_formats.FORMATS)
    monkeypatch.setattr(cache_formats, "FORMATS", (*FORMATS, "bf16"))  # each starts an engine
    promises = cache_formats.kv(setup)
    kinds = ("prefill", "decode")
    assert texts(promises) == [f"{kind} at batch 2 with {name} KV beside bf16 KV" for kind in kinds for name in FORMATS]
    assert {promise.bound for promise in promises} == {0.97}


@pytest.mark.matrix
def test_after_long_prompts_it_must_be_faster(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"LONG_PROMPT": 40, "LONG_BATCH": 2, "STEPS": 8, "LONGEST": 64, "FORMATS": ("int4", "bf16")}
    for name, value in small.items():
        monkeypatch.setattr(cache_formats, name, value)
    promises = cache_formats.long_kv(setup)
    assert texts(promises) == ["decode at batch 2 with int4 KV beside bf16 KV after 40 tokens"]
    assert {promise.bound for promise in promises} == {1.0}
