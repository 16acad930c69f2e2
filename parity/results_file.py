"""Results kept as they come, so that a comparison that was interrupted goes on where it was."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..core.errors import ConfigError
from .judge import Result
from .layout import ParityLayout


class ResultsFile:
    """Results as lines of JSON, appended as they come; what an earlier session left in it is `done`.

    Args:
        settings: what results depend on beside their layout; a file of other settings is refused.

    Raises:
        ConfigError: the file cannot be read or written, or is of other settings.
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
                    f"{path} was written by a comparison with other settings ({lines[0][:300]}; now {header}): give "
                    "this one another file."
                )
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"Cannot use {path} for results: {error.strerror}.") from error
        if not lines:
            self._write(header)
        elif not text.endswith("\n"):
            self._write("")  # ends the torn line
        for line in lines[1:]:
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError):
            return  # a line cut short when its session ended
        if not result.error:
            self.done[result.layout] = result

    def add(self, result: Result) -> None:
        """Keeps one result."""
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
