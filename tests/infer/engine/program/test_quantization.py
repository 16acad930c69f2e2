"""The quantization of weights: the codes of plain numpy, groups that every tp shares, weights that stay as they are."""

from math import lcm

import numpy as np
import pytest

from tk.core.quantization import Grouping, quantize
from tk.infer.engine.program.lower import lower
from tk.infer.engine.program.operations import Head, Multiply, Route, RunExperts
from tk.infer.engine.program.quantization import groupings
from tk.model.config import ModelConfig
from tk.model.registry import architectures, decoder_spec
from tk.model.row_slices import most_slices
from tk.model.spec import DecoderSpec

SIZES = {"vocab_size": 50, "hidden_size": 64, "num_attention_heads": 8, "intermediate_size": 208}


def spec_of(architecture: str, **options: object) -> DecoderSpec:
    return decoder_spec(ModelConfig.model_validate({"architecture": architecture, **SIZES, **options}))


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_every_tp_has_the_same_groups_and_routers_are_not_quantized(architecture: str, weight_dtype: str) -> None:
    spec = spec_of(architecture, tie_word_embeddings=False)
    found = [groupings(lower(spec, tp, tp - 1), weight_dtype) for tp in (1, 2, 4, 8)]
    assert all(each == found[0] for each in found)
    operations = lower(spec).operations
    products = {each.matrix.name for each in operations if isinstance(each, Multiply | Head)}
    products |= {name for each in operations if isinstance(each, RunExperts) for name in (each.gate_up, each.down)}
    assert products <= set(found[0])
    assert not any(each.matrix.name in found[0] for each in operations if isinstance(each, Route))
    head = next(each.matrix.name for each in operations if isinstance(each, Head))
    assert found[0][head].bits == 8
    assert {each.bits for name, each in found[0].items() if ".layers." in name} == {8 if weight_dtype == "int8" else 4}
    assert groupings(lower(spec), "bf16") == groupings(lower(spec), "auto") == {}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_codes_of_a_rank_are_those_of_the_whole_weight(tp: int) -> None:
    spec = spec_of("llama")
    assert most_slices(spec) == 8
    weight = np.random.default_rng(0).standard_normal((10, 208), np.float32)
    grouping = groupings(lower(spec, tp), "int4")["model.layers.0.mlp.down_proj.weight"]
    assert grouping == Grouping(4, 26), "the largest divisor of a slice of 208 / 8 columns"
    whole = quantize(weight, grouping)
    parts = [quantize(np.ascontiguousarray(part), grouping) for part in np.split(weight, tp, axis=1)]
    assert np.array_equal(np.concatenate([part.codes for part in parts], axis=1), whole.codes)
    assert np.array_equal(np.concatenate([part.scales for part in parts], axis=1), whole.scales)


def test_groups_fit_the_slices_of_a_tp_that_is_no_power_of_two() -> None:
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    spec = spec_of("llama", **sizes)
    for tp in (1, 3):
        program = lower(spec, tp)
        assert program.group_slices == lcm(most_slices(spec), tp) // tp
        found = groupings(program, "int8")
        for operation in program.operations:
            if isinstance(operation, Multiply):
                assert operation.matrix.in_features % found[operation.matrix.name].columns == 0


def test_a_weight_whose_groups_would_be_too_small_stays_as_it_is() -> None:
    found = groupings(lower(spec_of("llama", intermediate_size=131)), "int8")  # a prime number
    assert "model.layers.0.mlp.down_proj.weight" not in found
    assert "model.layers.0.mlp.gate_up_proj.weight" in found
