"""The calls of bench_reload_soak.py over gRPC and HTTP, and their answers in a form that can be compared."""

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from tk.benchmarks.serving.soak_cases import SoakCase
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import GenerationStub

PATIENCE: Final = 120.0  # seconds for a call that shall end by itself
_STATUSES: Final = {408: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}


@dataclass
class SoakAnswer:
    """The answer to a call, or the part of it that came.

    Attributes:
        status: "OK", the name of another status of gRPC, or "CUT": the caller left in the middle.
        step: the step that it reports; None if it reports none.
        samples: for each sample its text, token ids, log-probabilities and reason, as far as the protocol has them.
        more: what it has beside samples.
        error: the message of the server.
    """

    status: str = "OK"
    step: int | None = None
    samples: dict[int, list[Any]] = field(default_factory=dict)
    more: Any = None
    error: str = ""

    def sample(self, index: int) -> list[Any]:
        """Returns a sample to be filled."""
        return self.samples.setdefault(index, ["", [], [], ""])

    def begins(self, whole: "SoakAnswer") -> bool:
        """Returns whether this answer is a part of another one."""
        if self.more != whole.more and self.samples:
            return False
        for index, (text, ids, *_) in self.samples.items():
            other_text, other_ids, *_ = whole.samples.get(index, ["", [], [], ""])
            if not other_text.startswith(text) or other_ids[: len(ids)] != ids:
                return False
        return True

    def equals(self, other: "SoakAnswer") -> bool:
        """Returns whether two complete answers are one."""
        return (self.samples, self.more) == (other.samples, other.more)


class SoakCallers:
    """Calls of one server.

    Args:
        channel: an open channel to it, of grpc.aio.
        http_address: HOST:PORT of its HTTP.
        threads: the threads for calls over HTTP.
    """

    def __init__(self, channel: Any, http_address: str, threads: int = 8) -> None:
        self._stub: Any = GenerationStub(channel)
        self._http, self._threads = http_address, ThreadPoolExecutor(threads, "http-caller")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    async def ask(
        self, case: SoakCase, token: str, seconds: float = PATIENCE, leave_after: int = 1 << 30
    ) -> SoakAnswer:
        """Makes a call.

        Args:
            case: the request.
            token: the token of the caller.
            seconds: the deadline.
            leave_after: the number of events after which the caller leaves.
        """
        if case.body is not None:
            path, body = case.body
            call = _SoakHttpCall(self._http, token, path, body, seconds, leave_after)
            return await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
        answer = SoakAnswer()
        make = {"stream": self._streamed, "whole": self._whole, "score": self._scored}[case.kind]
        try:
            await make(case.message, {"metadata": bearer(token), "timeout": seconds}, leave_after, answer)
        except grpc.RpcError as error:
            answer.status, answer.error = error.code().name, error.details() or ""
        return answer

    async def _streamed(self, message: Any, options: dict[str, Any], leave_after: int, answer: SoakAnswer) -> None:
        call, events = self._stub.Generate(message, **options), 0
        async for event in call:
            events += 1
            kind = event.WhichOneof("event")
            if kind == "started":
                answer.step = event.started.step
            elif kind == "delta":
                sample = answer.sample(event.delta.index)
                sample[0] += event.delta.text
                sample[1] += event.delta.token_ids
                sample[2] += [each.SerializeToString() for each in event.delta.logprobs]
            elif kind == "finished":
                answer.sample(event.finished.index)[3] = event.finished.reason
            if events >= leave_after:
                call.cancel()
                answer.status = "CUT"
                return

    async def _whole(self, message: Any, options: dict[str, Any], leave_after: int, answer: SoakAnswer) -> None:
        call = self._stub.GenerateOnce(message, **options)
        if leave_after < 1 << 30:
            await asyncio.sleep(0.02 * leave_after)
            if call.cancel():
                answer.status = "CUT"
                return
        result = await call
        answer.step, answer.more = result.step, [each.SerializeToString() for each in result.prompt_logprobs]
        for each in result.choices:
            logprobs = [each.SerializeToString() for each in each.logprobs]
            answer.samples[each.index] = [each.text, list(each.token_ids), logprobs, each.reason]

    async def _scored(self, message: Any, options: dict[str, Any], leave_after: int, answer: SoakAnswer) -> None:
        answer.more = (await self._stub.Score(message, **options)).SerializeToString()


class _SoakHttpCall:
    """A call over HTTP, on a thread that waits."""

    def __init__(
        self, address: str, token: str, path: str, body: dict[str, Any], seconds: float, leave_after: int
    ) -> None:
        self._address, self._path, self._leave_after = address, path, leave_after
        self._is_streamed, self._data = bool(body.get("stream")), json.dumps(body)
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._headers["x-request-timeout"] = f"{seconds:.3f}"

    def run(self) -> SoakAnswer:
        answer = SoakAnswer()
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        try:
            connection.request("POST", self._path, self._data, self._headers)
            self._read(connection.getresponse(), answer)
        except OSError as error:
            answer.status, answer.error = "BROKEN", str(error)
        finally:
            connection.close()
        return answer

    def _read(self, response: http.client.HTTPResponse, answer: SoakAnswer) -> None:
        if response.status != 200:
            answer.error = response.read().decode(errors="replace")
            answer.status = _STATUSES.get(response.status, f"HTTP {response.status}")
            return
        for number, document in enumerate(_documents(response, self._is_streamed)):
            if "error" in document:
                answer.status, answer.error = str(document["error"]["code"]).upper(), document["error"]["message"]
                return
            answer.step = int(document["system_fingerprint"].removeprefix("step-"))
            for choice in document["choices"]:
                sample = answer.sample(choice["index"])
                said = choice.get("delta") or choice.get("message") or choice
                sample[0] += said.get("content") or said.get("text") or ""
                sample[3] = choice["finish_reason"] or sample[3]
            if self._is_streamed and number >= self._leave_after:
                answer.status = "CUT"
                return


def _documents(response: http.client.HTTPResponse, is_streamed: bool) -> Iterator[dict[str, Any]]:
    """Yields the JSON documents of a reply."""
    if not is_streamed:
        yield json.loads(response.read())
        return
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def bearer(token: str) -> list[tuple[str, str]]:
    """Returns the metadata with a caller's token."""
    return [("authorization", f"Bearer {token}")]


def malformed() -> list[tuple[str, Callable[[Any], Any], str]]:
    """Returns calls that the server refuses: a name, the call of a stub of Generation, and the status."""

    def asking(**fields: Any) -> Callable[[Any], Any]:
        return lambda stub: stub.GenerateOnce(pb.GenerateRequest(**fields), timeout=PATIENCE, metadata=bearer("one"))

    wrong = "INVALID_ARGUMENT"
    return [
        ("no prompt", asking(), wrong),
        ("a token beyond the vocabulary", asking(tokens={"ids": [1 << 31]}), wrong),
        ("top_p of 3", asking(text="a", sampling={"top_p": 3.0}), wrong),
        ("half a regular expression", asking(text="a", sampling={"regex": "(a|"}), wrong),
        ("half a schema", asking(text="a", sampling={"json_schema": '{"type":'}), wrong),
        ("an endless schema", asking(text="a", sampling={"json_schema": '{"$ref": "#/nowhere"}'}), wrong),
        ("half a grammar", asking(text="a", sampling={"grammar": "start: missing"}), wrong),
        ("a conversation of nobody", asking(chat={"messages": []}), wrong),
        ("too long", asking(tokens={"ids": [5] * 100_000}), wrong),
        ("another model", asking(text="a", model="other"), "NOT_FOUND"),
        (
            "no token",
            lambda stub: stub.GenerateOnce(pb.GenerateRequest(text="a"), timeout=PATIENCE),
            "UNAUTHENTICATED",
        ),
    ]


async def refused(call: Any) -> str:
    """Returns the status of a call."""
    with suppress(grpc.RpcError):
        await call
    code = await call.code()
    return str(code.name)
