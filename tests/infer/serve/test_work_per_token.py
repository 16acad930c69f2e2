"""The work of the server for a token, from the workers' answer to the call's stream: calls are counted, not time."""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

import tk
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.worker.processes import WorkerProcesses
from tk.infer.engine.worker.step_watch import StepWatch
from tk.infer.serve.access.tokens import Caller, Callers
from tk.infer.serve.call.call import Frontend, RequestRunner
from tk.infer.serve.call.request_log import RequestLog
from tk.infer.serve.grpc.calls import GrpcCall
from tk.infer.serve.grpc.service import GenerationService
from tk.infer.serve.metrics.observer import Observers
from tk.infer.serve.metrics.statistics import RequestStatistics
from tk.infer.serve.operations.lifecycle import Lifecycle
from tk.infer.serve.operations.model_switch import ModelSwitch
from tk.proto.v1 import generation_pb2 as pb
from tk.tests.infer.serve.stepped_workers import SteppedWorkers
from tk.tests.infer.serve.tiny_model import write_tiny_model

ROOT = Path(tk.__file__).parent
ROOMS = tuple(f"{ROOT / room}/" for room in ("core", "infer", "text"))
STREAMS = 16  # fewer than those whose messages wait for a second token
FEW, MANY = 8, 40  # new tokens of each


class CallCounter:
    """Counts the calls that tk's code makes and gets, of Python's and C's functions, by thread.

    Calls between modules of Python's own are not counted: their number depends on its version.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        is_call = event == "call"
        if not is_call and event != "c_call":
            return
        is_ours = frame.f_code.co_filename.startswith(ROOMS)
        if is_call and not is_ours and frame.f_back is not None:
            is_ours = frame.f_back.f_code.co_filename.startswith(ROOMS)
        self.calls[threading.current_thread().name] += is_ours


@pytest.fixture
def counter() -> Iterator[CallCounter]:
    counter = CallCounter()
    before = sys.getprofile()
    threading.setprofile(counter)  # for threads that begin from now on
    sys.setprofile(counter)
    yield counter
    sys.setprofile(before)
    threading.setprofile(None)


class Context:
    """The context of a call, whose messages no one reads."""

    def __init__(self, workers: SteppedWorkers) -> None:
        self._workers = workers
        self.num_tokens = 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> None:
        """Returns no time: there is no deadline."""

    async def send_initial_metadata(self, metadata: object) -> None:
        """Sends nothing."""

    async def write(self, message: pb.GenerateResponse) -> None:
        if message.WhichOneof("event") == "delta":
            self.num_tokens += len(message.delta.token_ids)
            self._workers.read(len(message.delta.token_ids))


async def generate(
    service: GenerationService,
    frontend: Frontend,
    workers: SteppedWorkers,
    length: int,
    callers: int,
    output: dict[str, int],
) -> None:
    """Makes all calls at once, each with a prompt of its own."""
    contexts = [Context(workers) for _ in range(STREAMS)]
    requests = [
        pb.GenerateRequest(
            tokens={"ids": [length, number, 1]},
            sampling={"temperature": 0.0},
            stopping={"max_new_tokens": length, "ignore_eos": True},
            output=output,
        )
        for number in range(STREAMS)
    ]

    async def call(number: int) -> None:
        with frontend.log.call("Generate") as record:
            call = GrpcCall(frontend, record, cast(Any, contexts[number]))
            call.caller = Caller(f"caller-{number % callers}")
            await service.Generate(requests[number], call)

    await asyncio.gather(*(call(number) for number in range(STREAMS)))
    assert [context.num_tokens for context in contexts] == [length] * STREAMS


@pytest.mark.parametrize(
    ("callers", "output", "most"),
    [
        pytest.param(1, {}, 183, id="one caller"),
        pytest.param(2, {}, 184, id="two callers"),
        pytest.param(1, {"logprobs": 2}, 204, id="log-probabilities"),
    ],
)
def test_a_token_takes_few_calls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counter: CallCounter,
    callers: int,
    output: dict[str, int],
    most: int,
) -> None:
    """The bounds are 3 % more than were needed before fair places, watched steps and certain places of tokens."""
    made: list[SteppedWorkers] = []

    def make_workers(
        processes: WorkerProcesses, watch: StepWatch, on_wake: Callable[[], object], beside: None
    ) -> SteppedWorkers:
        made.append(SteppedWorkers(processes, watch, on_wake))
        return made[-1]

    monkeypatch.setattr("tk.infer.engine.engine.WorkerGroup", make_workers)
    options = EngineOptions(write_tiny_model(tmp_path / "model"), kv_blocks=256, max_running=STREAMS)
    engine = Engine.start(options, processes=cast(WorkerProcesses, None))

    async def serve() -> list[Counter[str]]:
        switch = ModelSwitch(engine, lambda running, checkpoint: None)
        lifecycle, statistics = Lifecycle(), RequestStatistics()
        lifecycle.set_loaded()
        observer = Observers([statistics])
        runner = RequestRunner(switch, lifecycle, observer=observer)
        frontend = Frontend(Callers(), RequestLog(observer=observer), runner, statistics)
        service = GenerationService(runner)
        found = []
        for length in (FEW, MANY):
            before = counter.calls.copy()
            await generate(service, frontend, made[0], length, callers, output)
            found.append(counter.calls - before)
        return found

    try:
        few, many = asyncio.run(serve())
    finally:
        engine.close()
    per_token = {thread: (many[thread] - few[thread]) / (STREAMS * (MANY - FEW)) for thread in many}
    assert per_token["tk-engine"] > 0
    assert sum(per_token.values()) <= most, per_token
