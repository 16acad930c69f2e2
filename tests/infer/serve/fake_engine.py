"""The two halves of the server tests: an engine that follows a script, and a server on a thread of its own."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tk.core.errors import Cancelled, CheckpointError, TkError, WorkerDied, WorkerStalled
from tk.infer.engine.grammar.compiler import Grammars
from tk.infer.engine.options import check_names
from tk.infer.engine.planning.adapter_source import AdapterSource
from tk.infer.engine.planning.adapter_table import AdapterTable
from tk.infer.engine.request.adapter_lease import AdapterLease
from tk.infer.engine.request.events import (
    AdapterInfo,
    Delta,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    ModelInfo,
    Started,
    Timing,
    Usage,
)
from tk.infer.engine.request.request import Request
from tk.infer.engine.schedule.statistics import CacheReport, EngineLoad, EngineTotals
from tk.infer.serve.app import Server
from tk.infer.serve.engine_protocol import EngineProtocol
from tk.infer.serve.http.metrics_port import metrics_port_of
from tk.infer.serve.options import ServerOptions
from tk.text.chat_context import NEW_TURN, PromptForm
from tk.text.tokenizer import Tokenizer
from tk.text.tokenizer_files import TextFiles

WAIT_SECONDS = 20.0

INFO = ModelInfo(
    name="fake",
    architecture="llama",
    step=7,
    manifest_sha256="ab" * 32,
    version="0.0.0",
    api_revision=1,
    tp=1,
    dtype="fp32",
    weight_dtype="fp32",
    kv_dtype="int8",
    block_size=16,
    num_blocks=64,
    max_model_len=128,
    max_running=4,
    max_top_logprobs=20,
    vocab_size=256,
    eos_token_ids=(0,),
    kv_bytes_per_token=1024,
    kernels="aten",
)


class ByteTokenizer:
    """One token per byte; id 1 is the special token that begins a text."""

    longest_token_bytes = 1
    files = TextFiles(Path("a folder without a chat template"), {})

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        return [1] * special_tokens + list(text.encode())

    def encode_pair(self, prompt: str, continuation: str) -> tuple[list[int], int]:
        return self.encode(prompt + continuation), len(self.encode(prompt))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], form: PromptForm = NEW_TURN) -> list[int]:
        raise AssertionError("the server renders conversations itself")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if not (skip_special_tokens and token == 1)).decode(errors="replace")


def started(request: Request) -> Started:
    return Started(
        request.request_id,
        prompt_tokens=len(request.token_ids),
        cached_tokens=0,
        seed=request.params.seed or 99,
        step=INFO.step,
        adapter_sha256=request.adapter_digest,
    )


def delta(text: str, index: int = 0) -> Delta:
    return Delta(index, text, tuple(text.encode()))


def finished(index: int = 0, reason: FinishReason = FinishReason.LENGTH, tokens: int = 3) -> Finished:
    return Finished(index, reason, Usage(4, 0, tokens), Timing(0.1, 0.2, 0.3, 0))


def whole_answer(request: Request) -> list[Event]:
    """Every sample says "abc" in two deltas, samples interleaved."""
    samples = range(request.params.n)
    return [
        started(request),
        *(delta("ab", index) for index in samples),
        *(delta("c", index) for index in samples),
        *(finished(index) for index in samples),
        Done(),
    ]


class FakeBooks:
    """Says what the test wants."""

    def __init__(self) -> None:
        self.load_now = EngineLoad(blocks_total=INFO.num_blocks, blocks_free=INFO.num_blocks)
        self.flushed = 0

    def load(self) -> EngineLoad:
        return self.load_now

    def totals(self) -> EngineTotals:
        proposed, accepted = Counter(draft=9), Counter(draft=6)
        return EngineTotals(100, 25, 7, preemptions=4, leaked_blocks=1, proposed=proposed, accepted=accepted)

    def flush_prefix_cache(self) -> int:
        self.flushed += 1
        return 5

    def check_cache(self) -> CacheReport:
        return CacheReport(total=INFO.num_blocks, used=3, cached=5, free=55, leaked=1, problems=("a block is lost",))


def _released(request: Request, on_event: Callable[[Event], None], event: Event) -> None:
    """Ends a request's hold on its adapter with its last event."""
    if isinstance(event, Done | Failed) and request.lease is not None:
        request.lease.release()
    on_event(event)


class FakeAdapters:
    """Loads any path but one that is missing; `max_named` adapters may have names."""

    def __init__(self, max_named: int = 3) -> None:
        self.table = AdapterTable(max_named)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return self.table.infos

    def hold(self, name: str, version: AdapterLease | None = None) -> AdapterLease:
        return self.table.hold(name, version)

    def load(self, name: str, path: Path) -> AdapterInfo:
        check_names("adapters", (name,))
        if path.name == "missing":
            raise CheckpointError(f"{path} does not exist.")
        source = AdapterSource(str(path), "", f"sha256 of {path.name}", 8, 1024, 5)
        taken = self.table.reserve(name, source)
        taken.is_loaded = True
        self.table.give(name, taken)
        return source.info(name)

    def unload(self, name: str) -> tuple[AdapterInfo, Future[None]]:
        removed = self.table.remove(name)
        return removed.source.info(name), removed.unused


class FakeEngine:
    """Answers each request by `script`, on one thread of its own; the test emits the rest."""

    def __init__(self, script: Callable[[Request], Sequence[Event]] = whole_answer, info: ModelInfo = INFO) -> None:
        self.info = info
        self.tokenizer: ByteTokenizer | Tokenizer | None = ByteTokenizer()
        self.statistics = FakeBooks()
        self.adapters = FakeAdapters()
        self.grammars = Grammars(None, info.vocab_size, info.eos_token_ids)
        self.script = script
        self.refusal: TkError | None = None
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self._sinks: dict[tuple[str, str], Callable[[Event], None]] = {}
        self._watchers: list[Callable[[WorkerDied | None], None]] = []
        self._after_events: list[Callable[[], object]] = []
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1)

    @property
    def num_live(self) -> int:
        return len(self._sinks)

    def wait_ready(self) -> None:
        """Returns at once: there is no model."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if request.adapter:
            request = replace(request, lease=self.adapters.hold(request.adapter, request.version))
        with self._changed:
            self.requests.append(request)
            refusal = self.refusal
            if refusal is None:
                assert request.key not in self._sinks
                self._sinks[request.key] = partial(_released, request, on_event)
            self._changed.notify_all()
        if refusal is not None:
            raise refusal
        self.emit(request.key, *self.script(request))

    def emit(self, request: str | tuple[str, str], *events: Event) -> None:
        """Sends events of a request: its id, or its principal and id."""
        key = ("", request) if isinstance(request, str) else request
        self._thread.submit(self._emit, key, events)

    def abort(self, request_id: str, principal: str = "") -> bool:
        with self._changed:
            self.aborted.append(request_id)
            self._changed.notify_all()
            sink = self._sinks.get((principal, request_id))
        if sink is not None:
            self._thread.submit(self._cancel, (principal, request_id), sink)
        return sink is not None

    def after_events(self, callback: Callable[[], object]) -> None:
        self._after_events.append(callback)

    def watch(self, callback: Callable[[WorkerDied | None], None]) -> None:
        self._watchers.append(callback)

    def die(self, retry_after: float | None = None) -> None:
        error = self.refusal = WorkerDied("worker 0 is gone", retry_after)
        for key in list(self._sinks):
            self.emit(key, Failed(error))
        self._tell(error)

    def stall(self) -> None:
        self._tell(WorkerStalled("worker 0 is late"))

    def recover(self) -> None:
        self.refusal = None
        self._tell(None)

    def _tell(self, error: WorkerDied | None) -> None:
        for callback in self._watchers:
            self._thread.submit(callback, error)

    def kill(self) -> None:
        self.die()

    def wait_for(self, condition: Callable[["FakeEngine"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), WAIT_SECONDS), "the engine never got there"

    def settle(self) -> None:
        """Return when all that was to be emitted is emitted."""
        self._thread.submit(lambda: None).result(WAIT_SECONDS)

    def close(self) -> None:
        self._thread.shutdown()

    def _cancel(self, key: tuple[str, str], sink: Callable[[Event], None]) -> None:
        """Ends the request that was live when it was aborted, and no later one under its id."""
        if self._sinks.get(key) is sink:
            self._emit(key, [Failed(Cancelled("aborted"))])

    def _emit(self, key: tuple[str, str], events: Sequence[Event]) -> None:
        self._send(key, events)
        for callback in self._after_events:
            callback()

    def _send(self, key: tuple[str, str], events: Sequence[Event]) -> None:
        for event in events:
            sink = self._sinks.get(key)
            if sink is None:
                return
            if isinstance(event, (Done, Failed)):
                with self._changed:
                    del self._sinks[key]
                    self._changed.notify_all()
            sink(event)


class ServerThread:
    """A Server on a free loopback port, its event loop on a thread."""

    def __init__(
        self,
        engine: EngineProtocol,
        is_loaded: bool = True,
        loop: asyncio.AbstractEventLoop | None = None,
        **options: Any,
    ) -> None:
        self._loop = loop or asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self.run(self._make(engine, ServerOptions(port=0, **options)))
        self.target = self.run(self.server.start())
        if is_loaded:
            self.run(self.server.set_ready())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_SECONDS)

    def start(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    async def _make(self, engine: EngineProtocol, options: ServerOptions) -> Server:
        return Server(engine, options, ports=self._ports(options))

    def _ports(self, options: ServerOptions) -> list[Any]:
        """The ports beside that of gRPC."""
        self.metrics = None if options.metrics_port is None else metrics_port_of(options)
        return [] if self.metrics is None else [self.metrics]

    @property
    def metrics_port(self) -> int:
        assert self.metrics is not None
        return int(self.metrics.address.rpartition(":")[2])

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"
