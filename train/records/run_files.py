"""The names of a run's files beside its steps."""

from typing import Final

METRICS: Final = "metrics.jsonl"
SETTINGS: Final = "settings.json"  # the configuration of the last start
REPLACED: Final = (METRICS, SETTINGS)  # written under another name, then renamed: a crash may leave a half-written copy
