"""Attention to more keys than a tile and a split have: right, and the same bits however its work is cut."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tk.core.casts import Array
from tk.infer.engine.job import Job
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.kernels.native.binding.library import BF16_SETS, instruction_sets
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.worker.worker import load
from tk.tests.example_counts import sized
from tk.tests.infer.engine.kernels.native.running import BEST, NUM_BLOCKS, logits, runner
from tk.tests.infer.history import BLOCK_SIZE
from tk.tests.infer.sampling_row import SamplingRow, pack
from tk.tests.model.architectures import VOCAB

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
LENGTH = 2060
TOKENS = np.random.default_rng(0).integers(0, VOCAB, LENGTH).tolist()
PREFILL = (300, 700, 1023)  # as long as the runner's steps are, up to the first split's border
DECODES = (*PREFILL, 1024, 1025, 1026, 1500, 2000, 2047, 2048, 2049, 2050)
CHUNKS = (511, 1020, 1030, 1536, 2040, 2052)
SETS = [pytest.param(name, marks=() if name == BEST else pytest.mark.matrix) for name in instruction_sets()]
SHAPES = [(6, 16, None), (1, 64, 1100), (2, 32, None), (3, 24, 300)]  # query heads, head size, window
CASES = [
    ("fp32", "fp32", None),
    ("bf16", "int8", None),
    ("bf16", "bf16", 1100),
    ("bf16", "fp8", None),
    ("bf16", "int4", None),
    ("fp32", "k8v4", 1100),
    pytest.param("bf16", "int8", 1100, marks=pytest.mark.matrix),
    pytest.param("fp32", "fp16", None, marks=pytest.mark.matrix),
]


def make(folder: Path, window: int | None = None, heads: int = 6, head_dim: int = 16) -> MistralForCausalLM:
    """Saves a model of one layer in `folder` and returns it; a kv head has three query heads."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        head_dim=head_dim,
        sliding_window=window,
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def check_cuts(folder: Path, dtype: str, kv_dtype: str, instruction_set: str) -> None:
    """Compares decodes and chunks on 1 to 4 threads; in `make test` each of them once."""
    made = runner(folder, dtype, kv_dtype, 1, instruction_set)
    expected = logits(made, TOKENS, DECODES)
    assert np.isfinite(expected).all()
    made.close()
    for threads, cuts in ((3, CHUNKS), (4, DECODES), (1, CHUNKS), (2, DECODES), (3, DECODES))[: sized(5, 2)]:
        made = runner(folder, dtype, kv_dtype, threads, instruction_set)
        assert np.array_equal(logits(made, TOKENS, cuts), expected), (threads, cuts)
        made.close()


@pytest.mark.every(3)
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("dtype", "kv_dtype", "window"), CASES)
def test_bits_do_not_depend_on_threads_and_cuts(
    tmp_path: Path, dtype: str, kv_dtype: str, window: int | None, instruction_set: str
) -> None:
    make(tmp_path, window)
    check_cuts(tmp_path, dtype, kv_dtype, instruction_set)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        pytest.param("fp32", "fp32", marks=pytest.mark.matrix),
        pytest.param("fp32", "int8", marks=pytest.mark.matrix),
        ("fp32", "fp8"),
        ("fp32", "int4"),
        ("fp16", "int8"),
        pytest.param("fp16", "int4", marks=pytest.mark.matrix),
    ],
)
def test_bits_of_wide_vectors_do_not_depend_on_threads_and_cuts(
    tmp_path: Path, wide: str, dtype: str, kv_dtype: str
) -> None:
    make(tmp_path)
    check_cuts(tmp_path, dtype, kv_dtype, wide)


def decode(made: Backend, sequences: Sequence[tuple[int, int]]) -> Array:
    """Returns the logits of one more token for each (length so far, first block)."""
    tables = np.zeros((len(sequences), LENGTH // BLOCK_SIZE + 1), np.int32)
    for table, (length, first) in zip(tables, sequences, strict=True):
        table[: length // BLOCK_SIZE + 1] = np.arange(first, first + length // BLOCK_SIZE + 1)
    position = np.array([length for length, _ in sequences], np.int32)
    block = tables[np.arange(len(sequences)), position // BLOCK_SIZE]
    return made.logits(
        RunningPlan(
            tokens=np.array([TOKENS[length] for length, _ in sequences], np.int32),
            positions=position,
            slots=block * BLOCK_SIZE + position % BLOCK_SIZE,
            span_length=np.ones(len(sequences), np.int32),
            block_tables=tables,
            rows=pack([SamplingRow(token) for token in range(len(sequences))]),
        )
    )


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("kv_dtype", [pytest.param("bf16", marks=pytest.mark.matrix), "int8", "int4"])
def test_a_long_sequence_has_the_same_bits_beside_short_ones(
    tmp_path: Path, kv_dtype: str, instruction_set: str
) -> None:
    make(tmp_path)
    lengths, first, sequences = (5, 2050, 1, 1024, 300, 1023, 40), 1, []
    for length in lengths:
        sequences.append((length, first))
        first += length // BLOCK_SIZE + 1
    made = runner(tmp_path, "bf16", kv_dtype, 1, instruction_set)
    cuts = [range(500, length, 500) for length, _ in sequences]
    for (length, block), cut in zip(sequences, cuts, strict=True):
        logits(made, TOKENS[:length], cut, block)
    alone = np.concatenate([decode(made, [each]) for each in sequences])
    made.close()
    for threads in (1, 2, 4):
        made = runner(tmp_path, "bf16", kv_dtype, threads, instruction_set)
        for (length, block), cut in zip(sequences, cuts, strict=True):
            logits(made, TOKENS[:length], cut, block)
        for _ in range(2):
            assert np.array_equal(decode(made, sequences), alone), threads
        assert np.array_equal(decode(made, sequences[::-1])[::-1], alone), threads
        made.close()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("heads", "head_dim", "window", "instruction_set"),
    [
        pytest.param(*shape, name, marks=() if name == BEST or shape == SHAPES[0] else pytest.mark.matrix)
        for shape in SHAPES
        for name in instruction_sets()
    ],
)
def test_long_attention_is_that_of_transformers_and_int8_that_of_aten(
    tmp_path: Path, heads: int, head_dim: int, window: int | None, instruction_set: str
) -> None:
    model = make(tmp_path, window, heads, head_dim)
    with torch.no_grad():
        exact = model(torch.tensor([TOKENS])).logits[0].numpy()
    aten = load(Job(str(tmp_path), "aten", "fp32", "int8", NUM_BLOCKS, 0, BLOCK_SIZE, 512))
    rounded = logits(aten, TOKENS, CHUNKS)
    for kv_dtype, expected, error in (("fp32", exact, 1e-5), ("bf16", exact, 1e-2), ("int8", rounded, 2e-3)):
        made = runner(tmp_path, "fp32", kv_dtype, 2, instruction_set)
        found = logits(made, TOKENS, DECODES)
        made.close()
        assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected), kv_dtype


@pytest.mark.parametrize("instruction_set", [name for name in instruction_sets() if name not in BF16_SETS])
@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4"])
def test_rounding_queries_and_weights_to_int16_changes_little(
    tmp_path: Path, kv_dtype: str, instruction_set: str
) -> None:
    """Beside models in fp32, whose attention does not: of the same weights, so the same codes are stored."""
    make(tmp_path).bfloat16().save_pretrained(tmp_path)
    whole, rounded = (runner(tmp_path, dtype, kv_dtype, 1, instruction_set) for dtype in ("fp32", "bf16"))
    expected, found = (logits(made, TOKENS[:600], (500,)) for made in (whole, rounded))
    assert 1e-6 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-4
    whole.close()
    rounded.close()
