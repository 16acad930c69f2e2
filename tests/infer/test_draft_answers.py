"""The same answers with a draft model as without: tokens, texts, log-probabilities, ends and usage, bit for bit."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tk.core.errors import ConfigError, TkError, WorkerDied
from tk.infer import LLM, SamplingParams
from tk.infer.engine.request.completion import Completion
from tk.infer.engine.request.events import FinishReason
from tk.infer.engine.schedule.proposing.draft_policy import DraftPolicy
from tk.tests.example_counts import sized
from tk.tests.infer.drafts import always_draft, draft_of
from tk.tests.infer.engine.free_blocks import num_free_blocks
from tk.tests.infer.random_requests import said
from tk.tests.infer.random_schemas import is_accepted, random_schema

PROMPTS = [[5, 6, 7], list(range(1, 101)), list(range(1, 90)), [9], [3, 1, 4, 1, 5, 9, 2, 6] * 9]
BASE = SamplingParams(seed=11, max_new_tokens=30, ignore_eos=True, logprobs=2)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 24}}, "required": ["a"]}
OPTIONS = {
    "greedy": replace(BASE, temperature=0.0),
    "samples": replace(BASE, n=3, top_p=0.8, temperature=0.7),
    "hot": replace(BASE, temperature=1.5, top_p=0.95, logprobs=None),
    "penalties": replace(BASE, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, temperature=0.7),
    "filters": replace(BASE, top_k=5, min_p=0.05, logit_bias={7: 3.0, 9: -4.0}, logprobs=None),
    "stops": replace(BASE, stop_token_ids=tuple(range(100, 130)), min_new_tokens=9, stop=("e", "th"), n=2),
    "eos": replace(BASE, ignore_eos=False, logit_bias={263: 6.0}, min_new_tokens=18, include_stop=True, logprobs=0),
    "schema": replace(BASE, json_schema=json.dumps(SCHEMA), ignore_eos=False, logprobs=None, n=2),
    "masks": replace(BASE, regex="[ -~]*", ignore_eos=False, top_p=0.9, repetition_penalty=1.2),
    "prompt": replace(BASE, prompt_logprobs=1),
}


def answers(llm: LLM, prompts: list[list[int]]) -> dict[str, list[Completion]]:
    """The completions of all prompts under all options, together."""
    params = [params for params in OPTIONS.values() for _ in prompts]
    found = llm.generate(prompts * len(OPTIONS), params)
    assert llm.engine.statistics.check_cache().problems == ()
    assert num_free_blocks(llm.engine) == llm.model_info().num_blocks
    step = len(prompts)
    return {name: found[i * step : (i + 1) * step] for i, name in enumerate(OPTIONS)}


@pytest.mark.parametrize(
    ("kernels", "tp", "kv_dtype", "draft_weights"),
    [
        ("native", 2, "int8", "auto"),
        pytest.param("native", 1, "bf16", "int8", marks=pytest.mark.matrix),
        pytest.param("native", 1, "int4", "int4", marks=pytest.mark.matrix),
        pytest.param("aten", 2, "bf16", "auto", marks=pytest.mark.matrix),
        pytest.param("aten", 1, "int8", "int8", marks=pytest.mark.matrix),
    ],
)
def test_answers_are_the_same_bits_under_every_option(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    tp: int,
    kv_dtype: str,
    draft_weights: str,
) -> None:
    """In a cache that some sequences fill, with hits on what others computed."""
    model, prompts = model_folder("grouped"), PROMPTS[: sized(5, 3)]
    options: dict[str, Any] = {"dtype": "bf16", "kv_dtype": kv_dtype, "tp": tp, "kernels": kernels, "threads": 1}
    options |= {"kv_blocks": 14, "block_size": 16, "max_batched_tokens": 48, "max_running": 12}
    with LLM(model, **options) as llm:
        expected = answers(llm, prompts)
    always_draft(monkeypatch)
    draft = draft_of(model, tmp_path / "draft")
    with LLM(model, **options, draft=draft, draft_weight_dtype=draft_weights, speculate=4) as llm:
        found = answers(llm, prompts)
        again = answers(llm, prompts)  # after the answers of before, in whose blocks the draft has keys
    for name, group in expected.items():
        for one, other, third in zip(group, found[name], again[name], strict=True):
            assert said(one) == said(other) == said(third), name
        usage = Counter[str]()
        for each in (*found[name], *again[name]):
            usage.update(proposed=each.usage.proposed_tokens, accepted=each.usage.accepted_tokens)
        if name == "prompt":
            assert usage["proposed"] == 0, "the log-probabilities of a prompt are wanted"
        else:
            assert 0 < usage["accepted"] < usage["proposed"], name
    whole = [each for group in found.values() for each in group]
    assert sum(each.timing.preemptions for each in whole) > 0
    assert sum(each.usage.cached_tokens for group in (*found.values(), *again.values()) for each in group) > 0
    reasons = {choice.finish_reason for each in whole for choice in each.choices}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.STOP_TOKEN, FinishReason.EOS}


def test_a_draft_with_the_weights_of_the_model_is_always_right(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at a high temperature, with penalties and seeds that the engine draws: it samples with the same noise.

    Its keys are right, too, after preemptions, behind shared prompts and in blocks that other requests have left.
    """
    always_draft(monkeypatch)
    model = model_folder("grouped")
    hot = SamplingParams(temperature=1.5, max_new_tokens=41, ignore_eos=True)
    params = [
        *[hot] * 6,
        replace(hot, top_p=0.8, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2),
        replace(hot, n=3, logit_bias={5: 2.0}, min_new_tokens=20, logprobs=1),
    ]
    given = [*([i] * (40 + i) for i in range(6)), list(range(1, 81)), list(range(1, 61))]
    with LLM(model, kv_blocks=24, block_size=16, max_batched_tokens=64, draft=model, speculate=4) as llm:
        found = llm.generate(given, params)
        assert llm.engine.statistics.check_cache().problems == ()
        hits = llm.generate([[*given[6], *found[6].token_ids]], params[6])
        totals = llm.engine.statistics.totals()
        load, memory = llm.engine.statistics.load(), llm.engine.source.memory
    assert load.accepted_share == 1.0
    assert load.tokens_per_step > 1.4
    assert load.draft_weight_bytes == memory.weight_bytes, "they are the same model"
    assert load.draft_kv_bytes == memory.kv_bytes
    assert sum(each.timing.preemptions for each in found) > 0
    assert sum(each.usage.proposed_tokens for each in found) > 0.4 * sum(each.usage.completion_tokens for each in found)
    for completion in (*found, *hits):
        assert completion.usage.proposed_tokens == completion.usage.accepted_tokens
    assert totals.proposed == totals.accepted == {"draft": totals.proposed["draft"]}
    assert hits[0].usage.cached_tokens > 80


@pytest.mark.matrix
def test_documents_of_random_schemas_are_the_same(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = [random_schema(seed, depth=2) for seed in range(300)]
    params = [
        SamplingParams(
            json_schema=json.dumps(schema), seed=i, logprobs=1 if i % 3 == 0 else None, temperature=i % 4 / 2
        )
        for i, schema in enumerate(schemas)
    ]
    prompts = [[i % 256, i // 256, 7] for i in range(len(schemas))]
    model = model_folder("grouped")
    with LLM(model, kv_blocks=60, block_size=16) as llm:
        expected = llm.generate(prompts, params)
    always_draft(monkeypatch)
    with LLM(model, kv_blocks=60, block_size=16, draft=draft_of(model, tmp_path / "draft"), speculate=5) as llm:
        found = llm.generate(prompts, params)
    assert sum(each.usage.accepted_tokens for each in found) > 100
    for schema, one, other in zip(schemas, expected, found, strict=True):
        assert said(one) == said(other)
        assert one.finish_reason is not FinishReason.EOS or is_accepted(one.text, schema)


def test_a_draft_with_other_tokens_is_refused_by_name(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, draft = model_folder("grouped"), draft_of(model_folder("grouped"), tmp_path / "draft")
    tokenizer = draft / "tokenizer.json"
    changed = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(changed | {"truncation": None}, indent=3))
    with pytest.raises(ConfigError, match="Set speculate"):
        LLM(model, draft=draft)
    changed["model"]["merges"].reverse()
    tokenizer.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"tokenizer\.json of the draft .*/draft is not that of .*/grouped0"):
        LLM(model, draft=draft, speculate=4)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 265}))
    with pytest.raises(ConfigError, match=r"/draft has a vocabulary of 265 tokens, and .*/grouped0 one of 264"):
        LLM(model, draft=draft, speculate=4)


@pytest.mark.matrix
def test_a_draft_that_dies_ends_requests_as_a_worker_does_and_starts_again(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    model, params = model_folder("grouped"), SamplingParams(seed=1, max_new_tokens=200, ignore_eos=True)
    back = threading.Event()
    with LLM(model, kv_blocks=40, block_size=16, draft=model, speculate=3, max_restarts=1) as llm:
        (expected,) = llm.generate([[5]], params)
        assert llm.engine.draft is not None
        llm.engine.watch(lambda error: back.set() if error is None else None)
        stream = llm.stream([5], params)
        next(stream)
        os.kill(llm.engine.draft.workers.process_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="The draft's rank 0"):
            list(stream)
        assert back.wait(60)
        (found,) = llm.generate([[5]], params)
    assert said(found) == said(expected)
    assert found.usage.proposed_tokens == found.usage.accepted_tokens > 100


@pytest.mark.parametrize(
    ("busy", "max_restarts"), [(False, 0), *(pytest.param(busy, 1, marks=pytest.mark.matrix) for busy in (False, True))]
)
def test_a_draft_that_dies_while_it_has_no_step_is_noticed(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, busy: bool, max_restarts: int
) -> None:
    """While the engine sleeps, and while steps without proposals keep the workers busy."""
    monkeypatch.setattr(DraftPolicy, "choose", lambda policy, *given: {})
    model, params = model_folder("grouped"), SamplingParams(seed=1, max_new_tokens=600, ignore_eos=True)
    reported, heard = list[TkError | None](), threading.Event()

    def hear(error: TkError | None) -> None:
        reported.append(error)
        if len(reported) > max_restarts:
            heard.set()

    with LLM(model, kv_blocks=140, block_size=16, draft=model, speculate=3, max_restarts=max_restarts) as llm:
        assert llm.engine.draft is not None
        llm.engine.watch(hear)
        dead = llm.engine.draft.workers.process_ids[0]
        stream = llm.stream([5], params) if busy else iter([])
        next(stream, None)
        os.kill(dead, signal.SIGKILL)
        assert heard.wait(60)
        assert f"The draft's rank 0 (process {dead}) was killed by signal 9" in str(reported[0])
        if busy:
            with pytest.raises(WorkerDied, match="The draft's rank 0"):
                list(stream)
        if max_restarts:
            assert reported[1:] == [None], "both groups have started again"
            assert llm.generate([[5]], replace(params, max_new_tokens=3))[0].usage.completion_tokens == 3
