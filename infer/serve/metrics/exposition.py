"""The metrics of a server as Prometheus reads them: the table of all metrics, and its values in the text format.

Names, label names and kinds are vLLM's, with `tk_` instead of `vllm:`, where it has a metric of that meaning; so its
dashboards need a change of prefix only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from ...engine.schedule.statistics import EngineLoad, EngineTotals
from ..engine_protocol import EngineProtocol
from .statistics import LatencyHistogram, RequestStatistics

PREFIX: Final = "tk_"
MODEL_LABEL: Final = "model_name"


@dataclass(frozen=True)
class MetricSources:
    """The values that metrics are read from, at one moment."""

    step: int
    load: EngineLoad
    totals: EngineTotals
    requests: RequestStatistics


@dataclass(frozen=True)
class MetricEntry:
    """A metric.

    Attributes:
        name: the name without the prefix; that of a counter without `_total`, which Prometheus appends.
        help: the help text.
        read: returns its value, or its values by the label beside the model's; a histogram if that is its kind.
        family: the kind of a metric that is no histogram.
        label: the label beside the model's; "" = none.
    """

    name: str
    help: str
    read: Callable[[MetricSources], float | Mapping[str, int] | LatencyHistogram]
    family: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily
    label: str = ""

    def metric(self, sources: MetricSources, model: str) -> Metric:
        """Returns the metric of a model with its values now."""
        name, value = PREFIX + self.name, self.read(sources)
        if isinstance(value, LatencyHistogram):
            histogram = HistogramMetricFamily(name, self.help, labels=[MODEL_LABEL])
            histogram.add_metric([model], *value.read())
            return histogram
        metric = self.family(name, self.help, labels=[MODEL_LABEL, *([self.label] if self.label else [])])
        if isinstance(value, Mapping):
            for label, count in list(value.items()):  # the engine's thread may add one meanwhile
                metric.add_metric([model, label], count)
        else:
            metric.add_metric([model], value)
        return metric


CATALOG: Final = (
    MetricEntry(
        "num_requests_running", "Sequences that are computed.", lambda now: now.load.running, GaugeMetricFamily
    ),
    MetricEntry(
        "num_requests_waiting", "Sequences that wait to be computed.", lambda now: now.load.waiting, GaugeMetricFamily
    ),
    MetricEntry(
        "num_tokens_waiting",
        "Prompt tokens that wait to be computed.",
        lambda now: now.load.queued_tokens,
        GaugeMetricFamily,
    ),
    MetricEntry(
        "kv_cache_usage_perc",
        "Share of the blocks of the KV cache that requests hold, 0 to 1.",
        lambda now: now.load.blocks_used / max(now.load.blocks_total, 1),
        GaugeMetricFamily,
    ),
    MetricEntry(
        "kv_blocks_leaked",
        "Blocks of the KV cache that are used and that no request holds.",
        lambda now: now.totals.leaked_blocks,
        GaugeMetricFamily,
    ),
    MetricEntry("checkpoint_step", "Training step of the served checkpoint.", lambda now: now.step, GaugeMetricFamily),
    MetricEntry(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        lambda now: now.totals.prompt_tokens,
    ),
    MetricEntry("prefix_cache_hits", "Prompt tokens that the prefix cache had.", lambda now: now.totals.cached_tokens),
    MetricEntry(
        "num_preemptions", "Sequences whose blocks were taken away for others.", lambda now: now.totals.preemptions
    ),
    MetricEntry(
        "prompt_tokens", "Prompt tokens of the requests that were admitted.", lambda now: now.totals.prompt_tokens
    ),
    MetricEntry("generation_tokens", "New tokens.", lambda now: now.totals.new_tokens),
    MetricEntry(
        "proposed_tokens",
        "Tokens that were proposed and computed ahead, by the source of the proposals.",
        lambda now: now.totals.proposed,
        label="source",
    ),
    MetricEntry(
        "accepted_tokens",
        "Proposed tokens that came true.",
        lambda now: now.totals.accepted,
        label="source",
    ),
    MetricEntry(
        "request_success",
        "Completed samples, by the reason for their end.",
        lambda now: now.requests.successes,
        label="finished_reason",
    ),
    MetricEntry(
        "request_failures",
        "Requests that failed after the engine took them.",
        lambda now: now.requests.failures,
        label="status",
    ),
    MetricEntry(
        "request_rejections",
        "Calls that were refused before the engine took them.",
        lambda now: now.requests.rejections,
        label="status",
    ),
    MetricEntry(
        "principal_requests",
        "Requests that were taken and have ended.",
        lambda now: now.requests.principals.requests,
        label="principal",
    ),
    MetricEntry(
        "principal_prompt_tokens",
        "Tokens of the prompts of these.",
        lambda now: now.requests.principals.prompt_tokens,
        label="principal",
    ),
    MetricEntry(
        "principal_generation_tokens",
        "New tokens that were sent of these.",
        lambda now: now.requests.principals.new_tokens,
        label="principal",
    ),
    MetricEntry(
        "principal_rejections",
        "Calls that were refused before.",
        lambda now: now.requests.principals.refused,
        label="principal",
    ),
    MetricEntry(
        "adapter_requests",
        "Requests for an adapter that were taken and have ended.",
        lambda now: now.requests.adapters.requests,
        label="adapter",
    ),
    MetricEntry(
        "adapter_prompt_tokens",
        "Tokens of the prompts of these.",
        lambda now: now.requests.adapters.prompt_tokens,
        label="adapter",
    ),
    MetricEntry(
        "adapter_generation_tokens",
        "New tokens that were sent of these.",
        lambda now: now.requests.adapters.new_tokens,
        label="adapter",
    ),
    MetricEntry(
        "time_to_first_token_seconds",
        "Time from the submission of a request to its first token.",
        lambda now: now.requests.first_token,
    ),
    MetricEntry(
        "inter_token_latency_seconds",
        "Time between two tokens of a sample, when the engine sends them.",
        lambda now: now.requests.between_tokens,
    ),
    MetricEntry(
        "e2e_request_latency_seconds",
        "Time from submission to the last token of a completed request.",
        lambda now: now.requests.end_to_end,
    ),
    MetricEntry(
        "request_queue_time_seconds",
        "Time that a completed request waited to be computed.",
        lambda now: now.requests.queue_time,
    ),
)


class MetricsCollector:
    """Collects the metrics of one server whenever they are asked for, on the asker's thread.

    Args:
        statistics: the statistics of its requests.
    """

    def __init__(self, engine: EngineProtocol, statistics: RequestStatistics) -> None:
        self._engine, self._statistics = engine, statistics

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of the catalog, in its order."""
        info, books = self._engine.info, self._engine.statistics
        sources = MetricSources(info.step, books.load(), books.totals(), self._statistics)
        yield from (entry.metric(sources, info.name) for entry in CATALOG)

    def exposed(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics now, in the text format that a reader prefers, and its media type.

        Args:
            accept: the reader's header Accept; "" = it has none.
        """
        registry = CollectorRegistry()
        registry.register(self)
        encode, media_type = choose_encoder(accept)
        text: bytes = encode(registry)
        return text, media_type
