"""The report of a rank that ended with an error, for the launcher (no torch)."""

import json
import logging
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ...core.errors import TkError, pack, unpack

_log = logging.getLogger(__name__)

ERROR_FOLDER_VARIABLE: Final = "TK_ERROR_FOLDER"

# Parts of what torch and Python say when there is no memory, on a GPU or on a CPU.
_NO_MEMORY: Final = ("out of memory", "can't allocate memory", "OutOfMemoryError", "MemoryError")
_DETAILS: Final = re.compile(r"^\[enforce fail.*?\] .*?: |\s*(Of the allocated memory|See documentation).*$", re.DOTALL)
Kind = Literal["known", "unexpected", "peers lost"]


class MemoryExhausted(TkError):
    """A rank that needed more memory than its GPU, or its machine, has left."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The error that ended a rank.

    Attributes:
        kind: "peers lost" if it only shows that other ranks have died or are stuck; "known" for any other TkError;
            "unexpected" for all other exceptions.
    """

    error: TkError
    kind: Kind


def write_error(error: Exception, rank: int, peers_lost: bool) -> None:
    """Writes a rank's error to a file for the launcher, if there is one, and its traceback to the rank's output.

    Args:
        error: the error that ended the rank.
        peers_lost: whether the error only shows that other ranks have died or are stuck.
    """
    trace = "".join(traceback.format_exception(error))
    folder = os.environ.get(ERROR_FOLDER_VARIABLE)
    if folder is None or rank != 0:
        _log.error("Rank %d ended with an error.", rank, exc_info=error)
    if folder is not None:
        path = Path(folder) / f"error-{rank}.json"
        temporary = path.with_suffix(".tmp")
        reported = _reported(error, rank)
        is_known = reported is error or isinstance(reported, MemoryExhausted)
        kind: Kind = "peers lost" if peers_lost else "known" if is_known else "unexpected"
        report = {"kind": kind, "error": pack(reported), "traceback": trace}
        temporary.write_text(json.dumps(report), encoding="utf-8")
        temporary.rename(path)  # the launcher never reads half a file


def _reported(error: Exception, rank: int) -> TkError:
    if isinstance(error, TkError):
        return error
    text = f"{type(error).__name__}: {error}"
    if any(part in text for part in _NO_MEMORY):
        return MemoryExhausted(f"Rank {rank} found no memory: {_DETAILS.sub('', str(error)) or type(error).__name__}")
    return TkError(f"Rank {rank}: {text}")


def read_reports(folder: Path) -> list[RankReport]:
    """Returns the reports in `folder`, in an order that does not depend on time."""
    return [_read(path) for path in sorted(folder.glob("error-*.json"))]


def _read(path: Path) -> RankReport:
    """Reads one report; the rank's traceback becomes a note of the error, which `--debug` shows."""
    data = json.loads(path.read_text(encoding="utf-8"))
    error = unpack(data["error"])
    error.add_note(data["traceback"])
    return RankReport(error, data["kind"])
