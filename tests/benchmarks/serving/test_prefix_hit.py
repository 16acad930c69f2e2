"""The section about the prefix cache, on a tiny model."""

from pathlib import Path

import pytest

from tk.benchmarks.serving import prefix_hit
from tk.benchmarks.serving.setup import Setup
from tk.infer import LLM
from tk.tests.infer.serve.tiny_model import write_tiny_model


def test_each_prompt_is_new_once_and_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def seconds(llm: LLM, prompt: list[int]) -> float:
        [completion] = llm.generate(prompt)
        is_hit = completion.usage.cached_tokens > 0
        assert is_hit == (tuple(prompt) in seen)
        seen.append(tuple(prompt))
        return 1.0 if is_hit else 8.0

    monkeypatch.setattr(prefix_hit, "PROMPT_TOKENS", 100)
    monkeypatch.setattr(prefix_hit, "first_token_seconds", seconds)
    shown: list[str] = []
    setup = Setup(write_tiny_model(tmp_path / "model"), False, 1, 3, (1,), 8, 8, shown.append)
    [promise] = prefix_hit.prefix(setup)
    assert promise.found == 0.125
    assert not promise.is_kept
    assert shown == ["first token after 100 tokens: new 8000.0 ms, with a hit 1000.0 ms"]
    assert len(seen) == 2 * 3 + 1


def test_the_first_token_is_timed(tmp_path: Path) -> None:
    with LLM(write_tiny_model(tmp_path / "model"), threads=1) as llm:
        assert 0 < prefix_hit.first_token_seconds(llm, [5, 6, 7]) < 60
