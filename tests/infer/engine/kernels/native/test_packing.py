"""Panels of weights: their sizes, their order in memory, and which parameters are packed, kept wide or read by row."""

from typing import Any

import numpy as np
import pytest

from tk.core.casts import cast
from tk.core.dtypes import BF16, FP16, FP32, DType
from tk.core.integers import round_up
from tk.core.quantization import Grouping
from tk.infer.engine.kernels.native.binding.library import instruction_sets, load_kernels
from tk.infer.engine.kernels.native.binding.memory import CACHE_LINE
from tk.infer.engine.kernels.native.binding.structures import PANEL, Format
from tk.infer.engine.kernels.native.packing import PackedWeights, Stack, format_of, pack, pair_bytes, stacks
from tk.infer.engine.program.lower import lower
from tk.model.spec import EMBEDDING, HEAD, POSITIONS
from tk.tests.infer.engine.program.test_lower import spec_of

needs_compiler = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LAYER = "model.layers.0"


def weight(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Returns a matrix of whole numbers up to 255, which every dtype holds."""
    return (np.arange(rows * columns, dtype=np.float32) % 256).reshape(rows, columns)


@pytest.mark.parametrize(
    ("stack", "format_", "step", "panel", "matrix"),
    [
        (Stack(1, 32, 16), Format.FP32, 2, 32 * PANEL * 4, 32 * PANEL * 4),
        (Stack(1, 32, 17), Format.BF16, 2, 32 * PANEL * 2, 2 * 32 * PANEL * 2),
        (Stack(1, 33, 16), Format.BF16, 2, 34 * PANEL * 2, 34 * PANEL * 2),  # a pair of columns for the last one
        (Stack(1, 40, 16, slices=2), Format.BF16, 32, 64 * PANEL * 2, 64 * PANEL * 2),  # each slice of 20 takes 32
        (Stack(1, 64, 16, grouping=Grouping(8, 32)), Format.CODES8, 2, 2 * 36 * PANEL, 2 * 36 * PANEL),
        (Stack(1, 64, 16, grouping=Grouping(4, 32)), Format.CODES4, 2, 2 * 20 * PANEL, 2 * 20 * PANEL),
    ],
)
def test_sizes_of_panels(stack: Stack, format_: Format, step: int, panel: int, matrix: int) -> None:
    assert stack.panel_bytes(format_, step) == panel
    assert stack.matrix_bytes(format_, step) == matrix


@pytest.mark.parametrize(
    ("dtype", "format_", "size"), [(FP32, Format.FP32, 8), (BF16, Format.BF16, 4), (FP16, Format.FP16, 4)]
)
def test_a_pair_of_columns_has_two_values_per_row_of_a_panel(dtype: DType, format_: Format, size: int) -> None:
    assert format_of(dtype) == format_
    assert pair_bytes(format_) == PANEL * size == PANEL * 2 * dtype.itemsize


@needs_compiler
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 8), (20, 6), (33, 5)])
def test_a_panel_holds_16_rows_pair_of_columns_by_pair(dtype: DType, rows: int, columns: int) -> None:
    kernels = load_kernels("baseline")
    assert kernels is not None
    values = weight(rows, columns)
    packed, memory = pack(kernels, Stack(1, columns, rows), cast(values, FP32, dtype), dtype)
    assert (packed.inputs, packed.outputs, packed.format, packed.bias) == (columns, rows, format_of(dtype), None)
    padded = np.zeros((round_up(rows, PANEL), round_up(columns, 2)), np.float32)
    padded[:rows, :columns] = values
    panels = padded.reshape(-1, PANEL, padded.shape[1] // 2, 2)
    # BF16: the two values of a pair side by side; others: the even column's values, then the odd one's.
    expected = panels.transpose((0, 2, 1, 3) if dtype == BF16 else (0, 2, 3, 1)).reshape(-1)
    assert np.array_equal(cast(memory.view(dtype.numpy), dtype, FP32), expected)
    assert packed.panel_bytes == memory.nbytes // len(panels)


@needs_compiler
def test_experts_and_transposed_blocks_are_packed_as_plain_matrices() -> None:
    kernels = load_kernels("baseline")
    assert kernels is not None
    matrices = [weight(16, 8), weight(16, 8) + 500]
    alone = [pack(kernels, Stack(1, 8, 16), each, FP32)[1] for each in matrices]
    both = pack(kernels, Stack(2, 8, 16), np.concatenate(matrices), FP32)[1]
    assert np.array_equal(both, np.concatenate(alone))
    transposed = np.concatenate([matrices[0][:8].T, matrices[0][8:].T])  # two blocks [in, out / 2]
    turned = pack(kernels, Stack(1, 8, 16, num_transposed=2), transposed, FP32)[1]
    assert np.array_equal(turned, alone[0])


def test_stacks_are_the_matrices_of_the_products() -> None:
    names = dict(stacks(lower(spec_of("llama", num_hidden_layers=1))))
    layer = [f"{LAYER}.self_attn.{each}_proj.weight" for each in ("qkv", "o")]
    layer += [f"{LAYER}.mlp.{each}_proj.weight" for each in ("gate_up", "down")]
    assert list(names) == [*layer, HEAD]
    experts = dict(stacks(lower(spec_of("mixtral", num_hidden_layers=1, num_local_experts=4))))
    assert experts[f"{LAYER}.mlp.experts.gate_up_proj"] == Stack(4, 32, 96)
    assert experts[f"{LAYER}.mlp.experts.down_proj"] == Stack(4, 48, 32)
    quantized = dict(stacks(lower(spec_of("llama", num_hidden_layers=1)), "int8"))
    assert list(quantized) == [*names, EMBEDDING], "the embedding is read by row, from codes"


@needs_compiler
def test_norms_and_biases_are_wide_and_tables_stay_as_they_are() -> None:
    kernels = load_kernels("baseline")
    assert kernels is not None
    program = lower(spec_of("gpt2", num_hidden_layers=1, tie_word_embeddings=False))
    weights = PackedWeights(program, BF16, kernels)
    for param in program.params:
        weights.take(param, cast(weight(1, param.size).reshape(param.shape), FP32, BF16))
    assert set(weights.tables) == {EMBEDDING, POSITIONS}
    assert weights.tables[EMBEDDING].dtype == np.uint16
    assert set(weights.matrices) == set(dict(stacks(program)))
    assert set(weights.vectors) == {param.name for param in program.params} - {*weights.tables, *weights.matrices}
    bias = weights.vectors[f"{LAYER}.self_attn.qkv_proj.bias"]
    assert bias.dtype == np.float32
    assert (len(bias) % PANEL, bias.ctypes.data % CACHE_LINE) == (0, 0)
    assert np.array_equal(bias[:96], np.arange(96))
