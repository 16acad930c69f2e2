"""A pool of processes in which distributed tests run: ranks over gloo, torch imported once for the whole session.

A test names a module-level function; every rank imports its file and calls it inside an initialised default process
group. Arguments and results are JSON. A rank that fails makes the test fail with its traceback.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


class RankPool:
    """Ranks that are started when first needed and live until `close`."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[str]] = []

    def run(self, function: Callable[..., Any], world_size: int, **arguments: Any) -> list[Any]:
        """Calls `function(**arguments)` on `world_size` ranks; returns their results in rank order."""
        while len(self.ranks) < world_size:
            self.ranks.append(_start())
        with tempfile.TemporaryDirectory() as folder:
            job = {
                "file": function.__code__.co_filename,
                "function": function.__name__,
                "world_size": world_size,
                "store": f"{folder}/store",
                "arguments": arguments,
            }
            for rank, process in enumerate(self.ranks[:world_size]):
                assert process.stdin is not None
                process.stdin.write(json.dumps(job | {"rank": rank}) + "\n")
                process.stdin.flush()
            answers = [_answer(process) for process in self.ranks[:world_size]]
        failures = [answer["error"] for answer in answers if "error" in answer]
        if failures:
            self.close()
            raise AssertionError("a rank failed:\n" + "\n".join(failures))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Ends all ranks."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.communicate()
        self.ranks = []


def _start() -> subprocess.Popen[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        return {"error": f"the rank's process ended with exit code {process.wait()}"}
    answer: dict[str, Any] = json.loads(line)
    return answer


def _serve() -> None:
    import torch.distributed as dist

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a test prints is not an answer
    for line in sys.stdin:
        job = json.loads(line)
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
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(file: Path, name: str) -> Callable[..., Any]:
    path = file.resolve().relative_to(Path(__file__).resolve().parents[1]).with_suffix("")
    function: Callable[..., Any] = getattr(import_module(".".join(("tk", *path.parts))), name)
    return function


if __name__ == "__main__":
    _serve()
