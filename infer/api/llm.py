"""The Python API of inference, for scripts and notebooks."""

import queue
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ...core.errors import InvalidRequest
from ..engine import Engine
from ..options import EngineOptions
from ..requests.completion import Completion, CompletionBuilder
from ..requests.events import Delta, Done, Event, Failed, ModelInfo, Request
from ..requests.prompts import Prompt, as_params, as_prompt, as_prompts
from ..requests.sampling_params import SamplingParams


class LLM:
    """A model loaded on this machine; as a context manager it closes itself at the end.

    It works in scripts without a `__main__` guard, on stdin and in notebooks: the workers are new processes, which
    neither fork this one nor import the caller's script.

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
        options.setdefault("max_queued", 2**31)  # a script may pass any number of prompts at once
        self._engine = Engine.start(EngineOptions(Path(path), tp=tp, dtype=dtype, kv_dtype=kv_dtype, **options))

    def model_info(self) -> ModelInfo:
        """Returns the description of the loaded model."""
        return self._engine.info

    @property
    def engine(self) -> Engine:
        """The engine behind this object."""
        return self._engine

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Returns one Completion per prompt, in order; the engine computes them together.

        Args:
            prompts: a sequence of prompts, each a str or a list of token ids; a bare str or flat list is one prompt.
            params: one SamplingParams for all prompts, or one per prompt; None = the defaults.

        Raises:
            InvalidRequest: a prompt or a value cannot be served; all requests of the call are then ended.
            WorkerDied: a worker has died.
        """
        given = as_prompts(prompts)
        requests = [self._request(one, how) for one, how in zip(given, as_params(params, len(given)), strict=True)]
        builders = {request.request_id: CompletionBuilder() for request in requests}
        events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        live: set[str] = set()
        try:
            for request in requests:
                self._submit(request, events)
                live.add(request.request_id)
            while live:
                name, event = events.get()
                if isinstance(event, Done | Failed):
                    live.discard(name)
                builders[name].add(event)
        finally:
            for name in live:
                self._engine.abort(name)
        return [builder.completion() for builder in builders.values()]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Yields the Deltas of one prompt as they are computed; leaving the iterator early ends the request.

        Raises:
            InvalidRequest: the prompt or a value cannot be served.
            WorkerDied: a worker has died.
        """
        return self._stream(self._request(as_prompt(prompt), params or SamplingParams()))

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self._engine.tokenizer is None:
                raise InvalidRequest("The checkpoint has no tokenizer.json; give token ids.", field="prompt")
            prompt = tuple(self._engine.tokenizer.encode(prompt))
        return Request(uuid.uuid4().hex, prompt, params)

    def _submit(self, request: Request, events: "queue.SimpleQueue[tuple[str, Event]]") -> None:
        self._engine.submit(request, lambda event: events.put((request.request_id, event)))

    def _stream(self, request: Request) -> Iterator[Delta]:
        events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self._submit(request, events)
        try:
            while not isinstance(event := events.get()[1], Done):
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta):
                    yield event
        finally:
            self._engine.abort(request.request_id)
