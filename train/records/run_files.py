"""The names of a run's files beside its steps."""

from typing import Final

METRICS: Final = "metrics.jsonl"
REPLACED: Final = (METRICS,)  # written aside and renamed, so that a crash can leave a half-written copy
