"""Full queues, quotas and cancellations of a real server process: statuses, and a cache without leaks afterwards.

Tests stop the worker, so that what is live stays so for as long as they need it.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.serving import Serving
from tk.tests.infer.serve.test_status_table import seen
from tk.tests.infer.serve.tiny_model import write_tiny_model

WAIT_SECONDS = 60.0
CALLERS = {
    "alice": Caller("alice", frozenset({GENERATE})),
    "bob": Caller("bob", frozenset({GENERATE}), 2.0),
    "ops": Caller("ops", frozenset({GENERATE, ADMIN})),
}
LIMITS = {"--max-running": 2, "--max-queued": 4, "--max-queued-tokens": 300, "--quota-sequences": 3}


class Clients:
    """Stubs of a server, and the callers that use them."""

    def __init__(self, serving: Serving, channel: grpc.Channel) -> None:
        self.serving = serving
        self.generation: Any = GenerationStub(channel)
        self.admin: Any = AdminStub(channel)

    def stream(self, who: str, request_id: str, num_prompt: int = 20, timeout: float = WAIT_SECONDS) -> Any:
        request = pb.GenerateRequest(request_id=request_id, tokens={"ids": range(num_prompt)})
        request.stopping.max_new_tokens, request.stopping.ignore_eos = 480 - num_prompt, True
        return self.generation.Generate(request, metadata=bearer(who), timeout=timeout)

    def refusal(self, who: str, request_id: str, num_prompt: int = 20) -> tuple[str, dict[str, Any]]:
        call = self.stream(who, request_id, num_prompt)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert "x-request-id" not in dict(call.initial_metadata()), "a refusal has trailers only"
        return seen(caught.value)

    def load(self) -> pb.Load:
        load: pb.Load = self.admin.GetLoad(pb.GetLoadRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
        return load

    def wait_live(self, number: int, is_over: Callable[[], bool] = lambda: False) -> pb.Load:
        """The load, once so many sequences are live, or one of them is over."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (load := self.load()).running + load.waiting != number and not is_over():
            assert time.monotonic() < deadline, load
            time.sleep(0.005)
        return load

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A time in which no step ends: what the engine admits waits, and what ends is taken out afterwards."""
        [worker] = self.serving.worker_ids()
        os.kill(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)

    def check_idle(self) -> None:
        """Waits until nothing is live, and checks the cache."""
        self.wait_live(0)
        report = self.admin.CheckCache(pb.CheckCacheRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
        assert list(report.problems) == []
        assert (report.leaked, report.used, report.cached + report.free) == (0, 0, report.total)


def bearer(who: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {who}"),)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("model")
    model = write_tiny_model(folder / "tiny-llama")
    tokens = folder / "tokens"
    tokens.write_text("".join(line_of(token_digest(name), caller) for name, caller in CALLERS.items()))
    limits = [word for name, value in LIMITS.items() for word in (name, str(value))]
    serving = Serving(str(model), "--kv-blocks", "64", "--tokens", str(tokens), *limits).wait_ready()
    yield serving
    serving.close()


@pytest.fixture
def clients(serving: Serving) -> Iterator[Clients]:
    with grpc.insecure_channel(serving.target) as channel:
        clients = Clients(serving, channel)
        yield clients
        clients.check_idle()


def test_queue_and_quota_are_full_and_empty_again(clients: Clients) -> None:
    with clients.stopped():
        calls = [clients.stream("alice", f"a{i}") for i in range(3)]
        clients.wait_live(3)
        code, details = clients.refusal("alice", "a3")
        assert code == "RESOURCE_EXHAUSTED"
        assert details["QuotaFailure"].violations[0].subject == "principal:alice"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() >= 1000

        calls += [clients.stream("bob", f"b{i}") for i in range(2)]
        load = clients.wait_live(5)
        assert load.state == pb.STATE_SERVING
        assert load.blocks_used + load.blocks_cached + load.blocks_free == load.blocks_total == 64
        code, details = clients.refusal("bob", "b3", num_prompt=301 - load.queued_tokens)
        assert (code, details["QuotaFailure"].violations[0].subject) == ("RESOURCE_EXHAUSTED", "queue")
        assert "The queue has no room for the" in details["QuotaFailure"].violations[0].description

        calls.append(clients.stream("bob", "b2"))
        clients.wait_live(6)
        calls.append(clients.stream("ops", "o1"))
        clients.wait_live(7)
        code, details = clients.refusal("ops", "o2")
        assert (code, details["QuotaFailure"].violations[0].subject) == ("RESOURCE_EXHAUSTED", "queue")
        assert isinstance(details["RetryInfo"], error_details_pb2.RetryInfo)
        assert clients.refusal("bob", "b1")[0] == "ALREADY_EXISTS"
    for call in calls:
        assert len([response for response in call if response.WhichOneof("event") == "finished"]) == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline", "abort"])
@pytest.mark.parametrize("place", ["running", "waiting"])
def test_a_request_that_ends_early_gives_its_blocks_back(clients: Clients, how: str, place: str) -> None:
    own = grpc.insecure_channel(clients.serving.target)
    leaver = Clients(clients.serving, own)
    with clients.stopped():
        timeout = 2.0 if how == "deadline" else WAIT_SECONDS
        first = [clients.stream("bob", "b0")] if place == "waiting" else []
        clients.wait_live(len(first))
        call = leaver.stream("alice", "x", timeout=timeout)
        clients.wait_live(len(first) + 1, call.done)  # its deadline may pass on a slow machine
        others = [*first, clients.stream("bob", "b1")]
        clients.wait_live(len(others) + 1, call.done)
        expected = grpc.StatusCode.CANCELLED
        if how == "cancel":
            call.cancel()
        elif how == "disconnect":
            own.close()
        elif how == "abort":
            request = pb.AbortRequest(request_id="x", principal="alice")
            assert clients.admin.Abort(request, metadata=bearer("ops"), timeout=WAIT_SECONDS).found
        else:
            expected = grpc.StatusCode.DEADLINE_EXCEEDED
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == expected
    for other in others:
        assert len([response for response in other if response.WhichOneof("event") == "finished"]) == 1
    own.close()


def test_a_flushed_cache_finds_nothing(clients: Clients) -> None:
    call = clients.stream("alice", "", num_prompt=100)
    list(call)
    clients.wait_live(0)
    again = clients.stream("alice", "", num_prompt=100)
    assert next(again).started.cached_tokens == 96
    again.cancel()
    load = clients.wait_live(0)
    assert 0 < load.prefix_hit_rate < 1
    assert load.blocks_cached > 0
    flushed = clients.admin.FlushPrefixCache(pb.FlushPrefixCacheRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
    assert flushed.blocks == load.blocks_cached
    last = clients.stream("alice", "", num_prompt=100)
    assert next(last).started.cached_tokens == 0
    last.cancel()
