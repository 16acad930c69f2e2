"""The results file of a comparison, from which an interrupted comparison continues."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..core.errors import ConfigError
from .judge import Result
from .layout import ParityLayout


class ResultsFile:
    """A file of results as lines of JSON, to which each new result is appended.

    Args:
        path: the file; it is created if absent.
        settings: everything except the layout that determines the results; it must equal the file's.

    Attributes:
        done: the results of earlier sessions, by layout.

    Raises:
        ConfigError: the file cannot be read or written, or has other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[ParityLayout, Result] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            lines = text.splitlines()
            if lines and lines[0] != header:
                raise ConfigError(
                    f"{path} belongs to a comparison with other settings ({_differences(lines[0], header)}): use "
                    "another file for this one."
                )
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot use {path} as the results file: {error.strerror}.") from error
        if not lines:
            self._write(header)
        elif not text.endswith("\n"):
            self._write("")  # ends the line that an earlier session left incomplete
        for line in lines[1:]:
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            return  # its session ended in the middle of the line
        if not result.error:
            self.done[result.layout] = result

    def add(self, result: Result) -> None:
        """Appends one result to the file."""
        self._write(json.dumps(result.to_json()))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()

    def __enter__(self) -> "ResultsFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _differences(stored: str, header: str) -> str:
    """Returns the settings that differ, with both values."""
    try:
        there = _flat(json.loads(stored)["settings"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its first line holds none"
    here = _flat(json.loads(header)["settings"])
    keys = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    return ", ".join(f"{key} = {there.get(key, 'absent')}, now {here.get(key, 'absent')}" for key in keys)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns settings by their whole names, such as optimizer.lr."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
