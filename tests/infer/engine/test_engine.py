"""The engine with its worker processes, against `transformers` on the same random weights."""

import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tk.core.errors import (
    Cancelled,
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    ParallelError,
    PromptTooLong,
)
from tk.infer import LLM, SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.planning import memory_plan
from tk.infer.engine.request.events import Delta, Done, Event, Failed, Finished, FinishReason, ModelInfo, Started
from tk.infer.engine.request.request import Request
from tk.tests.clock import Clock
from tk.tests.infer.engine.free_blocks import num_free_blocks
from tk.tests.infer.serve.serving import stopped

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(1, 101)), [9], [3, 1, 4, 1, 5, 9, 2, 6] * 9]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    """Returns the continuation by `transformers`, which does not stop at the end token."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        model.generation_config.eos_token_id = None
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tuple(whole[0, len(prompt) :].tolist())


class Sink:
    """Collects the events of a request.

    Args:
        hold: is called at each delta, on the engine's thread: no request goes on before it returns.
    """

    def __init__(self, hold: Callable[[], object] = lambda: None) -> None:
        self.events: list[Event] = []
        self.hold = hold
        self.over = threading.Event()
        self.begun = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            self.begun.set()
            self.hold()
        if isinstance(event, Done | Failed):
            self.over.set()

    def error(self) -> Exception:
        """Of the request, once it is over."""
        assert self.over.wait(60)
        assert isinstance(self.events[-1], Failed)
        return self.events[-1].error


def test_greedy_equals_transformers(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    model = reference("grouped")
    expected = [greedy_tokens(model, prompt, 24) for prompt in PROMPTS]
    assert [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)] == expected
    assert [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS] == expected
    assert len(set(expected)) == len(PROMPTS)


def test_steps_cut_by_time_give_the_same_tokens(llm: LLM, model_folder: Callable[[str], Path]) -> None:
    with LLM(model_folder("grouped"), max_step_ms=0.001, kv_blocks=40) as cut:
        assert cut.engine.statistics._scheduler.cost.is_known, "steps were measured before the first request"
        made = [completion.token_ids for completion in cut.generate(PROMPTS, GREEDY)]
        assert cut.engine.statistics.check_cache().problems == ()
    assert made == [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def test_two_ranks_give_the_same_tokens(llm: LLM, llm_tp2: LLM) -> None:
    assert llm_tp2.engine.info.tp == 2
    for params in (GREEDY, SamplingParams(seed=4, max_new_tokens=24, n=2, ignore_eos=True)):
        one, two = llm.generate(PROMPTS, params), llm_tp2.generate(PROMPTS, params)
        assert [[c.token_ids for c in whole.choices] for whole in one] == [
            [c.token_ids for c in whole.choices] for whole in two
        ]


@pytest.mark.matrix  # test_architectures_served.py has a tied head in each run
def test_tied_head_equals_transformers(
    model_folder: Callable[[str], Path], reference: Callable[[str], LlamaForCausalLM]
) -> None:
    with LLM(model_folder("tied"), kv_blocks=30) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in found] == [greedy_tokens(reference("tied"), prompt, 24) for prompt in PROMPTS]


@pytest.mark.matrix  # test_batch_invariance.py and native/test_same_answers.py have it without an engine
def test_two_ranks_with_low_precision_are_the_same_alone_and_together(model_folder: Callable[[str], Path]) -> None:
    with LLM(model_folder("tied"), tp=2, dtype="bf16", kv_dtype="int8", kv_blocks=30, kernels="aten") as llm:
        together = llm.generate(PROMPTS, GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        info = llm.model_info()
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert (info.dtype, info.kv_dtype, info.kv_bytes_per_token) == ("bf16", "int8", 2 * 2 * 2 * (24 + 4))
    assert info.kernels == "aten", "as the workers report"


@pytest.mark.matrix
def test_half_precision_is_the_same_alone_and_together(model_folder: Callable[[str], Path]) -> None:
    with LLM(model_folder("grouped"), dtype="fp16", kv_blocks=30) as llm:
        together = llm.generate(PROMPTS, GREEDY)
        alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
        info = llm.model_info()
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert (info.dtype, info.kv_dtype) == ("fp16", "fp16")


def test_logprobs_equal_transformers(llm: LLM, reference: Callable[[str], LlamaForCausalLM]) -> None:
    prompt = PROMPTS[1]
    params = SamplingParams(seed=1, max_new_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (found,) = llm.generate(prompt, params)
    tokens = [*prompt, *found.token_ids]
    with torch.no_grad():
        expected = torch.log_softmax(reference("grouped")(torch.tensor([tokens])).logits[0].double(), dim=-1)
    assert len(found.prompt_logprobs) == len(prompt)
    assert found.prompt_logprobs[0].logprob is None
    for position, logprob in enumerate([*found.prompt_logprobs, *found.logprobs]):
        assert logprob.token_id == tokens[position]
        if position == 0:
            continue
        row = expected[position - 1]
        assert logprob.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
        assert logprob.rank == 1 + int((row > row[tokens[position]]).sum())
        top = row.topk(2 if position < len(prompt) else 3)
        assert [other.token_id for other in logprob.top] == top.indices.tolist()


def test_a_request_is_the_same_alone_and_in_company(llm: LLM) -> None:
    params = SamplingParams(seed=9, temperature=0.8, top_p=0.9, max_new_tokens=60, ignore_eos=True)
    alone = llm.generate(PROMPTS[1], params)[0]
    crowd = [[token] * (token + 20) for token in range(10)]
    together = llm.generate([*crowd, PROMPTS[1], *crowd], params)
    assert together[10].token_ids == alone.token_ids
    assert sum(completion.timing.preemptions for completion in together) > 0
    assert together[10].text == alone.text


def test_stop_strings_and_the_end_token(llm: LLM) -> None:
    (whole,) = llm.generate("the", SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True))
    stop = whole.text[7:10]
    (cut,) = llm.generate("the", SamplingParams(temperature=0, max_new_tokens=30, stop=(stop,), ignore_eos=True))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.matched) == (FinishReason.STOP_STRING, stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    end = SamplingParams(temperature=0, max_new_tokens=9, logit_bias={263: 1000.0})
    (ended,) = llm.generate("the", end)
    assert (ended.token_ids, ended.finish_reason, ended.matched, ended.text) == ((263,), FinishReason.EOS, 263, "")
    (late,) = llm.generate(
        "the", SamplingParams(temperature=0, max_new_tokens=9, min_new_tokens=4, logit_bias={263: 1000.0})
    )
    assert (len(late.token_ids), late.token_ids[-1], late.token_ids.count(263)) == (5, 263, 1)
    assert late.finish_reason is FinishReason.EOS


def test_order_of_events(llm: LLM) -> None:
    sink = Sink()
    params = SamplingParams(seed=77, n=2, max_new_tokens=3, ignore_eos=True, prompt_logprobs=0)
    llm.engine.submit(Request((1, 2, 3), params, "events"), sink)
    assert sink.over.wait(60)
    started, *rest, done = sink.events
    assert isinstance(started, Started)
    assert (started.request_id, started.prompt_tokens, started.seed) == ("events", 3, 77)
    assert [logprob.token_id for logprob in started.prompt_logprobs] == [1, 2, 3]
    assert isinstance(done, Done)
    for index in (0, 1):
        mine = [event for event in rest if isinstance(event, Delta | Finished) and event.index == index]
        assert [type(event) for event in mine] == [Delta, Delta, Delta, Finished]
        last = mine[-1]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 3)
        assert 0 <= last.timing.queue_seconds <= last.timing.first_token_seconds <= last.timing.total_seconds
    assert llm.engine.num_live == 0


def test_a_prompt_that_never_fits_is_refused_before_its_samples_take_memory(llm: LLM) -> None:
    request = Request((5,) * 1_000_000, SamplingParams(n=16, max_new_tokens=1), "long")
    tracemalloc.start()
    try:
        with pytest.raises(PromptTooLong, match="1000000 tokens"):
            llm.engine.submit(request, Sink())
        assert tracemalloc.get_traced_memory()[1] < 1_000_000, "a list of the tokens has 8 MB"
    finally:
        tracemalloc.stop()


def test_abort_frees_everything(llm: LLM) -> None:
    engine = llm.engine
    aborted = threading.Event()
    sinks = {f"abort-{i}": Sink(lambda: aborted.wait(60)) for i in range(12)}  # more than fit
    for name, sink in sinks.items():
        engine.submit(Request(tuple(range(60)), SamplingParams(max_new_tokens=500, ignore_eos=True), name), sink)
    assert sinks["abort-0"].begun.wait(60)
    assert num_free_blocks(engine) < engine.info.num_blocks
    for name in sinks:
        assert engine.abort(name)
    aborted.set()
    for sink in sinks.values():
        assert isinstance(sink.error(), Cancelled)
    assert (engine.num_live, num_free_blocks(engine)) == (0, engine.info.num_blocks)
    assert engine.statistics.check_cache().problems == ()
    assert not engine.abort("abort-0")
    assert not engine.abort("never was")
    assert [type(event) for event in sinks["abort-0"].events].count(Failed) == 1


def test_a_passed_deadline_ends_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, params = Clock(), SamplingParams(max_new_tokens=600, ignore_eos=True)
    monkeypatch.setattr("tk.infer.engine.schedule.live_table.time", SimpleNamespace(monotonic=clock))
    late = Sink()
    with pytest.raises(DeadlinePassed, match="request late is not expected"):
        llm.engine.submit(Request((1, 2), params, "late", deadline=clock.now - 1), late)
    assert not late.events
    running = Sink(lambda: setattr(clock, "now", 1e9))  # at its first token
    llm.engine.submit(Request((1, 2), params, "soon", deadline=1e6), running)
    assert isinstance(running.error(), DeadlinePassed)
    assert llm.engine.num_live == 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ((), {}, "prompt"),
        ((1, 264), {}, "prompt"),
        ((1, -1), {}, "prompt"),
        ((1,), {"temperature": -1.0}, "temperature"),
        ((1,), {"top_k": 2**40}, "top_k"),
        ((1,), {"max_new_tokens": 640}, "max_new_tokens"),
        (tuple([1] * 640), {}, "prompt"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(
    llm: LLM, prompt: tuple[int, ...], params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.engine.submit(Request(prompt, SamplingParams(**params), "bad"), Sink())
    assert error.value.field == field
    assert isinstance(error.value, PromptTooLong) == (len(prompt) == 640 or "max_new_tokens" in params)
    assert llm.engine.num_live == 0


def test_the_whole_length_can_be_used(llm: LLM) -> None:
    (full,) = llm.generate([[1] * 600], SamplingParams(ignore_eos=True))
    assert (full.usage.prompt_tokens, full.usage.completion_tokens) == (600, 40)
    assert full.finish_reason is FinishReason.LENGTH


def test_a_callback_that_fails_does_not_affect_other_requests(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("no room for events")

    llm.engine.submit(Request((1,), GREEDY, "broken"), broken)
    assert len(llm.generate([2], GREEDY)[0].token_ids) == 24
    assert "The callback of request broken failed" in caplog.text


def test_a_full_queue_and_a_live_name(model_folder: Callable[[str], Path]) -> None:
    options = EngineOptions(model_folder("grouped"), max_running=1, max_queued=1, kv_blocks=20)
    engine = Engine.start(options)
    try:
        first, second = Sink(), Sink()
        long = SamplingParams(max_new_tokens=600, ignore_eos=True)
        with stopped(engine.worker_process_ids[0]):
            engine.submit(Request((1,), long, "a"), first)
            with pytest.raises(InvalidRequest, match="id 'a' belongs to a live request") as error:
                engine.submit(Request((1,), long, "a"), Sink())
            assert error.value.field == "request_id"
            engine.submit(Request((1,), GREEDY, "b"), second)
            with pytest.raises(Overloaded):
                engine.submit(Request((1,), GREEDY, "c"), Sink())
            engine.abort("a")
        assert second.over.wait(60)
        assert isinstance(second.events[-1], Done)
    finally:
        engine.close()
    with pytest.raises(Cancelled):
        engine.submit(Request((1,), GREEDY, "d"), Sink())


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tp": 3}, ParallelError, "tp = 3"),
        ({"dtype": "fp8"}, ConfigError, "dtype = 'fp8'; use one of auto, fp32"),
        ({"kv_dtype": "int3"}, ConfigError, "kv_dtype = 'int3'"),
        ({"kernels": "cuda"}, ConfigError, "kernels = 'cuda'; use one of auto, native, aten"),
        ({"block_size": 24}, ConfigError, "block_size = 24"),
        ({"kv_blocks": 0}, ConfigError, "kv_blocks = 0"),
        ({"kv_blocks": 4, "kv_memory": 10}, ConfigError, "give only one of them"),
        ({"kv_memory": 1000}, ConfigError, "too little: two blocks of 32"),
        ({"max_model_len": 641}, ConfigError, "max_position_embeddings = 640"),
        ({"max_model_len": 100, "kv_blocks": 3}, ConfigError, "3 blocks of 32 = 96 tokens"),
        ({"max_running": 9, "max_batched_tokens": 8}, ConfigError, "max_running = 9"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    model_folder: Callable[[str], Path], options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Engine.start(EngineOptions(model_folder("grouped"), **options))


def test_the_plan_is_reported_before_the_model_is_loaded(model_folder: Callable[[str], Path]) -> None:
    class Enough(Exception):
        pass

    def on_plan(info: ModelInfo, memory: memory_plan.MemoryPlan) -> None:
        assert (info.name, memory.num_blocks) == (model_folder("grouped").name, 8)
        new = set(threading.enumerate()) - threads
        assert [thread.name for thread in new] == ["tk-workers"], "processes that have no job yet"
        raise Enough

    threads = set(threading.enumerate())
    with pytest.raises(Enough):
        Engine.start(EngineOptions(model_folder("grouped"), kv_blocks=8), on_plan)
    assert set(threading.enumerate()) == threads
