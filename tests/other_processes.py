"""The ways in which an object gets into another process or thread, and what its use does there."""

import copy
import json
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from tk.checkpoint.save import background_save
from tk.core.errors import TkError
from tk.infer.engine.worker import processes

SECONDS: Final = 60  # after which a use hangs
METHODS: Final = ("fork", "spawn", "forkserver")
Use = Callable[[Any], object]


def outcome(use: Use, subject: Any) -> str:
    """Uses an object; returns "works", or the error's message behind "refused: " if it is one of tk's."""
    try:
        use(subject)
    except TkError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "works"


def print_outcomes(subject: Any, use: Use, close: Use) -> None:
    """Tries every way, and at last this process again; prints the outcomes as JSON.

    Args:
        subject: the object.
        use: uses it; a function of a module.
        close: closes it, in forks too.
    """
    ways: dict[str, Callable[[], str]] = {
        "fork": partial(_forked, lambda: _used_and_closed(subject, use, close), os._exit),
        "fork that exits": partial(_forked, lambda: _used_and_closed(subject, use, close), _raise_exit),
        "thread": lambda: _in_thread(subject, use),
        "deepcopy": lambda: outcome(copy.deepcopy, subject),
        "another folder": lambda: _in_folder(subject, use),
        **{f"multiprocessing {method}": partial(_in_process, subject, use, method) for method in METHODS},
        "ProcessPoolExecutor": lambda: _in_pool(subject, use),
        "at home": lambda: outcome(use, subject),
    }
    found = {}
    for way, run in ways.items():
        signal.alarm(SECONDS)  # the default action ends the process
        found[way] = run()
        signal.alarm(0)
    holder = _sleeping_fork()
    late = 10 * SECONDS  # a close that awaits the end of processes whose sockets the fork holds is ended before
    with patch.object(processes, "EXIT_TIMEOUT", late), patch.object(background_save, "EXIT_TIMEOUT", late):
        signal.alarm(SECONDS // 2)
        close(subject)
        signal.alarm(0)
    found["close beside a fork"] = "works"
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    print(json.dumps(found), flush=True)


def _used_and_closed(subject: Any, use: Use, close: Use) -> str:
    found = outcome(use, subject)
    close(subject)
    return found


def _raise_exit(code: int) -> None:
    raise SystemExit(code)


def _forked(work: Callable[[], str], leave: Callable[[int], object]) -> str:
    """Runs `work` in a fork of this process, which then leaves; returns its result, or "hangs"."""
    ours, theirs = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        signal.alarm(SECONDS // 2)
        os.write(theirs, work().encode())
        leave(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as stream:
        found = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
    return found if status == 0 else f"hangs, or dies ({status}), after: {found}"


def _sleeping_fork() -> int:
    """Starts a fork that holds everything open; returns its process id."""
    process_id = os.fork()
    if process_id == 0:
        signal.alarm(SECONDS)  # it must not outlive a test for long
        signal.pause()
        os._exit(0)
    return process_id


def _in_thread(subject: Any, use: Use) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(outcome(use, subject)))
    thread.start()
    thread.join()
    return found[0]


def _in_folder(subject: Any, use: Use) -> str:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return outcome(use, subject)
        finally:
            os.chdir(before)


def _send_outcome(use: Use, subject: Any, connection: Any) -> None:
    connection.send_bytes(outcome(use, subject).encode())


def _in_process(subject: Any, use: Use, method: str) -> str:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_outcome, args=(use, subject, theirs))  # type: ignore[attr-defined]
    try:
        process.start()
    except TkError as error:
        return f"refused: {error}"
    theirs.close()
    if not ours.poll(SECONDS // 2):
        process.kill()
    try:
        found: str = ours.recv_bytes().decode()
    except EOFError:
        found = "hangs, or dies"
    process.join()
    return found


def _in_pool(subject: Any, use: Use) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        try:
            return pool.submit(outcome, use, subject).result(SECONDS // 2)
        except TkError as error:
            return f"refused: {error}"


def check_outcomes(found: dict[str, str], subject: str) -> None:
    """Asserts that threads, other folders and the process itself can use an object, and the others are refused by its
    name."""
    free = {"thread", "another folder", "at home", "close beside a fork"}
    assert {way for way, result in found.items() if result == "works"} == free, found
    for way in found.keys() - free:
        assert found[way].startswith("refused: "), (way, found[way])
        copied = way not in ("fork", "fork that exits", "multiprocessing fork")
        said = "cannot be copied" if copied else "was made in process"
        assert said in found[way], (way, found[way])
        if copied:
            assert f" {subject} " in found[way], (way, found[way])
