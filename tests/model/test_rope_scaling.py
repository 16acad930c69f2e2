"""Scaled rotary embedding against `transformers`: frequencies, the factor of attention, and tokens served."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tk.core.casts import Array
from tk.core.config import parse
from tk.infer.engine.program.lower import frequencies as served_frequencies
from tk.model.config import ModelConfig
from tk.model.registry import decoder_spec
from tk.model.rope import frequencies, rotation
from tk.model.rope_keys import read_rope
from tk.model.rope_scaling import LinearScaling, YarnScaling
from tk.model.shape import ModelKeys
from tk.model.spec import Rope
from tk.tests.example_counts import examples

CPU = torch.device("cpu")
CONTEXT = "original_max_position_embeddings"
# Configurations of models on the hub, with head_dim and rope_theta.
HUB: dict[str, tuple[int, float, dict[str, Any]]] = {
    "Qwen3": (128, 1e6, {"rope_type": "yarn", "factor": 4.0, CONTEXT: 32768}),
    "DeepSeek": (
        64, 1e4,
        {"rope_type": "yarn", "factor": 40, CONTEXT: 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
         "mscale_all_dim": 0.5},
    ),
    "gpt-oss": (64, 150000.0, {"rope_type": "yarn", "factor": 32.0, CONTEXT: 4096, "truncate": False}),
    "vicuna": (128, 1e4, {"rope_type": "linear", "factor": 4.0}),
}  # fmt: skip
KEYS = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": st.sampled_from([0.5, 1.0, 1.25, 3.3, 4.0, 7, 40.0])},
    optional={
        CONTEXT: st.sampled_from([1, 3, 16, 100, 4096, 32768, 10**6]),
        "beta_fast": st.sampled_from([None, 32, 16.5, 4]),
        "beta_slow": st.sampled_from([None, 1, 0.5, 4]),
        "mscale": st.sampled_from([None, 0, 1.0, 0.707]),
        "mscale_all_dim": st.sampled_from([None, 0, 1.0, 0.5]),
        "attention_factor": st.sampled_from([None, 1.0, 1.5]),
        "truncate": st.booleans(),
    },
)


def config_of(head_dim: int, theta: float, keys: dict[str, Any]) -> LlamaConfig:
    scaled = keys | {"rope_theta": theta}
    return LlamaConfig(hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=64, rope_parameters=scaled)


def rope_of(theta: float, keys: dict[str, Any]) -> Rope:
    read = read_rope({"rope_parameters": keys | {"rope_theta": theta}}, 1e4, 64)
    shape = parse(read, ModelKeys, "config.json")
    return Rope(shape.rope_theta, shape.rope_scaling)


@examples(300)
@given(KEYS, st.integers(1, 128), st.sampled_from([1.5, 777.0, 1e4, 5e5, 1e6]))
def test_yarn_is_bit_equal_to_transformers(keys: dict[str, Any], pairs: int, theta: float) -> None:
    """Any keys, also those whose bounds cross, or that keep or slow all pairs."""
    expected, attention_scaling = ROPE_INIT_FUNCTIONS["yarn"](config_of(2 * pairs, theta, keys))
    rope = rope_of(theta, keys)
    assert torch.equal(frequencies(rope, 2 * pairs, CPU), expected)
    assert rope.attention_scaling == attention_scaling


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub_have_the_frequencies_of_transformers(name: str) -> None:
    """In training to the bit; in serving they are exact but for one rounding, and so within one ulp of them."""
    head_dim, theta, keys = HUB[name]
    reference = LlamaRotaryEmbedding(config_of(head_dim, theta, keys))
    rope = rope_of(theta, keys)
    assert torch.equal(frequencies(rope, head_dim, CPU), reference.inv_freq)
    served: Array = served_frequencies(rope, head_dim).astype(np.float32)
    assert np.max(np.abs(served.view(np.int32) - reference.inv_freq.numpy().view(np.int32))) <= 1

    positions = torch.tensor([[0, 1, 77, 4095, 131071]])
    found = rotation(positions, head_dim, rope, torch.bfloat16)
    expected = reference(torch.zeros(1, dtype=torch.bfloat16), positions)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.squeeze(-2), theirs)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    """The paper's section 3.2: by a rotation's turns in the context of pretraining."""
    yarn, pairs = YarnScaling(factor=4.0, original_max_position_embeddings=4096), np.arange(32.0)
    plain = 1e4 ** (-pairs / 32)
    slowed = plain / yarn.frequencies(1 / plain, pairs, 1e4)
    turns = 4096 * plain / (2 * math.pi)
    assert np.allclose(slowed[turns > 64], 1.0)
    assert np.allclose(slowed[turns < 0.5], 4.0)
    assert np.all(np.diff(slowed) >= -1e-12)
    assert yarn.attention_scaling == 0.1 * math.log(4.0) + 1
    assert np.allclose(LinearScaling(factor=4.0).frequencies(1 / plain, pairs, 1e4), plain / 4)


@pytest.mark.parametrize("name", HUB)
def test_transformers_reads_the_scaling_of_a_run(name: str) -> None:
    """The config.json that a run writes; a checkpoint's own file is copied as it is."""
    head_dim, theta, keys = HUB[name]
    scaling = keys | {CONTEXT: 4096} if keys["rope_type"] == "yarn" else keys
    shape = {"hidden_size": head_dim, "num_attention_heads": 1, "rope_theta": theta, "vocab_size": 9}
    config = parse(shape | {"architecture": "qwen3", "rope_scaling": scaling}, ModelConfig, "[model]")
    written = json.loads(json.dumps(config.to_json()))
    assert ModelConfig.from_json(written) == config
    reference = Qwen3RotaryEmbedding(Qwen3Config.from_dict(written))
    rope = decoder_spec(config).rope
    assert rope is not None
    assert torch.equal(frequencies(rope, head_dim, CPU), reference.inv_freq)
    assert rope.attention_scaling == reference.attention_scaling
