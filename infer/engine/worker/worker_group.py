"""The engine's side of its workers: their jobs, messages, deaths and end."""

import select
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Final

from ....core.casts import Array
from ....core.errors import Cancelled, WorkerDied
from ..job import Job
from ..step.channel import Frame, error_from, masks_frame, tokens_frame
from ..step.rank_frames import RankFrames
from ..step.sampler_output import SamplerOutput
from .adapter_loaders import AdapterLoaders, PackedOrder
from .adapter_order import AdapterOrder
from .process_state import describe_ranks
from .processes import WorkerProcesses
from .step_watch import IDLE_SECONDS, LOOK_SECONDS, StepWatch

REPORT_TIMEOUT: Final = 5.0  # seconds for the kernel to report how a process ended whose connection is closed


class WorkerGroup:
    """The workers of an engine.

    Only the thread that calls `start` may call the other methods, except `wake`, `kill` and `pack_adapter`.

    Attributes:
        watch: the watch over their steps, which the sender of one begins.

    Args:
        processes: their processes, which the group ends.
        on_wake: is called after `wake`, also while the thread waits for an answer of workers that may hang.
        beside: a group that is idle while the thread waits for this one, which then notices an end of its processes.
        name: what errors call a rank.
    """

    def __init__(
        self,
        processes: WorkerProcesses,
        watch: StepWatch,
        on_wake: Callable[[], object] = lambda: None,
        beside: "WorkerGroup | None" = None,
        name: str = "Inference rank",
    ) -> None:
        self._processes, self.watch, self._on_wake, self._name = processes, watch, on_wake, name
        self._connections: Sequence[socket.socket] = ()
        self._loaders = AdapterLoaders(())
        self._uninformed: list[socket.socket] = []  # of ranks that do not sample the tokens that they need
        self._is_closing = self._is_killed = False
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        if beside is None:
            self._frames: RankFrames = RankFrames(self._woken)
        else:
            self._frames = RankFrames(self._woken, beside._frames, partial(beside._expect_silence, 0.0))

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids, in rank order."""
        return self._processes.process_ids

    def start(self, job: Job, timeout: float) -> str:
        """Gives the ranks their jobs, waits until each has loaded, and returns the kernels of rank 0 (see `Backend`).

        Args:
            job: the job that every rank receives, with its number and the file of the rendezvous.
            timeout: the time to load, in seconds.

        Raises:
            TkError: a worker reported an error, which keeps its class.
            WorkerDied: a worker ended without a report, or did not load in time.
            Cancelled: `wake` was called to close the group.
        """
        deadline = time.monotonic() + timeout
        self.watch.forget()
        self._connections = self._processes.connections()
        self._loaders = AdapterLoaders(self._processes.loader_connections())
        with tempfile.TemporaryDirectory(prefix="tk-infer-") as folder:
            for rank, connection in enumerate(self._connections):
                self._register(connection)
                frame = Frame("start", asdict(replace(job, rank=rank, store=f"{folder}/store")))
                self._send(frame, [connection])
            loading, kernels = set(range(job.tp)), ""
            while loading:
                if time.monotonic() >= deadline:
                    ranks = describe_ranks(self.process_ids)
                    raise WorkerDied(f"The inference workers did not load the model in {timeout:g} s: {ranks}.")
                for rank in self._wait_for_ranks(LOOK_SECONDS):
                    frame = self._receive(rank)
                    if frame.op == "error":
                        raise error_from(frame)
                    loading.remove(rank)
                    if not frame.values["samples"]:
                        self._uninformed.append(self._connections[rank])
                    kernels = frame.values["kernels"] if rank == 0 else kernels
            return kernels

    def _register(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            self._frames.add(connection, partial(self._wait_for, connection, select.POLLIN))
        except (ValueError, OSError) as error:  # another thread has closed the processes and their connections
            raise Cancelled("The workers were closed while they were starting.") from error

    def restart(self, job: Job, timeout: float) -> float:
        """Ends the processes, starts others with the same job as `start` does, and returns the seconds that it took.

        Raises:
            WorkerDied: also if `kill` was called, which is for good.
        """
        begun = time.monotonic()
        self._frames.forget()
        self._connections, self._uninformed = (), []
        self._loaders.close()
        self._processes.close()
        self._check_wanted()
        self._processes = self._processes.again()
        self._check_wanted()  # `kill` was perhaps too early for these processes
        self.start(job, timeout)
        return time.monotonic() - begun

    def send(self, message: bytes) -> None:
        """Sends the message of a step to every rank, which computes it after those before it.

        A rank that cannot be reached is reported by `receive`.
        """
        self._send(Frame("step", body=message), self._connections)

    def send_masks(self, masks: Array) -> None:
        """Sends the masks of the last step, uint32 [M, W], to the ranks that sample; they wait for them.

        All steps before it must be answered already.
        """
        self._send(masks_frame(masks), self._sampling)

    def sample_again(self, rows: Array, masks: Array) -> None:
        """Lets the ranks that sample do that again for the last step that was answered, which has candidates.

        Args:
            rows: the numbers of rows, int32 [M], whose masks are given.
            masks: uint32 [M, W].
        """
        self._send(masks_frame(masks, rows), self._sampling)

    def send_tokens(self, tokens: Array, are_chosen: bool = False) -> None:
        """Sends the tokens of the last step that was answered to the ranks that wait for them.

        Args:
            tokens: int32 [R].
            are_chosen: whether the step had candidates, so that no rank knows its tokens.
        """
        waiting = self._connections if are_chosen else self._uninformed
        if waiting:
            self._send(tokens_frame(tokens), waiting)

    def receive(self) -> SamplerOutput:
        """Returns the answer of rank 0 to the oldest step without one. `send_tokens` must follow.

        Raises:
            WorkerDied: a rank ended, reported an error, or did not answer in time.
            Cancelled: `wake` was called to close the group, here and wherever the thread waits.
        """
        while True:
            for rank in self._wait_for_ranks(self.watch.seconds_to_look):
                answer = self._receive(rank)
                if answer.op == "error":
                    raise WorkerDied(str(error_from(answer)))
                self.watch.answered()
                return SamplerOutput.decode(answer.body)
            self.watch.look(self.process_ids)

    def pack_adapter(self, order: AdapterOrder, timeout: float) -> PackedOrder:
        """Lets every rank read and pack an adapter beside its steps, from any thread: see `AdapterLoaders.pack`.

        Raises:
            Cancelled: `wake` was called to close the group.
        """
        try:
            return self._loaders.pack(order, timeout)
        except WorkerDied:
            self._check_wanted()
            raise

    def put_adapter(self, packed: PackedOrder) -> None:
        """Lets every rank put a packed adapter into its slot before the next step; all steps must be answered already.

        Raises:
            WorkerDied: other workers have packed it, which have ended.
        """
        if packed.loaders is not self._loaders:
            raise WorkerDied("The inference workers ended before the adapter was loaded. Load it again.")
        self._send(Frame("adapter", {"number": packed.number}), self._connections)

    def drop_adapter(self, slot: int) -> None:
        """Lets every rank free the memory of a slot that no request uses; all steps must be answered already."""
        self._send(Frame("drop", {"slot": slot}), self._connections)

    def sleep(self) -> None:
        """Returns when `wake` is called, or after a look at the workers, which have nothing to compute.

        Raises:
            WorkerDied: a worker has ended, also one of the group beside.
        """
        self._expect_silence(IDLE_SECONDS)
        self.watch.look_at_idle(self.process_ids)

    def _expect_silence(self, seconds: float) -> None:
        for rank in self._wait_for_ranks(seconds):
            raise WorkerDied(f"{self._name} {rank} sent an unexpected message ({self._receive(rank).op}).")

    def wake(self, closing: bool = False) -> None:
        """Ends a `sleep`, from any thread; if the group is to be closed, whatever its thread waits for."""
        self._is_closing |= closing
        if closing:
            self._loaders.end()
        with suppress(OSError):  # the socket is full of wake-ups already, or closed
            self._wake_up.send(b"w")

    def kill(self) -> None:
        """Kills all processes, from any thread; what waits for them raises WorkerDied, even if they cannot end."""
        self._is_killed = True
        self._processes.kill()
        self.wake()

    def close(self, kill: bool = False) -> None:
        """Ends all processes: at once if `kill`, else after a time to end by themselves; a second call does nothing."""
        self._loaders.close()
        self._processes.close(kill)
        self._frames.close()
        self._wake_up.close()
        self._woken.close()

    @property
    def _sampling(self) -> list[socket.socket]:
        """The connections to the ranks that sample."""
        return [connection for connection in self._connections if connection not in self._uninformed]

    def _send(self, frame: Frame, connections: Sequence[socket.socket]) -> None:
        data = frame.encode()
        for connection in connections:
            rest = memoryview(data)
            while rest:
                try:
                    rest = rest[connection.send(rest) :]
                except BlockingIOError:  # a rank that hangs reads nothing
                    self._wait_for(connection, select.POLLOUT)
                except OSError:  # `_receive` reports a dead rank by its number
                    break

    def _wait_for_ranks(self, seconds: float) -> Sequence[int]:
        """Waits for messages, or at most so long, or until `wake`; returns the ranks that sent one."""
        ranks, is_woken = self._frames.wait(seconds)
        if is_woken and not ranks:
            self._awake()
        return ranks

    def _wait_for(self, connection: socket.socket, event: int) -> None:
        """Waits until a rank reads or writes on, at most a short time, and watches over its step."""
        poll = select.poll()
        poll.register(connection, event)
        poll.register(self._woken, select.POLLIN)
        if any(descriptor == self._woken.fileno() for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)):
            self._awake()
        self.watch.look(self.process_ids)

    def _awake(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        self._check_wanted()
        self._on_wake()

    def _check_wanted(self) -> None:
        if self._is_killed:
            raise WorkerDied("The inference workers were killed.")
        if self._is_closing:
            raise Cancelled("The engine was closed.")

    def _receive(self, rank: int) -> Frame:
        frame = self._frames.receive(rank)
        if frame is not None:
            return frame
        code = self._processes.exit_code(rank, REPORT_TIMEOUT)
        how = f"ended with exit code {code}"
        if code is None or code < 0:
            how = "closed its connection" if code is None else f"was killed by signal {-code}"
        raise WorkerDied(f"{self._name} {rank} (process {self.process_ids[rank]}) {how}; see its messages on stderr.")
