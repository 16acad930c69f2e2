"""The metrics of a server as Prometheus' own parser reads them, vLLM's names, and the Grafana dashboard."""

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tk.core.errors import Cancelled
from tk.infer.engine.request.events import Done, Event, Failed
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.statistics import EngineLoad, EngineTotals
from tk.infer.serve.metrics.exposition import CATALOG, PREFIX, MetricEntry, MetricsCollector, MetricSources
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.infer.serve.metrics.statistics import LatencyHistogram, RequestStatistics
from tk.tests.infer.serve.fake_engine import INFO, FakeBooks, FakeEngine, delta, finished

Samples = dict[tuple[str, str], float]
NOTHING = MetricSources(0, EngineLoad(), EngineTotals(), RequestStatistics())
DASHBOARD = Path(__file__).resolve().parents[4] / "examples" / "deploy" / "grafana-dashboard.json"
# vLLM 0.32, vllm/v1/metrics/loggers.py: the metrics of which we have our own, without `vllm:`, and their label.
VLLM = {
    "num_requests_running": "",
    "num_requests_waiting": "",
    "kv_cache_usage_perc": "",
    "prefix_cache_queries": "",
    "prefix_cache_hits": "",
    "num_preemptions": "",
    "prompt_tokens": "",
    "generation_tokens": "",
    "request_success": "finished_reason",
    "time_to_first_token_seconds": "",
    "inter_token_latency_seconds": "",
    "e2e_request_latency_seconds": "",
    "request_queue_time_seconds": "",
}
_REQUEST = {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
VLLM_BOUNDS: dict[str, set[float]] = {
    "time_to_first_token_seconds": {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5}
    | {10, 20, 40, 80, 160, 640, 2560},
    "inter_token_latency_seconds": {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5}
    | {10, 20, 40, 80},
    "e2e_request_latency_seconds": _REQUEST,
    "request_queue_time_seconds": _REQUEST,
}
OURS = {"num_tokens_waiting", "kv_blocks_leaked", "checkpoint_step", "request_failures", "request_rejections"} | {
    *(f"principal_{name}" for name in ("requests", "prompt_tokens", "generation_tokens", "rejections")),
    *(f"adapter_{name}" for name in ("requests", "prompt_tokens", "generation_tokens")),
    *("proposed_tokens", "accepted_tokens"),
}


class Books(FakeBooks):
    def load(self) -> EngineLoad:
        return EngineLoad(running=2, waiting=3, queued_tokens=40, blocks_total=64, blocks_used=16)


class Counted(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = Books()


def sample_names(entry: MetricEntry) -> tuple[str, ...]:
    """Returns the names of a metric's time series."""
    name, kind = PREFIX + entry.name, entry.metric(NOTHING, "m").type
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    return tuple(name + ending for ending in endings[kind])


def histogram_bounds() -> dict[str, tuple[float, ...]]:
    values = {entry.name: entry.read(NOTHING) for entry in CATALOG}
    return {name: value.bounds for name, value in values.items() if isinstance(value, LatencyHistogram)}


def counted() -> MetricsCollector:
    statistics = RequestStatistics()
    answer: list[Event] = [delta("a"), delta("b"), finished(), Done()]
    for events in (answer, [Failed(Cancelled("aborted"))]):
        on_event = statistics.begin(Request((1,), SamplingParams(), "r"), lambda event: None)
        for each in events:
            on_event(each)
    statistics.refuse(RequestRecord("Generate", "alice", status="RESOURCE_EXHAUSTED"))
    ended = RequestRecord("Generate", "alice", values={"prompt_tokens": 5, "completion_tokens": 2})
    ended.admit("r", "sql")
    statistics.end(ended)
    return MetricsCollector(Counted(), statistics)


def samples(text: str) -> Samples:
    """Returns values by sample name and the label beside the model's."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == INFO.name
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def test_every_metric_of_the_catalog_is_shown() -> None:
    registry = CollectorRegistry()
    registry.register(counted())
    found = samples(generate_latest(registry).decode())
    assert {name for name, _ in found} == {name for entry in CATALOG for name in sample_names(entry)}
    assert found["tk_num_requests_running", ""] == 2
    assert found["tk_num_requests_waiting", ""] == 3
    assert found["tk_num_tokens_waiting", ""] == 40
    assert found["tk_kv_cache_usage_perc", ""] == 0.25
    assert found["tk_kv_blocks_leaked", ""] == 1
    assert found["tk_checkpoint_step", ""] == INFO.step
    assert found["tk_prefix_cache_queries_total", ""] == found["tk_prompt_tokens_total", ""] == 100
    assert found["tk_prefix_cache_hits_total", ""] == 25
    assert found["tk_num_preemptions_total", ""] == 4
    assert found["tk_generation_tokens_total", ""] == 7
    assert found["tk_proposed_tokens_total", "draft"] == 9
    assert found["tk_accepted_tokens_total", "draft"] == 6
    assert found["tk_request_success_total", "length"] == 1
    assert found["tk_request_failures_total", "CANCELLED"] == 1
    assert found["tk_request_rejections_total", "RESOURCE_EXHAUSTED"] == 1
    names = ("requests", "prompt_tokens", "generation_tokens", "rejections")
    assert [found[f"tk_principal_{name}_total", "alice"] for name in names] == [1, 5, 2, 1]
    assert [found[f"tk_adapter_{name}_total", "sql"] for name in names[:3]] == [1, 5, 2]
    for name, bounds in histogram_bounds().items():
        assert found[f"tk_{name}_bucket", "+Inf"] == found[f"tk_{name}_count", ""] == 1
        assert found[f"tk_{name}_bucket", str(bounds[-1])] == 1


def test_the_names_are_those_of_vllm_and_a_few_of_our_own() -> None:
    names = {entry.name: entry.label for entry in CATALOG}
    assert {name: names[name] for name in VLLM} == VLLM
    assert set(names) - set(VLLM) == OURS
    assert len(names) == len(CATALOG)
    assert all(entry.help.endswith(".") for entry in CATALOG)


def test_histograms_have_the_bounds_of_vllm() -> None:
    bounds = histogram_bounds()
    assert set(bounds) == set(VLLM_BOUNDS)
    for name, own in bounds.items():
        assert VLLM_BOUNDS[name] <= set(own)
        assert list(own) == sorted(set(own))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(rf"{PREFIX}\w+", expression)}
    offered = {name for entry in CATALOG for name in sample_names(entry)}
    assert asked <= offered
    assert [entry.name for entry in CATALOG if not asked & set(sample_names(entry))] == []
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for text in expressions for name in re.findall(r"\$(\w+)", text)}
    assert used - {"__rate_interval"} <= variables
