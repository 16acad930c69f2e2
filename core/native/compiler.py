"""The C compilers of this machine: the one that $CC names, the system's, the one in the package `ziglang`."""

import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..extras import install_line
from ..process import module_command

_SYSTEM_COMPILERS: Final = ("cc", "gcc", "clang")
# The oldest glibc and CPU that the libraries of `ziglang` are for; it would take this machine's otherwise.
_ZIG_TARGETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "x86_64": ("-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64"),
        "aarch64": ("-target", "aarch64-linux-gnu.2.17", "-mcpu=generic"),
    }
)
_TIME_LIMIT: Final = 300.0  # seconds of one run; a compiler that hangs must not hold the cache's lock for ever
_VERSION_LIMIT: Final = 30.0

_log = logging.getLogger(__name__)


def install_hint() -> str:
    """Returns the ways to a compiler, as the end of a sentence."""
    return f"install one (apt install gcc), or the one for Python: {install_line('compiler')}"


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that exists; whether it works, a build shows.

    Attributes:
        command: the words that every run of it begins with.
        identity: its name, version and place, for people and for the record of a library.
    """

    command: tuple[str, ...]
    identity: str

    def run(self, arguments: Sequence[str], folder: Path) -> str | None:
        """Runs the compiler in `folder`, where it also keeps its temporary files.

        Returns:
            Its messages if it failed; None if it succeeded.

        Raises:
            OSError: the compiler could not be started.
        """
        # Files take the messages: a compiler's own children may outlive it, and would hold a pipe open.
        private = {"TMPDIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder), "ZIG_GLOBAL_CACHE_DIR": str(folder)}
        with tempfile.TemporaryFile(dir=folder) as file:
            process = subprocess.Popen(
                (*self.command, *arguments),
                cwd=folder,
                env={**os.environ, "LC_ALL": "C", **private},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = process.wait(_TIME_LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"it did not end within {_TIME_LIMIT:.0f} s"
            file.seek(0)
            messages = file.read().decode(errors="replace").strip()
        return (messages or f"it ended with status {code}") if code else None


def find_compilers() -> Iterator[Compiler]:
    """Yields the compilers of this machine, the preferred first; each is looked for when it is asked for."""
    seen: set[tuple[str, ...]] = set()
    for command in (_chosen(), *([name] for name in _SYSTEM_COMPILERS)):
        program = shutil.which(command[0]) if command else None
        if program is None:
            continue
        real = (os.path.realpath(program), *command[1:])  # cc is mostly a link to gcc or clang
        if real not in seen:
            seen.add(real)
            yield from _installed((os.path.abspath(program), *command[1:]))
    yield from _packaged()


def _chosen() -> list[str]:
    """Returns the words of $CC; none, and says so, if they name no program."""
    text = os.environ.get("CC", "")
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its end
        words = [text]
    if words and shutil.which(words[0]) is None:
        _log.warning("The compiler that CC names, %s, does not exist; looking for another.", words[0])
    return words


def _installed(command: tuple[str, ...]) -> Iterator[Compiler]:
    try:
        shown = subprocess.run(
            (*command, "--version"),
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_LIMIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("The compiler %s does not run: %s", shlex.join(command), error)
        return
    lines = shown.stdout.decode(errors="replace").splitlines()
    yield Compiler(command, f"{lines[0] if lines else 'unknown version'} ({shlex.join(command)})")


def _packaged() -> Iterator[Compiler]:
    target = _ZIG_TARGETS.get(platform.machine())
    if target and importlib.util.find_spec("ziglang"):
        from importlib import metadata  # slow to import, and seldom needed

        try:
            version = metadata.version("ziglang")
        except metadata.PackageNotFoundError:
            version = "of unknown version"
        yield Compiler((*module_command("ziglang", ["cc"]), *target), f"ziglang {version}")
