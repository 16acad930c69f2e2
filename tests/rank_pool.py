"""A pool of processes in which distributed tests run: ranks over gloo, kept for the whole session.

A test names a module-level function; every rank imports its file and calls it inside an initialised default process
group. Arguments and results are JSON. A rank that fails makes the test fail with its traceback.

Importing torch and transformers takes seconds of processor time. One process does it and forks all ranks: a nursery,
which has no threads and runs no test itself.
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


@dataclass(frozen=True)
class Rank:
    """One process of the pool and the line to it: a JSON document each way per job."""

    pid: int
    line: TextIO

    def send(self, job: dict[str, Any]) -> None:
        """Has it begin a job."""
        self.line.write(json.dumps(job) + "\n")
        self.line.flush()

    def close(self) -> None:
        """Closes our end of the line."""
        self.line.close()


class RankPool:
    """Ranks that are started when first needed and live until `close`."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self._nursery: subprocess.Popen[str] | None = None

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
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Ends all ranks and the process that forked them."""
        self._end_ranks()
        if self._nursery is not None:
            self._nursery.communicate("")
            self._nursery = None

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
        """What the nursery answers."""
        if self._nursery is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._nursery = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )
        stdin, stdout = self._nursery.stdin, self._nursery.stdout
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


def _nurse() -> None:
    """Forks a rank on request, or ends one and answers with its exit code; at the end of input, ends all."""
    import_module("tk.train.trainer")
    import_module("tk.tests.model.architectures")
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of its parent's other threads"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints is not an answer
    codes: dict[int, int | None] = {}
    for request in sys.stdin:
        action, argument = request.split()
        if action == "end":
            codes[int(argument)] = answer = _end(int(argument), codes[int(argument)])
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                _serve(argument)
                os._exit(0)
            codes[answer] = None
        answers.write(f"{answer}\n")
        answers.flush()
    for child, code in codes.items():
        _end(child, code)


def _end(child: int, code: int | None) -> int:
    """A child's exit code, `code` if that is known; it is killed if it still runs."""
    if code is not None:
        return code
    os.kill(child, signal.SIGKILL)  # which changes nothing where it has exited
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _serve(address: str) -> None:
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
                answer = {"result": _load(Path(job["file"]), job["function"])(**job["arguments"])}
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = {"error": f"rank {job['rank']}:\n{traceback.format_exc()}"}
        gc.collect()  # a group that a cycle of references keeps alive keeps threads that poll, and peers that wait
        line.write(json.dumps(answer) + "\n")
        line.flush()


def _load(file: Path, name: str) -> Callable[..., Any]:
    path = file.resolve().relative_to(Path(__file__).resolve().parents[1]).with_suffix("")
    function: Callable[..., Any] = getattr(import_module(".".join(("tk", *path.parts))), name)
    return function


if __name__ == "__main__":
    _nurse()
