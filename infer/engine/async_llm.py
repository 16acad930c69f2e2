"""`LLM` for asyncio: the same methods with `await` and `async for`, any number of them at a time on one engine."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, overload

from ...core.errors import Cancelled, ConfigError
from ...core.given_paths import as_path
from ...core.home_process import HomeProcess
from .engine import Engine
from .options import EngineOptions
from .request.completion import Completion, CompletionBuilder
from .request.events import Delta, ModelInfo
from .request.prompts import GivenPrompt, GivenPrompts, as_prompts, is_one_prompt
from .request.request import CacheOptions, Request, as_request, as_requests, tokenized, with_grammar
from .request.sampling_params import SamplingParams
from .request.score import Score, score_of, score_requests
from .request.streams import EventStream, Wakeups


class AsyncLLM:
    """A model loaded on this machine, for coroutines; `async with` loads it and closes it at the end.

    A coroutine that is cancelled ends its requests, and their memory in the cache is free again. The methods may be
    called from any number of tasks, and from more than one event loop.

    Args: as for `LLM`.
    """

    def __init__(
        self, path: str | Path, *, tp: int = 1, dtype: str = "auto", kv_dtype: str = "auto", **options: Any
    ) -> None:
        self._home = HomeProcess("This AsyncLLM")
        options.setdefault("max_queued", 2**31)  # a program may ask for any number of prompts at once
        self._options = EngineOptions(as_path(path), tp=tp, dtype=dtype, kv_dtype=kv_dtype, **options)
        self._starting: Future[Engine] | None = None
        self._wakeups = Wakeups()
        self._closed = False

    async def start(self) -> Self:
        """Loads the model, which `async with` does too, while the event loop goes on.

        Raises:
            ConfigError: it was called before.
            Cancelled: the object was closed before the model was loaded.
            TkError: the model cannot be served; see `Engine.start`.
        """
        if self._starting is not None:
            raise ConfigError("The model is loaded already, or loading: call start() or use `async with` only once.")
        self._home = HomeProcess("This AsyncLLM")  # a fork may load the model if the first process has not
        executor = ThreadPoolExecutor(1, "tk-start")
        self._starting = executor.submit(Engine.start, self._options)
        executor.shutdown(wait=False)  # its thread ends after its work
        try:
            engine = await asyncio.wrap_future(self._starting)
        except asyncio.CancelledError:
            self._starting.add_done_callback(_close_started)
            raise
        if self._closed:
            await self.close()
            raise Cancelled("The model was closed while it was loading.")
        engine.after_events(self._wakeups.flush)
        return self

    @property
    def engine(self) -> Engine:
        """The engine behind this object.

        Raises:
            ConfigError: the model is not loaded, or another process has loaded it.
        """
        if self._starting is None or not self._starting.done():
            raise ConfigError("The model is not loaded: use `async with AsyncLLM(...) as llm`, or await llm.start().")
        self._home.require()
        return self._starting.result()

    def model_info(self) -> ModelInfo:
        """Returns the description of the loaded model."""
        return self.engine.info

    async def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; arguments and errors are those of `LLM.generate`."""
        requests = as_requests(prompts, params, cache, adapter)
        return await self._complete(await self._prepared(requests))

    async def stream(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Yields the Deltas of one prompt; a slow reader gets several tokens in one.

        If the reader leaves before the end, the request ends when the iterator is closed: at once with
        `contextlib.aclosing`, else when nothing refers to it.

        Raises:
            InvalidRequest: the prompt or a value cannot be served.
            WorkerDied: a worker has died.
            Cancelled: the model was closed.
        """
        with self._running(await self._prepared([as_request(prompt, params, cache, adapter)])) as [events]:
            async for event in events:
                if isinstance(event, Delta):
                    yield event

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter under a name, also one that another adapter has: requests that run end with theirs.

        Args:
            name: the name by which requests ask for it.
            path: a step folder, a run folder or a folder of PEFT.

        Raises:
            TkError: see `EngineAdapters.load`.
        """
        await asyncio.to_thread(self.engine.adapters.load, name, path)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter's name away; its room is free when the last request that uses it has ended.

        Raises:
            UnknownAdapter: no loaded adapter has the name.
        """
        self.engine.adapters.unload(name)

    @overload
    async def score(  # type: ignore[overload-overlap]  # a str is one text
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], *, adapter: str = ""
    ) -> Score: ...

    @overload
    async def score(
        self, prompt: str | Sequence[int], continuation: Sequence[str | Sequence[int]], *, adapter: str = ""
    ) -> list[Score]: ...

    async def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
    ) -> Score | list[Score]:
        """Returns the log-probabilities of one or several continuations; see `LLM.score`."""
        scores = await self.score_pairs([(prompt, one) for one in as_prompts(continuation)], adapter)
        return scores[0] if is_one_prompt(continuation) else scores

    async def score_pairs(self, pairs: Iterable[tuple[GivenPrompt, GivenPrompt]], adapter: str = "") -> list[Score]:
        """Returns the score of each pair of a prompt and its continuation, in order; see `LLM.score_pairs`."""
        requests = await asyncio.to_thread(score_requests, self.engine.tokenizer, list(pairs), adapter)
        return [score_of(completion) for completion in await self._complete(requests)]

    async def close(self) -> None:
        """Ends live requests with Cancelled, and the workers; a second call does nothing."""
        if not self._home.is_here:
            return
        self._closed = True
        if self._starting is not None and self._starting.done() and self._starting.exception() is None:
            await asyncio.to_thread(self._starting.result().close)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _prepared(self, requests: Sequence[Request]) -> list[Request]:
        """Returns requests whose prompts are token ids, and whose grammars are built."""
        engine = self.engine  # at first, since it refuses a fork, which would wait for a thread that it does not have
        return await asyncio.to_thread(
            lambda: [with_grammar(tokenized(request, engine.tokenizer), engine.grammars) for request in requests]
        )

    async def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Runs requests to their ends; if one fails, all are ended."""
        with self._running(requests) as streams:
            return await asyncio.gather(*map(_collect, streams))

    @contextmanager
    def _running(self, requests: Sequence[Request]) -> Iterator[list[EventStream]]:
        """Runs requests in the engine while the body runs, and yields their events."""
        streams: list[EventStream] = []
        try:
            for request in requests:
                stream = EventStream(self._wakeups)
                self.engine.submit(request, stream.push)
                streams.append(stream)
            yield streams
        finally:
            for request, stream in zip(requests, streams, strict=False):
                stream.leave()
                if not stream.ended:
                    self.engine.abort(request.request_id)


async def _collect(events: EventStream) -> Completion:
    builder = CompletionBuilder()
    async for event in events:
        builder.add(event)
    return builder.completion()


def _close_started(starting: Future[Engine]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
