"""The sampler in C against the one in numpy: equal to the bit on random rows of every kind."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.native import load_library
from tk.infer.engine.kernels.sampler import numpy_sampler
from tk.infer.engine.kernels.sampler.block import SamplingBlock, scratch_bytes
from tk.infer.engine.kernels.sampler.native_sampler import SOURCE, native_sampler
from tk.infer.engine.kernels.sampler.sampler import Sample, best_sampler, run_sampler
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.sampling_rows import SamplingRows
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.example_counts import examples
from tk.tests.infer.engine.kernels.sampler.native import native_samplers
from tk.tests.infer.sampling_row import SamplingRow, pack

Logits = np.ndarray[Any, Any]


def logits_of(kind: str, seed: int, shape: tuple[int, int]) -> Logits:
    """Returns rows of logits of a kind of distribution."""
    generator = np.random.default_rng(seed)
    normal = generator.standard_normal(shape)
    made: dict[str, Callable[[], Logits]] = {
        "flat": lambda: normal * 0.02,
        "normal": lambda: normal * 2,
        "peaked": lambda: np.where(generator.random(shape) < 3 / shape[1], normal * 3 + 15, normal * 2),
        "ties": lambda: np.round(normal * 2),
        "equal": lambda: np.full(shape, -3.25),
        "zeros": lambda: np.where(generator.random(shape) < 0.5, 0.0, -0.0),
        "wide": lambda: normal * 10.0 ** generator.integers(-42, 38, shape),
        "ascending": lambda: np.broadcast_to(np.linspace(-8, 9, shape[1]), shape),
        # The part of the row by which the sampler expects the cut of top-p is unlike the rest.
        "lower": lambda: normal - 5 * (np.arange(shape[1]) // 64 % 16 == 0),
        "higher": lambda: normal + 3 * (np.arange(shape[1]) // 64 % 16 == 0),
    }
    result: Logits = np.clip(made[kind](), -3e38, 3e38).astype(np.float32)
    return result


@st.composite
def batches(draw: st.DrawFn) -> tuple[Logits, SamplingRows, Logits | None]:
    """Draws logits, rows with options, and masks."""
    vocab = draw(st.sampled_from([1, 2, 5, 31, 63, 64, 65, 128, 200, 1000, 4099, 33000]))
    num_rows = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["flat", "normal", "normal", "peaked", "ties", "equal", "zeros", "wide", "ascending"]))
    logits = logits_of(kind, draw(st.integers(0, 10**6)), (num_rows, vocab))
    tokens = st.integers(0, vocab - 1)
    rows = st.builds(
        SamplingRow,
        token=st.just(0),
        target=st.sampled_from([-1, -1, -1, vocab - 1]),
        num_top=st.sampled_from([-1, -1, 0, 1, 5, 20]),
        temperature=st.sampled_from([0.0, 1.0, 1.0, 0.3, 2.5, 1e-3, 1e-42, 1e30]),
        top_k=st.sampled_from([0, 0, 1, 3, 17, 50, 900, 20000]),
        top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.05, 0.5, 0.9, 0.999, 1 - 2**-24]),
        min_p=st.sampled_from([0.0, 0.0, 1e-30, 0.02, 0.3, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 0.7, 1.9, 1e30]),
        presence_penalty=st.sampled_from([0.0, 1.3, -2.0, 3e38]),
        frequency_penalty=st.sampled_from([0.0, 0.6, -0.4, 3e38, -3e38]),
        seed=st.integers(0, 2**64 - 1),
        sample_index=st.integers(0, 15),
        new_number=st.integers(0, 100000),
        bias=st.dictionaries(tokens, st.sampled_from([-5.0, 2.5, 3e38, -np.inf]), max_size=4),
        counts=st.dictionaries(tokens, st.integers(0, 5), max_size=12).map(TokenCounts),
        mask=st.integers(-2, 2),
    )
    batch = pack(draw(st.lists(rows, min_size=num_rows, max_size=num_rows)))
    masks = None
    if draw(st.booleans()):
        words = (3, (vocab + 31) // 32)
        generator = np.random.default_rng(draw(st.integers(0, 99)))
        masks = generator.integers(0, 2**32, words, np.uint32) & generator.integers(0, 2**32, words, np.uint32)
        whole = generator.random(words)
        masks[whole < 0.2], masks[whole > 0.8] = 0, 2**32 - 1
    for bad in draw(st.sampled_from([(), (), (), (np.nan,), (np.inf, -np.inf)])):
        logits[draw(st.integers(0, num_rows - 1)), draw(tokens)] = bad
    return logits, batch, masks


def assert_same(found: SamplerOutput, expected: SamplerOutput) -> None:
    for name, values in asdict(expected).items():
        assert np.array_equal(getattr(found, name), values), f"{name}: {getattr(found, name)} is not {values}"


@examples(200)
@given(batches())
def test_c_and_numpy_agree_to_the_bit(drawn: tuple[Logits, SamplingRows, Logits | None]) -> None:
    logits, rows, masks = drawn
    before = logits.copy()
    expected = run_sampler(logits, rows, masks, numpy_sampler.sample)
    for sample in native_samplers().values():
        assert_same(run_sampler(logits, rows, masks, sample), expected)
    assert np.array_equal(logits, before, equal_nan=True), "the sampler writes no logits"


@pytest.mark.parametrize("vocab", [49_152, 128_256, 262_145])
@pytest.mark.parametrize("kind", ["flat", "normal", "peaked", "ties", "equal", "lower", "higher"])
def test_large_vocabularies(vocab: int, kind: str) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.99, "temperature": 0.7},
        {"top_k": 50},
        {"top_k": 30_000, "top_p": 0.5},
        {"min_p": 0.05},
    ]
    batch = [SamplingRow(0, **{"temperature": 1.0, "seed": i, "num_top": 3} | each) for i, each in enumerate(options)]
    logits, rows = logits_of(kind, vocab, (len(batch), vocab)), pack(batch)
    expected = run_sampler(logits, rows, None, numpy_sampler.sample)
    for sample in native_samplers().values():
        assert_same(run_sampler(logits, rows, None, sample), expected)


def test_rows_may_lie_apart() -> None:
    wide = logits_of("normal", 1, (6, 300))
    rows = pack([SamplingRow(0, temperature=1.0, seed=i, num_top=2) for i in range(3)])
    sample: Sample = next(iter(native_samplers().values()))
    expected = run_sampler(wide[::2, 20:280].copy(), rows, None, sample)
    assert_same(run_sampler(wide[::2, 20:280], rows, None, sample), expected)
    turned = np.asfortranarray(wide[::2, 20:280])
    assert_same(run_sampler(turned, rows, None, sample), expected)


def test_the_scratch_is_as_large_as_the_compiler_says() -> None:
    loaded = load_library(SOURCE)
    assert loaded is not None
    for unit in native_samplers():
        bytes_in_c = getattr(loaded.library, f"tk_sampler_scratch_bytes_{unit}")
        bytes_in_c.argtypes, bytes_in_c.restype = (ctypes.c_int64,), ctypes.c_int64
        for vocab in (1, 63, 64, 65, 5000, 128_256):
            assert bytes_in_c(vocab) <= scratch_bytes(vocab) < bytes_in_c(vocab) + 64


def test_rows_may_be_divided_in_any_way() -> None:
    """As threads and ranks divide them: each takes its rows from one block."""
    logits = logits_of("normal", 3, (8, 5000))
    rows = pack([SamplingRow(0, temperature=1.0, top_p=0.9, seed=i, num_top=2) for i in range(8)])
    expected = run_sampler(logits, rows, None, numpy_sampler.sample)
    for sampler in native_samplers().values():
        block = SamplingBlock(8, 5000)
        block.fill(rows)
        block.batch.logits, block.batch.row_stride = logits.ctypes.data, 5000
        parts = [(5, 8), (0, 1), (1, 5)]
        scratch = [np.empty(scratch_bytes(5000), np.uint8) for _ in parts]
        with ThreadPoolExecutor(3) as pool:
            for (first, stop), own in zip(parts, scratch, strict=True):
                pool.submit(sampler.sample_rows, block.batch, first, stop, own.ctypes.data)
        assert_same(block.output(8, 2), expected)


def test_a_block_is_used_again_by_other_rows() -> None:
    logits = logits_of("normal", 5, (3, 500))
    batches = [
        [SamplingRow(0, num_top=4, bias={7: 30.0}, temperature=1.0), SamplingRow(0, target=3, num_top=1)],
        [SamplingRow(0, temperature=1.0, seed=5, mask=i) for i in (2, -1, 0)],
        [SamplingRow(0, num_top=0, counts=TokenCounts({3: 1}), repetition_penalty=1.5)],
    ]
    masks = np.full((3, 16), 0x0F0F0F0F, np.uint32)
    for sampler in native_samplers().values():
        for batch in batches:
            rows, count = pack(batch), len(batch)
            for mask in (None, masks[:count]):
                expected = run_sampler(logits[:count], rows, mask, numpy_sampler.sample)
                assert_same(run_sampler(logits[:count], rows, mask, sampler), expected)


def test_no_rows_give_no_results() -> None:
    rows = pack([])
    samplers: list[Sample] = [numpy_sampler.sample, *native_samplers().values()]
    for sample in samplers:
        assert run_sampler(np.zeros((0, 40), np.float32), rows, None, sample).token_ids.shape == (0,)


def test_the_best_sampler_is_native_where_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_sampler() is not None
    assert best_sampler() is not numpy_sampler.sample
    monkeypatch.setattr("tk.infer.engine.kernels.sampler.native_sampler.load_library", lambda source: None)
    assert best_sampler() is numpy_sampler.sample
