"""What a rank leaves behind when it ends with an error, for whoever started it. No torch."""

import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ...core.errors import TkError, pack, unpack

ERROR_FOLDER_VARIABLE: Final = "TK_ERROR_FOLDER"

Kind = Literal["understood", "fault", "echo"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank said of its end.

    Attributes:
        kind: "echo" is what a rank sees of others that are gone or stuck, "understood" another TkError, "fault" one of
            ours.
    """

    error: TkError
    kind: Kind


def write_error(error: Exception, rank: int, echo: bool) -> None:
    """Leaves a rank's error for the launcher, if there is one, and its traceback in the rank's output."""
    trace = "".join(traceback.format_exception(error))
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    if folder is None or rank != 0:
        print(trace, file=sys.stderr)
    if folder is not None:
        path = Path(folder) / f"error-{rank}.json"
        aside = path.with_suffix(".tmp")
        told = error if isinstance(error, TkError) else TkError(f"Rank {rank}: {type(error).__name__}: {error}")
        kind: Kind = "echo" if echo else "understood" if told is error else "fault"
        report = {"kind": kind, "error": pack(told), "traceback": trace}
        aside.write_text(json.dumps(report), encoding="utf-8")
        aside.rename(path)


def read_reports(folder: Path) -> list[RankReport]:
    """The reports of all ranks that left one."""
    return [_read(path) for path in sorted(folder.glob("error-*.json"))]


def _read(path: Path) -> RankReport:
    """A rank's report; the error carries the rank's traceback as a note, which `--debug` shows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    error = unpack(data["error"])
    error.add_note(data["traceback"])
    return RankReport(error, data["kind"])
