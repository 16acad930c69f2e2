"""Principals of a real server over both protocols: one never finds, nor sees, the prefixes that another has cached.

The tokens that steps compute are counted, not seconds: the log of slow steps has every step here.
"""

import http.client
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub
from tk.tests.infer.serve.serving import WAIT_SECONDS, Serving
from tk.tests.infer.serve.test_status_table import seen
from tk.tests.infer.serve.tiny_model import write_tiny_model

LENGTH: Final = 321  # tokens of a prompt, one per letter
FULL: Final = 320  # of them in full blocks
LONG: Final = 1600  # letters of a prompt that more steps compute than are planned ahead of a worker that is stopped
CALLERS: Final = {
    "alice": Caller("alice", frozenset({GENERATE})),
    "bob": Caller("bob", frozenset({GENERATE})),
    "ops": Caller("ops", frozenset({GENERATE, ADMIN})),
}
OPTIONS: Final = "--kv-blocks 256 --max-queued-tokens 1500 --http 0 --slow-step-ms 0.0001"


def bearer(who: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {who}"),)


def short_answer(prompt: str) -> pb.GenerateRequest:
    stopping = pb.Stopping(max_new_tokens=3, ignore_eos=True)
    return pb.GenerateRequest(request_id="same", text=prompt, sampling={"seed": 1}, stopping=stopping)


class Tenants:
    """A server, and calls of its principals.

    Args:
        serving: the server.
        channel: to its gRPC port.
        log: its standard error.
    """

    def __init__(self, serving: Serving, channel: grpc.Channel, log: Path) -> None:
        self.serving, self._log = serving, log
        self.generation: Any = GenerationStub(channel)
        self.admin: Any = AdminStub(channel)
        assert serving.process.stdout is not None
        self._http = serving.process.stdout.readline().removeprefix("http ").strip()

    def over_grpc(self, who: str, prompt: str) -> tuple[int, Any]:
        """The cached tokens of an answer, and all else in it that neither the prompt's text nor the clock decides."""
        request = short_answer(prompt)
        result, call = self.generation.GenerateOnce.with_call(request, metadata=bearer(who), timeout=WAIT_SECONDS)
        [choice] = result.choices
        for message, names in ((choice, ("text", "token_ids")), (result, ("timing",))):
            for name in names:
                message.ClearField(name)
        first = next(iter(self.generation.Generate(request, metadata=bearer(who), timeout=WAIT_SECONDS)))
        self.wait_idle()
        again = first.started.cached_tokens
        first.started.ClearField("cached_tokens")
        assert again == FULL, "within one principal the second call finds the first one's blocks"
        headers = sorted(call.initial_metadata()), sorted(call.trailing_metadata())
        return result.usage.cached_tokens, (result, first, headers)

    def over_http(self, who: str, prompt: str) -> tuple[int, Any]:
        """The same over HTTP."""
        body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True, "seed": 1}
        status, headers, answer = self.ask(who, "/v1/completions", body)
        assert status == 200, answer
        for name in ("created", "id"):
            del answer[name]
        for choice in answer["choices"]:
            del choice["text"]
        again = self.ask(who, "/v1/completions", body)[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again == FULL, "within one principal the second call finds the first one's blocks"
        self.wait_idle()
        names = sorted(name for name, _ in headers)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], (answer, names)

    def ask(
        self, who: str, path: str, body: Any = None, timeout: float | None = None
    ) -> tuple[int, list[tuple[str, str]], Any]:
        connection = http.client.HTTPConnection(self._http, timeout=WAIT_SECONDS)
        try:
            headers = {"authorization": f"Bearer {who}", "content-type": "application/json", "x-request-id": "same"}
            if timeout is not None:
                headers["x-request-timeout"] = str(timeout)
            data = None if body is None else json.dumps(body)
            connection.request("GET" if data is None else "POST", path, data, headers)
            response = connection.getresponse()
            return response.status, response.getheaders(), json.loads(response.read())
        finally:
            connection.close()

    def wait_idle(self) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while (load := self.load()).running + load.waiting:
            assert time.monotonic() < end, load
            time.sleep(0.005)

    def load(self) -> pb.Load:
        load: pb.Load = self.admin.GetLoad(pb.GetLoadRequest(), metadata=bearer("ops"), timeout=WAIT_SECONDS)
        return load

    def num_computed(self) -> int:
        """The prompt tokens that all steps so far have computed, from the log of steps."""
        return sum(map(int, re.findall(r"(\d+) of them of prompts", self._log.read_text())))

    @contextmanager
    def computes(self, num_tokens: int, num_blocks: int) -> Iterator[None]:
        """Checks that steps compute so many prompt tokens meanwhile, and that so many more blocks are cached then."""
        computed, cached = self.num_computed(), self.load().blocks_cached
        yield
        end = time.monotonic() + WAIT_SECONDS
        while (found := self.num_computed() - computed) < num_tokens and time.monotonic() < end:
            time.sleep(0.005)  # a thread of its own writes the log
        assert (found, self.load().blocks_cached - cached) == (num_tokens, num_blocks)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """A time in which no step ends."""
        [worker] = self.serving.worker_ids()
        os.kill(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(worker, signal.SIGCONT)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    folder = tmp_path_factory.mktemp("tenants")
    tokens = folder / "tokens"
    tokens.write_text("".join(line_of(token_digest(name), caller) for name, caller in CALLERS.items()))
    with tempfile.NamedTemporaryFile(dir=folder) as log:
        words = (str(write_tiny_model(folder / "model", 2048)), "--tokens", str(tokens), *OPTIONS.split())
        serving = Serving(*words, log=log.fileno()).wait_ready()
        yield serving, Path(log.name)
        serving.close()


@pytest.fixture(scope="module")
def tenants(serving: tuple[Serving, Path]) -> Iterator[Tenants]:
    with grpc.insecure_channel(serving[0].target) as channel:
        tenants = Tenants(serving[0], channel, serving[1])
        end = time.monotonic() + WAIT_SECONDS
        while not tenants.num_computed():  # the line of the server's own first request may still be on its way
            assert time.monotonic() < end
            time.sleep(0.005)
        yield tenants


def test_a_principal_computes_what_another_has_cached_and_sees_no_difference(tenants: Tenants) -> None:
    ways = {"grpc": tenants.over_grpc, "http": tenants.over_http}
    for first, second in product(ways, ways):
        hot, cold = (f"{name} {first} {second} ".ljust(LENGTH, "a") for name in ("hot", "cold"))
        # Each way asks twice: the whole prompt, and then the one token after the blocks that it finds.
        with tenants.computes(LENGTH + 1, FULL // 32):
            assert ways[first]("alice", hot)[0] == 0
        with tenants.computes(LENGTH + 1, FULL // 32):
            found, view = ways[second]("bob", hot)
        with tenants.computes(LENGTH + 1, FULL // 32):
            assert ways[second]("bob", cold) == (found, view), "what no one has asked before"
        assert found == 0
        with tenants.computes(2, 0):
            assert ways[first]("bob", hot)[0] == FULL, "hits within one principal, whatever the protocol"


def test_a_refusal_says_nothing_of_what_another_has_cached(tenants: Tenants) -> None:
    hot, cold = ("refused " + name.ljust(LONG, "a") for name in ("hot", "cold"))
    tenants.generation.GenerateOnce(short_answer(hot), metadata=bearer("alice"), timeout=WAIT_SECONDS)
    refusals = [refused_beside(tenants, prompt) for prompt in (hot, cold)]
    assert refusals[0] == refusals[1]
    (code, text, details), (status, _, answer), (late_status, _, late) = refusals[0]
    assert (code, status, late_status) == ("RESOURCE_EXHAUSTED", 429, 504)
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000
    for words in (text, answer["error"]["message"], late["error"]["message"]):
        assert set(re.findall(r"\d+", words)) <= {"1500", "1510", "20", "0", "00"}, "limits, and its own numbers"


def refused_beside(tenants: Tenants, prompt: str) -> tuple[Any, ...]:
    """What bob reads in refusals while a prompt of alice's is computed: over both protocols, and for want of time."""
    with tenants.stopped():
        alice = tenants.generation.Generate(short_answer(prompt), metadata=bearer("alice"), timeout=WAIT_SECONDS)
        while not tenants.load().running:
            time.sleep(0.005)
        large = pb.GenerateRequest(text="b" * 1510)
        with pytest.raises(grpc.RpcError) as caught:
            tenants.generation.GenerateOnce(large, metadata=bearer("bob"), timeout=WAIT_SECONDS)
        code, details = seen(caught.value)
        wide = tenants.ask("bob", "/v1/completions", {"prompt": "b" * 1510})
        late = tenants.ask("bob", "/v1/completions", {"prompt": "b" * 20}, timeout=1e-6)
    list(alice)
    tenants.wait_idle()
    for refusal in (wide, late):
        refusal[1][:] = [pair for pair in refusal[1] if pair[0] not in ("date", "content-length")]
    return (code, caught.value.details(), details), wide, late


def test_the_numbers_of_the_server_are_for_operators(tenants: Tenants) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        tenants.admin.GetLoad(pb.GetLoadRequest(), metadata=bearer("bob"), timeout=WAIT_SECONDS)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert [tenants.ask("bob", path)[0] for path in ("/load", "/metrics", "/v1/models")] == [403, 403, 200]
    views = []
    for who in ("alice", "bob"):
        info = tenants.generation.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer(who), timeout=WAIT_SECONDS)
        views.append((info, tenants.ask(who, "/v1/models")[2], tenants.ask(who, "/health")[2]))
        tenants.over_grpc(who, f"numbers {who}".ljust(LENGTH, "a"))
    assert views[0] == views[1]
