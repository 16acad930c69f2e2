"""Samples of requests, as the engine makes them, without a model."""

from collections.abc import Sequence
from typing import Any

from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.samples.block_table import BlockTable
from tk.infer.engine.schedule.samples.proposer import Proposer
from tk.infer.engine.schedule.samples.sample import Output, Sample

DEFAULTS = SamplingParams()


def new_sample(
    arrival: int,
    prompt: Sequence[int],
    max_tokens: int,
    params: SamplingParams = DEFAULTS,
    *,
    index: int = 0,
    root: bytes = b"",
    proposer: Proposer | None = None,
    **options: Any,
) -> Sample:
    """Returns a sample that waits.

    Args:
        arrival: the number of its request.
        prompt: the prompt.
        max_tokens: the largest number of tokens of prompt and output together.
        params: the sampling options.
        index: the number of the sample.
        root: the root of the keys of its blocks.
        proposer: makes proposals.
        options: other fields of Request.
    """
    request = Request(tuple(prompt), params, f"r{arrival}", **options)
    return Sample(request, index, arrival, 0, Output(max_tokens), BlockTable(root), proposer)
