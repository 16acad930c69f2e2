"""The sampler against slow numpy written from docs/wire.md, and against torch's log_softmax and topk."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.engine.kernels.sampler import numpy_sampler
from tk.infer.engine.kernels.sampler.philox import gumbel, uniform
from tk.infer.engine.kernels.sampler.sampler import Sample, run_sampler
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.example_counts import examples
from tk.tests.infer.engine.kernels.sampler.native import able_units, native_samplers
from tk.tests.infer.sampling_row import SamplingRow, pack

VOCAB = 40


@pytest.fixture(params=["numpy", *able_units()])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Every implementation that this machine can run."""
    return numpy_sampler.sample if request.param == "numpy" else native_samplers()[request.param]


def normal(seed: int, num_rows: int) -> np.ndarray[Any, Any]:
    """Returns rows of logits."""
    return np.random.default_rng(seed).standard_normal((num_rows, VOCAB)).astype(np.float32)


def slow_choice(logits: np.ndarray[Any, Any], row: SamplingRow) -> int:
    """The order of docs/wire.md, one token at a time, in float64."""
    x = logits.astype(np.float64).copy()
    for token, bias in (row.bias or {}).items():
        x[token] += bias
    for token, count in zip(*(row.counts or TokenCounts()).columns(), strict=True):
        x[token] = x[token] / row.repetition_penalty if x[token] > 0 else x[token] * row.repetition_penalty
        x[token] -= row.presence_penalty * (count > 0) + row.frequency_penalty * count
    if row.temperature == 0:
        return int(np.argmax(x))
    x /= row.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if row.top_k:
        order = order[: row.top_k]
    weights = np.exp(x[order] - x[order[0]])
    probabilities = weights / weights.sum()
    kept, total = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        if (row.top_p < 1 and total >= row.top_p) or probability < row.min_p * probabilities[0]:
            break
        kept.append(token)
        total += probability
    ids = np.sort(kept)
    noise = gumbel(uniform(row.seed, row.sample_index, row.new_number, ids))
    return int(ids[np.argmax(x[ids] + noise)])


rows = st.builds(
    SamplingRow,
    token=st.just(0),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 17, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.93]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.9]),
    presence_penalty=st.sampled_from([0.0, 1.3, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 15),
    new_number=st.integers(0, 100000),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-5.0, 2.5, -np.inf]), max_size=4),
    counts=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 5), max_size=12).map(TokenCounts),
)


@examples(200)
@given(batch=st.lists(rows, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_every_row_is_chosen_as_the_wire_says(batch: list[SamplingRow], seed: int) -> None:
    logits = normal(seed, len(batch)) * np.float32(3)
    result = run_sampler(logits, pack(batch))
    assert result.token_ids.tolist() == [slow_choice(logits[i], row) for i, row in enumerate(batch)]
    assert result.finite.all()


def test_ties_go_to_the_lowest_id(sample: Sample) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 9] = logits[0, 30] = 4.0
    for row in (SamplingRow(0), SamplingRow(0, temperature=1.0, top_k=1)):
        assert run_sampler(logits, pack([row, row]), None, sample).token_ids.tolist() == [9, 0]
    row = SamplingRow(0, num_top=5)
    result = run_sampler(logits, pack([row, row]), None, sample)
    assert result.top_ids.tolist() == [[9, 30, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert result.rank.tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-42])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_a_temperature_near_zero_is_argmax(sample: Sample, temperature: float, filters: dict[str, float]) -> None:
    logits = normal(5, 4) * np.float32(30)
    batch = [SamplingRow(0, temperature=temperature, seed=seed, bias={0: -np.inf}, **filters) for seed in range(4)]  # type: ignore[arg-type]
    found = run_sampler(logits, pack(batch), None, sample).token_ids
    assert found.tolist() == (logits[:, 1:].argmax(axis=-1) + 1).tolist()


def test_a_bias_near_the_largest_float_wins(sample: Sample) -> None:
    batch = [SamplingRow(0, temperature=0.5, seed=seed, bias={seed: 2e38, seed + 1: 3e38}) for seed in range(6)]
    logits = np.zeros((6, VOCAB), np.float32)
    assert run_sampler(logits, pack(batch), None, sample).token_ids.tolist() == list(range(1, 7))


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.999}])
def test_draws_follow_the_distribution(sample: Sample, options: dict[str, float]) -> None:
    num_draws = 1_000
    logits = normal(3, 1)[0]
    batch = [SamplingRow(0, seed=11, new_number=i, **options) for i in range(num_draws)]  # type: ignore[arg-type]
    drawn = run_sampler(np.tile(logits, (num_draws, 1)), pack(batch), None, sample).token_ids
    shares = np.exp(logits.astype(np.float64) / options["temperature"])
    expected = num_draws * shares / shares.sum()
    chi_square = ((np.bincount(drawn, minlength=VOCAB) - expected) ** 2 / expected).sum()
    assert 16 < chi_square < 80, "39 degrees of freedom: each side has a chance below 1 in 2,000"


def test_a_mask_allows_tokens(sample: Sample) -> None:
    logits = normal(4, 64)
    allowed = np.random.default_rng(6).random((64, VOCAB)) < 0.2
    allowed[:, 17] = True
    bits = np.packbits(allowed, axis=-1, bitorder="little")
    masks = np.zeros((64, (VOCAB + 31) // 32 * 4), np.uint8)
    masks[:, : bits.shape[-1]] = bits
    masks32 = masks.view(np.uint32)
    for options in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 3}):
        rows = pack([SamplingRow(0, seed=i, bias={39: 9.0}, mask=63 - i, **options) for i in range(64)])  # type: ignore[arg-type]
        chosen = run_sampler(logits, rows, masks32, sample).token_ids
        assert np.take_along_axis(allowed[::-1], chosen[:, None], -1).all()
        assert len(set(chosen.tolist())) > 5
        everything = run_sampler(logits, rows, np.full_like(masks, 255).view(np.uint32), sample)
        free = run_sampler(logits, rows, None, sample).token_ids.tolist()
        assert everything.token_ids.tolist() == free
        mixed = run_sampler(logits, replace(rows, mask=np.where(np.arange(64) % 2, rows.mask, -1)), masks32, sample)
        assert mixed.token_ids[::2].tolist() == free[::2]
        assert mixed.token_ids[1::2].tolist() == chosen[1::2].tolist()


def test_logprobs_are_of_the_raw_logits(sample: Sample) -> None:
    vocab, num_top = 3001, 20
    logits = (np.random.default_rng(2).standard_normal((3, vocab)) * 4).astype(np.float32)
    batch = [
        SamplingRow(0, num_top=num_top, temperature=0.5, bias={3: 100.0}),
        SamplingRow(0),
        SamplingRow(0, target=17, num_top=0),
    ]
    result = run_sampler(logits, pack(batch), None, sample)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    assert result.token_ids[[0, 2]].tolist() == [3, 17]
    for row, token in ((0, 3), (2, 17)):
        assert result.logprob[row] == pytest.approx(float(expected[row, token]), abs=2e-6)
        assert result.rank[row] == 1 + int((expected[row] > expected[row, token]).sum())
    top = expected[0].topk(num_top)
    assert result.top_ids[0].tolist() == top.indices.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], top.values.numpy(), atol=2e-6)
    assert not result.top_ids[1:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5, VOCAB - 1])
def test_a_row_that_is_not_finite_is_flagged_and_alone(sample: Sample, bad: float, place: int) -> None:
    logits = normal(7, 3)
    rows = pack([SamplingRow(0, num_top=2, temperature=1.0, top_p=0.8, seed=i) for i in range(3)])
    clean = run_sampler(logits, rows, None, sample)
    logits[1, place] = bad
    result = run_sampler(logits, rows, None, sample)
    assert result.finite.tolist() == [1, 0, 1]
    assert result.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert result.token_ids[1] == 0


def test_a_row_does_not_depend_on_the_others(sample: Sample) -> None:
    logits = normal(8, 9)
    batch = [
        SamplingRow(0, temperature=1.0, top_p=0.7 + i / 30, num_top=i, bias={i: 2.0}, counts=TokenCounts({3: i}))
        for i in range(9)
    ]
    whole = run_sampler(logits, pack(batch), None, sample)
    for first, stop in ((0, 1), (1, 4), (4, 9)):
        part = run_sampler(logits[first:stop], pack(batch[first:stop]), None, sample)
        for name, values in asdict(part).items():
            expected = getattr(whole, name)[first:stop]
            assert np.array_equal(expected[:, : values.shape[-1]] if values.ndim == 2 else expected, values), name
