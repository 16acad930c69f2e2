"""The sampler: it turns logits into tokens by bias, penalties, temperature, top-k, top-p and min-p (docs/wire.md).

Letters: R rows, V vocabulary, K candidates of a row. The result of a row depends only on that row.
"""

import numpy as np
import torch

from ...scheduling.step_plan import NO_LOGPROBS, SAMPLE, Array, SamplerOutput, SamplingRows
from .philox import gumbel


def run_sampler(logits_RV: torch.Tensor, rows: SamplingRows) -> SamplerOutput:
    """Chooses a token for every row whose target is SAMPLE, and scores the tokens of all rows that request it.

    Args:
        logits_RV: the raw logits in fp32, without padding of the vocabulary.
        rows: the options of the rows.
    """
    finite_R = torch.isfinite(logits_RV).all(dim=-1)
    token_ids_R = torch.from_numpy(rows.target.astype(np.int64))
    chosen = np.flatnonzero(rows.target == SAMPLE)
    if len(chosen):
        everything = len(chosen) == len(rows)
        picked_RV = logits_RV.clone() if everything else logits_RV[torch.from_numpy(chosen)]
        token_ids_R[torch.from_numpy(chosen)] = choose(picked_RV, rows, chosen)
    logprob, rank, top_ids, top_logprobs = _score(logits_RV, token_ids_R, rows)
    return SamplerOutput(
        token_ids=token_ids_R.numpy().astype(np.int32),
        finite=finite_R.numpy().astype(np.uint8),
        logprob=logprob,
        rank=rank,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def choose(logits_RV: torch.Tensor, rows: SamplingRows, chosen: Array) -> torch.Tensor:
    """Chooses a token for the rows `chosen` of `rows`; overwrites their logits `logits_RV` and returns int64 [R]."""
    _add_bias(logits_RV, rows, chosen)
    _penalize(logits_RV, rows, chosen)
    result_R = torch.argmax(logits_RV, dim=-1)  # the first, so the lowest id, of equals
    random = np.flatnonzero(rows.temperature[chosen] > 0)
    filtered = (rows.top_k[chosen] > 0) | (rows.top_p[chosen] < 1) | (rows.min_p[chosen] > 0)
    for wants_filter in (False, True):
        local = random[filtered[random] == wants_filter]
        if len(local):
            which = chosen[local]
            scaled_RV = _scale(logits_RV[torch.from_numpy(local)], _column(rows.temperature[which]))
            scores_RK, ids_RK = _keep(scaled_RV, rows, which) if wants_filter else _keep_all(scaled_RV)
            result_R[torch.from_numpy(local)] = _gumbel_max(scores_RK, ids_RK, rows, which)
    return result_R


def _add_bias(logits_RV: torch.Tensor, rows: SamplingRows, chosen: Array) -> None:
    place, entries = _entries(rows.bias_row, chosen)
    if len(entries):
        index = (place, torch.from_numpy(rows.bias_token[entries].astype(np.int64)))
        logits_RV.index_put_(index, torch.from_numpy(rows.bias_value[entries]), accumulate=True)


def _penalize(logits_RV: torch.Tensor, rows: SamplingRows, chosen: Array) -> None:
    """Applies penalties: repetition divides positive and multiplies negative logits (CTRL, arXiv 1909.05858), the
    others subtract."""
    place, entries = _entries(rows.count_row, chosen)
    if not len(entries):
        return
    row = rows.count_row[entries]
    index = (place, torch.from_numpy(rows.count_token[entries].astype(np.int64)))
    count = torch.from_numpy(rows.count_value[entries].astype(np.float32))
    repetition = torch.from_numpy(rows.repetition_penalty[row])
    values = logits_RV[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= torch.from_numpy(rows.presence_penalty[row]) * (count > 0)
    values -= torch.from_numpy(rows.frequency_penalty[row]) * count
    logits_RV[index] = values


def _entries(entry_row: Array, chosen: Array) -> tuple[torch.Tensor, Array]:
    """Returns, for the (row, token, value) entries of `chosen`: each one's place in `chosen`, and the entries."""
    entries = np.flatnonzero(np.isin(entry_row, chosen))
    return torch.from_numpy(np.searchsorted(chosen, entry_row[entries])), entries


def _scale(logits_RV: torch.Tensor, temperature_R1: torch.Tensor) -> torch.Tensor:
    """Divides logits by the temperature.

    If that overflows, the row's largest logit is subtracted first, which does not change the softmax. Quotients that
    still overflow become -inf, so the choice tends to argmax as the temperature goes to 0.
    """
    scaled_RV = logits_RV / temperature_R1
    overflown_R1 = scaled_RV.isinf().any(dim=-1, keepdim=True)
    return torch.where(overflown_R1, (logits_RV - logits_RV.amax(dim=-1, keepdim=True)) / temperature_R1, scaled_RV)


def _keep_all(scaled_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scaled_RV, torch.arange(scaled_RV.shape[-1]).unsqueeze(0)


def _keep(scaled_RV: torch.Tensor, rows: SamplingRows, which: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scores of the tokens that top-k, top-p and min-p keep (others -inf) and their ids, best first."""
    scores_RK, ids_RK = torch.sort(scaled_RV, dim=-1, descending=True, stable=True)
    top_k = _column(rows.top_k[which])
    place_K = torch.arange(scores_RK.shape[-1])
    scores_RK.masked_fill_((top_k > 0) & (place_K >= top_k), -torch.inf)
    probability_RK = torch.softmax(scores_RK.double(), dim=-1)
    before_RK = probability_RK.cumsum(dim=-1) - probability_RK
    top_p = _column(rows.top_p[which]).double()
    dropped_RK = (before_RK >= top_p) & (top_p < 1)
    dropped_RK |= probability_RK < _column(rows.min_p[which]).double() * probability_RK[:, :1]
    dropped_RK[:, 0] = False
    scores_RK.masked_fill_(dropped_RK, -torch.inf)
    num_kept = int((scores_RK > -torch.inf).sum(dim=-1).max())
    return scores_RK[:, : max(1, num_kept)], ids_RK[:, : max(1, num_kept)]


def _gumbel_max(scores_RK: torch.Tensor, ids_RK: torch.Tensor, rows: SamplingRows, which: Array) -> torch.Tensor:
    """Draws from softmax(scores) as argmax(scores + Gumbel noise); a token's noise does not depend on other tokens."""
    ids_RK = ids_RK.expand(len(which), -1)
    noise_RK = np.stack(
        [
            gumbel(int(rows.seed[row]), int(rows.sample_index[row]), int(rows.new_number[row]), ids_K.numpy())
            for row, ids_K in zip(which, ids_RK, strict=True)
        ]
    )
    best_R1 = torch.argmax(scores_RK.double() + torch.from_numpy(noise_RK), dim=-1, keepdim=True)
    return ids_RK.gather(-1, best_R1).squeeze(-1)


def _score(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, rows: SamplingRows) -> tuple[Array, Array, Array, Array]:
    """Returns the log-softmax of the raw logits at each row's token, its rank, and the most probable alternatives."""
    num_rows, most = len(rows), max(0, int(rows.num_top.max(initial=0)))
    logprob, rank = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    top_ids, top_logprobs = np.zeros((num_rows, most), np.int32), np.zeros((num_rows, most), np.float32)
    wanted = np.flatnonzero(rows.num_top != NO_LOGPROBS)
    if len(wanted):
        index = torch.from_numpy(wanted)
        logprobs_RV = torch.log_softmax(logits_RV[index], dim=-1)
        own_R1 = logprobs_RV.gather(-1, token_ids_R[index].unsqueeze(-1))
        logprob[wanted] = own_R1.squeeze(-1).numpy()
        rank[wanted] = 1 + (logprobs_RV > own_R1).sum(dim=-1).numpy()
        top = torch.topk(logprobs_RV, min(most, logprobs_RV.shape[-1]), dim=-1)
        top_ids[wanted, : top.indices.shape[-1]] = top.indices.numpy()
        top_logprobs[wanted, : top.values.shape[-1]] = top.values.numpy()
    return logprob, rank, top_ids, top_logprobs


def _column(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).unsqueeze(-1)
