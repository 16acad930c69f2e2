"""The tensors of a model with adapters: names, splits and order of the factors; combinations that are refused."""

from dataclasses import replace
from typing import Any

import pytest

from tk.core.errors import ConfigError
from tk.core.layout import Layout
from tk.core.local_params import local_params
from tk.model.lora.options import LoraOptions
from tk.model.lora.table import is_factor, with_adapters
from tk.model.registry import decoder_spec
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.decoders import config_of
from tk.tests.model.lora.peft_models import adapted_spec


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_factors_follow_their_weight_and_are_split_as_the_side_that_they_share(name: str) -> None:
    spec = adapted_spec(name, rank=4, random=False)
    base = decoder_spec(config_of(name)).table
    frozen = [each for each in spec.table if not is_factor(each)]
    assert [replace(each, trainable=True, stored=True) for each in frozen] == list(base)
    assert {(each.trainable, each.stored) for each in frozen} == {(False, False)}
    for place, weight in enumerate(spec.table):
        if weight.name not in spec.adapters:
            continue
        first, second = spec.table[place + 1 : place + 3]
        module = weight.name.removesuffix(".weight")
        assert (first.name, second.name) == (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        rows, columns = reversed(weight.shape) if spec.transposed else weight.shape
        assert (first.shape, second.shape) == ((4, columns), (rows, 4))
        assert (first.init, second.init, first.trainable, second.trainable) == ("uniform", "zeros", True, True)
        assert (first.split is None) != (second.split is None), "one of the two is a replica"
        for each in (first, second):
            assert each.partial_grad == (each.split is None)
            assert each.layer == weight.layer


@pytest.mark.parametrize("name", list(ENTRIES))
def test_a_rank_holds_the_factors_of_its_part_of_the_weight(name: str) -> None:
    spec = adapted_spec(name, rank=4)
    for rank in range(2):
        held = {
            piece.tensor.name: piece.box
            for local in local_params(spec.table, Layout(tp=2), rank)
            for piece in local.pieces
        }
        for weight in spec.adapters:
            module = weight.removesuffix(".weight")
            ranges = [slice(start, end) for start, end in zip(held[weight].offset, held[weight].end, strict=True)]
            rows, columns = reversed(ranges) if spec.transposed else ranges
            assert held[f"{module}.lora_A.weight"].slices == (slice(0, 4), columns)
            assert held[f"{module}.lora_B.weight"].slices == (rows, slice(0, 4))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("qwen2", {"modules_to_save": ["lm_head"]}, "lm_head is tied to model.embed_tokens in this model"),
        ("qwen2", {"modules_to_save": ["embed_tokens"]}, "lm_head is tied to model.embed_tokens in this model"),
        ("qwen2", {"targets": ["q_proj"], "bias": "lora_only"}, "would train .*q_proj.bias and not .*k_proj.bias"),
        ("llama3", {"modules_to_save": ["gate_proj"]}, "would train .*gate_proj.weight and not .*up_proj.weight"),
        ("mixtral", {"rank_pattern": {r".*experts\.1\.w2": 3}}, r"experts.1.w2 another adapter than expert 0"),
        ("mixtral", {"alpha_pattern": {r".*experts\.1\.w2": 3}}, r"experts.1.w2 another adapter than expert 0"),
        ("mixtral", {"exclude": r".*experts\.[1-3]\.w1"}, r"experts.1.w1 another adapter than expert 0"),
        ("mixtral", {"dropout": 0.1}, r"dropout = 0.1: .*experts.0.w1 has an adapter.*exclude = "),
    ],
)
def test_combinations_that_cannot_be_trained_are_refused_by_name(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=r"\[lora\] .*" + said):
        with_adapters(decoder_spec(config_of(name)), LoraOptions(**options))


def test_experts_differ_from_layer_to_layer_and_from_kind_to_kind() -> None:
    spec = adapted_spec("mixtral", targets=r".*layers\.1\..*experts\.\d\.w[13]", rank_pattern={"w3": 2}, rank=5)
    assert {name.split(".")[-2]: adapter.rank for name, adapter in spec.adapters.items()} == {"w1": 5, "w3": 2}
    assert len(spec.adapters) == 2 * 4


def test_dropout_without_experts_is_allowed_in_a_mixture() -> None:
    spec = adapted_spec("glm4_moe", dropout=0.1, exclude=r".*\.experts\..*")
    assert {adapter.dropout for adapter in spec.adapters.values()} == {0.1}
    assert [name for name in spec.adapters if "shared_experts" in name]
