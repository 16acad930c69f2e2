"""The steps of the sampler in numpy, each alone; test_sampler.py compares the whole with docs/wire.md."""

from dataclasses import replace

import numpy as np
import pytest

from tk.infer.engine.kernels.sampler.numpy_sampler import _gumbel_max, _keep_top_k, _keep_top_p, sample
from tk.infer.engine.kernels.sampler.philox import gumbel, uniform
from tk.infer.engine.step.sampling_rows import WITH_CANDIDATES
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.sampling_row import SamplingRow, pack

IDS = np.array([2, 3, 5, 7, 11])


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, [2, 3, 5, 7, 11]), (1, [3]), (2, [3, 5]), (3, [3, 5, 11]), (9, [2, 3, 5, 7, 11])]
)
def test_top_k_keeps_the_lowest_of_equals(top_k: int, kept: list[int]) -> None:
    scores = np.array([-3.0, 0.0, -1.0, -2.0, -1.0], np.float32)
    assert _keep_top_k(IDS, scores, top_k).tolist() == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, [2, 3, 5, 7, 11]), (0.81, [2, 3, 5]), (0.79, [2, 3]), (0.5, [2, 3]), (0.49, [2]), (1e-9, [2])],
)
def test_top_p_keeps_tokens_whose_better_ones_weigh_less(top_p: float, kept: list[int]) -> None:
    shares = np.array([0.495, 0.301, 0.104, 0.06, 0.04])
    scores = np.log(shares / shares[0]).astype(np.float32)
    assert _keep_top_p(IDS, scores, top_p, vocab_size=20).tolist() == kept


def test_the_gumbel_trick_takes_the_largest_sum_of_score_and_noise() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        scores = -generator.random(20) * 9
        uniform = generator.random(20)
        assert _gumbel_max(scores, uniform) == int(np.argmax(scores - np.log(-np.log(uniform))))


def test_repetition_divides_what_is_positive_and_other_penalties_subtract() -> None:
    logits = np.array([[4.0, 3.9, -1.0, 0.0]], np.float32)
    halved = SamplingRow(0, repetition_penalty=2.0, counts=TokenCounts({0: 0}))
    assert sample(logits, pack([halved])).token_ids.tolist() == [1], "4.0 / 2 < 3.9"
    counted = SamplingRow(0, presence_penalty=0.05, frequency_penalty=0.03, counts=TokenCounts({0: 1}))
    assert sample(logits, pack([counted])).token_ids.tolist() == [0], "4.0 - 0.08 > 3.9"
    twice = SamplingRow(0, presence_penalty=0.05, frequency_penalty=0.03, counts=TokenCounts({0: 2}))
    assert sample(logits, pack([twice])).token_ids.tolist() == [1], "4.0 - 0.11 < 3.9"


def test_a_mask_bans_tokens_before_the_choice() -> None:
    logits = np.zeros((1, 40), np.float32)
    masks = np.array([[0, 1 << 3]], np.uint32)
    for row in (SamplingRow(0, mask=0), SamplingRow(0, mask=0, temperature=1.0, seed=4)):
        assert sample(logits, pack([row]), masks).token_ids.tolist() == [35]


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 40.0])
def test_the_first_candidate_that_a_mask_allows_is_the_choice_under_it(temperature: float) -> None:
    generator = np.random.default_rng(3)
    logits = np.round(generator.standard_normal((60, 90)) * 2, 1).astype(np.float32)  # with equals
    penalized = {"repetition_penalty": 1.4, "counts": TokenCounts(dict.fromkeys(range(0, 90, 7), 1))}
    row = SamplingRow(0, temperature=temperature, **penalized)  # type: ignore[arg-type]
    asked = sample(logits, pack([replace(row, seed=i, mask=WITH_CANDIDATES) for i in range(60)]))
    masks = generator.integers(0, 2**32, (60, 3), np.uint32)
    masked = sample(logits, pack([replace(row, seed=i, mask=i) for i in range(60)]), masks)
    free = sample(logits, pack([replace(row, seed=i) for i in range(60)]))
    assert asked.token_ids.tolist() == free.token_ids.tolist()
    assert (asked.candidates >= 0).sum() > 0.95 * asked.candidates.size
    allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    num_found = 0
    for i, candidates in enumerate(asked.candidates):
        found = [token for token in candidates.tolist() if token >= 0 and allowed[i, token]]
        num_found += bool(found)
        assert not found or found[0] == masked.token_ids[i]
    assert num_found > 50


def test_candidates_end_where_rounding_might_decide() -> None:
    logits = np.full((1, 40), -9.0, np.float32)
    row = SamplingRow(0, temperature=1.0, seed=5, mask=WITH_CANDIDATES)
    order = sample(logits, pack([row])).candidates[0]
    assert len(set(order.tolist())) == 8
    noise = gumbel(uniform(5, 0, 0, np.arange(40)))
    logits[0, order[2]] += np.float32(
        noise[order[1]] - noise[order[2]]
    )  # which makes the second and third equal, nearly
    found = sample(logits, pack([row])).candidates[0]
    assert found.tolist() == [order[0], *[-1] * 7]


def test_there_are_no_candidates_without_a_finite_score() -> None:
    bias = dict.fromkeys(range(5), -np.inf)
    rows = [
        SamplingRow(0, temperature=t, bias={t: -np.inf, **(bias if t else {})}, mask=WITH_CANDIDATES) for t in (0, 1)
    ]
    found = sample(np.zeros((2, 5), np.float32), pack(rows))
    assert found.candidates.tolist() == [[1, 2, 3, 4, *[-1] * 4], [-1] * 8]


def test_a_scored_row_keeps_its_token_and_has_a_rank() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    found = sample(logits, pack([SamplingRow(0, target=2, num_top=1)]))
    assert (found.token_ids.tolist(), found.rank.tolist(), found.top_ids.tolist()) == ([2], [3], [[0]])
    np.testing.assert_allclose([*found.logprob, *found.top_logprobs[0]], np.log([0.2, 0.5]), rtol=1e-6)
