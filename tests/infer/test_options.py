"""The options of an engine: a value of a wrong type is refused with its name, before anything starts."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer import LLM, options
from tk.infer.options import EngineOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp", "2"),
        ("tp", True),
        ("kv_memory", "4GiB"),
        ("kv_blocks", 40.0),
        ("kv_dtype", None),
        ("kv_dtype", 8),
        ("weight_dtype", 4),
        ("prefix_cache", "no"),
        ("speculate", 2.5),
        ("speculate", None),
        ("max_step_ms", "20"),
        ("step_timeout", None),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {type(value).__name__} .*; it must be "):
        LLM("nowhere", **{name: value})


def test_a_checkpoint_is_a_path() -> None:
    with pytest.raises(ConfigError, match="The checkpoint is a int; it must be the path of a folder"):
        LLM(3)  # type: ignore[arg-type]


def test_every_option_has_a_type() -> None:
    assert set(options._TYPES) == {field.name for field in fields(EngineOptions)} - {"checkpoint"}
    EngineOptions(Path("m")).validate()
