"""The metrics of a server as Prometheus reads them."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from ...engine.request.events import ModelInfo
from ...engine.schedule.books import EngineLoad, EngineTotals
from . import catalog
from .catalog import MODEL_LABEL, MetricEntry
from .tally import LatencyCounts, RequestTally


class CountedBooks(Protocol):
    """The part of an engine's books that metrics show."""

    def load(self) -> EngineLoad:
        """Returns the load now."""

    def totals(self) -> EngineTotals:
        """Returns the totals since the start of the engine."""


class CountedEngine(Protocol):
    """The part of an engine that metrics show."""

    @property
    def info(self) -> ModelInfo:
        """The description of the served model."""

    @property
    def books(self) -> CountedBooks:
        """The load and the totals."""


class MetricsCollector:
    """Collects the metrics of one server whenever they are asked for, on the asker's thread.

    Args:
        engine: the engine.
        tally: the counts of its requests.
    """

    def __init__(self, engine: CountedEngine, tally: RequestTally) -> None:
        self._engine, self._tally = engine, tally

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of the catalog, in its order."""
        model = self._engine.info.name
        numbers = self._numbers()
        by_label = self._by_label()
        for entry in catalog.CATALOG:
            if entry.bounds:
                yield _histogram(entry, model, self._tally.latencies[entry])
            elif entry.label:
                yield _labelled(entry, model, by_label[entry])
            else:
                yield _number(entry, model, numbers[entry])

    def _numbers(self) -> dict[MetricEntry, float]:
        load, totals = self._engine.books.load(), self._engine.books.totals()
        return {
            catalog.RUNNING: load.running,
            catalog.WAITING: load.waiting,
            catalog.WAITING_TOKENS: load.queued_tokens,
            catalog.KV_USAGE: load.blocks_used / max(load.blocks_total, 1),
            catalog.LEAKED_BLOCKS: totals.leaked_blocks,
            catalog.STEP: self._engine.info.step,
            catalog.PREFIX_QUERIES: totals.prompt_tokens,
            catalog.PREFIX_HITS: totals.cached_tokens,
            catalog.PREEMPTIONS: totals.preemptions,
            catalog.PROMPT_TOKENS: totals.prompt_tokens,
            catalog.GENERATION_TOKENS: totals.new_tokens,
        }

    def _by_label(self) -> dict[MetricEntry, Mapping[str, int]]:
        tally = self._tally
        return {
            catalog.SUCCESS: tally.successes,
            catalog.FAILURES: tally.failures,
            catalog.REJECTIONS: tally.rejections,
            catalog.PRINCIPAL_REQUESTS: tally.principals.requests,
            catalog.PRINCIPAL_PROMPT_TOKENS: tally.principals.prompt_tokens,
            catalog.PRINCIPAL_NEW_TOKENS: tally.principals.new_tokens,
            catalog.PRINCIPAL_REJECTIONS: tally.principals.refused,
        }


def exposed(collector: MetricsCollector, accept: str) -> tuple[bytes, str]:
    """Returns the metrics now, in the text format that a reader prefers, and its media type.

    Args:
        collector: the metrics.
        accept: the reader's header Accept; "" = it has none.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    encode, media_type = choose_encoder(accept)
    text: bytes = encode(registry)
    return text, media_type


def _number(entry: MetricEntry, model: str, value: float) -> Metric:
    family = CounterMetricFamily if entry.kind is catalog.MetricKind.COUNTER else GaugeMetricFamily
    metric = family(entry.name, entry.help, labels=[MODEL_LABEL])
    metric.add_metric([model], value)
    return metric


def _labelled(entry: MetricEntry, model: str, values: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(entry.name, entry.help, labels=[MODEL_LABEL, entry.label])
    for name, value in list(values.items()):
        metric.add_metric([model, name], value)
    return metric


def _histogram(entry: MetricEntry, model: str, counts: LatencyCounts) -> Metric:
    cumulative, total = counts.read()
    names = [*map(str, counts.bounds), "+Inf"]
    metric = HistogramMetricFamily(entry.name, entry.help, labels=[MODEL_LABEL])
    metric.add_metric([model], list(zip(names, cumulative, strict=True)), total)
    return metric
