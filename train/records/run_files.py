"""The names of a run's files beside its steps."""

from typing import Final

METRICS: Final = "metrics.jsonl"
REPLACED: Final = (METRICS,)  # written under another name, then renamed: a crash may leave a half-written copy
