"""The pool of rank processes: each process is started once and then serves as a rank of many jobs.

Jobs run side by side in lanes; a lane has as many processes as its job has ranks. Jobs and answers are lines of JSON.
If a rank fails, dies or sends nothing for too long, the pool reports the job's error and replaces the lane's processes.
This module does not import torch.
"""

import json
import os
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..core.errors import TkError, WorkerDied, pack, unpack
from ..core.process import start_module

GRACE_SECONDS: Final = 3.0  # the time for the peers of a failed rank to answer
LOG_TAIL: Final = 2000  # characters of a dead rank's output in the error


@dataclass(frozen=True, eq=False)
class PoolJob:
    """A job for `num_ranks` ranks.

    Attributes:
        name: the job's name in errors.
        payload: plain data, the same for every rank.
        num_ranks: the number of ranks that the job needs.
        groups: the key of the job's process groups; successive jobs of a lane with the same key may keep them.
    """

    name: str
    payload: dict[str, Any]
    num_ranks: int
    groups: str


@dataclass(frozen=True)
class Outcome:
    """The end of a job: every rank's answer in rank order, or an error."""

    job: PoolJob
    answers: tuple[dict[str, Any], ...] = ()
    error: str = ""
    seconds: float = 0.0


class RankProcess:
    """One process of the pool; a thread puts its lines of output, and None at its end, into `inbox`."""

    def __init__(self, module: str, log: Path, inbox: "queue.Queue[Line]") -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = start_module(
                module,
                environment={"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        self._reader = threading.Thread(target=self._read, args=(inbox,), daemon=True)
        self._reader.start()

    def _read(self, inbox: "queue.Queue[Line]") -> None:
        for line in self.process.stdout or ():
            inbox.put((self, line))
        inbox.put((self, None))

    def send(self, message: dict[str, Any]) -> None:
        """Sends a job; if the process is dead, does nothing, since its end is in the inbox already."""
        try:
            if self.process.stdin is not None:
                self.process.stdin.write(json.dumps(message).encode() + b"\n")
                self.process.stdin.flush()
        except BrokenPipeError:
            return

    def end(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def describe_exit(self) -> str:
        """Describes the end of the process: its exit code and the last lines of its output."""
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
        return f"its process ended with code {self.process.wait()}" + (f": {tail}" if tail else "")


Line = tuple[RankProcess, bytes | None]


@dataclass
class Lane:
    """Processes that work on one job at a time.

    Attributes:
        places: the indexes of the lane's processes in the pool.
        job: the current job; None = the lane is free.
        started: the start of the job, in seconds of `time.monotonic`, like the next two.
        last_message: the time of the last line from any of its ranks.
        deadline: the time at which the pool stops waiting for the peers of a failed rank; None = no rank has failed.
        answers: the last message of each rank that has finished, by rank.
        error: the first error of a rank.
        groups: the key of the process groups that the processes hold.
        store: the file by which the ranks find each other.
    """

    places: range
    job: PoolJob | None = None
    started: float = 0.0
    last_message: float = 0.0
    deadline: float | None = None
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    groups: str | None = None
    store: str = ""

    @property
    def complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) == len(self.places)


class Pool:
    """Up to `num_ranks` processes of `python -m MODULE`; leaving its context ends them.

    Args:
        num_ranks: the largest number of processes at a time.
        module: the dotted name of the module that each process runs.
        folder: the folder for the output of the ranks, and for the files by which they find each other.
        silence_seconds: the time after which a job fails if none of its ranks has sent a message.
    """

    def __init__(self, num_ranks: int, module: str, folder: Path, silence_seconds: float) -> None:
        self.num_ranks = num_ranks
        self.module = module
        self.folder = folder
        self.silence_seconds = silence_seconds
        self.ranks: dict[int, RankProcess] = {}
        self.inbox: queue.Queue[Line] = queue.Queue()
        self._num_stores = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self._end(list(self.ranks))

    def run(self, jobs: Iterable[PoolJob]) -> Iterator[Outcome]:
        """Runs all jobs, those with fewer ranks first, else in the given order; yields each outcome at once."""
        by_size: dict[int, deque[PoolJob]] = {}
        for job in jobs:
            by_size.setdefault(job.num_ranks, deque()).append(job)
        for size in sorted(by_size):
            yield from self._run_jobs(by_size[size], size)

    def _run_jobs(self, waiting: deque[PoolJob], size: int) -> Iterator[Outcome]:
        """Runs jobs of `size` ranks each, in as many lanes as the pool and the machine's cores allow."""
        count = min(self.num_ranks // size, max(1, 2 * (os.cpu_count() or 1) // size), len(waiting))
        lanes = [Lane(range(number * size, (number + 1) * size)) for number in range(count)]
        while True:
            for lane in lanes:
                if lane.job is None and waiting:
                    self._begin(lane, waiting.popleft())
            if all(lane.job is None for lane in lanes):
                return
            self._receive(lanes)
            for lane in lanes:
                outcome = self._outcome(lane)
                if outcome is not None:
                    yield outcome

    def _begin(self, lane: Lane, job: PoolJob) -> None:
        for place in lane.places:
            if place not in self.ranks:
                self.ranks[place] = RankProcess(self.module, self.folder / f"rank-{place}.log", self.inbox)
                lane.groups = None
        if lane.groups != job.groups:
            self._num_stores += 1
            lane.groups, lane.store = job.groups, str(self.folder / f"store-{self._num_stores}")
        lane.job, lane.answers, lane.error, lane.deadline = job, {}, "", None
        lane.started = lane.last_message = time.monotonic()
        for rank, place in enumerate(lane.places):
            self.ranks[place].send(
                {"rank": rank, "num_ranks": job.num_ranks, "store": lane.store, "payload": job.payload}
            )

    def _receive(self, lanes: Sequence[Lane]) -> None:
        """Handles one line of any rank; returns after a moment if none comes."""
        try:
            sender, line = self.inbox.get(timeout=0.2)
        except queue.Empty:
            return
        for lane in lanes:
            for rank, place in enumerate(lane.places):
                if self.ranks.get(place) is sender and lane.job is not None:
                    self._handle(lane, rank, sender, line)

    def _handle(self, lane: Lane, rank: int, sender: RankProcess, line: bytes | None) -> None:
        lane.last_message = time.monotonic()
        message = {"error": pack(WorkerDied(sender.describe_exit()))} if line is None else json.loads(line)
        if "error" in message:
            lane.error = lane.error or f"rank {rank}: {unpack(message['error'])}"
            lane.deadline = lane.deadline or lane.last_message + GRACE_SECONDS
        if "error" in message or "result" in message:
            lane.answers[rank] = message

    def _outcome(self, lane: Lane) -> Outcome | None:
        """Returns the outcome of a lane's job, or None if it still runs; after an error, ends the lane's processes."""
        job, now = lane.job, time.monotonic()
        if job is None:
            return None
        if not lane.complete and now - lane.last_message > self.silence_seconds:
            silent = ", ".join(str(rank) for rank in range(job.num_ranks) if rank not in lane.answers)
            lane.error = lane.error or f"no message from ranks {silent} for {self.silence_seconds:g} seconds"
            lane.deadline = now
        if not lane.complete and (lane.deadline is None or now < lane.deadline):
            return None
        lane.job, seconds = None, now - lane.started
        if lane.error:
            self._end(lane.places)
            return Outcome(job, error=lane.error, seconds=seconds)
        return Outcome(job, tuple(lane.answers[rank]["result"] for rank in range(job.num_ranks)), seconds=seconds)

    def _end(self, places: Iterable[int]) -> None:
        for place in places:
            self.ranks.pop(place).end()


def first_answer(outcome: Outcome) -> dict[str, Any]:
    """Returns the answer of a job's rank 0.

    Raises:
        TkError: the job failed.
    """
    if outcome.error:
        raise TkError(f"{outcome.job.name}: {outcome.error}")
    return outcome.answers[0]
