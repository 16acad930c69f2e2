"""The statistics of an engine for operators: its load, and the blocks of its cache."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from .scheduler import Scheduler


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine; the fields are those of the message Load."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefix_hit_rate: float = 0.0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0
    accepted_share: float = 0.0
    tokens_per_step: float = 0.0
    draft_weight_bytes: int = 0
    draft_kv_bytes: int = 0


@dataclass(frozen=True)
class EngineTotals:
    """Totals since the start of an engine.

    Attributes:
        prompt_tokens: the prompt tokens of the requests that were admitted.
        cached_tokens: how many of them the prefix cache had.
        new_tokens: the tokens that were sampled, of all requests.
        preemptions: how often a sample lost its blocks to others.
        leaked_blocks: the blocks that are used now and that no request holds.
        proposed, accepted: the proposals that were computed, and those that came true, by their sources.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    leaked_blocks: int = 0
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class CacheReport:
    """The blocks of a cache: total = used + cached + free + leaked; the fields are those of the message CacheReport."""

    total: int
    used: int
    cached: int
    free: int
    leaked: int = 0
    problems: tuple[str, ...] = ()


class EngineStatistics:
    """The statistics of an engine, for any thread.

    Args:
        scheduler: the engine's scheduler.
        lock: guards it.
        draft_bytes: the bytes of the weights and of the cache of a draft model.
    """

    def __init__(self, scheduler: Scheduler, lock: threading.Lock, draft_bytes: tuple[int, int] = (0, 0)) -> None:
        self._scheduler, self._lock, self._draft_bytes = scheduler, lock, draft_bytes

    def load(self) -> EngineLoad:
        """Returns the load now. The effort grows with the running samples only."""
        scheduler = self._scheduler
        with self._lock:
            blocks, (prefill, decode) = scheduler.allocator, scheduler.activity.rates()
            num_running, (accepted_share, tokens_per_step) = len(scheduler.running), scheduler.activity.gains()
            return EngineLoad(
                running=num_running,
                waiting=scheduler.num_live - num_running,
                queued_tokens=scheduler.num_queued_tokens,
                blocks_total=blocks.num_blocks,
                blocks_used=blocks.num_used,
                blocks_cached=blocks.num_cached,
                blocks_free=blocks.num_free,
                prefix_hit_rate=scheduler.activity.hit_rate,
                prefill_tokens_per_second=prefill,
                decode_tokens_per_second=decode,
                accepted_share=accepted_share,
                tokens_per_step=tokens_per_step,
                draft_weight_bytes=self._draft_bytes[0],
                draft_kv_bytes=self._draft_bytes[1],
            )

    def totals(self) -> EngineTotals:
        """Returns the totals now. The effort grows with the blocks in use."""
        with self._lock:
            activity = self._scheduler.activity
            return EngineTotals(
                prompt_tokens=activity.num_prompt,
                cached_tokens=activity.num_cached,
                new_tokens=activity.num_new,
                preemptions=activity.num_preempted,
                leaked_blocks=self._scheduler.num_leaked_blocks,
                proposed=Counter({source.value: count for source, count in activity.proposed.items()}),
                accepted=Counter({source.value: count for source, count in activity.accepted.items()}),
            )

    def flush_prefix_cache(self) -> int:
        """Makes cached blocks free, and those in use unknown to later requests; returns how many were cached."""
        with self._lock:
            count = self._scheduler.allocator.num_cached
            self._scheduler.allocator.flush()
        return count

    def check_cache(self) -> CacheReport:
        """Counts the blocks, and looks for problems. Steps wait meanwhile: the effort grows with the blocks in use."""
        with self._lock:
            blocks, leaked = self._scheduler.allocator, self._scheduler.num_leaked_blocks
            return CacheReport(
                total=blocks.num_blocks,
                used=blocks.num_used - leaked,
                cached=blocks.num_cached,
                free=blocks.num_free,
                leaked=leaked,
                problems=self._problems(),
            )

    def _problems(self) -> tuple[str, ...]:
        try:
            self._scheduler.check_integrity()
        except AssertionError as error:
            return (str(error),)
        return ()
