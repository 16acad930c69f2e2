"""A small run of bench_reload_soak.py, and its promise about memory."""

from pathlib import Path

import pytest

from tk.benchmarks.bench_reload_soak import Times, growth, soak
from tk.tests.infer.serve.tiny_model import write_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize("seconds", [pytest.param(40.0, marks=[pytest.mark.matrix, pytest.mark.timeout(300)])])
def test_reloads_under_mixed_load_leave_nothing_and_change_no_answer(tmp_path: Path, seconds: float) -> None:
    model = write_tiny_model(tmp_path / "model", 1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert soak(model, tmp_path, ("--threads", "1", "--kv-blocks", "256"), 60, Times(seconds, 1.5, 4))


def test_memory_that_grows_is_seen() -> None:
    steady, rising = [100, 101] * 8, list(range(100, 116))
    assert all(promise.is_kept for promise in growth(steady))
    assert [promise.is_kept for promise in growth(rising)] == [False, False]
    assert [promise.is_kept for promise in growth([*steady[:7], 120, *steady[7:]])] == [True, False]
