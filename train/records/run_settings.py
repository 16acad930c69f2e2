"""The configuration of a run's last start, beside its steps: a resumed run says what differs from it (no torch)."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint.files.small_files import replace_small
from ..config.train_config import TrainConfig
from .run_files import SETTINGS


def write_settings(config: TrainConfig, attempt: str) -> None:
    """Writes the configuration into its run folder, whose lock the caller holds as `attempt`."""
    data = json.dumps(config.model_dump(mode="json"), indent=2).encode()
    replace_small(config.run_folder / SETTINGS, data, attempt)


def changes_since(folder: Path, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the old and the new value of each key that differs from the last start of the run in `folder`.

    A key is "section.key"; a value that only one of both configurations has is None in the other. The result is empty
    if the folder has no configuration that can be read: one of an older tk, or no run's folder.
    """
    try:
        before = dict(_flat(json.loads((folder / SETTINGS).read_bytes())))
    except (OSError, ValueError, AttributeError):
        return {}
    now = dict(_flat(config.model_dump(mode="json")))
    keys = [*now, *(key for key in before if key not in now)]
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
