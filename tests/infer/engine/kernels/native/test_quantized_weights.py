"""Products with quantized weights: right, the same bits for any number of rows, and the memory that the plan counts."""

from pathlib import Path

import numpy as np
import pytest

from tk.checkpoint import Checkpoint
from tk.core.dtypes import FP32
from tk.core.quantization import Grouping, quantize
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.native.binding import library
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels
from tk.infer.engine.kernels.native.packing import Stack
from tk.infer.engine.planning.model_bytes import weight_bytes_per_rank
from tk.infer.engine.worker.worker import load
from tk.model.stored_config import stored_config
from tk.tests.infer.engine.kernels.native.products import ROWS, multiply
from tk.tests.infer.engine.kernels.native.running import BEST, logits, rank_logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()
GLM = pytest.param("glm4_moe", marks=pytest.mark.matrix)
SHAPES = [
    (Grouping(8, 128), 256, 96, 1),
    (Grouping(4, 32), 64, 70, 1),
    (Grouping(8, 18), 36, 33, 2),
    (Grouping(4, 13), 39, 21, 3),
    (Grouping(4, 32), 256, 64, 8),
]


def check(instruction_set: str, grouping: Grouping, inputs: int, outputs: int, slices: int) -> None:
    """Compares products with those of widened codes, and the bits of any number of rows."""
    kernels, random = load_kernels(instruction_set), np.random.default_rng(inputs)
    assert kernels is not None
    weight = random.standard_normal((outputs, inputs), np.float32)
    x = random.standard_normal((512, inputs), np.float32)
    stack = Stack(1, inputs, outputs, slices=slices, grouping=grouping)
    whole = multiply(kernels, stack, weight, FP32, x)
    expected = x.astype(np.float64) @ quantize(weight, grouping).widen().T.astype(np.float64)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-4)
    for rows in ROWS:
        assert np.array_equal(multiply(kernels, stack, weight, FP32, x[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize(("grouping", "inputs", "outputs", "slices"), SHAPES)
def test_products_are_right_and_rows_independent(
    instruction_set: str, grouping: Grouping, inputs: int, outputs: int, slices: int
) -> None:
    check(instruction_set, grouping, inputs, outputs, slices)


@pytest.mark.parametrize(("grouping", "inputs", "outputs", "slices"), SHAPES[:3])
def test_wide_vectors_are_right_too(wide: str, grouping: Grouping, inputs: int, outputs: int, slices: int) -> None:
    assert wide in {unit.name for unit in library.SOURCE.units}
    check(wide, grouping, inputs, outputs, slices)


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_slices_of_one_rank_are_the_tree_of_the_slices_of_two(instruction_set: str, weight_dtype: str) -> None:
    kernels, random = load_kernels(instruction_set), np.random.default_rng(2)
    assert kernels is not None
    grouping = Grouping(8 if weight_dtype == "int8" else 4, 16)
    weight, x = random.standard_normal((32, 128), np.float32), random.standard_normal((7, 128), np.float32)
    whole = multiply(kernels, Stack(1, 128, 32, slices=8, grouping=grouping), weight, FP32, x)
    half = Stack(1, 64, 32, slices=4, grouping=grouping)
    halves = [
        multiply(kernels, half, np.ascontiguousarray(weight[:, part]), FP32, x[:, part])
        for part in (slice(64), slice(64, 128))
    ]
    assert np.array_equal(whole, halves[0] + halves[1])


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_ranks_have_the_bits_of_one_rank_in_fp32(tmp_path: Path, weight_dtype: str) -> None:
    ENTRIES["llama3"].make(tmp_path / "model")
    alone = runner(tmp_path / "model", weight_dtype=weight_dtype)
    expected = logits(alone, TOKENS, ())
    alone.close()
    found = rank_logits(tmp_path / "model", 2, tmp_path / "store", TOKENS, (1, 20), "fp32", BEST, weight_dtype)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "name", ["llama3", "qwen2_moe", "gpt2 untied", pytest.param("gpt2", marks=pytest.mark.matrix), GLM]
)
@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_aten_gives_the_logits_of_native_kernels(tmp_path: Path, name: str, weight_dtype: str) -> None:
    ENTRIES[name].make(tmp_path)
    native = runner(tmp_path, weight_dtype=weight_dtype)
    expected = logits(native, TOKENS, ())
    native.close()
    aten = load(Job(str(tmp_path), "aten", "fp32", "fp32", 320, 0, BLOCK_SIZE, 512, weight_dtype=weight_dtype))
    found = logits(aten, TOKENS, (1, 20))
    assert np.linalg.norm(found - expected) < 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["llama3", "qwen2_moe", GLM, "gpt2 untied", "gpt2"])
@pytest.mark.parametrize(("weight_dtype", "tolerance"), [("int8", 0.05), ("int4", 0.6)])
def test_logits_are_near_those_of_the_whole_weights(
    tmp_path: Path, name: str, weight_dtype: str, tolerance: float
) -> None:
    ENTRIES[name].make(tmp_path)
    plain, coded = runner(tmp_path), runner(tmp_path, weight_dtype=weight_dtype)
    expected, found = (logits(each, TOKENS, ()) for each in (plain, coded))
    off = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert 0 < np.median(off) < tolerance
    plain.close()
    coded.close()


@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama3", "qwen2_moe", GLM, "gpt2 untied"])
def test_weights_take_what_the_plan_counts(tmp_path: Path, name: str, weight_dtype: str) -> None:
    """Nearly: rows are padded to panels, vectors are fp32."""
    ENTRIES[name].make(tmp_path)
    made = runner(tmp_path, "bf16", "bf16", weight_dtype=weight_dtype)
    kept = made._weights
    used = sum(each.nbytes for each in (*kept.memory.values(), *kept.tables.values()))
    planned = weight_bytes_per_rank(stored_config(Checkpoint.open(tmp_path)), 1, "bf16", weight_dtype)
    assert 0.9 * planned < used < 1.1 * planned
    made.close()
