"""The result of checking a checkpoint, as plain data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong; tensor, slot and block are None where the file as a whole is meant."""

    file: str
    message: str
    tensor: str | None = None
    slot: str | None = None
    block: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The findings of a verification.

    Attributes:
        has_checksums: False for a Hugging Face folder, of which only headers and sizes can be checked.
        num_bytes: bytes of tensor data read.
        notes: files that are none of the checkpoint's, in words; they do no harm.
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
        """Whether nothing is wrong."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"path": str(self.path), "ok": self.ok}
