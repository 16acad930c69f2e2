"""Options of an engine: those of a wrong type, or wrong for every model, are refused by name before anything starts."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.infer import LLM
from tk.infer.engine import options
from tk.infer.engine.kv_formats import KV_DTYPES
from tk.infer.engine.options import WEIGHT_DTYPES, EngineOptions

FOLDER = Path("model")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({name: 0}, f"{name} = 0; it must be 1 or more") for name in ("tp", "kv_blocks", "kv_memory", "threads")),
        *(({name: 0}, f"{name} = 0; it must be 1 or more") for name in ("max_model_len", "max_running")),
        *(({name: 0}, f"{name} = 0; it") for name in ("max_queued_tokens", "quota_sequences", "quota_tokens")),
        *(({name: -1}, f"{name} = -1; it must be 0 or more") for name in ("max_queued", "max_restarts", "speculate")),
        ({"max_step_ms": 0.0}, "max_step_ms = 0.0; it must be more than 0 milliseconds"),
        ({"slow_step_ms": -1.0}, "slow_step_ms = -1.0; it must be more than 0 milliseconds"),
        ({"max_step_ms": float("nan")}, "max_step_ms = nan"),
        ({"step_timeout": 0.0}, "step_timeout = 0.0; it must be more than 0 seconds"),
        ({"step_timeout": float("nan")}, "step_timeout = nan; it must"),
        ({"dtype": "int8"}, "dtype = 'int8'; use one of auto, fp32"),
        ({"weight_dtype": "fp32"}, "weight_dtype = 'fp32'; use one of auto, int8"),
        ({"kv_dtype": "fp4"}, "kv_dtype = 'fp4'; use one of auto, fp32"),
        ({"kernels": "cuda"}, "kernels = 'cuda'; use one of auto, native"),
        ({"block_size": 48}, "block_size = 48; it must be a power of two up to 256"),
        ({"block_size": 0}, "block_size = 0"),
        ({"max_running": 9, "max_batched_tokens": 8}, "max_running = 9 is more than max_batched_tokens = 8"),
        ({"draft": "small"}, "draft = small proposes nothing while speculate is 0"),
        ({"draft_weight_dtype": "int8"}, "draft_weight_dtype = 'int8' has no model without draft"),
        ({"draft": "small", "speculate": 1, "draft_weight_dtype": "int3"}, "draft_weight_dtype = 'int3'; use one of"),
        ({"kv_blocks": 8, "kv_memory": 1 << 20}, "kv_blocks and kv_memory both set"),
        ({"served_model_names": ("a", "")}, "served_model_names has ''; a name has 1 to 200 characters"),
        ({"served_model_names": ("a\n",)}, r"served_model_names has 'a\n'; a name"),
        ({"served_model_names": ("a", "b", "a")}, "served_model_names = a, b, a has a name twice"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineOptions(FOLDER, **given).validate()
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tp": 8, "kv_blocks": 1, "threads": 1, "max_queued": 0, "max_step_ms": 0.5},
        {"max_running": 8, "max_batched_tokens": 8, "block_size": 256, "kernels": "aten"},
        {"draft": "small", "speculate": 4, "draft_weight_dtype": "int4"},
        *({"kv_dtype": name} for name in KV_DTYPES),
        *({"weight_dtype": name} for name in WEIGHT_DTYPES),
    ],
)
def test_other_options_are_left_to_the_engine(given: dict[str, Any]) -> None:
    EngineOptions(FOLDER, **given).validate()


def test_only_the_checkpoint_has_a_place() -> None:
    with pytest.raises(TypeError, match="positional"):
        EngineOptions(FOLDER, 2)  # type: ignore[call-arg]


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
        ("batch_invariant", 1),
        ("speculate", 2.5),
        ("speculate", None),
        ("draft", 4),
        ("max_step_ms", "20"),
        ("start_timeout", None),
        ("served_model_names", "name"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {type(value).__name__} .*; it must be "):
        LLM("nowhere", **{name: value})


def test_a_checkpoint_is_a_path() -> None:
    with pytest.raises(ConfigError, match=r"The path is a int; it must be a str or a pathlib\.Path"):
        LLM(3)  # type: ignore[arg-type]


def test_every_option_has_a_type() -> None:
    assert set(options._TYPES) == {field.name for field in fields(EngineOptions)} - {"checkpoint"}
    EngineOptions(Path("m")).validate()
