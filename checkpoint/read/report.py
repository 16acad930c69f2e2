"""The result of checking a checkpoint, as plain data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a checkpoint; tensor, slot and block are None if it concerns the whole file."""

    file: str
    message: str
    tensor: str | None = None
    slot: str | None = None
    block: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings of a verification.

    Attributes:
        path: the checkpoint's folder.
        step: the training step.
        has_checksums: False for a Hugging Face folder, whose headers and sizes alone can be checked.
        num_files: the number of data files.
        num_bytes: the bytes of tensor data that were read.
        problems: the problems found.
        notes: sentences about harmless files that do not belong to the checkpoint.
    """

    path: Path
    step: int
    has_checksums: bool
    num_files: int
    num_bytes: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return asdict(self) | {"path": str(self.path), "ok": self.ok}
