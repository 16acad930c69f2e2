"""The plan of a step without a persistent batch: everything is read from the samples, every time."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tk.infer.engine.schedule.samples.sample import Sample, ScheduledChunk
from tk.infer.engine.step.running_plan import RunningPlan
from tk.infer.engine.step.sampling_rows import NO_LOGPROBS, WITH_CANDIDATES, ScoredRow
from tk.infer.engine.step.slot_entries import TokenCounts
from tk.tests.infer.sampling_row import SamplingRow, pack


@dataclass(frozen=True)
class Planned:
    """A chunk as it was when its step was planned; its first `num_sure` proposals come without a row."""

    sample: Sample
    start: int
    stop: int
    samples: bool
    blocks: tuple[int, ...]
    proposals: tuple[int, ...] = ()
    num_sure: int = 0

    @staticmethod
    def of(chunk: ScheduledChunk) -> "Planned":
        """Returns a chunk with a copy of its block table."""
        blocks = tuple(chunk.sample.table.blocks)
        return Planned(chunk.sample, chunk.start, chunk.stop, chunk.is_last, blocks, chunk.proposals, len(chunk.sure))


def full_plan(
    planned: Sequence[Planned], block_size: int, stopping: Sequence[int] = (), scored: Sequence[ScoredRow] = ()
) -> RunningPlan:
    """Returns the plan of a step whose tokens are all known by now."""
    tokens: list[int] = []
    positions, slots = [], []
    rows = list(map(SamplingRow.of, scored))
    tables = np.zeros((len(planned), max(len(chunk.blocks) for chunk in planned)), np.int32)
    for i, chunk in enumerate(planned):
        tokens += [*chunk.sample.tokens(chunk.start, chunk.stop), *chunk.proposals]
        stop = chunk.stop + len(chunk.proposals)
        tables[i, : len(chunk.blocks)] = chunk.blocks
        position = np.arange(chunk.start, stop, dtype=np.int32)
        positions.append(position)
        slots.append(tables[i, position // block_size] * block_size + position % block_size)
        for i in range(chunk.num_sure, len(chunk.proposals) + 1) if chunk.samples else ():
            first = len(tokens) - 1 - len(chunk.proposals)
            row = sampling_row(chunk.sample, chunk.stop, first + i, stopping, chunk.proposals[:i])
            if chunk.sample.output.matcher is not None:
                is_asked = chunk.sample.output.has_candidates
                row = replace(row, mask=WITH_CANDIDATES if is_asked else sum(other.mask >= 0 for other in rows))
            rows.append(row)
    return RunningPlan(
        tokens=np.array(tokens, np.int32),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        span_length=np.array([chunk.stop + len(chunk.proposals) - chunk.start for chunk in planned], np.int32),
        block_tables=tables,
        rows=pack(sorted(rows, key=lambda row: row.token)),
    )


def sampling_row(
    sample: Sample, length: int, token: int, stopping: Sequence[int] = (), proposals: Sequence[int] = ()
) -> SamplingRow:
    """Returns the row that chooses the token after the first `length` ones and proposals, at packed token `token`."""
    params, output = sample.request.params, [*sample.tokens(sample.num_prompt, length), *proposals]
    bias = dict(params.logit_bias)
    if len(output) < params.min_new_tokens:
        bias = {token: value for token, value in bias.items() if token not in stopping}
        bias |= dict.fromkeys(stopping, -math.inf)
    counts = None
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        prompt = list(sample.request.token_ids) if params.repetition_penalty != 1 else []
        counted = dict.fromkeys(prompt, 0) | Counter(dict.fromkeys(prompt, 0)) + Counter(output)
        counts = TokenCounts({token: counted[token] for token in dict.fromkeys([*prompt, *output])})
    return SamplingRow(
        token=token,
        num_top=NO_LOGPROBS if params.logprobs is None else params.logprobs,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=sample.seed,
        sample_index=sample.index,
        new_number=len(output),
        bias=bias,
        counts=counts,
    )
