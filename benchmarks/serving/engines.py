"""tk's engines as contestants: requests that begin together, through the scheduler, the sampler and the workers."""

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from tk.benchmarks.peers.token_clock import NotTogether, Speeds, SpeedWorkload, speeds
from tk.infer import LLM, SamplingParams
from tk.infer.engine.request.events import Delta, Done, Event, Failed
from tk.infer.engine.request.request import Request

_TRIES: Final = 5


class EngineContestant:
    """An engine with sampling options, greedy ones by default.

    Attributes:
        name: its name in what is printed.
        llm: the engine.
        prompt: the prompt of all sequences; None = random ones of the workload's length.
        prompt_seed: the seed of random prompts, which every run then has: after the first, the prefix cache holds them.
    """

    def __init__(
        self, name: str, llm: LLM, prompt: Sequence[int] | None = None, prompt_seed: int | None = None, **sampling: Any
    ) -> None:
        self.name = name
        self.llm = llm
        self.prompt = prompt
        self.prompt_seed = prompt_seed
        self._sampling = {"temperature": 0.0, "ignore_eos": True} | sampling

    def run(self, workload: SpeedWorkload) -> Speeds:
        """Runs a workload, again if this process had to wait so long that sequences did not run together.

        Raises:
            TkError: the engine cannot run it.
            NotTogether: they never did.
        """
        for _ in range(_TRIES - 1):
            with suppress(NotTogether):
                return speeds(workload, *self._run(workload))
        return speeds(workload, *self._run(workload))

    def _run(self, workload: SpeedWorkload) -> tuple[float, list[list[float]]]:
        """Returns the time of the start, and the times of each sequence's tokens."""
        params = SamplingParams(max_new_tokens=workload.new_tokens, **self._sampling)
        vocab, shape = self.llm.model_info().vocab_size, (workload.batch, workload.prompt_tokens)
        ids = np.random.default_rng(self.prompt_seed).integers(3, vocab, shape).tolist()
        if self.prompt is not None:
            ids = [self.prompt] * workload.batch
        arrivals: list[list[float]] = [[] for _ in ids]
        events: queue.SimpleQueue[tuple[int, float, Event]] = queue.SimpleQueue()
        start = time.perf_counter()
        for i, prompt in enumerate(ids):
            request = Request(tuple(prompt), params, f"{start}-{i}")
            self.llm.engine.submit(request, lambda event, i=i: events.put((i, time.perf_counter(), event)))  # type: ignore[misc]  # mypy knows no default of a lambda's parameter
        live = len(ids)
        while live:
            i, now, event = events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                arrivals[i].extend([now] * len(event.token_ids))
            live -= isinstance(event, Done)
        return start, arrivals


@contextmanager
def engine(name: str, path: Path, **options: Any) -> Iterator[EngineContestant]:
    """Opens an engine for a with block; it has run a few tokens.

    Raises:
        TkError: the model cannot be served with these options.
    """
    with LLM(path, **options) as llm:
        contestant = EngineContestant(name, llm)
        contestant.run(SpeedWorkload(8, 8, 1))
        contestant.run(SpeedWorkload(1, 8, 4))
        yield contestant
