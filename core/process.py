"""Child processes of tk: their start, their end with the process that started them, their imports and allocator."""

import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

PARENT_VARIABLE: Final = "TK_PARENT"  # the environment variable with the process id of the parent
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # constants of glibc's malloc.h


def module_command(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """Returns the words of `python -m MODULE ARGUMENTS`, by the interpreter of this process."""
    return [sys.executable, "-P", "-m", module, *arguments]  # -P: modules in the current folder must not shadow others


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
    """Starts `python -m MODULE ARGUMENTS`; the module must call `die_with_parent()` first.

    The child searches modules in the same folders as this process, so tk need not be installed and the current folder
    does not matter. The child runs in a session of its own, which keeps the terminal's Ctrl-C from it: this process
    decides when it ends.

    Args:
        module: the dotted name of the module.
        arguments: the child's command-line arguments.
        environment: variables to add to this process's own.
        inherited: file descriptors that stay open in the child, under the same numbers.
        stdin, stdout, stderr: as in `subprocess.Popen`.
    """
    paths = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    return subprocess.Popen(
        module_command(module, arguments),
        env={**os.environ, **environment, "PYTHONPATH": paths, PARENT_VARIABLE: str(os.getpid())},
        pass_fds=inherited,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def die_with_parent() -> None:
    """Makes the kernel kill this child of `start_module` when the thread that started it ends (Linux only).

    If the parent has ended already, this process exits at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        sys.exit(1)


def exit_within(seconds: float, code: int) -> None:
    """Ends this process with an exit code, and without any clean-up, unless it ends by itself in so many seconds.

    A thread that cannot be interrupted, in native code for example, would otherwise hold the process. The children of
    `start_module` end with it. A line on stderr says that this happened, and names the threads that were left.
    """
    timer = threading.Timer(seconds, _exit_now, (seconds, code))
    timer.name, timer.daemon = "tk-exit", True
    timer.start()


def _exit_now(seconds: float, code: int) -> None:
    names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())
    line = f"tk has not ended by itself in {seconds:g} s, and ends without clean-up; its threads: {names}.\n"
    if select.select((), (2,), (), 0)[
        1
    ]:  # stderr may have no reader; in a pipe that can be written to, a line has place
        os.write(2, line.encode()[: select.PIPE_BUF])
    os._exit(code)


@contextmanager
def lasting_imports() -> Iterator[None]:
    """A context for imports of modules that stay to the process's end: no search for garbage looks at them.

    Importing torch makes hundreds of thousands of objects. Python would search them while it makes them, an eighth of
    the time of the import, and in every complete search afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def share_one_memory_area() -> None:
    """Lets all threads of this process share one area of glibc's malloc; to be called before any thread starts.

    By default each thread gets an area of its own, up to eight per core, and keeps the end of it. What one thread frees
    another cannot use, so a process whose threads come and go grows with what each of them once took. With another
    malloc this function does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)


@contextmanager
def freed_memory_returned() -> Iterator[None]:
    """A context for work with large buffers, after which glibc's malloc returns all freed memory to the system.

    Otherwise buffers of tens of MiB stay resident. The process should not have started threads before: they would have
    areas of their own, of which malloc keeps the end. With another malloc this context does nothing.
    """
    share_one_memory_area()
    yield
    return_freed_memory()


def return_freed_memory() -> None:
    """Makes glibc's malloc return all freed memory to the system; with another malloc this does nothing.

    What is freed in blocks of up to 32 MiB otherwise stays resident, between small blocks that are in use.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory for this process's next allocations.

    By default malloc returns large blocks to the system, which clears every page again for the next layer's
    allocation: a fifth of a training step on a CPU. With another malloc this function does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def return_large_blocks() -> None:
    """Makes glibc's malloc return every block of 1 MiB or more to the system as soon as it is freed.

    By default freed blocks of up to 32 MiB stay resident between small blocks that are in use: hundreds of MiB in a
    step with layers of 44 M parameters. With another malloc this function does nothing.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 2**20)
