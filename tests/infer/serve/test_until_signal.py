"""The run of a server from its opening to a signal, over a scripted engine; signals reach this process itself."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tk.core.errors import Cancelled, TkError
from tk.infer.engine.request.events import Done, Failed
from tk.infer.engine.request.request import Request
from tk.infer.serve.app import End, serve_until_signal
from tk.infer.serve.options import ServerOptions
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub
from tk.tests.infer.serve.fake_engine import WAIT_SECONDS, FakeEngine, delta, finished, started


class LoadingFake(FakeEngine):
    """Loads until the test says so, and closes as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.waits = threading.Event(), threading.Event()
        self.is_closed = self.is_killed = False

    def wait_ready(self) -> None:
        self.waits.set()
        assert self.loaded.wait(WAIT_SECONDS)
        if self.is_closed:
            raise Cancelled("closed")

    def close(self) -> None:
        self.is_closed = True
        self.loaded.set()

    def kill(self) -> None:
        self.is_killed = True
        super().kill()


@pytest.fixture
def loading() -> Iterator[LoadingFake]:
    engine = LoadingFake()
    yield engine
    super(LoadingFake, engine).close()


def beside(work: Callable[[], None]) -> threading.Thread:
    """Runs work beside the server, which needs the main thread."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def readiness(target: str) -> str:
    with grpc.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def test_the_port_is_open_while_the_engine_loads_and_ready_after_a_warm_up_request(
    loading: LoadingFake, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def visit() -> None:
        assert loading.waits.wait(WAIT_SECONDS)
        [target] = [m.removeprefix("listening on ") for m in caplog.messages if m.startswith("listening on ")]
        seen.append(readiness(target))
        with grpc.insecure_channel(target) as channel:
            stub = GenerationStub(channel)
            calls = [
                (stub.GenerateOnce, pb.GenerateRequest(text="hi")),
                (stub.Tokenize, pb.TokenizeRequest(text="hi")),
                (stub.GetModelInfo, pb.GetModelInfoRequest()),
            ]
            for call, request in calls:
                with pytest.raises(grpc.RpcError, match="loading") as caught:
                    call(request, timeout=WAIT_SECONDS)
                seen.append(caught.value.code().name)
            alive = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            seen.append(str(alive.status == health_pb2.HealthCheckResponse.SERVING))
        assert loading.requests == []
        loading.loaded.set()

    def on_ready(address: str) -> None:
        seen.append(f"ready after {len(loading.requests)}")

        def end() -> None:
            seen.append(readiness(address))
            send(signal.SIGTERM)

        threads.append(beside(end))

    with caplog.at_level("INFO", logger="tk"):
        threads = [beside(visit)]
        assert serve_until_signal(loading, ServerOptions(port=0), on_ready) is End.DRAINED
    for thread in threads:
        thread.join()
    assert seen == ["NOT_SERVING", *["UNAVAILABLE"] * 3, "True", "ready after 1", "SERVING"]
    assert not loading.is_killed


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, End.TERMINATED), (signal.SIGINT, End.INTERRUPTED)])
def test_a_signal_while_the_engine_loads_ends_it(loading: LoadingFake, number: int, end: End) -> None:
    def interrupt() -> None:
        assert loading.waits.wait(WAIT_SECONDS)
        send(number)

    thread = beside(interrupt)
    assert serve_until_signal(loading, ServerOptions(port=0), lambda address: None) is end
    thread.join()
    assert loading.is_killed
    assert loading.is_closed


def test_an_engine_that_cannot_answer_the_warm_up_request_is_not_served(loading: LoadingFake) -> None:
    def broken(request: Request) -> list[Failed]:
        return [Failed(TkError("The model's logits are not finite."))]

    loading.script = broken
    loading.loaded.set()
    ready: list[str] = []
    with pytest.raises(TkError, match="not finite"):
        serve_until_signal(loading, ServerOptions(port=0), ready.append)
    assert ready == []


@pytest.mark.parametrize("signals", [1, 2])
def test_live_requests_finish_after_one_signal_and_not_after_two(loading: LoadingFake, signals: int) -> None:
    threads: list[threading.Thread] = []
    ends: list[str] = []

    def use(address: str) -> None:
        loading.script = lambda request: [started(request)]
        with grpc.insecure_channel(address) as channel:
            call = GenerationStub(channel).Generate(pb.GenerateRequest(text="hi", request_id="x"), timeout=WAIT_SECONDS)
            next(call)
            request = health_pb2.HealthCheckRequest(service="tk.v1.Generation")
            watch = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=WAIT_SECONDS)
            next(watch)
            send(signal.SIGTERM)
            next(watch)
            if signals == 2:
                send(signal.SIGTERM)
            else:
                loading.emit("x", delta("abc"), finished(), Done())
            try:
                ends.append(" ".join(str(response.WhichOneof("event")) for response in call))
            except grpc.RpcError as error:
                ends.append(error.code().name)

    loading.loaded.set()
    end = serve_until_signal(
        loading, ServerOptions(port=0), lambda address: threads.append(beside(lambda: use(address)))
    )
    threads[0].join()
    assert (end, ends, loading.is_killed) == (
        (End.DRAINED, ["delta finished"], False) if signals == 1 else (End.SECOND_SIGNAL, ["UNAVAILABLE"], True)
    )
