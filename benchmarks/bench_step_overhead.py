"""The CPU time of a decode step outside the backend: in the engine's thread and in a worker that computes nothing."""

import threading
import time
from pathlib import Path

import click

from tk.benchmarks.random_model import tiny_model
from tk.infer import SamplingParams
from tk.infer.engine.engine import Engine
from tk.infer.engine.options import EngineOptions
from tk.infer.engine.request.events import Delta, Event, Failed
from tk.infer.engine.request.request import Request
from tk.infer.engine.worker.processes import WorkerProcesses

SETTLE = 20  # steps before the measurement


class Watch:
    """The receiver of one request's events, on the engine's thread: it reads the clocks at two of its tokens.

    Args:
        workers: the process ids of the workers.
        steps: the number of steps to measure.
    """

    def __init__(self, workers: tuple[int, ...], steps: int) -> None:
        self.readings: list[tuple[float, float, float]] = []  # seconds: engine's thread, worker of rank 0, wall
        self.over = threading.Event()
        self._worker, self._steps, self._tokens = workers[0], steps, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Failed):
            self.over.set()
        if not isinstance(event, Delta):
            return
        self._tokens += 1
        if self._tokens in (SETTLE, SETTLE + self._steps):
            worker_clock = (~self._worker << 3) | 2  # clock_getcpuclockid(3) of another process
            self.readings.append((time.thread_time(), time.clock_gettime(worker_clock), time.perf_counter()))
        if self._tokens == SETTLE + self._steps:
            self.over.set()


def measure(engine: Engine, batch: int, context: int, steps: int, params: SamplingParams) -> tuple[float, ...]:
    """Returns microseconds per step: of the engine's CPU time, of the worker's, and of wall time."""
    watch = Watch(engine.worker_process_ids, steps)
    names = [f"{batch}-{context}-{i}" for i in range(batch)]
    for name in names:
        last = name == names[-1]  # the others decode already when its prompt is computed
        engine.submit(Request((5,) * context, params, name), watch if last else lambda event: None)
    if not watch.over.wait(300) or len(watch.readings) < 2:
        raise click.ClickException("The measured request ended early.")
    for name in names:
        engine.abort(name)
    begin, end = watch.readings
    return tuple((after - before) / steps * 1e6 for before, after in zip(begin, end, strict=True))


@click.command()
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 8, 64), show_default=True)
@click.option("--context", "contexts", type=int, multiple=True, default=(100, 8000, 32000), show_default=True)
@click.option("--steps", type=int, default=500, show_default=True)
@click.option("--tp", type=int, default=1, show_default=True)
@click.option("--penalties/--no-penalties", default=False, help="Repetition and presence penalties, and logprobs.")
def main(batches: tuple[int, ...], contexts: tuple[int, ...], steps: int, tp: int, penalties: bool) -> None:
    """Print microseconds of CPU time per decode step, and per token of all sequences of a batch."""
    longest = max(contexts) + 2 * steps + 1000
    folder = tiny_model(Path(".build/bench"), longest)
    params = SamplingParams(ignore_eos=True)
    if penalties:
        params = SamplingParams(ignore_eos=True, repetition_penalty=1.1, presence_penalty=0.5, logprobs=5)
    options = EngineOptions(
        folder, tp=tp, kv_blocks=max(batches) * (longest // 32 + 1), max_batched_tokens=8192, max_running=max(batches)
    )
    engine = Engine.start(options, processes=WorkerProcesses(tp, 1, "tk.benchmarks.zero_compute_worker"))
    try:
        print(f"{'batch':>6} {'context':>8} {'engine us':>10} {'worker us':>10} {'per token':>10} {'wall us':>8}")
        for batch in batches:
            for context in contexts:
                engine_us, worker_us, wall_us = measure(engine, batch, context, steps, params)
                per_token = (engine_us + worker_us) / batch
                print(
                    f"{batch:>6} {context:>8} {engine_us:>10.0f} {worker_us:>10.0f} {per_token:>10.1f} {wall_us:>8.0f}",
                    flush=True,
                )
    finally:
        engine.close()


if __name__ == "__main__":
    main()
