"""The metrics of a server: names, kinds, help texts and bounds of histograms.

Names, label names and kinds are vLLM's, with `tk_` instead of `vllm:`, where it has a metric of that meaning; so its
dashboards need a change of prefix only. Histograms have all of its bounds, and more below: small models are faster.
"""

import enum
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "tk_"
MODEL_LABEL: Final = "model_name"


class MetricKind(enum.Enum):
    """The kinds of metrics of Prometheus that are in use. It appends `_total` to the names of counters."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class MetricEntry:
    """A metric.

    Attributes:
        name: the name with the prefix; that of a counter without `_total`.
        kind: the kind.
        help: the help text.
        label: the label beside the model's; "" = none.
        bounds: the upper bounds of a histogram in seconds, ascending, without infinity.
    """

    name: str
    kind: MetricKind
    help: str
    label: str = ""
    bounds: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names of its time series."""
        if self.kind is MetricKind.COUNTER:
            return (f"{self.name}_total",)
        if self.kind is MetricKind.HISTOGRAM:
            return f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count"
        return (self.name,)


def _counter(name: str, text: str, label: str = "") -> MetricEntry:
    return MetricEntry(PREFIX + name, MetricKind.COUNTER, text, label)


def _gauge(name: str, text: str) -> MetricEntry:
    return MetricEntry(PREFIX + name, MetricKind.GAUGE, text)


def _histogram(name: str, text: str, bounds: tuple[float, ...]) -> MetricEntry:
    return MetricEntry(PREFIX + name, MetricKind.HISTOGRAM, text, bounds=bounds)


_FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

RUNNING: Final = _gauge("num_requests_running", "Sequences that are computed.")
WAITING: Final = _gauge("num_requests_waiting", "Sequences that wait to be computed.")
WAITING_TOKENS: Final = _gauge("num_tokens_waiting", "Prompt tokens that wait to be computed.")
KV_USAGE: Final = _gauge("kv_cache_usage_perc", "Share of the blocks of the KV cache that requests hold, 0 to 1.")
LEAKED_BLOCKS: Final = _gauge("kv_blocks_leaked", "Blocks of the KV cache that are used and that no request holds.")
STEP: Final = _gauge("checkpoint_step", "Training step of the served checkpoint.")
PREFIX_QUERIES: Final = _counter("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
PREFIX_HITS: Final = _counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
PREEMPTIONS: Final = _counter("num_preemptions", "Sequences whose blocks were taken away for others.")
PROMPT_TOKENS: Final = _counter("prompt_tokens", "Prompt tokens of the requests that were admitted.")
GENERATION_TOKENS: Final = _counter("generation_tokens", "New tokens.")
SUCCESS: Final = _counter("request_success", "Completed samples, by the reason for their end.", "finished_reason")
FAILURES: Final = _counter("request_failures", "Requests that failed after the engine took them.", "status")
REJECTIONS: Final = _counter("request_rejections", "Calls that were refused before the engine took them.", "status")
PRINCIPAL_REQUESTS: Final = _counter("principal_requests", "Requests that were taken and have ended.", "principal")
PRINCIPAL_PROMPT_TOKENS: Final = _counter("principal_prompt_tokens", "Tokens of the prompts of these.", "principal")
PRINCIPAL_NEW_TOKENS: Final = _counter(
    "principal_generation_tokens", "New tokens that were sent of these.", "principal"
)
PRINCIPAL_REJECTIONS: Final = _counter("principal_rejections", "Calls that were refused before.", "principal")
FIRST_TOKEN: Final = _histogram(
    "time_to_first_token_seconds", "Time from the submission of a request to its first token.", _FIRST_TOKEN_BOUNDS
)
BETWEEN_TOKENS: Final = _histogram(
    "inter_token_latency_seconds", "Time between two tokens of a sample, when the engine sends them.", _TOKEN_BOUNDS
)
END_TO_END: Final = _histogram(
    "e2e_request_latency_seconds", "Time from submission to the last token of a completed request.", _REQUEST_BOUNDS
)
QUEUE_TIME: Final = _histogram(
    "request_queue_time_seconds", "Time that a completed request waited to be computed.", _REQUEST_BOUNDS
)

CATALOG: Final = (
    *(RUNNING, WAITING, WAITING_TOKENS, KV_USAGE, LEAKED_BLOCKS, STEP),
    *(PREFIX_QUERIES, PREFIX_HITS, PREEMPTIONS, PROMPT_TOKENS, GENERATION_TOKENS, SUCCESS, FAILURES, REJECTIONS),
    *(PRINCIPAL_REQUESTS, PRINCIPAL_PROMPT_TOKENS, PRINCIPAL_NEW_TOKENS, PRINCIPAL_REJECTIONS),
    *(FIRST_TOKEN, BETWEEN_TOKENS, END_TO_END, QUEUE_TIME),
)
