"""The record beside a built library, as JSON: its units, its compiler, and the digest of its bytes."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class LibraryRecord:
    """The content of a record.

    Attributes:
        units: the names of the units in the library.
        omitted: the names of the units that the compiler refused, each with its messages.
        compiler: the identity of the compiler that built it.
        tried: the identities of all compilers that were tried, that one last.
        size: the library's size in bytes.
        sha256: the library's digest, in hexadecimal digits.
    """

    units: tuple[str, ...]
    omitted: tuple[tuple[str, str], ...]
    compiler: str
    tried: tuple[str, ...]
    size: int
    sha256: str

    def to_json(self) -> bytes:
        """Returns the record as a JSON document."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parses a record. Raises ValueError if `data` is not one."""
        match json.loads(data):
            case {
                "units": [*units],
                "omitted": [*omitted],
                "compiler": str(compiler),
                "tried": [*tried],
                "size": int(size),
                "sha256": str(sha256),
            } if all(isinstance(pair, list) and len(pair) == 2 for pair in omitted):
                pairs = tuple((str(name), str(messages)) for name, messages in omitted)
                return cls(tuple(map(str, units)), pairs, compiler, tuple(map(str, tried)), size, sha256)
        raise ValueError("it does not have the fields of a record")
