"""Regular expressions of strangers: those that do not end are refused, others cost nothing or one process."""

import pytest

from tk.core.errors import ConfigError, TkError
from tk.model.lora import quick_patterns
from tk.model.lora.options import LoraOptions
from tk.model.lora.quick_patterns import require_quick
from tk.model.lora.targets import repeating_expressions

NAMES = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(4)]


@pytest.mark.parametrize("pattern", [r"([\w.]+)+!", r"(\w|.)+!"])
def test_a_pattern_that_does_not_end_is_refused(pattern: str) -> None:
    options = LoraOptions(targets=pattern)
    with pytest.raises(ConfigError, match=r"^adapter: matching the names of modules with .* takes more than 0\.3 s"):
        require_quick(repeating_expressions(options), NAMES, "adapter", seconds=0.3)


def test_usual_patterns_pass() -> None:
    options = LoraOptions(targets=r".*layers\.\d+\..*(q|v)_proj", rank_pattern={r"layers\.[0-3]": 4, r"\d+\.q_proj": 2})
    expressions = repeating_expressions(options)
    assert expressions == [options.targets, r"(.*\.)?(\d+\.q_proj)$"]
    require_quick(expressions, NAMES, "adapter")


def test_the_start_of_the_process_does_not_count() -> None:
    require_quick(["a"], NAMES, "adapter", seconds=0.03)  # less than a start takes


def test_a_process_that_fails_or_is_stopped_is_no_fault_of_the_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(quick_patterns, "MODULE", "tk.no_module")
        with pytest.raises(TkError, match=r"^adapter: .* ended with exit code 1\."):
            require_quick(["a"], NAMES, "adapter")
    monkeypatch.setattr(quick_patterns, "LONGEST_WAIT", -1.0)
    with pytest.raises(TkError, match="killed by signal 9") as stopped:
        require_quick(["a"], NAMES, "adapter")
    assert not isinstance(stopped.value, ConfigError)


def test_names_alone_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tk.model.lora.quick_patterns.start_module", None)
    options = LoraOptions(targets=("q_proj",), rank_pattern={r"layers\.1": 2})
    require_quick(repeating_expressions(options), NAMES, "adapter")
