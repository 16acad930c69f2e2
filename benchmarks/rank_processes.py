"""The ranks of a layout as processes that step on request, so that several layouts or checkouts can step in turn."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """A step of all ranks: its seconds, and the CPU time of the rank that used most, in seconds."""

    seconds: float
    cpu_seconds: float


class RankProcesses:
    """The processes of a layout's ranks, each of which runs a step for every line that it reads and prints its seconds.

    Args:
        command: the command of a rank, in which {rank} stands for its number.
        num_ranks: the number of ranks.
        environment: the environment variables.
    """

    def __init__(self, command: Sequence[str], num_ranks: int, environment: Mapping[str, str]) -> None:
        self.processes = [
            subprocess.Popen(
                [word.replace("{rank}", str(rank)) for word in command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def step(self) -> Step:
        """Runs one step on all ranks, which are idle before and after it."""
        before = [_cpu_seconds(process.pid) for process in self.processes]
        for process in self.processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes if process.stdout]
        if not all(answers):
            raise SystemExit("A rank ended early; its error is above.")
        used = [_cpu_seconds(process.pid) for process in self.processes]
        return Step(float(answers[0]), max(now - then for then, now in zip(before, used, strict=True)))

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            process.communicate()


def _cpu_seconds(pid: int) -> float:
    """Returns the time that a process's threads have run so far, without that of threads that ended."""
    threads = sorted(Path(f"/proc/{pid}/task").iterdir())
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
