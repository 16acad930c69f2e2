"""The same answer with proposals as without: tokens, texts, log-probabilities and logits, bit for bit."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.request.completion import Completion
from tk.infer.engine.request.events import FinishReason
from tk.infer.engine.schedule import live_request
from tk.infer.engine.schedule.proposing.proposals import RowCost
from tk.infer.engine.worker import step_timing
from tk.tests.infer.engine.free_blocks import num_free_blocks
from tk.tests.infer.history import History
from tk.tests.infer.oracle import Oracle

PROMPTS = [[5, 6, 7], list(range(1, 101)), [9], [3, 1, 4, 1, 5, 9, 2, 6] * 9, list(range(1, 90))]
BASE = SamplingParams(seed=11, max_new_tokens=30, ignore_eos=True, logprobs=2)
OPTIONS = {
    "greedy": replace(BASE, temperature=0.0),
    "samples": replace(BASE, n=3, top_p=0.8),
    "penalties": replace(BASE, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, temperature=0.7),
    "filters": replace(BASE, top_k=5, min_p=0.05, logit_bias={7: 3.0, 9: -4.0}, logprobs=None),
    "stops": replace(BASE, stop_token_ids=tuple(range(100, 130)), min_new_tokens=9, stop=("e", "th"), n=2),
    "eos": replace(BASE, ignore_eos=False, logit_bias={263: 6.0}, min_new_tokens=18, include_stop=True, logprobs=0),
    "prompt": replace(BASE, prompt_logprobs=1),
}


def answers(llm: LLM) -> dict[str, list[Completion]]:
    """The completions of all prompts under all options, together."""
    params = [params for params in OPTIONS.values() for _ in PROMPTS]
    found = llm.generate(PROMPTS * len(OPTIONS), params)
    assert llm.engine.statistics.check_cache().problems == ()
    assert num_free_blocks(llm.engine) == llm.model_info().num_blocks
    step = len(PROMPTS)
    return {name: found[i * step : (i + 1) * step] for i, name in enumerate(OPTIONS)}


def said(completions: Iterable[Completion]) -> list[object]:
    return [(completion.choices, completion.prompt_logprobs) for completion in completions]


def know(monkeypatch: pytest.MonkeyPatch, texts: Sequence[Sequence[int]]) -> None:
    """Lets engines that start from now on propose what follows in these texts, whatever steps cost."""
    seeds = count()
    monkeypatch.setattr(step_timing, "RowCost", lambda measured: RowCost({1: 1.0}))
    monkeypatch.setattr(live_request, "Proposer", lambda most: Oracle(texts, most, next(seeds)))


@pytest.mark.parametrize(
    ("kernels", "tp", "kv_dtype"),
    [
        ("native", 2, "int8"),
        pytest.param("native", 1, "bf16", marks=pytest.mark.matrix),
        pytest.param("aten", 2, "bf16", marks=pytest.mark.matrix),
        pytest.param("aten", 1, "int8", marks=pytest.mark.matrix),
    ],
)
def test_answers_are_the_same_bits_under_every_option(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kernels: str, tp: int, kv_dtype: str
) -> None:
    options: dict[str, Any] = {"dtype": "bf16", "kv_dtype": kv_dtype, "tp": tp, "kernels": kernels, "threads": 1}
    options |= {"kv_blocks": 13, "block_size": 16, "max_batched_tokens": 48, "max_running": 12}
    with LLM(model_folder("grouped"), **options) as llm:
        expected = answers(llm)
    pairs = zip(PROMPTS * len(OPTIONS), (each for group in expected.values() for each in group), strict=True)
    know(monkeypatch, [[*prompt, *choice.token_ids] for prompt, one in pairs for choice in one.choices])
    with LLM(model_folder("grouped"), **options, speculate=6) as llm:
        found = answers(llm)
    for name, group in expected.items():
        assert said(found[name]) == said(group), name
        proposed, accepted = (
            sum(getattr(each.usage, f"{kind}_tokens") for each in found[name]) for kind in ("proposed", "accepted")
        )
        if name == "prompt":
            assert proposed == 0, "the log-probabilities of a prompt are wanted"
        else:
            assert 0 < accepted < proposed, name
    whole = [each for group in found.values() for each in group]
    assert sum(each.timing.preemptions for each in whole) > 0
    assert sum(each.usage.cached_tokens for each in whole) > 0
    reasons = {choice.finish_reason for each in whole for choice in each.choices}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.STOP_TOKEN, FinishReason.EOS}


def test_a_text_that_repeats_itself_is_proposed(model_folder: Callable[[str], Path], llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
    biased = replace(params, logit_bias={7: 50.0})
    prompts, both = [[5, 6, 7], [9]], [params, biased]
    expected = llm.generate(prompts, both)
    with LLM(model_folder("grouped"), kv_blocks=40, block_size=16, speculate=8) as speculating:
        found = speculating.generate(prompts, both)
        streamed = list(speculating.stream([9], biased))
    assert said(found) == said(expected)
    assert [token for delta in streamed for token in delta.token_ids] == list(found[1].token_ids)
    usage = found[1].usage
    assert usage.completion_tokens == 200
    assert usage.accepted_tokens > 150, "the same token 200 times"
    assert usage.accepted_tokens <= usage.proposed_tokens


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "kernels"),
    [
        ("bf16", "bf16", "native"),
        ("bf16", "int4", "native"),
        ("bf16", "int8", "aten"),
        pytest.param("fp32", "int8", "native", marks=pytest.mark.matrix),
    ],
)
def test_logits_are_the_same_bits(make_runner: Callable[..., Backend], dtype: str, kv_dtype: str, kernels: str) -> None:
    num_twins = 60 if kv_dtype == "int4" else 0  # fewer than blocks
    runner = make_runner("tied", dtype, kv_dtype, 100, kernels, num_twins)
    every = range(len(PROMPTS))
    alone = {i: History(runner, 100, 512, PROMPTS, 36, num_twins=num_twins).run([i]) for i in every}
    texts = [[*PROMPTS[i], *alone[i].tokens[i]] for i in every]
    for num_blocks, ahead in ((100, 0), (100, 1), (13, 1)):
        options = (64, PROMPTS, 36, ahead, lambda i: Oracle(texts, 5, i))
        found = History(runner, num_blocks, *options, num_twins).run(every)
        assert (found.preemptions > 0) == (num_blocks == 13)
        assert min(found.accepted, found.rejected) > 20
        for i in every:
            for one, other in zip(alone[i].logits[i], found.logits[i], strict=True):
                assert torch.equal(one, other), (i, num_blocks, ahead)


@pytest.mark.parametrize(("width", "least", "most"), [(1, 60, 120), (12, 0, 60)])
def test_a_wide_batch_stops_proposing(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, width: int, least: int, most: int
) -> None:
    """Four rows take as long as one and more take longer; the same token comes 100 times."""
    monkeypatch.setattr(step_timing, "RowCost", lambda measured: RowCost({1: 1.0, 4: 1.0, 64: 16.0}))
    prompts = [[9, i] for i in range(width)]
    params = SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True, logit_bias={7: 50.0}, logprobs=1)
    options: dict[str, Any] = {"kv_blocks": 120, "block_size": 16, "threads": 1, "max_running": 12}
    with LLM(model_folder("grouped"), **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM(model_folder("grouped"), **options, speculate=8) as llm:
        found = llm.generate(prompts, params)
    assert said(found) == said(expected)
    assert least <= sum(each.usage.proposed_tokens for each in found) <= most
