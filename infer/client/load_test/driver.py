"""The run of a load test: it sends the requests and notes when their tokens come."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from ....core.errors import TkError
from ...engine.request.events import Delta
from ...engine.request.sampling_params import SamplingParams
from ..async_client import AsyncClient
from .workload import Workload

OK = "OK"


@dataclass
class Observation:
    """One request as its caller saw it. Times are in seconds after the start of the test.

    Attributes:
        due: the time at which the request was due; latencies count from here, also if it was sent later.
        sent: the time at which it was sent.
        ended: the time at which the call ended.
        messages: the time and the number of new tokens of each message with tokens.
        status: the name of the gRPC status, "OK" for a completed request.
    """

    due: float
    sent: float = 0.0
    ended: float = 0.0
    messages: list[tuple[float, int]] = field(default_factory=list)
    status: str = OK

    @property
    def num_tokens(self) -> int:
        """The number of tokens that came."""
        return sum(count for _, count in self.messages)

    @property
    def first_token_seconds(self) -> float:
        """The time from the moment at which the request was due to its first token."""
        return self.messages[0][0] - self.due

    @property
    def token_seconds(self) -> float:
        """The mean time per token after the first message; 0 if no other message came."""
        later = self.num_tokens - self.messages[0][1]
        return (self.messages[-1][0] - self.messages[0][0]) / later if later else 0.0

    @property
    def gaps(self) -> list[float]:
        """The times between messages with tokens."""
        times = [when for when, _ in self.messages]
        return [after - before for before, after in pairwise(times)]


class LoadTest:
    """A load test of one server.

    Args:
        client: the connection, which makes one attempt per call: a refusal is a result here.
        workload: the requests.
        vocab_size: the size of the model's vocabulary.
        on_end: is called at the end of each request.
    """

    def __init__(
        self,
        client: AsyncClient,
        workload: Workload,
        vocab_size: int,
        on_end: Callable[[Observation], None] = lambda observation: None,
    ) -> None:
        self._client, self._workload, self._vocab_size, self._on_end = client, workload, vocab_size, on_end
        self._start = 0.0

    async def at_rate(self, rate: float) -> list[Observation]:
        """Sends requests at random times, `rate` per second in the mean, however many are running (an open loop)."""
        self._start = time.monotonic()
        tasks: list[asyncio.Task[Observation]] = []
        try:
            for due, request in zip(self._workload.arrivals(rate), self._requests(), strict=True):
                if (early := due - self._now()) > 0:
                    await asyncio.sleep(early)
                tasks.append(asyncio.create_task(self._observe(due, *request)))
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def at_concurrency(self, concurrency: int) -> list[Observation]:
        """Keeps `concurrency` requests running; each is sent when one before it has ended (a closed loop)."""
        self._start = time.monotonic()
        requests, observations = self._requests(), list[Observation]()

        async def caller() -> None:
            for request in requests:
                observations.append(await self._observe(self._now(), *request))

        tasks = [asyncio.create_task(caller()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return observations

    async def _observe(self, due: float, prompt: list[int], params: SamplingParams) -> Observation:
        seen = Observation(due, self._now())
        try:
            async with aclosing(self._client.stream(prompt, params)) as deltas:
                async for delta in deltas:
                    self._note(seen, delta)
        except TkError as error:
            seen.status = getattr(error, "status", error.grpc_status)
        seen.ended = self._now()
        self._on_end(seen)
        return seen

    def _note(self, seen: Observation, delta: Delta) -> None:
        if delta.token_ids:
            seen.messages.append((self._now(), len(delta.token_ids)))

    def _requests(self) -> Iterator[tuple[list[int], SamplingParams]]:
        return self._workload.requests(self._vocab_size)

    def _now(self) -> float:
        return time.monotonic() - self._start
