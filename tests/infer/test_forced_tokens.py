"""Tokens that a constraint forces are computed in one step, and nothing of any answer depends on that."""

import json
from dataclasses import replace

import pytest

from tk.infer import LLM, SamplingParams
from tk.infer.engine.grammar.grammar import Matcher
from tk.infer.engine.request.completion import Completion
from tk.infer.engine.schedule.samples.sample import Source
from tk.infer.engine.schedule.step_in_flight import Masks, StepInFlight
from tk.tests.infer.random_schemas import random_schema

# Each kind of request chooses its tokens in a way of its own: among candidates, under masks, after filters.
KINDS = (
    SamplingParams(),
    SamplingParams(logprobs=2),
    SamplingParams(temperature=0.0, n=2, logprobs=0),
    SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.7, stop=("e", '":'), include_stop=True),
    SamplingParams(frequency_penalty=0.5, logit_bias={44: 2.0}, min_new_tokens=0),
    SamplingParams(max_new_tokens=9, n=2),
)


def answers(llm: LLM, seeds: range) -> list[Completion]:
    """Returns answers under random schemas, computed together."""
    params = [
        replace(KINDS[seed % len(KINDS)], json_schema=json.dumps(random_schema(seed)), seed=seed) for seed in seeds
    ]
    llm.engine.statistics.flush_prefix_cache()
    prompts = [[seed % 256, seed // 256, *range(3 * seed % 60)] for seed in seeds]  # none begins as another
    found = llm.generate(prompts, params)
    assert llm.engine.statistics.check_cache().problems == ()
    return found


def watched_steps(monkeypatch: pytest.MonkeyPatch) -> list[StepInFlight]:
    """Returns the steps that engines compute from now on, as they come."""
    steps, masks = list[StepInFlight](), StepInFlight.masks

    def watched(step: StepInFlight) -> Masks | None:
        steps.append(step)
        return masks(step)

    monkeypatch.setattr(StepInFlight, "masks", watched)
    return steps


@pytest.mark.parametrize(
    ("served", "seeds"),
    [
        ("llm", range(28)),
        pytest.param("llm_tp2", range(28, 300), marks=pytest.mark.matrix),
        pytest.param("llm", range(300, 500), marks=pytest.mark.matrix),
    ],
)
def test_forced_chains_change_nothing_of_answers_under_random_schemas(
    served: str, seeds: range, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: LLM = request.getfixturevalue(served)
    steps = watched_steps(monkeypatch)
    found, num_steps = answers(llm, seeds), len(steps)
    chunks = [chunk for step in steps for chunk in step.chunks if chunk.proposals]
    assert len(chunks) > len(seeds) / 2
    assert {chunk.source for chunk in chunks} == {Source.CONSTRAINT}
    monkeypatch.setattr(Matcher, "forced_chain", lambda matcher, most: [])
    steps.clear()
    expected = answers(llm, seeds)
    assert not any(step.has_proposals for step in steps)
    assert num_steps < len(steps)
    for one, other in zip(found, expected, strict=True):
        assert (one.choices, one.usage) == (other.choices, other.usage)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_long_chain_takes_few_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, logprobs: int | None) -> None:
    steps = watched_steps(monkeypatch)
    regex = "[01] and a long text without any choice [01]"
    (found,) = llm.generate([[5]], SamplingParams(regex=regex, logprobs=logprobs, seed=3))
    assert found.usage.completion_tokens > 30
    assert found.usage.proposed_tokens == found.usage.accepted_tokens == 0, "they are no guesses"
    assert len(steps) < 8
    assert max(len(chunk.proposals) for step in steps for chunk in step.chunks) > 28
    most = max(len(step.rows) for step in steps)
    assert most > 30 if logprobs else most == 1, "only log-probabilities need the logits before forced tokens"
