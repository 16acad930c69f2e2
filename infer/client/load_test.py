"""A load test of a server: requests at a given rate or a given number at a time, and the latencies of their callers."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, Final

from ...core.errors import ConfigError, TkError
from ...core.line_chart import Curve, Panel, Points, draw_panels
from ..engine.request.sampling_params import SamplingParams
from .client import AsyncClient, gather

FIRST_ID: Final = 3  # lower ids are special tokens in most vocabularies
OK: Final = "OK"
PERCENTILES: Final = (50, 90, 99)
_POINTS: Final = 200  # of a curve


@dataclass(frozen=True)
class Workload:
    """The requests: prompts of random tokens, each of its own length, continued to a given number of tokens.

    Attributes:
        num_requests: how many are sent in all.
        prompt_tokens: the least and the largest number of tokens of a prompt.
        new_tokens: the least and the largest number of tokens of an answer.
        shared_prefix: the number of tokens with which every prompt begins, as with one system prompt.
        temperature: the temperature of sampling.
        seed: the seed of lengths, tokens and times; the same one gives the same requests.

    Raises:
        ConfigError: a number is out of range.
    """

    _: KW_ONLY
    num_requests: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    shared_prefix: int = 0
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ConfigError(f"{name} is {least} to {most}; write N, or N-M with 1 <= N <= M.")
        if self.num_requests < 1:
            raise ConfigError(f"num_requests is {self.num_requests}; it must be 1 or more.")
        if not 0 <= self.shared_prefix < self.prompt_tokens[0]:
            raise ConfigError(
                f"shared_prefix is {self.shared_prefix}; it must be less than the shortest prompt, "
                f"{self.prompt_tokens[0]} tokens."
            )

    def requests(self, vocab_size: int) -> Iterator[tuple[list[int], SamplingParams]]:
        """Yields the prompt's token ids and the sampling parameters of each request."""
        first = min(FIRST_ID, vocab_size - 1)
        prefix = random.Random(f"prefix {self.seed}").choices(range(first, vocab_size), k=self.shared_prefix)
        for number in range(self.num_requests):
            draw = random.Random(f"{self.seed} {number}")
            length, new = draw.randint(*self.prompt_tokens), draw.randint(*self.new_tokens)
            rest = draw.choices(range(first, vocab_size), k=length - self.shared_prefix)
            params = SamplingParams(
                max_new_tokens=new, ignore_eos=True, temperature=self.temperature, seed=draw.getrandbits(63)
            )
            yield prefix + rest, params

    def arrivals(self, rate: float) -> Iterator[float]:
        """Yields the time of each request in seconds after the start: a Poisson process of `rate` requests per second.

        Callers who know nothing of each other arrive so; they do not wait for the server to answer earlier ones.
        """
        draw, due = random.Random(f"arrivals {self.seed}"), 0.0
        for _ in range(self.num_requests):
            yield due
            due += draw.expovariate(rate)


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
        arrivals, requests = self._workload.arrivals(rate), self._workload.requests(self._vocab_size)
        tasks: list[asyncio.Task[Observation]] = []
        try:
            for due, request in zip(arrivals, requests, strict=True):
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
        requests, observations = self._workload.requests(self._vocab_size), list[Observation]()

        async def caller() -> None:
            for request in requests:
                observations.append(await self._observe(self._now(), *request))

        await gather(caller() for _ in range(concurrency))
        return observations

    async def _observe(self, due: float, prompt: list[int], params: SamplingParams) -> Observation:
        seen = Observation(due, self._now())
        try:
            async with aclosing(self._client.stream(prompt, params)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        seen.messages.append((self._now(), len(delta.token_ids)))
        except TkError as error:
            seen.status = getattr(error, "status", error.grpc_status)
        seen.ended = self._now()
        self._on_end(seen)
        return seen

    def _now(self) -> float:
        return time.monotonic() - self._start


@dataclass(frozen=True)
class Targets:
    """The latencies that callers were promised (service level objective); None = any.

    Attributes:
        first_token_seconds: the longest time to the first token.
        token_seconds: the longest mean time per token after it.
    """

    first_token_seconds: float | None = None
    token_seconds: float | None = None

    def are_met(self, seen: Observation) -> bool:
        """Returns whether a request completed within the targets."""
        if seen.status != OK or not seen.messages:
            return False
        first, later = self.first_token_seconds, self.token_seconds
        return (first is None or seen.first_token_seconds <= first) and (later is None or seen.token_seconds <= later)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns the smallest value that `percent` of the values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    rank = -(-len(values) * percent // 100)  # rounded up
    return sorted(values)[max(0, int(rank) - 1)]


def summary(observations: Sequence[Observation], targets: Targets) -> dict[str, Any]:
    """Returns the result as a JSON document; times are in seconds, rates per second."""
    completed = [seen for seen in observations if seen.status == OK and seen.messages]
    seconds = max((seen.ended for seen in observations), default=0.0)
    met = sum(targets.are_met(seen) for seen in observations)
    return {
        "seconds": seconds,
        "requests": len(observations),
        "statuses": dict(Counter(seen.status for seen in observations)),
        "requests_per_second": _rate(len(completed), seconds),
        "tokens_per_second": _rate(sum(seen.num_tokens for seen in observations), seconds),
        "goodput_per_second": _rate(met, seconds),
        "met_targets": met / len(observations) if observations else 0.0,
        "latest_send_seconds": max((seen.sent - seen.due for seen in observations), default=0.0),
        "latencies": {
            name: {"mean": sum(values) / len(values) if values else None}
            | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            for name, values in latencies(completed).items()
        },
    }


def latencies(completed: Sequence[Observation]) -> dict[str, list[float]]:
    """Returns the latencies of completed requests by name, in seconds.

    "first token" and "whole request" count from the time at which a request was due, "between tokens" has every pause
    between two messages, "per token" one mean per request.
    """
    return {
        "first token": [seen.first_token_seconds for seen in completed],
        "between tokens": [gap for seen in completed for gap in seen.gaps],
        "per token": [seen.token_seconds for seen in completed if len(seen.messages) > 1],
        "whole request": [seen.ended - seen.due for seen in completed],
    }


def table(result: dict[str, Any]) -> str:
    """Returns a summary as lines for a terminal."""
    statuses = ", ".join(f"{count} {name}" for name, count in sorted(result["statuses"].items()))
    lines = [
        f"{result['requests']} requests in {result['seconds']:.1f} s: {statuses}",
        f"{result['requests_per_second']:.2f} requests/s completed, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['goodput_per_second']:.2f} requests/s within the targets ({100 * result['met_targets']:.1f} %)",
        f"{'milliseconds':<16}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
    ]
    for name, values in result["latencies"].items():
        cells = ("-" if value is None else f"{1000 * value:.1f}" for value in values.values())
        lines.append(f"{name:<16}" + "".join(f"{cell:>10}" for cell in cells))
    if result["latest_send_seconds"] > 0.05:
        late = 1000 * result["latest_send_seconds"]
        lines.append(f"This machine sent requests up to {late:.0f} ms late, which the latencies include.")
    return "\n".join(lines)


def draw(observations: Sequence[Observation]) -> str:
    """Returns an SVG: for each latency, the part of its values (percent) that do not exceed a time (milliseconds)."""
    completed = [seen for seen in observations if seen.status == OK and seen.messages]
    panels = [
        Panel(f"{name}: % within ms", (Curve(_distribution(values)),)) for name, values in latencies(completed).items()
    ]
    return draw_panels(panels, ())


def _distribution(values: Sequence[float]) -> Points:
    percents = [100 * number / _POINTS for number in range(_POINTS + 1)] if values else []
    return [(1000 * (percentile(values, percent) or 0.0), percent) for percent in percents]


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
