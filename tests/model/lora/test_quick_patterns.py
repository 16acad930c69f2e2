"""Regular expressions of strangers: those that do not end are refused, others cost nothing or one process."""

import pytest

from tk.core.errors import ConfigError
from tk.model.lora.options import LoraOptions
from tk.model.lora.quick_patterns import require_quick
from tk.model.lora.targets import repeating_expressions

NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(4)]


@pytest.mark.parametrize("pattern", [r"([\w.]+)+!", r"(\w|.)+!"])
def test_a_pattern_that_does_not_end_is_refused(pattern: str) -> None:
    options = LoraOptions(targets=pattern)
    with pytest.raises(ConfigError, match=r"^adapter: matching the names of modules with .* takes more than 1 s"):
        require_quick(repeating_expressions(options), NAMES, "adapter", seconds=1.0)


def test_usual_patterns_pass() -> None:
    options = LoraOptions(targets=r".*layers\.\d+\..*(q|v)_proj", rank_pattern={r"layers\.[0-3]": 4, r"\d+\.q_proj": 2})
    expressions = repeating_expressions(options)
    assert expressions == [options.targets, r"(.*\.)?(\d+\.q_proj)$"]
    require_quick(expressions, NAMES, "adapter")


def test_names_alone_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tk.model.lora.quick_patterns.start_module", None)
    options = LoraOptions(targets=("q_proj",), rank_pattern={r"layers\.1": 2})
    require_quick(repeating_expressions(options), NAMES, "adapter")
