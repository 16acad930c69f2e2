"""config.json as models on the hub have it, with old spellings, and `[model]` with exactly its options."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, reshard
from tk.core.config import parse
from tk.core.errors import ConfigError, ManifestError, TkError
from tk.core.layout import Layout
from tk.model.config import ModelConfig
from tk.model.registry import count_multiplied, count_parameters, decoder_spec, tensor_table
from tk.model.rope_scaling import Llama3Scaling
from tk.tests.model.architectures import ENTRIES

# The keys that shape a model, from the config.json of the named model on the hub.
HUB: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "Qwen/Qwen3-30B-A3B": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "openai-community/gpt2": {
        "activation_function": "gelu_new",
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "vocab_size": 50257,
    },
}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
SMALL = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
PARAMETERS = {  # the number of all parameters, and of those in the matrix products of a token
    "meta-llama/Llama-3.1-8B": (8_030_261_248, 7_504_924_672),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, 12_748_853_248),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, 3_041_867_776),
    "openai-community/gpt2": (124_439_808, 123_653_376),
}


@pytest.mark.parametrize("name", HUB)
def test_models_of_the_hub_have_their_known_sizes(name: str) -> None:
    config = ModelConfig.from_json(HUB[name])
    decoder = decoder_spec(config)
    assert (count_parameters(decoder), count_multiplied(decoder)) == PARAMETERS[name]
    assert ModelConfig.from_json(config.to_json()) == config


def test_options_are_read_from_either_spelling() -> None:
    llama = ModelConfig.from_json(HUB["meta-llama/Llama-3.1-8B"])
    assert (llama.rope_theta, llama.dtype_name, llama.eos_token_id) == (500000.0, "bf16", (128001,))
    assert llama.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    gpt2 = ModelConfig.from_json(HUB["openai-community/gpt2"])
    assert (gpt2.intermediate_size, gpt2.tie_word_embeddings, gpt2.head_dim) == (3072, True, 64)
    assert decoder_spec(ModelConfig.from_json(HUB["Qwen/Qwen3-30B-A3B"])).layers[0].window is None


def test_a_sliding_window_counts_by_the_rule_of_its_architecture() -> None:
    mistral = {"model_type": "mistral", "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 4}
    bare = mistral | {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}
    qwen = bare | {"use_sliding_window": False, "max_window_layers": 3}
    cases = [
        (mistral, [4096] * 4),
        (mistral | {"sliding_window": None}, [None] * 4),
        (bare, [None] * 4),
        (qwen, [None] * 4),
        (qwen | {"use_sliding_window": True}, [None, None, None, 16]),
        (qwen | {"use_sliding_window": True, "layer_types": MIXED}, [16, None, None, 16]),
        (mistral | {"layer_types": MIXED, "sliding_window": 5}, [5, None, None, 5]),
    ]
    for config, windows in cases:
        found = ModelConfig.from_json(config)
        assert [layer.window for layer in decoder_spec(found).layers] == windows
        assert ModelConfig.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not supported; supported are glm4_moe, gpt2, llama"),
        ({"sliding_window": 8}, "sliding_window = 8 is not an option of llama"),
        ({"architecture": "gpt2", "num_key_value_heads": 2}, "num_key_value_heads = 2 is not an option of gpt2"),
        ({"architecture": "gpt2", "rope_theta": 5e5}, "rope_theta = 500000.0 is not an option of gpt2"),
        (
            {"architecture": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "= 3 must not exceed num_local_experts = 2",
        ),
        ({"architecture": "mixtral", "num_expert": 2}, r"unknown key 'num_expert'; did you mean 'num_local_experts'"),
        ({"rope_scaling": {"factor": 8.0}}, r"'rope_scaling\.low_freq_factor' is missing"),
        ({"dtype": "float8"}, "dtype = 'float8' must be one of float32"),
    ],
)
def test_a_shape_is_refused_by_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"vocab_size": 101} | section, ModelConfig, "config.json")


def test_gpt2_as_the_hub_stores_it(tmp_path: Path) -> None:
    """The hub's files lack the base model's prefix, and hold the causal mask as a tensor."""
    source = tmp_path / "source"
    ENTRIES["gpt2"].make(source)
    file = source / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{layer}.attn.bias": tensors["wte.weight"][:64, :64].clone() for layer in range(3)}
    save_file(tensors | masks, file)
    config = ModelConfig.from_folder(source)
    sharded = reshard(source, tmp_path / "sharded", layout=Layout(tp=2), table=tensor_table(config))
    found = Checkpoint.open(sharded)
    assert set(found.tensors) - set(found.aliases) == {f"transformer.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert found.read(f"transformer.{name}").torch().equal(tensor)


def test_a_tensor_that_no_architecture_knows_is_not_lost_silently(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ENTRIES["mixtral"].make(source)
    data = json.loads((source / "config.json").read_text()) | {"num_local_experts": 3}
    (source / "config.json").write_text(json.dumps(data))
    table = tensor_table(ModelConfig.from_folder(source))
    with pytest.raises(TkError, match=r"gate\.weight should have shape \[3, 64\].*found \[4, 64\]"):
        reshard(source, tmp_path / "sharded", layout=Layout(tp=2), table=table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters: factor is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for llama"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function = 'relu'"),
        ({"sliding_window": 9}, "sliding_window = 9 is not supported for llama; it must be missing"),
        (
            {"model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 32},
            "hidden_size = 64 are one key of gpt2",
        ),
        ({"hidden_size": -1}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size must not be null for llama; a file without it has 32000"),
        ({"rope_parameters": 7}, "rope_parameters must be an object"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "layer_types": 3}, "must be a list"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers.*less than or equal to 10000"),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"rope_parameters": 5}, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_theta": "abc"}}, "rope_theta"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"dtype": 7}, "dtype"),
    ],
)
def test_a_config_that_tk_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    config = ModelConfig.model_validate(SMALL).to_json() | change
    with pytest.raises(ManifestError, match=message):
        ModelConfig.from_json(config)


def test_config_survives_both_spellings() -> None:
    options = {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True, "rope_theta": 5000.0}
    config = ModelConfig.model_validate(SMALL | options)
    older = config.to_json()
    del older["rope_parameters"]
    assert ModelConfig.from_json(older) == config == ModelConfig.from_json(config.to_json())
