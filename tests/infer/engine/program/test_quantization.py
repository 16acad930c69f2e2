"""The quantization of weights: the codes of plain numpy, groups that every tp shares, weights that stay as they are."""

from math import lcm

import numpy as np
import pytest

from tk.core.casts import Array, cast
from tk.core.dtypes import BF16, FP32
from tk.core.quantization import Grouping, quantize, untransposed
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


def bf16(values: Array) -> Array:
    return cast(cast(values.astype(np.float32), FP32, BF16), BF16, FP32)


def reference(values: Array, grouping: Grouping) -> tuple[Array, Array, Array]:
    """Returns codes, scales and minima, group by group, by rounding to nearest."""
    codes, scales, minima = [], [], []
    for group in values.reshape(-1, grouping.columns):
        if grouping.bits == 8:
            scale, low = np.abs(group).max() / np.float32(127), np.float32(0)
            code = np.rint(group / (scale or np.float32(1))).clip(-127, 127) + 128
        else:
            low = bf16(group.min()[None])[0]
            scale = bf16((group.max() - group.min())[None] / np.float32(15))[0]
            code = np.rint((group - low) / (scale or np.float32(1))).clip(0, 15)
        codes.append(code)
        scales.append(scale)
        minima.append(low)
    shape = len(values), -1
    return np.array(codes).reshape(values.shape), np.reshape(scales, shape), np.reshape(minima, shape)


@pytest.mark.parametrize(
    ("grouping", "rows", "columns"),
    [(Grouping(8, 128), 700, 256), (Grouping(4, 32), 3, 64), (Grouping(4, 13), 70, 39), (Grouping(8, 20), 1, 40)],
)
def test_codes_scales_and_minima_are_those_of_plain_numpy(grouping: Grouping, rows: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    values = random.standard_normal((rows, columns), np.float32) * 10.0 ** random.integers(-9, 3, (rows, 1))
    values = values.astype(np.float32)
    values[0, : grouping.columns] = 0
    found = quantize(values, grouping)
    for mine, plain in zip((found.codes, found.scales, found.minima), reference(values, grouping), strict=True):
        assert np.array_equal(mine, plain)
    step = np.repeat(found.scales, grouping.columns, axis=1)
    # Half a step; in 4 bits, minimum and scale are rounded too.
    slack = 0.5 * step if grouping.bits == 8 else 0.6 * step + 2.0**-8 * np.abs(values)
    assert (np.abs(found.widen() - values) <= slack + 1e-30).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_values_that_are_not_finite_reach_the_logits(bits: int) -> None:
    values = np.ones((3, 32), np.float32)
    values[0, 3], values[1, 20] = np.nan, np.inf
    wide = quantize(values, Grouping(bits, 16)).widen()
    assert np.isnan(wide[0, :16]).all()
    assert np.isnan(wide[1, 16:]).all()
    np.testing.assert_allclose(np.delete(wide.reshape(6, 16), (0, 3), axis=0), 1, rtol=0.01)


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


def test_transposed_blocks_become_rows() -> None:
    weight = np.arange(48).reshape(12, 4)
    stored = np.concatenate([block.T for block in np.split(weight, 3)])
    assert np.array_equal(untransposed(stored, 3), weight)
    assert untransposed(weight, 0) is weight


def test_bytes_of_groups_fill_words() -> None:
    assert (Grouping(8, 128).group_bytes, Grouping(4, 32).group_bytes) == (4 + 128, 4 + 16)
    assert (Grouping(8, 18).room, Grouping(4, 26).room, Grouping(4, 26).group_bytes) == (20, 32, 4 + 16)
