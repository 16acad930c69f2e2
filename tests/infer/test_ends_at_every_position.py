"""Steps that C carries out alone end where those of Python do: by length, by a stop token and by an abort."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.request.events import Delta, Done, Event, Failed, FinishReason
from tk.infer.engine.request.request import Request
from tk.tests.infer.engine.free_blocks import num_free_blocks

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no compiler")
PROMPTS = [[5, 6, 7], list(range(1, 30)), list(range(1, 60))]
LENGTH = 40  # new tokens, in which every prompt enters a block
BASE = SamplingParams(seed=7, max_new_tokens=LENGTH, ignore_eos=True)


def abort_after(llm: LLM, prompt: list[int], counts: range) -> list[list[int]]:
    """Runs a request for each count together, and ends it when it has so many tokens; returns those that came."""
    found, ended = {count: list[int]() for count in counts}, threading.Semaphore(0)

    def take(count: int, event: Event) -> None:
        if isinstance(event, Delta):
            found[count] += event.token_ids
            if len(found[count]) == count:
                llm.engine.abort(f"abort {count}")
        elif isinstance(event, Done | Failed):
            ended.release()

    for count in counts:
        request = Request(tuple(prompt), BASE, f"abort {count}")
        llm.engine.submit(request, lambda event, count=count: take(count, event))  # type: ignore[misc]  # mypy knows no default of a lambda's parameter
    for _ in counts:
        assert ended.acquire(timeout=60)
    return list(found.values())


@pytest.mark.parametrize(
    ("tp", "apart"), [(1, 4), (2, 9), *(pytest.param(tp, 1, marks=pytest.mark.matrix) for tp in (1, 2))]
)
def test_answers_end_where_those_of_python_do(model_folder: Callable[[str], Path], tp: int, apart: int) -> None:
    """Rows with log-probabilities are sent by Python, step by step; blocks run out now and then."""
    positions = range(1, LENGTH + 1, apart)
    folder = model_folder("grouped")
    with LLM(folder, kernels="native", tp=tp, threads=1, kv_blocks=7, max_running=8) as llm:
        expected = [each.token_ids for each in llm.generate(PROMPTS, replace(BASE, logprobs=0))]
        cases = [(prompt, tokens, at) for at in positions for prompt, tokens in zip(PROMPTS, expected, strict=True)]
        prompts = [prompt for prompt, _, _ in cases]
        lengths = llm.generate(prompts, [replace(BASE, max_new_tokens=at) for _, _, at in cases])
        assert [each.token_ids for each in lengths] == [tokens[:at] for _, tokens, at in cases]
        stops = llm.generate(prompts, [replace(BASE, stop_token_ids=(tokens[at - 1],)) for _, tokens, at in cases])
        ends = [tokens.index(tokens[at - 1]) + 1 for _, tokens, at in cases]
        assert [each.token_ids for each in stops] == [c[1][:end] for c, end in zip(cases, ends, strict=True)]
        assert {each.choices[0].finish_reason for each in stops} == {FinishReason.STOP_TOKEN}
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            for count, came in zip(positions, abort_after(llm, prompt, positions), strict=True):
                assert came[:count] == list(tokens[:count])
                assert came == list(tokens[: len(came)])
        assert llm.engine.statistics.check_cache().problems == ()
        assert num_free_blocks(llm.engine) == llm.model_info().num_blocks
        assert llm.engine.statistics.totals().preemptions
