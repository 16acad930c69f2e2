"""Constrained output of the engine with its processes: valid for every backend and tp, alone and in company."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tk.core.casts import Array
from tk.core.errors import Cancelled, InvalidRequest
from tk.infer import LLM, AsyncLLM, SamplingParams
from tk.infer.engine.grammar.compiler import Grammars
from tk.infer.engine.grammar.grammar import Grammar, Matcher
from tk.infer.engine.kernels.native.binding.library import instruction_sets
from tk.infer.engine.request.events import Delta, Done, FinishReason
from tk.infer.engine.request.request import Request
from tk.infer.engine.schedule import live_request
from tk.infer.engine.schedule.step_in_flight import Masks, StepInFlight
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.tests.infer.engine.free_blocks import num_free_blocks
from tk.tests.infer.engine.test_engine import PROMPTS, Sink
from tk.tests.infer.random_schemas import is_accepted, random_schema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
REGEX = r"[A-Z][a-z]{2,9} (is|was) [0-9]{1,3}\."
KINDS = {
    "json_schema": SamplingParams(json_schema=json.dumps(SCHEMA), seed=1, n=3, logprobs=1),
    "regex": SamplingParams(regex=REGEX, seed=2, n=2, top_p=0.9),
    "grammar": SamplingParams(grammar='start: "yes" | "no" | "perhaps " start', seed=3, temperature=2.0),
    "greedy": SamplingParams(regex=REGEX, temperature=0.0, repetition_penalty=1.3),
    "free": SamplingParams(seed=4, max_new_tokens=12, ignore_eos=True, repetition_penalty=1.2),
}
END = 263
DIGITS = SamplingParams(regex="[0-9]+", seed=5, logit_bias={END: -1000.0})  # which does not end by itself


@pytest.fixture(scope="module")
def aten(model_folder: Callable[[str], Path]) -> Iterator[LLM]:
    """The same model on torch's operators over two ranks, of which one samples."""
    with LLM(model_folder("grouped"), kernels="aten", tp=2, kv_blocks=64) as llm:
        yield llm


def texts(llm: LLM, names: list[str]) -> dict[str, list[str]]:
    """Returns the texts of requests of KINDS that are computed together."""
    found = llm.generate([PROMPTS[0]] * len(names), [KINDS[name] for name in names])
    return {name: [choice.text for choice in one.choices] for name, one in zip(names, found, strict=True)}


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[str]]:
    """The texts of KINDS, one request after the other."""
    return {name: texts(llm, [name])[name] for name in KINDS}


def test_every_kind_is_kept(alone: dict[str, list[str]]) -> None:
    assert all(is_accepted(text, SCHEMA) for text in alone["json_schema"])
    assert len(set(alone["json_schema"])) == 3, "samples have states of their own"
    assert all(re.fullmatch(REGEX, text) for text in alone["regex"] + alone["greedy"])
    assert re.fullmatch("(perhaps )*(yes|no)", alone["grammar"][0])


def test_texts_are_the_same_in_company(llm: LLM, alone: dict[str, list[str]]) -> None:
    """Preempted and cut into pieces, beside requests without constraints, whose texts stay the same, too."""
    crowd = [[token] * (token + 20) for token in range(10)]
    long = replace(DIGITS, max_new_tokens=60)
    given = [*([(prompt, long) for prompt in crowd]), *[(PROMPTS[0], params) for params in KINDS.values()]]
    found = llm.generate([prompt for prompt, _ in given], [params for _, params in given])
    assert sum(completion.timing.preemptions for completion in found) > 0
    for completion in found[: len(crowd)]:
        assert re.fullmatch("[0-9]+", completion.text)
    together = [[choice.text for choice in completion.choices] for completion in found[len(crowd) :]]
    assert together == list(alone.values())
    assert llm.engine.statistics.check_cache().problems == ()


def test_two_ranks_and_other_kernels_keep_them_too(llm_tp2: LLM, aten: LLM, alone: dict[str, list[str]]) -> None:
    assert texts(llm_tp2, list(KINDS)) == alone
    found = texts(aten, list(KINDS))
    assert all(is_accepted(text, SCHEMA) for text in found["json_schema"])
    assert all(re.fullmatch(REGEX, text) for text in found["regex"] + found["greedy"])


CHOSEN = {
    "schema": SamplingParams(json_schema=json.dumps(SCHEMA), seed=1, n=3),
    "greedy": replace(KINDS["greedy"], regex=r"[A-Z][a-z]{2,30}"),
    "hot": SamplingParams(regex=REGEX, seed=3, temperature=3.0, n=2, presence_penalty=0.5),
    "ends early": SamplingParams(regex="(ab?)*", seed=8, n=4, max_new_tokens=20),
    "forced": SamplingParams(regex="a long text without any choice in it (1|2)", seed=9, temperature=0.5),
}


@pytest.mark.parametrize("served", ["llm", pytest.param("llm_tp2", marks=pytest.mark.matrix), "aten"])
def test_tokens_chosen_among_candidates_are_those_under_masks(
    served: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: LLM = request.getfixturevalue(served)
    crowd = [KINDS["free"], *CHOSEN.values(), *KINDS.values()]
    made, chose = 0, 0
    masks_of, choose = StepInFlight.masks_of, StepInFlight.choose

    def counted_masks(self: StepInFlight, rows: Sequence[int]) -> Masks:
        nonlocal made
        made += len(rows)
        return masks_of(self, rows)

    def counted_choice(self: StepInFlight, result: SamplerOutput) -> tuple[Array, list[int]]:
        nonlocal chose
        chose += 1
        return choose(self, result)

    monkeypatch.setattr(StepInFlight, "masks_of", counted_masks)
    monkeypatch.setattr(StepInFlight, "choose", counted_choice)
    runs: dict[bool, list[list[int]]] = {}
    counts: dict[bool, int] = {}
    for chooses in (True, False):
        if not chooses:
            monkeypatch.setattr(live_request, "has_candidates", lambda params: False)
        made, chose = 0, 0
        alone = [llm.generate([PROMPTS[0]], [params]) for params in CHOSEN.values()]
        counts[chooses] = made
        together = llm.generate([PROMPTS[0]] * len(crowd), crowd)
        assert (chose > 20) is chooses
        found = [*(one for (one,) in alone), *together]
        runs[chooses] = [list(choice.token_ids) for one in found for choice in one.choices]
    assert runs[True] == runs[False]
    assert 0 < counts[True] < counts[False] / 2
    assert llm.engine.statistics.check_cache().problems == ()


@pytest.mark.skipif(not instruction_sets(), reason="no compiler")
def test_more_rows_than_one_part_of_the_head_holds(model_folder: Callable[[str], Path]) -> None:
    prompts = [[token] for token in range(70)]
    with LLM(model_folder("grouped"), kv_blocks=200, max_running=80, max_batched_tokens=80) as wide:
        found = wide.generate(prompts, [replace(DIGITS, max_new_tokens=5), KINDS["free"]] * 35)
    assert all(re.fullmatch("[0-9]{5}", completion.text) for completion in found[::2])
    assert len({completion.text for completion in found[::2]}) > 20


def test_speculation_beside_them_changes_nothing(
    model_folder: Callable[[str], Path], alone: dict[str, list[str]]
) -> None:
    """Sequences that repeat themselves are speculated on, in the steps of constrained ones, which are not."""
    again = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, repetition_penalty=0.5)
    with LLM(model_folder("grouped"), kv_blocks=64, speculate=4) as llm:
        (free,) = llm.generate([[1, 2, 3] * 8], again)
        found = llm.generate([[1, 2, 3] * 8, *[PROMPTS[0]] * len(KINDS)], [again, *KINDS.values()])
        assert llm.engine.statistics.check_cache().problems == ()
    assert found[0].token_ids == free.token_ids
    assert [[choice.text for choice in one.choices] for one in found[1:]] == list(alone.values())


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 200), marks=pytest.mark.matrix)])
def test_documents_of_random_schemas_are_accepted(llm: LLM, seeds: range) -> None:
    schemas = [random_schema(seed, depth=2) for seed in seeds]
    params = [SamplingParams(json_schema=json.dumps(schema), seed=i) for i, schema in enumerate(schemas)]
    found = llm.generate([PROMPTS[0]] * len(schemas), params)
    for schema, completion in zip(schemas, found, strict=True):
        assert completion.finish_reason is FinishReason.EOS
        assert is_accepted(completion.text, schema), (completion.text, schema)


def test_the_end_comes_by_the_end_token_or_where_nothing_may_follow(llm: LLM) -> None:
    wish = {END: 1000.0}  # chosen wherever it is allowed
    (early,) = llm.generate([[5]], SamplingParams(regex="(ab){2,}", logit_bias=wish))
    assert (early.text, early.token_ids[-1], early.finish_reason) == ("abab", END, FinishReason.EOS)
    assert early.matched == END
    (full,) = llm.generate([[5]], SamplingParams(regex="(ab){2}", logit_bias={END: -1000.0}))
    assert (full.text, full.finish_reason, full.matched) == ("abab", FinishReason.EOS, None)
    assert END not in full.token_ids
    (never,) = llm.generate([[5]], replace(DIGITS, max_new_tokens=9))
    assert (len(never.token_ids), never.finish_reason) == (9, FinishReason.LENGTH)


def test_stop_strings_and_stop_tokens_end_before(llm: LLM) -> None:
    (whole,) = llm.generate([[5]], replace(DIGITS, max_new_tokens=40))
    stop = whole.text[11:13]
    (cut,) = llm.generate([[5]], replace(DIGITS, max_new_tokens=40, stop=(stop,)))
    assert (cut.text, cut.matched) == (whole.text[: whole.text.index(stop)], stop)
    token = whole.token_ids[6]
    (ended,) = llm.generate([[5]], replace(DIGITS, max_new_tokens=40, stop_token_ids=(token,)))
    assert (ended.finish_reason, ended.token_ids[-1]) == (FinishReason.STOP_TOKEN, token)


def test_logprobs_are_of_all_tokens(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    (found,) = llm.generate([PROMPTS[1]], replace(DIGITS, max_new_tokens=5, logprobs=2))
    tokens = [*PROMPTS[1], *found.token_ids]
    with torch.no_grad():
        expected = torch.log_softmax(reference("grouped")(torch.tensor([tokens])).logits[0].double(), dim=-1)
    for place, logprob in enumerate(found.logprobs):
        row = expected[len(PROMPTS[1]) - 1 + place]
        assert logprob.logprob == pytest.approx(float(row[logprob.token_id]), abs=1e-4)
        assert [other.token_id for other in logprob.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "a(b"}, "regex"),
        ({"json_schema": '{"type": "strin"}'}, "json_schema"),
        ({"grammar": "start: foo"}, "grammar"),
        ({"regex": "a", "json_schema": "{}"}, "regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"grammar": 'start: "a"', "min_new_tokens": 1}, "min_new_tokens"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused_at_once(llm: LLM, options: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.engine.submit(Request((1,), SamplingParams(**options), "bad"), Sink())  # type: ignore[arg-type]
    assert error.value.field == field
    assert llm.engine.num_live == 0


def test_an_aborted_request_frees_all(llm: LLM) -> None:
    sink = Sink()
    params = replace(DIGITS, n=4, max_new_tokens=600)
    llm.engine.submit(Request((1, 2), params, "digits"), sink)
    assert sink.begun.wait(60)
    assert llm.engine.abort("digits")
    assert isinstance(sink.error(), Cancelled)
    assert (llm.engine.num_live, num_free_blocks(llm.engine)) == (0, llm.engine.info.num_blocks)
    assert re.fullmatch("[0-9]*", "".join(event.text for event in sink.events if isinstance(event, Delta)))
    assert llm.engine.statistics.check_cache().problems == ()


def test_a_constraint_that_fails_ends_only_its_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = InvalidRequest("regex became too complex", field="regex")
    calls = 0

    def write_mask(self: Matcher, mask: "np.ndarray[tuple[int], np.dtype[np.uint32]]") -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            monkeypatch.setattr(Matcher, "error", property(lambda self: broken))
        whole(self, mask)

    whole = Matcher.write_mask
    free, bad = Sink(), Sink()
    monkeypatch.setattr(Matcher, "write_mask", write_mask)
    llm.engine.submit(Request((1, 2), KINDS["free"], "free"), free)
    llm.engine.submit(Request((1, 2), replace(DIGITS, max_new_tokens=50), "bad"), bad)
    assert bad.error() is broken
    assert 1 < sum(isinstance(event, Delta) for event in bad.events) < 5
    assert free.over.wait(60)
    assert isinstance(free.events[-1], Done)
    assert num_free_blocks(llm.engine) == llm.engine.info.num_blocks


def test_grammars_are_built_beside_the_event_loop(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    build = Grammars.compile

    def watched(self: Grammars, *given: Any) -> Grammar:
        threads.append(threading.current_thread())
        return build(self, *given)

    monkeypatch.setattr(Grammars, "compile", watched)

    async def run() -> list[str]:
        async with AsyncLLM(model_folder("grouped"), kv_blocks=40) as llm:
            found = await llm.generate([PROMPTS[0]] * 2, KINDS["regex"])
            streamed = [delta.text async for delta in llm.stream(PROMPTS[0], replace(KINDS["regex"], n=1))]
            return [*(completion.text for completion in found), "".join(streamed)]

    made = asyncio.run(run())
    assert all(re.fullmatch(REGEX, text) for text in made)
    assert len(threads) == 3
    assert threading.main_thread() not in threads
