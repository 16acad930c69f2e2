"""The statistics of two engines as those of one."""

import threading
from collections import Counter

from tk.infer.engine.schedule.statistics import CacheReport, EngineLoad, EngineTotals
from tk.infer.serve.operations.merged_statistics import MergedStatistics
from tk.tests.infer.serve.fake_engine import INFO, FakeEngine


def test_requests_of_both_engines_and_blocks_of_the_current_one_are_counted() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[0].statistics.load_now = EngineLoad(running=1, waiting=2, queued_tokens=3, blocks_total=9, blocks_used=4)
    engines[1].statistics.load_now = EngineLoad(running=10, waiting=20, queued_tokens=30, blocks_total=7, blocks_used=5)
    merged = MergedStatistics(lambda: engines, threading.Lock())
    assert merged.load() == EngineLoad(running=11, waiting=22, queued_tokens=33, blocks_total=9, blocks_used=4)
    assert merged.flush_prefix_cache() == 10
    assert [engine.statistics.flushed for engine in engines] == [1, 1]
    problems = ("a block is lost",) * 2
    whole = CacheReport(total=INFO.num_blocks + 1, used=3, cached=5, free=55, leaked=2, problems=problems)
    assert merged.check_cache() == whole
    for engine in engines:
        engine.close()


def test_totals_never_fall_when_an_engine_ends() -> None:
    engines = [FakeEngine(), FakeEngine()]
    merged = MergedStatistics(lambda: engines, threading.Lock())
    assert merged.totals() == EngineTotals(200, 50, 14, 8, 2, Counter(draft=18), Counter(draft=12))
    ended = engines.pop()
    merged.add_ended(ended.statistics.totals())
    assert merged.totals() == EngineTotals(200, 50, 14, 8, 1, Counter(draft=18), Counter(draft=12))
    for engine in (*engines, ended):
        engine.close()
