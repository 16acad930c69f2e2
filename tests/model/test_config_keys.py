"""The lists of keys against the config classes of `transformers`, and what is refused by name."""

import dataclasses
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tk.core.errors import ManifestError
from tk.model.config import ModelConfig
from tk.model.config_keys import CHANGE_NOTHING, NEUTRAL, READ_HERE, model_values, unknown_keys
from tk.model.registry import architectures
from tk.model.spec import Architecture
from tk.tests.model.architectures import ENTRIES

NAMES = sorted(architectures())


def fields_of(name: str) -> dict[str, Any]:
    """Returns every key that the config class of `transformers` has, with its default."""
    found: type[PreTrainedConfig] = CONFIG_MAPPING[name]
    return {field.name: field.default for field in dataclasses.fields(found)}


def lists_of(architecture: Architecture) -> list[frozenset[str]]:
    own = architecture.defaults.keys() | architecture.requires.keys()
    return [frozenset(own), architecture.ignored, CHANGE_NOTHING, frozenset(NEUTRAL.keys() - own), READ_HERE - own]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_the_class_of_transformers_is_in_one_list(name: str) -> None:
    lists = lists_of(architectures()[name])
    counts = {key: sum(key in each for each in lists) for key in fields_of(name)}
    assert {key: count for key, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_key_has_the_default_of_the_class_of_transformers(name: str) -> None:
    architecture, fields = architectures()[name], fields_of(name)
    own = {**architecture.defaults, **architecture.requires}
    assert own.pop("bos_token_id") is own.pop("eos_token_id") is None, "the tokenizer's count"
    assert {key: own[key] for key in own if key in fields} == {key: fields[key] for key in own if key in fields}
    beyond = own.keys() - fields.keys()
    read_anyway = {"head_dim", "rope_theta", "layer_types", "partial_rotary_factor", "router_aux_loss_coef"}
    assert beyond <= read_anyway, "keys that the class reads without a field of their own, or that are tk's"
    if "rope_theta" in own:
        assert CONFIG_MAPPING[name]().rope_parameters["rope_theta"] == own["rope_theta"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_type_alone_is_the_model_of_the_class_of_transformers(name: str) -> None:
    # The defaults of GLM-4.5's class would cut heads of 42 dims and rotate 21 of them; its files give the size.
    sizes = {"head_dim": 128} if name == "glm4_moe" else {}
    mine = ModelConfig.from_json({"model_type": name, **sizes}).to_json()
    theirs = CONFIG_MAPPING[name](**sizes).to_dict()
    theirs |= theirs.get("rope_parameters") or {}
    if theirs.get("sliding_window") == 0:  # Qwen2-MoE's class writes it for none
        theirs["sliding_window"] = None
    tokens, made_of_others = {"bos_token_id", "eos_token_id"}, {"n_inner", "head_dim", "max_window_layers"}
    compared = mine.keys() & theirs.keys() - tokens - made_of_others - {"architectures"}
    assert {"vocab_size", "initializer_range"} < compared
    assert {key: mine[key] for key in compared} == {key: theirs[key] for key in compared}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_file_that_transformers_saves_has_no_unknown_key(name: str) -> None:
    config = ENTRIES[name].make_config().to_dict()
    assert unknown_keys(config, architectures()[config["model_type"]]) == []


def test_a_key_of_no_list_is_named_unless_it_says_nothing() -> None:
    data = {"model_type": "llama", "rope_tetha": 5e5, "logit_scale": 0.5, "flag": False, "list": [], "none": None}
    assert unknown_keys(data, architectures()["llama"]) == ["rope_tetha", "logit_scale"]


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("fp8", r"FineGrainedFP8Config\(dequantize=True\)"),
        ("bitsandbytes", r"model\.dequantize\(\)"),
        ("gptq", "Name the folder of the model that was quantized, in bf16 or fp16"),
        ("awq", "Name the folder of the model that was quantized, in bf16 or fp16"),
    ],
)
def test_quantized_weights_are_refused_before_anything_else(method: str, advice: str) -> None:
    data = {"model_type": "llama", "hidden_act": "gelu", "quantization_config": {"quant_method": method, "bits": 4}}
    with pytest.raises(ManifestError, match=rf"quantization_config says .* \({method}\).*{advice}.*--weight-dtype"):
        ModelConfig.from_json(data)


def test_spellings_of_one_key_must_agree() -> None:
    mixtral = architectures()["mixtral"]
    assert model_values({"num_experts": 4, "num_local_experts": 4}, mixtral)["num_local_experts"] == 4
    assert model_values({"num_experts": 4}, mixtral)["num_local_experts"] == 4
    with pytest.raises(ValueError, match=r"num_local_experts = 4 and num_experts = 8 are one key of mixtral"):
        model_values({"num_experts": 8, "num_local_experts": 4}, mixtral)


def test_null_is_read_only_where_it_has_a_meaning() -> None:
    qwen3 = architectures()["qwen3"]
    assert model_values({"num_key_value_heads": None}, qwen3)["num_key_value_heads"] is None
    with pytest.raises(ValueError, match="head_dim must not be null for qwen3; a file without it has 128"):
        model_values({"head_dim": None}, qwen3)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, False, [], ""])
def test_a_value_that_is_no_size_is_not_taken_for_a_missing_key(key: str, value: object) -> None:
    with pytest.raises(ManifestError, match=key):
        ModelConfig.from_json({"model_type": "llama", key: value})
