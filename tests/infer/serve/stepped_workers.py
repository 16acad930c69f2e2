"""Workers of an engine in its own process that compute nothing: each answers a step when it is let to."""

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from tk.core.casts import Array
from tk.core.errors import Cancelled
from tk.infer.engine.job import Job
from tk.infer.engine.step.sampler_output import SamplerOutput
from tk.infer.engine.step.step_message import StepMessage, decode_message
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.infer.engine.worker.step_watch import StepWatch

NUM_TOP = 2  # alternatives of every token


class SteppedWorkers:
    """Stands for a `WorkerGroup`; every row gets the next of the tokens 1 to 99.

    A step of several rows is answered when readers have got the tokens of the step before: see `read`.
    """

    process_ids = ()

    def __init__(self, processes: WorkerProcesses, watch: StepWatch, on_wake: Callable[[], object]) -> None:
        self.watch = watch
        self._woken, self._is_closing = threading.Event(), False
        self._num_rows: deque[int] = deque()  # of the steps without an answer
        self._num_last = self._next = self._num_unread = 0
        self._may_answer = threading.Event()
        self._may_answer.set()

    def read(self, num_tokens: int) -> None:
        """Records that readers have got so many tokens."""
        self._num_unread -= num_tokens
        if not self._num_unread:
            self._may_answer.set()

    def start(self, job: Job, timeout: float) -> str:
        return "none"

    def send(self, message: bytes) -> None:
        step = decode_message(message)
        if isinstance(step, StepMessage):
            self._num_last = int(step.spans[:, 5].sum())
        self._num_rows.append(self._num_last)

    def send_masks(self, masks: Array) -> None:
        raise AssertionError("no request has a constraint")

    def send_tokens(self, tokens: Array) -> None:
        """Every worker has sampled them itself."""

    def receive(self) -> SamplerOutput:
        self._may_answer.wait()
        if self._is_closing:
            raise Cancelled("closed")
        num_rows = self._num_rows.popleft()
        if num_rows:
            self._may_answer.clear()
            self._num_unread = num_rows
        tokens = (np.arange(self._next, self._next + num_rows, dtype=np.int32)) % 99 + 1
        self._next += num_rows
        return SamplerOutput(
            token_ids=tokens,
            finite=np.ones(num_rows, np.uint8),
            logprob=np.full(num_rows, -0.5, np.float32),
            rank=np.ones(num_rows, np.int32),
            top_ids=np.stack([tokens] * NUM_TOP, axis=1),
            top_logprobs=np.full((num_rows, NUM_TOP), -0.5, np.float32),
            candidates=np.empty((num_rows, 0), np.int32),
        )

    def sleep(self) -> None:
        self._woken.wait()
        self._woken.clear()

    def wake(self, closing: bool = False) -> None:
        self._is_closing |= closing
        self._woken.set()
        if closing:
            self._may_answer.set()

    def close(self, kill: bool = False) -> None:
        """No process has to end."""
