"""The limits of a scheduler."""

from dataclasses import dataclass

from ...options import EngineOptions


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits on samples, tokens and the predicted duration of a step; see EngineOptions. None = no limit."""

    max_running: int
    max_queued: int
    max_batched_tokens: int
    max_model_len: int
    max_step_seconds: float | None = None
    max_queued_tokens: int | None = None
    quota_sequences: int | None = None
    quota_tokens: int | None = None
    slow_step_seconds: float | None = None

    @staticmethod
    def of(options: EngineOptions, max_model_len: int) -> "Limits":
        """Returns the limits of an engine whose samples have at most `max_model_len` tokens."""
        return Limits(
            max_running=options.max_running,
            max_queued=options.max_queued,
            max_batched_tokens=options.max_batched_tokens,
            max_model_len=max_model_len,
            max_step_seconds=None if options.max_step_ms is None else options.max_step_ms / 1000,
            max_queued_tokens=options.max_queued_tokens,
            quota_sequences=options.quota_sequences,
            quota_tokens=options.quota_tokens,
            slow_step_seconds=None if options.slow_step_ms is None else options.slow_step_ms / 1000,
        )
