"""The sampler in numpy: the reference of sampler.c, and the fallback where nothing can compile it.

The score of a token is (logit - largest logit) / temperature in float32, after bias and penalties. Every later step
uses scores only, so both samplers agree to the bit (exact_math.py). The result of a row depends only on that row.
Letters: R rows, V vocabulary, K kept tokens, whose ids ascend.
"""

from typing import Any, Final

import numpy as np

from .....core.casts import Array
from ...step.sampler_output import NUM_CANDIDATES, SamplerOutput
from ...step.sampling_rows import NO_LOGPROBS, SAMPLE, WITH_CANDIDATES, SamplingRows
from .block import most_alternatives
from .exact_math import log, weights
from .philox import gumbel, uniform

_LARGEST: Final = np.finfo(np.float32).max


def sample(logits_RV: Array, rows: SamplingRows, masks: Array | None = None) -> SamplerOutput:
    """Samples all rows; see `sampler.run_sampler`."""
    num_rows, most = len(rows), max(0, most_alternatives(rows))
    output = SamplerOutput(
        token_ids=np.zeros(num_rows, np.int32),
        finite=np.zeros(num_rows, np.uint8),
        logprob=np.zeros(num_rows, np.float32),
        rank=np.zeros(num_rows, np.int32),
        top_ids=np.zeros((num_rows, most), np.int32),
        top_logprobs=np.zeros((num_rows, most), np.float32),
        candidates=np.full((num_rows, NUM_CANDIDATES * rows.have_candidates), -1, np.int32),
    )
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        for i in range(len(rows)):
            is_finite = bool(np.isfinite(logits_RV[i]).all())
            output.finite[i] = is_finite
            output.token_ids[i] = max(0, rows.target[i])
            if not is_finite:
                continue
            if rows.target[i] == SAMPLE and rows.mask[i] == WITH_CANDIDATES:
                best, count = _offer(_adjust(logits_RV[i], rows, i, masks), rows, i)
                output.token_ids[i] = best[0]
                output.candidates[i, :count] = best[:count]
            elif rows.target[i] == SAMPLE:
                output.token_ids[i] = _choose(_adjust(logits_RV[i], rows, i, masks), rows, i)
            if rows.num_top[i] != NO_LOGPROBS:
                _score(logits_RV[i], i, int(rows.num_top[i]), output)
    return output


def _adjust(logits_V: Array, rows: SamplingRows, i: int, masks: Array | None) -> Array:
    """Returns the logits of a row after mask, bias and penalties: float32 [V], finite or -inf.

    Repetition divides positive and multiplies negative logits (CTRL, arXiv 1909.05858), the others subtract.
    """
    result_V = logits_V.copy()
    if masks is not None and rows.mask[i] >= 0:
        allowed_V = np.unpackbits(masks[rows.mask[i]].view(np.uint8), bitorder="little")[: len(result_V)]
        result_V[allowed_V == 0] = -np.inf
    biased, counted = (slice(*np.searchsorted(column, (i, i + 1))) for column in (rows.bias_row, rows.count_row))
    np.add.at(result_V, rows.bias_token[biased], rows.bias_value[biased])
    tokens, counts = rows.count_token[counted], rows.count_value[counted]
    x, repetition = result_V[tokens], rows.repetition_penalty[i]
    x = np.where(x > 0, x / repetition, np.where(x < 0, x * repetition, x))
    less = (x - rows.presence_penalty[i]) - rows.frequency_penalty[i] * counts.astype(np.float32)
    result_V[tokens] = np.where(counts > 0, less, x)
    for changed in (rows.bias_token[biased], tokens):
        x = result_V[changed]
        result_V[changed] = np.where(np.isnan(x), -np.inf, np.minimum(x, _LARGEST))
    return result_V


def _choose(logits_V: Array, rows: SamplingRows, i: int) -> int:
    largest = logits_V.max()
    temperature = rows.temperature[i]
    if not temperature > 0 or largest == -np.inf:
        return int(np.argmax(logits_V))  # the first, so the lowest id, of equals
    scores_V = logits_V - largest
    if temperature != 1:
        scores_V /= temperature
    ids_K = np.flatnonzero(scores_V > -np.inf)
    ids_K = _keep_top_k(ids_K, scores_V[ids_K], int(rows.top_k[i]))
    ids_K = _keep_top_p(ids_K, scores_V[ids_K], float(rows.top_p[i]), len(scores_V))
    if rows.min_p[i] > 0:
        ids_K = ids_K[scores_V[ids_K] >= log(rows.min_p[i : i + 1].astype(np.float64))]
    scores_K = scores_V[ids_K].astype(np.float64)
    uniform_K = uniform(int(rows.seed[i]), int(rows.sample_index[i]), int(rows.new_number[i]), ids_K)
    return int(ids_K[_gumbel_max(scores_K, uniform_K)])


def _offer(logits_V: Array, rows: SamplingRows, i: int) -> tuple[Array, int]:
    """Returns the best tokens of a row without filters, at least one, and how many of them are candidates.

    Each candidate would win over all behind it also if some tokens were masked: see row_best.h.
    """
    largest, temperature = logits_V.max(), rows.temperature[i]
    if not temperature > 0 or largest == -np.inf:
        best = np.argsort(-logits_V, kind="stable")[:NUM_CANDIDATES]
        return best, int(np.count_nonzero(logits_V[best] > -np.inf))
    scores_V = logits_V - largest
    if temperature != 1:
        scores_V /= temperature
    ids_K = np.flatnonzero(scores_V > -np.inf)
    scores_K = scores_V[ids_K].astype(np.float64)
    totals_K = scores_K + gumbel(uniform(int(rows.seed[i]), int(rows.sample_index[i]), int(rows.new_number[i]), ids_K))
    order = np.argsort(-totals_K, kind="stable")[: NUM_CANDIDATES + 1]
    gaps = -np.diff(totals_K[order], append=-np.inf)
    is_close = ~(gaps > (16.0 - scores_K[order]) * 2.0**-20)
    count = int(np.argmax(is_close)) if is_close.any() else len(order)
    return ids_K[order[:NUM_CANDIDATES]], min(count, NUM_CANDIDATES)


def _keep_top_k(ids_K: Array, scores_K: Array, top_k: int) -> Array:
    """Keeps the `top_k` best tokens, the lowest ids of equals; 0 keeps all."""
    if not 0 < top_k < len(ids_K):
        return ids_K
    least = np.partition(scores_K, -top_k)[-top_k]
    better_K = scores_K > least
    equal = np.flatnonzero(scores_K == least)[: top_k - int(better_K.sum())]
    better_K[equal] = True
    result_K: Array = ids_K[better_K]
    return result_K


def _keep_top_p(ids_K: Array, scores_K: Array, top_p: float, vocab_size: int) -> Array:
    """Keeps the best tokens whose better ones weigh less than `top_p` of all, but always the best token."""
    if top_p >= 1:
        return ids_K
    weights_K = weights(scores_K, vocab_size)
    total = weights_K.sum()
    # All tokens below this floor weigh less than 1 - top_p together, so the better ones weigh enough without them.
    candidates = np.flatnonzero(scores_K >= np.log((1 - top_p) * total / vocab_size / 2))
    order = candidates[np.argsort(-scores_K[candidates], kind="stable")]
    before = np.cumsum(weights_K[order]) - weights_K[order]
    num_kept = max(1, int(np.searchsorted(before, top_p * total)))
    return ids_K[np.sort(order[:num_kept])]


def _gumbel_max(scores_K: Array, uniform_K: Array) -> int:
    """Draws from softmax(scores) as argmax(scores + Gumbel noise); the first of equals.

    Only tokens that may win pay for logarithms: score + noise > best means -log(u) < exp(score - best), and
    1 - u <= -log(u).
    """
    share_K = np.exp(scores_K) / (1 - uniform_K)
    leader = slice(start := int(np.argmax(share_K)), start + 1)
    best = (scores_K[leader] + gumbel(uniform_K[leader]))[0]
    able = np.flatnonzero(share_K * np.exp(-best) > 1 - 1e-6)
    return int(able[np.argmax(scores_K[able] + gumbel(uniform_K[able]))])


def _score(logits_V: Array, i: int, num_top: int, output: SamplerOutput) -> None:
    """Reports the log-softmax of the raw logits at the row's token, its rank, and the best alternatives."""
    scores_V = logits_V - logits_V.max()
    log_total = log(np.array([weights(scores_V, len(scores_V)).sum()]))

    def logprobs(ids: Any) -> Array:
        result: Array = (scores_V[ids].astype(np.float64) - log_total).astype(np.float32)
        return result

    token = output.token_ids[i : i + 1]
    output.logprob[i] = logprobs(token)[0]
    output.rank[i] = 1 + np.count_nonzero(scores_V > scores_V[token])
    top = _keep_top_k(np.arange(len(scores_V)), scores_V, num_top) if num_top else np.zeros(0, np.int64)
    top = top[np.argsort(-scores_V[top], kind="stable")]
    output.top_ids[i, : len(top)] = top
    output.top_logprobs[i, : len(top)] = logprobs(top)
