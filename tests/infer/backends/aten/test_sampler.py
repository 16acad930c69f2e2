"""The sampler against slow numpy written from docs/wire.md, and its noise against the paper's known answers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk.infer.backends.aten.philox import gumbel, philox4x32
from tk.infer.backends.aten.sampler import run_sampler
from tk.infer.scheduling.step_plan import SamplingRow, SamplingRows

VOCAB = 40
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(  # kat_vectors of Random123, the paper's own library
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    words = philox4x32([np.array([word], np.uint64) for word in counter], key)
    assert tuple(int(word[0]) for word in words) == expected


def test_noise_is_gumbel_and_each_tokens_own() -> None:
    noise = gumbel(5, 0, 3, np.arange(50000))
    assert abs(noise.mean() - np.euler_gamma) < 0.02
    assert abs(noise.std() - np.pi / np.sqrt(6)) < 0.02
    some = np.array([7, 40000, 3])
    assert np.array_equal(gumbel(5, 0, 3, some), noise[some])
    for other in (gumbel(6, 0, 3, some), gumbel(5, 1, 3, some), gumbel(5, 0, 4, some), gumbel(5 + 2**32, 0, 3, some)):
        assert not np.isin(other, noise[some]).any()


def slow_choice(logits: np.ndarray[Any, Any], row: SamplingRow) -> int:
    """The order of docs/wire.md, one token at a time, in float64."""
    x = logits.astype(np.float64).copy()
    for token, bias in (row.bias or {}).items():
        x[token] += bias
    for token, count in (row.counts or {}).items():
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
    noise = gumbel(row.seed, row.sample_index, row.new_number, np.array(kept))
    return kept[int(np.argmax(x[kept] + noise))]


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
    counts=st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, 5), max_size=12),
)


@settings(max_examples=200, deadline=None)
@given(batch=st.lists(rows, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_every_row_is_chosen_as_the_wire_says(batch: list[SamplingRow], seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal((len(batch), VOCAB)) * 3).astype(np.float32)
    result = run_sampler(torch.from_numpy(logits.copy()), SamplingRows.pack(batch))
    assert result.token_ids.tolist() == [slow_choice(logits[i], row) for i, row in enumerate(batch)]
    assert result.finite.all()


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 9] = logits[0, 30] = 4.0
    assert run_sampler(logits, SamplingRows.pack([SamplingRow(0), SamplingRow(0)])).token_ids.tolist() == [9, 0]
    top_1 = SamplingRow(0, temperature=1.0, top_k=1)
    assert run_sampler(logits, SamplingRows.pack([top_1, top_1])).token_ids.tolist() == [9, 0]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-42])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}])
def test_a_temperature_near_zero_is_argmax(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 30
    batch = [SamplingRow(0, temperature=temperature, seed=seed, bias={0: -np.inf}, **filters) for seed in range(4)]  # type: ignore[arg-type]
    assert (
        run_sampler(logits, SamplingRows.pack(batch)).token_ids.tolist() == (logits[:, 1:].argmax(dim=-1) + 1).tolist()
    )


def test_a_bias_near_the_largest_float_wins() -> None:
    batch = [SamplingRow(0, temperature=0.5, seed=seed, bias={seed: 2e38, seed + 1: 3e38}) for seed in range(6)]
    assert run_sampler(torch.zeros(6, VOCAB), SamplingRows.pack(batch)).token_ids.tolist() == list(range(1, 7))


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    batch = [SamplingRow(0, temperature=1.0, seed=11, new_number=i) for i in range(4000)]
    drawn = run_sampler(logits.expand(4000, -1).contiguous(), SamplingRows.pack(batch)).token_ids
    shares = np.bincount(drawn, minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2)) * 4
    batch = [
        SamplingRow(0, num_top=5, temperature=0.5, bias={3: 100.0}),
        SamplingRow(0),
        SamplingRow(0, target=17, num_top=0),
    ]
    result = run_sampler(logits.clone(), SamplingRows.pack(batch))
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert result.token_ids[0] == 3
    assert result.token_ids[2] == 17
    for row, token in ((0, 3), (2, 17)):
        assert result.logprob[row] == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert result.rank[row] == 1 + int((expected[row] > expected[row, token]).sum())
    top = expected[0].topk(5)
    assert result.top_ids[0].tolist() == top.indices.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], top.values.numpy(), atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_told_and_alone(bad: float) -> None:
    logits = torch.randn(3, VOCAB)
    clean = run_sampler(logits.clone(), SamplingRows.pack([SamplingRow(0, temperature=1.0, seed=i) for i in range(3)]))
    logits[1, 5] = bad
    result = run_sampler(logits, SamplingRows.pack([SamplingRow(0, temperature=1.0, seed=i) for i in range(3)]))
    assert result.finite.tolist() == [1, 0, 1]
    assert result.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
