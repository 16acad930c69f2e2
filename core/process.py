"""Processes of tk's own: how one is started, and what it asks of the system at its start: to end with its starter, to
keep the memory that it has."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

PARENT_VARIABLE: Final = "TK_PARENT"  # process id of the starter, in a child's environment
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def start_module(
    module: str,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    inherited: Sequence[int] = (),
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m MODULE ARGUMENTS`; the module's first act is `die_with_parent()`.

    The child finds modules where this process finds them, whether or not tk is installed and whatever the current
    folder is. A session of its own keeps the terminal's Ctrl-C from it: its starter decides when it ends.

    Args:
        environment: variables beside this process's own.
        inherited: descriptors that stay open in the child, under the same numbers.
        stdin, stdout, stderr: as `subprocess.Popen` has them.
    """
    paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: not what lies in the current folder
        env={**os.environ, **environment, "PYTHONPATH": paths, PARENT_VARIABLE: str(os.getpid())},
        pass_fds=inherited,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def die_with_parent() -> None:
    """Has the kernel kill this process, which `start_module` began, when the thread that started it ends; Linux only.

    If the starter is gone already, this process ends here and now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        sys.exit(1)


def keep_freed_memory() -> None:
    """Has glibc keep what this process frees for its next allocations.

    By default large blocks go back to the system, which clears every page anew when the next layer asks for as much: a
    fifth of a training step on a CPU. Where malloc is not glibc's, nothing happens.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)
