"""The device's sampler against numpy's: bits of noise, and tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tk.core.casts import Array
from tk.infer.engine.kernels.sampler import exact_math, numpy_sampler, philox
from tk.infer.engine.kernels.triton.rows.samples import OptionColumns, SampleShape, advance, log, sample, uniform
from tk.tests.infer.engine.kernels.triton.one_step import on_device
from tk.tests.infer.engine.kernels.triton.rows.test_filters import options
from tk.tests.infer.engine.kernels.triton.where import DEVICE
from tk.tests.infer.sampling_row import SamplingRow, pack

pytestmark = pytest.mark.triton
SEEDS = [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1]


@triton.jit
def _noise(found: tl.tensor, gumbel: tl.tensor, settings: tl.tensor, DRAWS: tl.constexpr) -> None:
    draws = tl.arange(0, DRAWS)[:, None]
    tokens = draws * 4 + tl.arange(0, 4)[None, :]
    numbers = uniform(draws, tl.program_id(0), settings)
    tl.store(found + tl.program_id(0) * DRAWS * 4 + tokens, numbers)
    tl.store(gumbel + tl.program_id(0) * DRAWS * 4 + tokens, 0.0 - log(0.0 - log(numbers)))


@triton.jit
def _log(x: tl.tensor, out: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(out + at, log(tl.load(x + at)))


def test_noise_has_the_bits_of_the_hosts() -> None:
    rows = pack([SamplingRow(i, seed=seed, sample_index=3 * i, new_number=77 + i) for i, seed in enumerate(SEEDS)])
    found, noise = torch.zeros(2, len(SEEDS), 256, dtype=torch.float64, device=DEVICE)
    of_rows = options(rows)
    columns = OptionColumns(*(of_rows.columns[name] for name in OptionColumns._fields))
    _noise[(len(SEEDS),)](found, noise, columns, DRAWS=64)
    for row, seed in enumerate(SEEDS):
        expected = philox.uniform(seed, 3 * row, 77 + row, np.arange(256))
        np.testing.assert_array_equal(found[row].cpu().numpy(), expected)
        np.testing.assert_array_equal(noise[row].cpu().numpy(), philox.gumbel(expected))


def test_logarithms_have_the_bits_of_the_hosts() -> None:
    values = np.random.default_rng(0).random(1024) * np.logspace(-300, 300, 1024)
    found = torch.zeros(1024, dtype=torch.float64, device=DEVICE)
    _log[(1,)](on_device(values), found, SIZE=1024)
    np.testing.assert_array_equal(found.cpu().numpy(), exact_math.log(values))


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_tokens_are_those_of_the_hosts_sampler(vocab: int) -> None:
    logits_RV = (np.random.default_rng(vocab).normal(size=(6, vocab)) * 3).astype(np.float32)
    logits_RV[4, vocab // 2 :] = logits_RV[4].max() + 1  # equals: the first one counts
    logits_RV[5, 3] = np.nan
    rows = pack(
        [
            SamplingRow(0),
            SamplingRow(1, temperature=1.0, seed=SEEDS[3], new_number=5),
            SamplingRow(2, temperature=0.3, seed=7, sample_index=2),
            SamplingRow(3, temperature=5.0, seed=8),
            SamplingRow(4),
            SamplingRow(5, temperature=1.0),
        ]
    )
    for number in range(3):
        rows = replace(rows, new_number=rows.new_number + np.int32(number))
        expected = numpy_sampler.sample(logits_RV, rows)
        found = sample(on_device(logits_RV), options(rows)).cpu().numpy()
        np.testing.assert_array_equal(found[0], expected.token_ids)
        np.testing.assert_array_equal(found[1], expected.finite)


def test_a_large_vocabulary_has_blocks_for_all_tokens() -> None:
    for vocab in (1, 1024, 1025, 151_936, 5_000_000):
        shape = SampleShape.of(vocab)
        assert (shape.num_blocks - 1) * shape.draws * 4 < vocab <= shape.num_blocks * shape.draws * 4
        assert shape.num_blocks <= shape.blocks <= 1024


def test_rows_advance_but_padding() -> None:
    columns = torch.zeros(11, 4, dtype=torch.int32, device=DEVICE)
    columns[1:3] = torch.tensor([[15, 3, -1, -1], [31, 99, -1, -1]], device=DEVICE)
    tables = torch.tensor([[1, 5, 0], [3, 7, 0], [9, 9, 9], [9, 9, 9]], dtype=torch.int32, device=DEVICE)
    wide = torch.zeros(11, 6, dtype=torch.int32, device=DEVICE)
    wide[:, :4] = columns
    advance(wide[:, :4], tables, torch.tensor([42, 43, 44, 45], dtype=torch.int32, device=DEVICE), 16)
    found: Array = wide[:, :4].cpu().numpy()
    assert found[:3].tolist() == [[42, 43, 0, 0], [16, 4, -1, -1], [5 * 16, 3 * 16 + 4, -1, -1]]
    assert found[7].tolist() == [1, 1, 0, 0]
