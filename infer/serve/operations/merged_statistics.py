"""The statistics of a current engine and of an old one that finishes its requests."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace

from ...engine.schedule.statistics import CacheReport, EngineLoad, EngineTotals
from ..engine_protocol import EngineProtocol


class MergedStatistics:
    """The statistics of several engines as those of one.

    Args:
        engines: returns the engines now, the current one first.
        lock: guards them; `add_ended` is called under it, when an engine leaves them.
    """

    def __init__(self, engines: Callable[[], Sequence[EngineProtocol]], lock: AbstractContextManager[object]) -> None:
        self._engines, self._lock = engines, lock
        self._ended = EngineTotals()

    def load(self) -> EngineLoad:
        """Returns the load of the current engine, with the requests of all."""
        current, *old = (engine.statistics.load() for engine in self._engines())
        return replace(
            current,
            running=current.running + sum(load.running for load in old),
            waiting=current.waiting + sum(load.waiting for load in old),
            queued_tokens=current.queued_tokens + sum(load.queued_tokens for load in old),
        )

    def totals(self) -> EngineTotals:
        """Returns the totals of all engines, ended ones included: they only grow."""
        with self._lock:
            return functools.reduce(_sum, (engine.statistics.totals() for engine in self._engines()), self._ended)

    def add_ended(self, totals: EngineTotals) -> None:
        """Adds the totals of an engine that has ended, whose blocks exist no more."""
        self._ended = _sum(self._ended, replace(totals, leaked_blocks=0))

    def flush_prefix_cache(self) -> int:
        """Forgets the prefix caches; returns how many of their blocks no request used."""
        return sum(engine.statistics.flush_prefix_cache() for engine in self._engines())

    def check_cache(self) -> CacheReport:
        """Returns the blocks of the current engine, with the leaked blocks and problems of all."""
        current, *old = (engine.statistics.check_cache() for engine in self._engines())
        leaked = sum(report.leaked for report in old)
        return replace(
            current,
            total=current.total + leaked,
            leaked=current.leaked + leaked,
            problems=(*current.problems, *(problem for report in old for problem in report.problems)),
        )


def _sum(one: EngineTotals, other: EngineTotals) -> EngineTotals:
    return EngineTotals(*(getattr(one, each.name) + getattr(other, each.name) for each in fields(EngineTotals)))
