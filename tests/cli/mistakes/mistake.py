"""A mistake of a user: a command line in the folder of `world.py`, and what its message must say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Prepare = Callable[[Path], None]


@dataclass(frozen=True)
class Mistake:
    """One row of the table.

    Attributes:
        command: the words after `tk`, as a shell reads them; {name} is the address of the server `server`.
        code: the exit code.
        what, where, remedy: regular expressions, in any case, for parts of the message: what is wrong; the file, key,
            line, option or tensor; and what would be right.
        section: the anchor of its section in docs/troubleshooting.md.
        files: files to write before, by name.
        prepare: makes other things in the folder, which is its argument.
        server: the kind of server that runs meanwhile (see servers.py); "" = none.
        variables: the environment.
        changed: a name in a module of ours and another value, for what this machine does not have.
        absent: a Python package that is not installed.
        processes: whether ranks or workers start, which takes seconds.
    """

    command: str
    code: int
    what: str
    where: str
    remedy: str
    section: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Prepare | None = None
    server: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[str, object] | None = None
    absent: str = ""
    processes: bool = False
