"""Weights on torch: copies in the dtype of the products, slices of rows' sums, and codes where they are quantized."""

from typing import Any

import numpy as np
import pytest
import torch

from tk.core.casts import cast
from tk.core.dtypes import BF16, FP32, DType
from tk.infer.engine.kernels.aten.prepared_weights import CodedProduct, PreparedProduct, PreparedWeights
from tk.infer.engine.program.lower import Program, lower
from tk.infer.engine.program.operations import Multiply
from tk.model.spec import EMBEDDING
from tk.parallel.coded_weight import CodedWeight
from tk.tests.infer.engine.program.test_lower import spec_of

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def prepared(
    program: Program, dtype: DType = FP32, weight_dtype: str = "auto"
) -> tuple[PreparedWeights, dict[str, np.ndarray[Any, Any]]]:
    """Returns random weights of a program, and their values in fp32 as they were before quantization."""
    weights, given = PreparedWeights(program, dtype, weight_dtype), {}
    generator = np.random.default_rng(0)
    for param in program.params:
        values = generator.standard_normal(param.shape).astype(np.float32)
        coded = param.name in weights._groupings
        stored = values if coded else cast(values, FP32, dtype)
        given[param.name] = values if coded else cast(stored, dtype, FP32)
        weights.take(param, stored)
    return weights, given


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_parameters_keep_their_bits_in_memory_of_their_own(dtype: DType) -> None:
    weights, given = prepared(lower(spec_of("llama")), dtype)
    for name, values in given.items():
        assert weights[name].dtype == weights.dtype
        assert np.array_equal(weights[name].float().numpy(), values)
    ids = torch.tensor([3, 3, 49])
    assert np.array_equal(weights.lookup(EMBEDDING, ids).float().numpy(), given[EMBEDDING][[3, 3, 49]])
    assert weights.rows(EMBEDDING) is weights[EMBEDDING]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_products_are_views_of_the_parameters_in_slices(architecture: str) -> None:
    program = lower(spec_of(architecture), num_slices=4)
    weights, given = prepared(program)
    products = weights.products(program)
    matrices = {each.matrix.name: each for each in program.operations if isinstance(each, Multiply)}
    assert set(matrices) < set(products), "and the head"
    for name, operation in matrices.items():
        made, matrix = products[name], operation.matrix
        assert isinstance(made, PreparedProduct)
        assert len(made.slices) == operation.num_slices
        assert made.slices[0].data_ptr() == weights[name].data_ptr()
        x = torch.randn(3, matrix.in_features)
        stored = torch.from_numpy(given[name])
        blocks = stored.chunk(matrix.num_transposed) if matrix.num_transposed else (stored.t(),)
        expected = x @ torch.cat(blocks, dim=-1)
        if matrix.bias:
            expected += torch.from_numpy(given[matrix.bias])
        torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-4)


def test_equal_shapes_are_those_of_equal_sums() -> None:
    program = lower(spec_of("llama"), num_slices=4)
    products = prepared(program)[0].products(program)
    first, second = (products[f"model.layers.{layer}.self_attn.o_proj.weight"] for layer in (0, 1))
    assert first.shapes == second.shapes != products[QKV].shapes


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_quantized_parameters_are_kept_as_codes_alone(weight_dtype: str) -> None:
    program = lower(spec_of("llama"))
    weights, given = prepared(program, BF16, weight_dtype)
    made = weights.products(program)[QKV]
    assert isinstance(made, CodedProduct)
    assert QKV not in weights._params
    coded = weights.rows(QKV)
    assert isinstance(coded, CodedWeight)
    near = np.abs(coded[:].float().numpy() - given[QKV]).max()
    assert 0 < near < {"int8": 0.05, "int4": 0.5}[weight_dtype]
    assert weights["model.norm.weight"].dtype == torch.bfloat16
