"""The load and the statistics of a cache, of a scheduler without workers."""

import threading
from dataclasses import asdict

import pytest

from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.activity import Activity
from tk.infer.engine.schedule.samples.sample import Sample
from tk.infer.engine.schedule.scheduler import Scheduler
from tk.infer.engine.schedule.statistics import CacheReport, EngineLoad, EngineStatistics, EngineTotals
from tk.infer.engine.schedule.waiting.admission import Limits
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.engine.schedule.new_sample import new_sample

BLOCK, NUM_BLOCKS = 4, 32


def make(arrival: int, num_prompt: int) -> Sample:
    prompt = tuple(range(num_prompt))
    params, length = SamplingParams(), num_prompt + 9
    return new_sample(arrival, prompt, length, params, root=b"root")


def step(policy: Scheduler) -> None:
    chunks = policy.schedule()
    lasts = [chunk.sample for chunk in chunks if chunk.is_last]
    for chunk in chunks:
        policy.advance(chunk)
    for sample in lasts:
        sample.output.tokens.append(0)
    policy.observe(chunks, 0.01)
    for _ in lasts:
        policy.activity.new_token()


def make_statistics() -> tuple[Scheduler, EngineStatistics]:
    policy = Scheduler(Limits(2, 9, 8, 64), NUM_BLOCKS, BLOCK)
    policy.activity = Activity(lambda: 100.0)
    return policy, EngineStatistics(policy, threading.Lock())


def test_the_load_follows_a_request_through_the_engine() -> None:
    policy, statistics = make_statistics()
    assert statistics.load() == EngineLoad(blocks_total=NUM_BLOCKS, blocks_free=NUM_BLOCKS)
    first, second, third = make(0, 16), make(1, 16), make(2, 16)
    for sample in (first, second, third):
        policy.add([sample])
    load = statistics.load()
    assert (load.running, load.waiting, load.queued_tokens, load.blocks_used) == (0, 3, 48, 0)
    step(policy)
    load = statistics.load()
    assert (load.running, load.waiting, load.queued_tokens, load.blocks_used) == (1, 2, 40, 4)
    while policy.queue.waiting or second.num_uncomputed > 1:
        step(policy)
        if first.num_new == 2:
            policy.finish(first)
    load = statistics.load()
    assert load.blocks_used + load.blocks_cached + load.blocks_free == NUM_BLOCKS
    assert (load.running, load.waiting, load.queued_tokens) == (2, 0, 0)
    assert load.prefix_hit_rate == 24 / 48, "all but the last block of the second and third prompt"
    assert load.prefill_tokens_per_second == 16 + 4 + 4, "in the first second"
    assert load.decode_tokens_per_second == first.num_new + second.num_new + third.num_new
    policy.finish(second)
    policy.finish(third)
    load, totals = statistics.load(), statistics.totals()
    assert (load.blocks_used, load.blocks_cached, load.blocks_free) == (0, 4, NUM_BLOCKS - 4)
    num_new = first.num_new + second.num_new + third.num_new
    assert totals == EngineTotals(prompt_tokens=48, cached_tokens=24, new_tokens=num_new)


def test_a_flushed_cache_is_free_and_finds_nothing_while_running_sequences_keep_their_blocks() -> None:
    policy, statistics = make_statistics()
    done, running = make(0, 16), make(1, 16)
    policy.add([done])
    while not done.num_new:
        step(policy)
    policy.finish(done)
    policy.add([running])
    step(policy)
    assert running.num_computed == 16
    assert statistics.check_cache() == CacheReport(total=NUM_BLOCKS, used=4, cached=1, free=NUM_BLOCKS - 5)
    held = list(running.table.blocks)
    assert statistics.flush_prefix_cache() == 1
    assert running.table.blocks == held
    later = make(2, 16)
    policy.add([later])
    step(policy)
    assert later.num_computed < 16, "its prompt is computed anew"
    assert not set(later.table.blocks) & set(held)
    while policy.num_live:
        step(policy)
        for sample in [each for each in policy.running if each.num_tokens == each.output.max_tokens]:
            policy.finish(sample)
        assert statistics.check_cache().problems == ()
    assert statistics.check_cache().leaked == 0


def test_a_leaked_block_is_counted_and_named() -> None:
    policy, statistics = make_statistics()
    sample = make(0, 16)
    policy.add([sample])
    step(policy)
    [lost] = policy.allocator.allocate(1)
    report = statistics.check_cache()
    assert (report.used, report.leaked) == (4, 1)
    assert statistics.totals() == EngineTotals(prompt_tokens=16, leaked_blocks=1)
    assert report.used + report.cached + report.free + report.leaked == report.total
    assert report.problems == (f"leaked blocks, or wrong numbers of holders: [{lost}]",)
    policy.allocator.free([lost])
    assert statistics.check_cache().problems == ()


def test_the_fields_are_those_of_the_wire() -> None:
    load = pb.Load(state=pb.STATE_SERVING, **asdict(EngineLoad(running=3, prefix_hit_rate=0.5)))
    assert (load.running, load.prefix_hit_rate) == (3, 0.5)
    assert {field.name for field in pb.Load.DESCRIPTOR.fields} == {"state", *asdict(EngineLoad())}
    report = pb.CacheReport(**asdict(CacheReport(9, 1, 2, 5, 1, ("a",))))
    assert (report.total, report.leaked, list(report.problems)) == (9, 1, ["a"])
    assert {field.name for field in pb.CacheReport.DESCRIPTOR.fields} == set(asdict(CacheReport(9, 1, 2, 5, 1)))


def test_a_slow_step_is_logged_with_its_size(caplog: pytest.LogCaptureFixture) -> None:
    policy = Scheduler(Limits(2, 9, 8, 64, slow_step_seconds=0.05), NUM_BLOCKS, BLOCK)
    for sample in (make(0, 16), make(1, 16)):
        policy.add([sample])
    chunks = policy.schedule()
    policy.observe(chunks, 0.05)
    assert caplog.messages == []
    policy.observe(chunks, 0.0512)
    assert caplog.messages == ["slow step: 51 ms for 8 tokens, 8 of them of prompts; 1 sequences run, 1 wait"]
