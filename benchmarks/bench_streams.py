"""The CPU time of events on their way from the engine's thread to the readers of many streams, and their wake-ups."""

import asyncio
import resource
from dataclasses import dataclass
from pathlib import Path

import click

from tk.benchmarks.random_model import tiny_model
from tk.infer import SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import Delta
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.streams import EventStream, Wakeups
from tk.infer.engine.worker.processes import WorkerProcesses

SETTLE = 20  # tokens of each stream before the measurement
PROMPT = 10


@dataclass(frozen=True)
class Reading:
    """The state of this process at a moment: CPU seconds, tokens that were read, wake-ups, switches of threads."""

    seconds: float
    tokens: int
    wakeups: int
    switches: int


class Readers:
    """Streams of one event loop that read the tokens of an engine.

    Args:
        engine: the engine, whose workers compute nothing.
        count: the number of streams.
        steps: the number of tokens of each that are measured.
    """

    def __init__(self, engine: Engine, count: int, steps: int) -> None:
        self._engine, self._count, self._steps = engine, count, steps
        self._wakeups = Wakeups()
        self._num_wakeups = self._num_tokens = 0
        self.readings: list[Reading] = []
        engine.after_events(self._wake)

    async def run(self) -> None:
        """Reads all streams to their ends."""
        await asyncio.gather(*(self._read(index) for index in range(self._count)))

    def _wake(self) -> None:
        self._num_wakeups += bool(self._wakeups.flush())

    async def _read(self, index: int) -> None:
        stream = EventStream(self._wakeups)
        params = SamplingParams(max_new_tokens=self._steps + 2 * SETTLE, ignore_eos=True)
        self._engine.submit(Request((5,) * PROMPT, params, str(index)), stream.push)
        async for event in stream:
            self._num_tokens += len(event.token_ids) if isinstance(event, Delta) else 0
            ends = (SETTLE * self._count, (SETTLE + self._steps) * self._count)
            if len(self.readings) < len(ends) and self._num_tokens >= ends[len(self.readings)]:
                self._take_reading()

    def _take_reading(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        switches = used.ru_nvcsw + used.ru_nivcsw
        self.readings.append(Reading(used.ru_utime + used.ru_stime, self._num_tokens, self._num_wakeups, switches))


@click.command()
@click.option("--streams", type=int, default=64, show_default=True)
@click.option("--steps", type=int, default=300, show_default=True)
def main(streams: int, steps: int) -> None:
    """Print the CPU time of this process per token, and wake-ups and switches of threads per step."""
    folder = tiny_model(Path(".build/bench"), max(2000, steps + 100))
    blocks = streams * ((steps + 2 * SETTLE + PROMPT) // 32 + 1)
    processes = WorkerProcesses(1, 1, "tk.benchmarks.zero_compute_worker")
    engine = Engine.start(EngineOptions(folder, kv_blocks=blocks, max_running=streams), processes=processes)
    try:
        readers = Readers(engine, streams, steps)
        asyncio.run(readers.run())
    finally:
        engine.close()
    begin, end = readers.readings
    tokens = end.tokens - begin.tokens
    print(
        f"{(end.seconds - begin.seconds) / tokens * 1e6:.1f} us of CPU time per token; per step "
        f"{(end.wakeups - begin.wakeups) / tokens * streams:.2f} wake-ups and "
        f"{(end.switches - begin.switches) / tokens * streams:.1f} switches of threads"
    )


if __name__ == "__main__":
    main()
