"""A pool of processes in which distributed tests run: ranks over gloo, kept for the whole session.

A test names a module-level function; every rank imports its file and calls it inside an initialised default process
group. Arguments and results are JSON. A rank that fails makes the test fail with its traceback.

The imports of torch and transformers take seconds of processor time. So one process imports them and forks all ranks:
the fork server, which has no threads and runs no test itself.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from tk.core.process import lasting_imports


@dataclass(frozen=True)
class Rank:
    """One process of the pool.

    Attributes:
        pid: the process id.
        line: the connection, over which one JSON document per job goes each way.
    """

    pid: int
    line: TextIO

    def send(self, job: dict[str, Any]) -> None:
        """Starts a job, or ends the one that has been answered: the empty one."""
        self.line.write(json.dumps(job) + "\n")
        self.line.flush()

    def close(self) -> None:
        """Closes this end of the connection."""
        self.line.close()


class RankPool:
    """Ranks that are started at their first use and live until `close`."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self._fork_server: subprocess.Popen[str] | None = None

    def run(self, function: Callable[..., Any], world_size: int, **arguments: Any) -> list[Any]:
        """Calls `function(**arguments)` on `world_size` ranks; returns their results in rank order."""
        while len(self.ranks) < world_size:
            self.ranks.append(self._start())
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "file": function.__code__.co_filename,
                "function": function.__name__,
                "world_size": world_size,
                "store": f"{folder}/store",
                "arguments": arguments,
            }
            for number, rank in enumerate(self.ranks[:world_size]):
                rank.send(job | {"rank": number})
            answers = [self._answer(rank) for rank in self.ranks[:world_size]]
        failures = [answer["error"] for answer in answers if "error" in answer]
        if failures:
            self._end_ranks()
            raise AssertionError("a rank failed:\n" + "\n".join(failures))
        for rank in self.ranks[:world_size]:
            rank.send({})
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Ends all ranks and the process that forked them."""
        self._end_ranks()
        if self._fork_server is not None:
            self._fork_server.communicate("")
            self._fork_server = None

    def _end_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
            self._ask(f"end {rank.pid}")
        self.ranks = []

    def _start(self) -> Rank:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/line")
            listener.listen()
            pid = int(self._ask(f"fork {folder}/line"))
            with listener.accept()[0] as connection:
                return Rank(pid, connection.makefile("rw", encoding="utf-8"))

    def _ask(self, request: str) -> str:
        """Sends a request to the fork server, which is started at its first use, and returns its answer."""
        if self._fork_server is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._fork_server = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        stdin, stdout = self._fork_server.stdin, self._fork_server.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(request + "\n")
        stdin.flush()
        return stdout.readline()

    def _answer(self, rank: Rank) -> dict[str, Any]:
        line = ""
        with suppress(ConnectionResetError):
            line = rank.line.readline()
        if not line:
            return {"error": f"the rank's process ended with exit code {self._ask(f'end {rank.pid}').strip()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


def _serve_forks() -> None:
    """Runs the fork server: forks a rank, or ends one and answers with its exit code; at the end of input, ends all."""
    with lasting_imports():  # ranks, which collect garbage after each job, need not look at these modules
        import_module("tk.train.run.trainer")
        import_module("tk.tests.model.architectures")
    assert len(os.listdir("/proc/self/task")) == 1, "a forked process lacks its parent's other threads"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout carries answers, so tests print to stderr
    codes: dict[int, int | None] = {}
    for request in sys.stdin:
        action, argument = request.split()
        if action == "end":
            codes[int(argument)] = answer = _end(int(argument), codes[int(argument)])
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _run_jobs(argument)
                os._exit(0)
            codes[answer] = None
        answers.write(f"{answer}\n")
        answers.flush()
    for child, code in codes.items():
        _end(child, code)


def _end(child: int, code: int | None) -> int:
    """Returns a child's exit code, which is `code` if that is known; kills the child if it still runs."""
    if code is not None:
        return code
    os.kill(child, signal.SIGKILL)  # no effect on a child that has exited
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_jobs(address: str) -> None:
    """Runs one rank: each job that arrives at an address, until the connection is closed."""
    import torch.distributed as dist

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        line = connection.makefile("rw", encoding="utf-8")
    for request in line:
        job = json.loads(request)
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{job['store']}", rank=job["rank"], world_size=job["world_size"]
            )
            try:
                _answer(line, {"result": _load(Path(job["file"]), job["function"])(**job["arguments"])})
                line.readline()  # until all have answered: a peer that still connects must not find this group closed
            finally:
                dist.destroy_process_group()
        except BaseException:
            _answer(line, {"error": f"rank {job['rank']}:\n{traceback.format_exc()}"})
        gc.collect()  # a process group in a cycle of references would keep its threads alive and its peers waiting


def _answer(line: TextIO, answer: dict[str, Any]) -> None:
    line.write(json.dumps(answer) + "\n")
    line.flush()


def _load(file: Path, name: str) -> Callable[..., Any]:
    path = file.resolve().relative_to(Path(__file__).resolve().parents[1]).with_suffix("")
    function: Callable[..., Any] = getattr(import_module(".".join(("tk", *path.parts))), name)
    return function


if __name__ == "__main__":
    _serve_forks()
