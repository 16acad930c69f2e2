"""A decoder's shape: values that are filled in, and shapes that no decoder has."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.core.errors import ConfigError
from tk.model.shape import ModelKeys, ModelShape

ROPE_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_yarn_extends_the_context_and_linear_scaling_does_not() -> None:
    """Cards of models with YaRN leave max_position_embeddings as it was in pretraining."""
    shape = parse({"rope_scaling": YARN, "max_position_embeddings": 20}, ModelKeys, "[model]")
    assert (shape.context_length, shape.context_text) == (64, "max_position_embeddings = 20, which YaRN extends to 64")
    assert parse({"rope_scaling": YARN, "max_position_embeddings": 99}, ModelKeys, "[model]").context_length == 99
    linear = parse({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ModelKeys, "[model]")
    assert (linear.context_length, linear.context_text) == (2048, "max_position_embeddings = 2048")


def test_heads_are_filled_in_from_the_hidden_size() -> None:
    shape = ModelKeys(hidden_size=96, num_attention_heads=6)
    assert (shape.num_key_value_heads, shape.head_dim) == (6, 16)
    assert (ModelKeys().num_attention_heads, ModelKeys().head_dim) == (4, 64), "256 / 4"
    given = ModelKeys(hidden_size=100, num_attention_heads=6, num_key_value_heads=2, head_dim=24)
    assert (given.num_key_value_heads, given.head_dim) == (2, 24), "hidden_size need not be a multiple of the heads"


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), ((), ())])
def test_the_end_tokens_are_a_tuple(given: Any, ids: tuple[int, ...]) -> None:
    assert ModelKeys.model_validate({"eos_token_id": given}).eos_token_id == ids


@pytest.mark.parametrize(("dtype", "name"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16")])
def test_a_dtype_has_its_name_on_the_command_line(dtype: str, name: str) -> None:
    assert ModelShape(vocab_size=1, dtype=dtype).dtype_name == name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads = 3 must divide hidden_size = 256"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 must divide num_attention_heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must not exceed num_local_experts = 8"),
        ({"dtype": "fp32"}, "dtype = 'fp32' must be one of float32, bfloat16, float16"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": ROPE_SCALING | {"factor": 0.0}}, "factor' = 0.0: input should be greater than 0"),
        ({"rope_scaling": ROPE_SCALING | {"low_freq_factor": 0.0}}, "low_freq_factor' = 0.0: input should be greater"),
        (
            {"rope_scaling": ROPE_SCALING | {"high_freq_factor": 1.0}},
            "high_freq_factor = 1 must be greater than low_freq_factor = 1",
        ),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type must be 'linear', 'llama3' or 'yarn'"),
        ({"rope_scaling": YARN | {"betafast": 1.0}}, "unknown key 'rope_scaling.betafast'; did you mean 'beta_fast'"),
        ({"rope_scaling": YARN | {"beta_slow": 33}}, "beta_fast = 32 must not be less than beta_slow = 33"),
        ({"rope_scaling": YARN | {"factor": 0.0}}, "'rope_scaling.factor' = 0.0: input should be greater than 0"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1 must be greater than 1 for rope_type = 'yarn'"),
        ({"hidden_sizes": 8}, "unknown key 'hidden_sizes'; did you mean 'hidden_size'"),
    ],
)
def test_a_shape_that_no_decoder_has_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(section, ModelKeys, "[model]")


@pytest.mark.parametrize(
    ("section", "message"), [({}, "'vocab_size' is missing"), ({"vocab_size": 0}, "'vocab_size' = 0")]
)
def test_a_shape_has_a_vocabulary(section: dict[str, Any], message: str) -> None:
    assert parse(section, ModelKeys, "[model]").vocab_size == 0
    with pytest.raises(ConfigError, match=message):
        parse(section, ModelShape, "config.json")
