"""Processes that stand by to be ranks: started once, put together anew for every job, several jobs side by side.

A lane is as many of them as a job has ranks. Jobs and answers are lines of JSON; a lane in which a rank fails, dies or
falls silent is ended, its job's error is told, and the next job gets new processes. No torch is imported here.
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

GRACE_SECONDS: Final = 3.0  # that the peers of a failed rank get to answer
LOG_TAIL: Final = 2000  # characters of a dead rank's output that its error shows


@dataclass(frozen=True, eq=False)
class PoolJob:
    """What `num_ranks` ranks do together.

    Attributes:
        name: what errors call it.
        payload: plain data, the same for every rank.
        groups: jobs of equal `groups`, one after another, may keep their process groups.
    """

    name: str
    payload: dict[str, Any]
    num_ranks: int
    groups: str


@dataclass(frozen=True)
class Outcome:
    """How a job ended: every rank's answer in rank order, or an error."""

    job: PoolJob
    answers: tuple[dict[str, Any], ...] = ()
    error: str = ""
    seconds: float = 0.0


class RankProcess:
    """One process of the pool; its lines, and None when it ends, arrive in `inbox` with itself."""

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
        """One job for this rank; if it is dead, its end is in the inbox already."""
        try:
            if self.process.stdin is not None:
                self.process.stdin.write(json.dumps(message).encode() + b"\n")
                self.process.stdin.flush()
        except BrokenPipeError:
            return

    def end(self) -> None:
        """Ends it at once and waits for that."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def last_words(self) -> str:
        """How it ended, and what it printed last."""
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
        return f"its process ended with code {self.process.wait()}" + (f": {tail}" if tail else "")


Line = tuple[RankProcess, bytes | None]


@dataclass
class Lane:
    """Ranks that work on one job at a time.

    Attributes:
        places: which of the pool's processes they are.
        heard: when one of them said something last.
        give_up: when peers of a failed rank have had their time.
    """

    places: range
    job: PoolJob | None = None
    started: float = 0.0
    heard: float = 0.0
    give_up: float | None = None
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    groups: str | None = None
    store: str = ""

    @property
    def complete(self) -> bool:
        """Whether every rank has answered."""
        return len(self.answers) == len(self.places)


class Pool:
    """Up to `num_ranks` processes running `python -m MODULE`; a context that ends them.

    Args:
        folder: takes what ranks print, and the files by which they find each other.
        silence_seconds: after which a job none of whose ranks has said anything has failed.
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
        """Runs all jobs, those of fewer ranks first, otherwise in their order; yields each as it ends."""
        by_size: dict[int, deque[PoolJob]] = {}
        for job in jobs:
            by_size.setdefault(job.num_ranks, deque()).append(job)
        for size in sorted(by_size):
            yield from self._run_alike(by_size[size], size)

    def _run_alike(self, waiting: deque[PoolJob], size: int) -> Iterator[Outcome]:
        """Jobs of `size` ranks each, in as many lanes as there are processes for."""
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
        lane.job, lane.answers, lane.error, lane.give_up = job, {}, "", None
        lane.started = lane.heard = time.monotonic()
        for rank, place in enumerate(lane.places):
            self.ranks[place].send(
                {"rank": rank, "num_ranks": job.num_ranks, "store": lane.store, "payload": job.payload}
            )

    def _receive(self, lanes: Sequence[Lane]) -> None:
        """Takes in one line of any rank, or waits a moment."""
        try:
            sender, line = self.inbox.get(timeout=0.2)
        except queue.Empty:
            return
        for lane in lanes:
            for rank, place in enumerate(lane.places):
                if self.ranks.get(place) is sender and lane.job is not None:
                    self._note(lane, rank, sender, line)

    def _note(self, lane: Lane, rank: int, sender: RankProcess, line: bytes | None) -> None:
        lane.heard = time.monotonic()
        message = {"error": pack(WorkerDied(sender.last_words()))} if line is None else json.loads(line)
        if "error" in message:
            lane.error = lane.error or f"rank {rank}: {unpack(message['error'])}"
            lane.give_up = lane.give_up or lane.heard + GRACE_SECONDS
        if "error" in message or "result" in message:
            lane.answers[rank] = message

    def _outcome(self, lane: Lane) -> Outcome | None:
        """How a lane's job ended, if it has; a lane with an error begins with new processes."""
        job, now = lane.job, time.monotonic()
        if job is None:
            return None
        if not lane.complete and now - lane.heard > self.silence_seconds:
            silent = ", ".join(str(rank) for rank in range(job.num_ranks) if rank not in lane.answers)
            lane.error = lane.error or f"ranks {silent} said nothing for {self.silence_seconds:g} seconds"
            lane.give_up = now
        if not lane.complete and (lane.give_up is None or now < lane.give_up):
            return None
        lane.job, seconds = None, now - lane.started
        if lane.error:
            self._end(lane.places)
            return Outcome(job, error=lane.error, seconds=seconds)
        return Outcome(job, tuple(lane.answers[rank]["result"] for rank in range(job.num_ranks)), seconds=seconds)

    def _end(self, places: Iterable[int]) -> None:
        for place in places:
            self.ranks.pop(place).end()


def only(outcome: Outcome) -> dict[str, Any]:
    """The answer of a job's rank 0.

    Raises:
        TkError: the job failed.
    """
    if outcome.error:
        raise TkError(f"{outcome.job.name}: {outcome.error}")
    return outcome.answers[0]
