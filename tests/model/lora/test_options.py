"""The options: their defaults, and values that are refused when they are read."""

import re
from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.model.lora.options import ALL_LINEAR, LoraOptions


def test_defaults_adapt_all_linear_layers() -> None:
    options = LoraOptions()
    assert (options.rank, options.alpha, options.dropout) == (16, 32.0, 0.0)
    assert (options.targets, options.exclude, options.modules_to_save) == (ALL_LINEAR, (), ())
    assert (options.bias, options.rslora) == ("none", False)
    assert parse(options.model_dump(mode="json"), LoraOptions, "stored") == options


def test_lists_of_modules_become_tuples() -> None:
    options = parse({"targets": ["q_proj"], "exclude": ["a", "b"], "modules_to_save": ["norm"]}, LoraOptions, "test")
    assert (options.targets, options.exclude, options.modules_to_save) == (("q_proj",), ("a", "b"), ("norm",))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"targets": []}, 'targets is empty: name modules ("q_proj"), or write "all-linear"'),
        ({"targets": ""}, "targets is empty"),
        ({"targets": "(q"}, "targets: '(q' is no regular expression"),
        ({"exclude": "*.q_proj"}, "exclude: '*.q_proj' is no regular expression"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: '(' is no regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: 'q_proj' = 0 must be above 0"),
        ({"alpha_pattern": {"q_proj": -1.0}}, "alpha_pattern: 'q_proj' = -1.0 must be above 0"),
        ({"rank": 0}, "rank"),
        ({"alpha": 0}, "alpha"),
        ({"dropout": 1.0}, "dropout"),
        ({"bias": "some"}, "bias"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
    ],
)
def test_values_without_a_meaning_are_refused_by_name(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(data, LoraOptions, "test")
