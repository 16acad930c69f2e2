"""Quantized weights by instructions for bf16: the bits of a model in numpy, for any rows, batches, cuts and threads."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tk.core.dtypes import BF16
from tk.core.native.compiler import find_compilers
from tk.core.quantization import MOST_COLUMNS, Grouping, quantize
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.native.binding.library import Kernels, instruction_sets
from tk.infer.engine.kernels.native.packing import Stack, pack, packed_matrix
from tk.infer.engine.step.running_plan import RunningPlan
from tk.tests.example_counts import sized
from tk.tests.infer.engine.kernels.native.numpy_model import coded
from tk.tests.infer.engine.kernels.native.products import MODELS, ROWS, load, multiply
from tk.tests.infer.engine.kernels.native.running import logits, rank_logits, runner
from tk.tests.infer.engine.kernels.native.test_bf16_products import extreme
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow
from tk.tests.infer.sampling_row import pack as pack_rows
from tk.tests.model.architectures import ENTRIES, VOCAB

pytestmark = pytest.mark.skipif(next(find_compilers(), None) is None, reason="no compiler")
OF_SET = {"avx512_bf16": "dot_model", "amx": "amx_model"}  # the numpy model of the CPU's instructions
WEIGHT_DTYPES = ("int8", "int4")
SHAPES = [
    (Grouping(8, 128), 256, 130, 1),
    (Grouping(4, 32), 256, 70, 8),
    (Grouping(8, 80), 160, 40, 1),  # half a step of 32 columns
    (Grouping(8, 18), 36, 33, 2),
    (Grouping(4, 13), 52, 21, 4),
    (Grouping(4, 24), 240, 150, 1),
    (Grouping(4, 32), 480, 20, 1),  # 15 groups: more than tiles hold at once, and an odd number
    (Grouping(8, 96), 480, 70, 1),
]


def check(kernels: Kernels, grouping: Grouping, inputs: int, outputs: int, slices: int, model: str) -> None:
    """Compares products of every number of rows with the numpy model's."""
    random, stack = np.random.default_rng(inputs), Stack(1, inputs, outputs, slices=slices, grouping=grouping)
    weight = random.standard_normal((outputs, inputs), np.float32)
    of_row = np.arange(512) % 37  # so many different rows: the numpy model is slow, and no tile has that height
    some = random.standard_normal((37, inputs), np.float32)
    x, expected = some[of_row], coded(some, quantize(weight, grouping), slices, model)[of_row]
    for rows in ROWS:
        assert np.array_equal(multiply(kernels, stack, weight, BF16, x[:rows]), expected[:rows]), rows


@pytest.mark.every(3)
@pytest.mark.parametrize(("grouping", "inputs", "outputs", "slices"), SHAPES)
def test_products_have_the_bits_of_the_numpy_model_for_every_number_of_rows(
    name: str, grouping: Grouping, inputs: int, outputs: int, slices: int
) -> None:
    check(load(name), grouping, inputs, outputs, slices, name)


@pytest.mark.parametrize("instruction_set", [each for each in instruction_sets() if each in OF_SET])
@pytest.mark.parametrize(("grouping", "inputs", "outputs", "slices"), SHAPES)
def test_the_instructions_of_this_cpu_have_them_too(
    instruction_set: str, grouping: Grouping, inputs: int, outputs: int, slices: int
) -> None:
    kernels = load(instruction_set)
    if reason := kernels.refusal():
        pytest.skip(reason.decode())
    check(kernels, grouping, inputs, outputs, slices, OF_SET[instruction_set])


@pytest.mark.parametrize("bits", [8, 4])
def test_denormal_values_and_sums_are_flushed_as_by_the_numpy_model(name: str, bits: int) -> None:
    random, grouping = np.random.default_rng(3), Grouping(bits, 8)
    weight, x = random.standard_normal((80, 16), np.float32) * np.float32(2.0**-60), extreme(random, 200, 16)
    codes = quantize(weight, grouping)
    expected = coded(x, codes, 1, name)
    for rows in (1, 2, 3, 200):
        found = multiply(load(name), Stack(1, 16, 80, grouping=grouping), weight, BF16, x[:rows])
        assert np.array_equal(found.view(np.int32), expected[:rows].view(np.int32)), rows
    exact = x.astype(np.float64) @ codes.widen().T.astype(np.float64)
    assert ((expected == 0) & (exact != 0)).any(), "nothing was flushed"


@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES)
def test_memory_that_was_packed_before_has_the_format_of_its_rows(name: str, weight_dtype: str) -> None:
    stack = Stack(1, 64, 16, grouping=Grouping(int(weight_dtype[3:]), 32))
    weight = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    packed, memory = pack(load(name), stack, weight, BF16)
    assert packed_matrix(load(name), stack, memory, BF16).format == packed.format
    assert packed_matrix(load("baseline"), stack, memory, BF16).format != packed.format, "rows of fp32"


@pytest.mark.parametrize(
    ("name", "architecture", "weight_dtype"),
    [
        pytest.param(
            *each,
            marks=()
            if each in (("dot_model", "llama3", "int8"), ("amx_model", "llama3", "int4"))
            else pytest.mark.matrix,
        )
        for each in product(MODELS, ("llama3", "mixtral", "gpt2 untied"), WEIGHT_DTYPES)
    ],
    indirect=["name"],
)
def test_bits_do_not_depend_on_cuts_threads_and_batches(
    tmp_path: Path, name: str, architecture: str, weight_dtype: str
) -> None:
    ENTRIES[architecture].make(tmp_path)
    count = sized(64, 19)
    tokens = np.random.default_rng(0).integers(0, VOCAB, count).tolist()
    made = [runner(tmp_path, "bf16", "bf16", threads, name, weight_dtype=weight_dtype) for threads in (1, 3)]
    expected = logits(made[0], tokens, range(1, count))  # token by token
    every: list[Sequence[int]] = [(), (1, 8, 10), range(2, count, 2), range(3, count, 3), (31, 32, 33, 63)]
    for cuts in every[: sized(5, 2)]:
        for each in made:
            assert np.array_equal(logits(each, tokens, cuts), expected)
    for count in sized((2, 3, 5, 8, 17, 33, 64), (2, 3, 7, 19)):
        for each in made:
            assert np.array_equal(batch(each, tokens, count), expected[:count]), count
    for each in made:
        each.close()


def batch(made: Backend, tokens: list[int], count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Returns the logits of `count` sequences in one step, sequence i at token i, whose prompts were computed alone."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    tables = np.arange(1, count * blocks + 1, dtype=np.int32).reshape(count, blocks)
    for i in range(1, count):
        logits(made, tokens[:i], (), int(tables[i, 0]))
    position = np.arange(count, dtype=np.int32)
    plan = RunningPlan(
        tokens=np.array(tokens[:count], np.int32),
        positions=position,
        slots=tables[position, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        span_length=np.ones(count, np.int32),
        block_tables=tables,
        rows=pack_rows([SamplingRow(token) for token in range(count)]),
    )
    return made.logits(plan)


@pytest.mark.parametrize(
    ("name", "weight_dtype", "tp"),
    [
        pytest.param(
            *each, marks=() if each in (("dot_model", "int4", 2), ("amx_model", "int4", 3)) else pytest.mark.matrix
        )
        for each in product(MODELS, WEIGHT_DTYPES, (2, 3))
    ],
    indirect=["name"],
)
def test_ranks_have_the_same_bits_at_any_cut(tmp_path: Path, name: str, weight_dtype: str, tp: int) -> None:
    entry = ENTRIES["llama3"]
    width = 6 * MOST_COLUMNS[int(weight_dtype[3:])]  # every tp has the same codes: the largest groups fit their slices
    sizes = {"hidden_size": width, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": width}
    replace(entry, options=entry.options | sizes).make(tmp_path / "model")
    count = sized(48, 19)
    tokens = np.random.default_rng(0).integers(0, VOCAB, count).tolist()
    found = [
        rank_logits(tmp_path / "model", tp, tmp_path / f"store{i}", tokens, cuts, "bf16", name, weight_dtype)
        for i, cuts in enumerate(((), range(1, count), (1, 3, 8)))
    ]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    alone = runner(tmp_path / "model", "bf16", "bf16", instruction_set=name, weight_dtype=weight_dtype)
    expected = logits(alone, tokens, ())
    alone.close()
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=0.03 * np.abs(expected).max())
