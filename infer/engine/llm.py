"""The Python API of inference, for scripts and notebooks."""

import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self, overload

from ...core.given_paths import as_path
from ...core.home_process import HomeProcess
from .engine import Engine
from .options import EngineOptions
from .request.completion import Completion, CompletionBuilder
from .request.events import Delta, Done, Event, Failed, ModelInfo
from .request.prompts import GivenPrompt, GivenPrompts, as_prompts, is_one_prompt
from .request.request import CacheOptions, Request, as_request, as_requests, tokenized
from .request.sampling_params import SamplingParams
from .request.score import Score, score_of, score_requests


class LLM:
    """A model loaded on this machine; as a context manager it closes itself at the end.

    It works in scripts without a `__main__` guard, on stdin and in notebooks: the workers are new processes, which
    neither fork this one nor import the caller's script. A process that is forked
    from this one makes an LLM of its own: methods of this one are refused there, and `close` does nothing.

    Args:
        path: a step folder, a run folder or a Hugging Face folder.
        tp: the number of tensor-parallel ranks.
        dtype: the dtype of weights and activations; "auto" = as stored.
        kv_dtype: the dtype of the KV cache; "auto" = `dtype`.
        options: other fields of EngineOptions.

    Raises:
        TkError: the model cannot be served; see `Engine.start`.
    """

    def __init__(
        self, path: str | Path, *, tp: int = 1, dtype: str = "auto", kv_dtype: str = "auto", **options: Any
    ) -> None:
        self._home = HomeProcess("This LLM")
        options.setdefault("max_queued", 2**31)  # a script may pass any number of prompts at once
        self._engine = Engine.start(EngineOptions(as_path(path), tp=tp, dtype=dtype, kv_dtype=kv_dtype, **options))

    def model_info(self) -> ModelInfo:
        """Returns the description of the loaded model."""
        return self.engine.info

    @property
    def engine(self) -> Engine:
        """The engine behind this object.

        Raises:
            ConfigError: another process made this object.
        """
        self._home.require()
        return self._engine

    def generate(
        self,
        prompts: GivenPrompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; the engine computes them together.

        Args:
            prompts: a sequence of prompts, each a str, a list of token ids or a Conversation; one alone is one prompt.
            params: one SamplingParams for all prompts, or one per prompt; None = the defaults.
            cache: the use of the prefix cache; None = the defaults.
            adapter: the name of a loaded adapter; "" = none.

        Raises:
            InvalidRequest: a prompt or a value cannot be served; all requests of the call are then ended.
            WorkerDied: a worker has died.
        """
        requests = as_requests(prompts, params, cache, adapter)
        return self._complete([tokenized(request, self.engine.tokenizer) for request in requests])

    def stream(
        self,
        prompt: GivenPrompt,
        params: SamplingParams | None = None,
        cache: CacheOptions | None = None,
        adapter: str = "",
    ) -> Iterator[Delta]:
        """Yields the Deltas of one prompt as they are computed; leaving the iterator early ends the request.

        Raises:
            InvalidRequest: the prompt or a value cannot be served.
            WorkerDied: a worker has died.
        """
        return self._stream(tokenized(as_request(prompt, params, cache, adapter), self.engine.tokenizer))

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter under a name, also one that another adapter has: requests that run end with theirs.

        Args:
            name: the name by which requests ask for it.
            path: a step folder, a run folder or a folder of PEFT.

        Raises:
            TkError: see `EngineAdapters.load`.
        """
        self.engine.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter's name away; its room is free when the last request that uses it has ended.

        Raises:
            UnknownAdapter: no loaded adapter has the name.
        """
        self.engine.adapters.unload(name)

    @overload
    def score(  # type: ignore[overload-overlap]  # a str is one text
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], *, adapter: str = ""
    ) -> Score: ...

    @overload
    def score(
        self, prompt: str | Sequence[int], continuation: Sequence[str | Sequence[int]], *, adapter: str = ""
    ) -> list[Score]: ...

    def score(
        self,
        prompt: str | Sequence[int],
        continuation: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        adapter: str = "",
    ) -> Score | list[Score]:
        """Returns the log-probabilities of a continuation of the prompt, or of each of several.

        Args:
            prompt: text or token ids, at least one token. The log-probabilities of its own tokens are not computed.
            continuation: text, token ids, or a sequence of these, for which the result is a list in the same order.
                Text after text is tokenized together with it; tokens that are not wholly in the prompt are scored.
            adapter: the name of a loaded adapter; "" = none.

        Raises:
            InvalidRequest: prompt or continuation have no tokens, or cannot be served.
            PromptTooLong: prompt and continuation are together longer than the model's limit.
            WorkerDied: a worker has died.
        """
        scores = self.score_pairs([(prompt, one) for one in as_prompts(continuation)], adapter)
        return scores[0] if is_one_prompt(continuation) else scores

    def score_pairs(self, pairs: Iterable[tuple[GivenPrompt, GivenPrompt]], adapter: str = "") -> list[Score]:
        """Returns the score of each pair of a prompt and its continuation, in order; the engine computes them together.

        Raises:
            TkError: see `score`.
        """
        completions = self._complete(score_requests(self.engine.tokenizer, pairs, adapter))
        return [score_of(completion) for completion in completions]

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns the completions of requests, in order."""
        builders = {request.request_id: CompletionBuilder() for request in requests}
        for request_id, event in self._run(requests):
            builders[request_id].add(event)
        return [builder.completion() for builder in builders.values()]

    def _stream(self, request: Request) -> Iterator[Delta]:
        with closing(self._run([request])) as events:
            yield from (event for _, event in events if isinstance(event, Delta))

    def _run(self, requests: Sequence[Request]) -> Generator[tuple[str, Event], None, None]:
        """Runs requests to their ends and yields their events with their ids; if one fails, all are ended."""
        events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        live: set[str] = set()

        def submit(request: Request) -> None:
            self._engine.submit(request, lambda event: events.put((request.request_id, event)))
            live.add(request.request_id)

        try:
            for request in requests:
                submit(request)
            while live:
                request_id, event = events.get()
                if isinstance(event, Done | Failed):
                    live.discard(request_id)
                if isinstance(event, Failed):
                    raise event.error
                yield request_id, event
                self._home.require()  # a fork may go on with the iterator: nothing would come
        finally:
            if self._home.is_here:
                for request_id in live:
                    self._engine.abort(request_id)
