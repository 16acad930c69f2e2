"""The load of bench_reload_soak.py: callers of all kinds, reloads, and edits of the served folder, all at once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import grpc

from tk.benchmarks.serving.grpc_load import LoadedServer
from tk.benchmarks.serving.process_figures import ProcessFigures
from tk.benchmarks.serving.reload_steps import Edit, files_of
from tk.benchmarks.serving.soak_answers import SoakAnswer, SoakCallers, bearer, malformed, refused
from tk.benchmarks.serving.soak_cases import SoakCase
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, token_digest
from tk.proto.v1 import generation_pb2 as pb
from tk.proto.v1.generation_pb2_grpc import AdminStub, GenerationStub

PRINCIPALS: Final = ("one", "two", "three")  # each with its name as its token
OPERATOR: Final = "ops"
FATES: Final = ("read", "read", "read", "leave", "deadline", "slow")
LONG_WORDS: Final = 1000  # take a thread of the server longer than the next call takes to come
POOL_ROUNDS: Final = 8
IDLE_SECONDS: Final = 30.0  # for the last requests, connections and old workers to end


def tokens_text() -> str:
    """Returns the file of tokens of the callers and of the operator."""
    callers = [Caller(name, frozenset((GENERATE,))) for name in PRINCIPALS]
    callers.append(Caller(OPERATOR, frozenset((GENERATE, ADMIN))))
    return "".join(line_of(token_digest(each.principal), each) for each in callers)


class Expected:
    """The answers of fresh servers, each of one step."""

    def __init__(self) -> None:
        self._answers: dict[int, list[SoakAnswer]] = {}

    def has(self, number: int, answer: SoakAnswer) -> bool:
        """Returns whether an answer is, or begins, that of the step that it reports; of any step if it reports none."""
        if answer.status not in ("OK", "CUT"):
            return True
        steps = list(self._answers) if answer.step is None else [answer.step]
        compare = answer.equals if answer.status == "OK" else answer.begins
        return any(compare(self._answers[step][number]) for step in steps if step in self._answers)

    async def learn(self, step: int, served: LoadedServer, cases: Sequence[SoakCase]) -> None:
        """Asks a fresh server of a step."""
        async with grpc.aio.insecure_channel(served.target) as channel:
            with closing(SoakCallers(channel, served.http_address)) as callers:
                answers = [await callers.ask(case, PRINCIPALS[0]) for case in cases]
        for number, answer in enumerate(answers):
            if answer.status != "OK":
                raise SystemExit(f"Case {number} was not answered by a fresh server: {answer.status} {answer.error}")
            if answer.step not in (step, None):
                raise SystemExit(f"Case {number} was answered by step {answer.step} of a server of step {step}.")
        self._answers[step] = answers


class ReloadSoak:
    """The load, the reloads and the edits of one run.

    Args:
        served: the server.
        steps: the steps that it changes between.
        cases: the requests.
        expected: their answers by each step's number.
        channel: an open channel to the server.
    """

    def __init__(
        self, served: LoadedServer, steps: Sequence[Path], cases: Sequence[SoakCase], expected: "Expected", channel: Any
    ) -> None:
        self._served, self._steps, self._cases, self._expected = served, steps, cases, expected
        self._stub: Any = GenerationStub(channel)
        self._admin: Any = AdminStub(channel)
        self._callers = SoakCallers(channel, served.http_address)
        self._edits = asyncio.Lock()  # no file is changed while a step is loaded
        self._numbers = iter(range(1 << 60))
        self._over = 0.0
        self.start = time.monotonic()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[ProcessFigures] = []
        self.num_edits = self.reloads = 0

    async def run(self, seconds: float, every: float, concurrency: int, edits: bool) -> None:
        """Runs everything for a time, with a reload every so many seconds."""
        self._over = time.monotonic() + seconds
        works = [self._call_on(random.Random(f"caller {number}")) for number in range(concurrency)]
        works += [self._reload_on(every), self._break_on(random.Random("malformed"))]
        if edits:
            works.append(self._edit_on(random.Random("edits")))
        await asyncio.gather(*works)

    def close(self) -> None:
        """Ends the threads of callers."""
        self._callers.close()

    def _has_ended(self) -> bool:
        return time.monotonic() >= self._over

    async def _call_on(self, draw: random.Random) -> None:
        while not self._has_ended():
            number = draw.randrange(len(self._cases))
            case, fate = self._cases[number].fresh(next(self._numbers)), draw.choice(FATES)
            options: dict[str, Any] = {}
            if fate == "leave":
                options["leave_after"] = draw.randint(1, 12)
            elif fate == "deadline":
                options["seconds"] = draw.uniform(0.01, 0.5)
            elif fate == "slow":
                await asyncio.sleep(draw.uniform(0.0, 0.5))
            answer = await self._callers.ask(case, draw.choice(PRINCIPALS), **options)
            self._judge(number, case, fate, answer)

    def _judge(self, number: int, case: SoakCase, fate: str, answer: SoakAnswer) -> None:
        self.ends[f"{case.kind} {answer.status}"] += 1
        allowed = {"OK", "RESOURCE_EXHAUSTED"} | {"leave": {"CUT"}, "deadline": {"DEADLINE_EXCEEDED"}}.get(fate, set())
        if answer.status not in allowed:
            self.wrong.append(f"{case.kind} of {fate}: {answer.status} {answer.error[:200]}")
        elif not self._expected.has(number, answer):
            self.wrong.append(
                f"case {number}, {case.kind}, step {answer.step}, {answer.status}: {answer.samples}"[:600]
            )

    async def _break_on(self, draw: random.Random) -> None:
        """Makes calls that shall be refused."""
        while not self._has_ended():
            name, call, status = draw.choice(malformed())
            found = await refused(call(self._stub))
            self.ends[f"malformed {found}"] += 1
            if found not in (status, "RESOURCE_EXHAUSTED"):
                self.wrong.append(f"{name}: {found} and not {status}")
            await asyncio.sleep(draw.uniform(0.0, 0.3))

    async def _reload_on(self, every: float) -> None:
        """Changes to the next step every so many seconds, and reads and prints the figures before each change."""
        due = time.monotonic() + every
        while not self._has_ended():
            await asyncio.sleep(max(0.0, min(due, self._over) - time.monotonic()))
            due += every
            if self._has_ended():
                return
            sample = await asyncio.to_thread(ProcessFigures.of, self._served.process_id, self.start)
            print(sample.row(str(len(self.samples))), flush=True)
            self.samples.append(sample)
            await self.reload()

    async def reload(self) -> None:
        """Serves the next step."""
        path = self._steps[(self.reloads + 1) % len(self._steps)]
        async with self._edits:
            try:
                message = pb.ReloadRequest(checkpoint=str(path))
                await self._admin.Reload(message, metadata=bearer(OPERATOR), timeout=300.0)
            except grpc.RpcError as error:
                self.wrong.append(f"a reload: {error.code().name} {error.details()}")
        self.reloads += 1

    async def _edit_on(self, draw: random.Random) -> None:
        """Changes one file after the other of the served step, each for a moment."""
        while not self._has_ended():
            for place in range(1 << 10):
                async with self._edits:
                    files = files_of(self._steps[self.reloads % len(self._steps)])
                    edit = Edit(files[place % len(files)], draw)
                    try:
                        await asyncio.sleep(draw.uniform(0.0, 0.5))
                    finally:
                        edit.undo()
                    self.num_edits += 1
                await asyncio.sleep(draw.uniform(0.0, 0.5))
                if self._has_ended() or place >= len(files):
                    break

    async def fill_pools(self) -> None:
        """Makes long calls at the same time, so that the server's pools have all threads that they may have.

        A pool begins a thread only if none of it waits when a call comes, so short calls leave it half full.
        """
        message = pb.TokenizeRequest(text="word " * LONG_WORDS)
        for _ in range(POOL_ROUNDS):
            calls = [self._stub.Tokenize(message, metadata=bearer(PRINCIPALS[0]), timeout=30.0) for _ in range(64)]
            await asyncio.gather(*calls)

    async def settle(self) -> ProcessFigures:
        """Returns the figures when no request is live and the old workers have ended, or after some time."""
        end = time.monotonic() + IDLE_SECONDS
        while time.monotonic() < end:
            load = await self._admin.GetLoad(pb.GetLoadRequest(), metadata=bearer(OPERATOR), timeout=30.0)
            if load.running + load.waiting == 0:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(3.0)
        return ProcessFigures.of(self._served.process_id, self.start)

    async def blocks(self) -> Any:
        """Returns the report of the server's blocks."""
        return await self._admin.CheckCache(pb.CheckCacheRequest(), metadata=bearer(OPERATOR), timeout=30.0)
