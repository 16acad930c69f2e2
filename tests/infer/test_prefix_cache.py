"""The same answer with shared blocks as without: logits and log-probabilities bit for bit, and real hits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tk.infer import LLM, SamplingParams
from tk.infer.engine.kernels.backend import Backend
from tk.infer.engine.request.completion import Completion, CompletionBuilder
from tk.infer.engine.request.request import CacheOptions, Request
from tk.tests.infer.engine.free_blocks import num_free_blocks
from tk.tests.infer.engine.schedule.new_sample import new_sample
from tk.tests.infer.engine.test_engine import Sink
from tk.tests.infer.full_plan import Planned, full_plan
from tk.tests.infer.history import BLOCK_SIZE, History

PREFIX = tuple(int(token) for token in np.random.default_rng(5).integers(0, 260, 150))
PROMPTS = (PREFIX, PREFIX[:-1], (*PREFIX[:100], 7, 8, 9), PREFIX[:32])
BYPASS, OTHER = CacheOptions(bypass=True), CacheOptions(salt="logprobs")
PARAMS = SamplingParams(seed=3, max_new_tokens=6, logprobs=2, ignore_eos=True)


def answers(
    llm: LLM, prompts: tuple[tuple[int, ...], ...], params: SamplingParams, **options: object
) -> list[Completion]:
    """The completions of prompts that come one after the other; `options` are fields of Request."""
    found = []
    for number, prompt in enumerate(prompts):
        sink, builder = Sink(), CompletionBuilder()
        llm.engine.submit(Request(prompt, params, f"r{number}", **options), sink)  # type: ignore[arg-type]
        assert sink.over.wait(120)
        for event in sink.events:
            builder.add(event)
        found.append(builder.completion())
    assert llm.engine.statistics.check_cache().problems == ()
    return found


def cached(completions: list[Completion]) -> list[int]:
    return [completion.usage.cached_tokens for completion in completions]


def said(completions: list[Completion]) -> list[object]:
    """All that a model said: token ids and log-probabilities, of prompts too."""
    return [(completion.choices, completion.prompt_logprobs) for completion in completions]


@pytest.mark.parametrize(
    ("kernels", "tp", "dtype", "kv_dtype"),
    [
        ("native", 1, "bf16", "bf16"),
        pytest.param("native", 2, "bf16", "int8", marks=pytest.mark.matrix),
        pytest.param("aten", 1, "bf16", "int8", marks=pytest.mark.matrix),
        ("native", 1, "bf16", "int4"),
        pytest.param("aten", 1, "bf16", "int4", marks=pytest.mark.matrix),
        pytest.param("native", 2, "bf16", "k8v4", marks=pytest.mark.matrix),
        pytest.param("native", 1, "bf16", "int8", marks=pytest.mark.matrix),
        pytest.param("native", 2, "bf16", "bf16", marks=pytest.mark.matrix),
        pytest.param("aten", 1, "bf16", "bf16", marks=pytest.mark.matrix),
        pytest.param("aten", 2, "bf16", "bf16", marks=pytest.mark.matrix),
        pytest.param("aten", 2, "bf16", "int8", marks=pytest.mark.matrix),
        pytest.param("native", 1, "fp32", "fp32", marks=pytest.mark.matrix),
        pytest.param("aten", 1, "fp32", "fp32", marks=pytest.mark.matrix),
    ],
)
def test_answers_are_the_same_bits_with_and_without_hits(
    model_folder: Callable[[str], Path], kernels: str, tp: int, dtype: str, kv_dtype: str
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "tp": tp, "kernels": kernels, "threads": 1}
    with LLM(
        model_folder("grouped"), kv_blocks=60, block_size=16, max_batched_tokens=48, max_running=8, **options
    ) as llm:
        alone = answers(llm, PROMPTS, PARAMS, cache=BYPASS)
        assert cached(alone) == [0, 0, 0, 0]
        assert cached(answers(llm, PROMPTS, PARAMS)) == [0, 144, 96, 16]
        again = answers(llm, PROMPTS, PARAMS)
        assert cached(again) == [144, 144, 96, 16]
        assert said(again) == said(alone)
        longer = answers(llm, ((*PREFIX, *alone[0].token_ids, 5, 6, 7, 8, 9),), PARAMS)
        assert cached(longer) == [144], "the block that the output began to fill was not full"
        many = replace(PARAMS, n=5)
        shared, bypassed = answers(llm, PROMPTS, many), answers(llm, PROMPTS, many, cache=BYPASS)
        assert said(shared) == said(bypassed)
        assert [completion.choices[0] for completion in shared] == [completion.choices[0] for completion in alone]
        assert num_free_blocks(llm.engine) == 60


def test_prompt_logprobs_are_computed_and_scores_begin_after_the_prompt(llm: LLM) -> None:
    params = replace(PARAMS, prompt_logprobs=1)
    whole = answers(llm, (PREFIX, PREFIX), params, cache=OTHER)
    assert cached(whole) == [0, 0]
    assert said(whole[:1]) == said(whole[1:])
    assert len(whole[0].prompt_logprobs) == len(PREFIX)
    part = answers(llm, (PREFIX,), params, cache=OTHER, logprobs_from=100)
    assert cached(part) == [96]
    assert part[0].prompt_logprobs == whole[0].prompt_logprobs[100:]
    assert cached(answers(llm, (PREFIX,), params, cache=OTHER, logprobs_from=97)) == [96]
    assert cached(answers(llm, (PREFIX,), params, cache=OTHER, logprobs_from=96)) == [80]


def test_salts_and_principals_are_never_crossed(llm: LLM) -> None:
    prompt = ((9, *PREFIX),)
    for principal, salt in (("", "a"), ("", "b"), ("a", ""), ("b", "a"), ("", "")):
        cache, bypass = CacheOptions(salt=salt), CacheOptions(bypass=True, salt=salt)
        assert cached(answers(llm, prompt, PARAMS, principal=principal, cache=cache)) == [0]
        assert cached(answers(llm, prompt, PARAMS, principal=principal, cache=cache)) == [144]
        assert cached(answers(llm, prompt, PARAMS, principal=principal, cache=bypass)) == [0]


def test_prompts_that_come_together_are_computed_once(llm: LLM) -> None:
    salted = CacheOptions(salt="together")
    prompts = [PREFIX, PREFIX, PREFIX[:100], (*PREFIX, 5), PREFIX]
    alone = [llm.generate(prompt, PARAMS, CacheOptions(bypass=True))[0] for prompt in prompts]
    together = llm.generate(prompts, PARAMS, salted)
    assert cached(together) == [0, 144, 96, 144, 144]
    assert said(together) == said(alone)
    assert cached(llm.generate(prompts, PARAMS, salted)) == [144, 144, 96, 144, 144]


def test_without_a_prefix_cache_only_the_samples_of_a_request_share(model_folder: Callable[[str], Path]) -> None:
    with LLM(model_folder("grouped"), kv_blocks=40, block_size=16, prefix_cache=False) as llm:
        found = answers(llm, (PREFIX, PREFIX), replace(PARAMS, n=8))
        assert cached(found) == [0, 0]
        assert said(found[:1]) == said(found[1:])
        assert llm.engine.statistics._scheduler.allocator.num_cached == 0
        assert found[0].timing.preemptions == 0, "8 prompts of 10 blocks do not fit into 40"


@pytest.mark.parametrize("kernels", ["native", "aten"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8", "int4"])
def test_a_hit_reads_what_the_cache_holds(make_runner: Callable[..., Backend], kernels: str, kv_dtype: str) -> None:
    runner = make_runner("grouped", "bf16", kv_dtype, 40, kernels)
    history = History(runner, 40, 512, [PREFIX], 3)
    manager = history.policy._blocks

    def logits() -> list[list[float]]:
        history.logits.clear()
        return [row.tolist() for row in history.run([0]).logits[0]]

    cold = logits()
    sample = new_sample(0, PREFIX, 200)
    assert manager.num_cached(sample) == 144
    assert logits() == cold
    block = manager._find(sample)[3]
    stranger = new_sample(0, [1] * BLOCK_SIZE, 200)
    runner.logits(full_plan([Planned(stranger, 0, BLOCK_SIZE, True, (block,))], BLOCK_SIZE))
    assert logits() != cold
