"""The metrics of a server as Prometheus' own parser reads them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tk.core.errors import Cancelled
from tk.infer.engine.request.events import Done, Event, Failed, ModelInfo
from tk.infer.engine.request.request import Request
from tk.infer.engine.request.sampling_params import SamplingParams
from tk.infer.engine.schedule.books import EngineLoad, EngineTotals
from tk.infer.serve.metrics.catalog import CATALOG
from tk.infer.serve.metrics.exposition import MetricsCollector
from tk.infer.serve.metrics.request_record import RequestRecord
from tk.infer.serve.metrics.tally import RequestTally
from tk.tests.infer.serve.fake_engine import INFO, delta, finished

Samples = dict[tuple[str, str], float]


class Books:
    def load(self) -> EngineLoad:
        return EngineLoad(running=2, waiting=3, queued_tokens=40, blocks_total=64, blocks_used=16)

    def totals(self) -> EngineTotals:
        return EngineTotals(prompt_tokens=100, cached_tokens=25, new_tokens=7, preemptions=4, leaked_blocks=1)


class CountedFake:
    def __init__(self) -> None:
        self.info: ModelInfo = INFO
        self.books = Books()


def counted() -> MetricsCollector:
    tally = RequestTally()
    answer: list[Event] = [delta("a"), delta("b"), finished(), Done()]
    for events in (answer, [Failed(Cancelled("aborted"))]):
        on_event = tally.begin(Request((1,), SamplingParams(), "r"), lambda event: None)
        for each in events:
            on_event(each)
    tally.refuse(RequestRecord("Generate", "alice", status="RESOURCE_EXHAUSTED"))
    ended = RequestRecord("Generate", "alice", values={"prompt_tokens": 5, "completion_tokens": 2})
    ended.admit("r")
    tally.end(ended)
    return MetricsCollector(CountedFake(), tally)


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
    assert {name for name, _ in found} == {name for entry in CATALOG for name in entry.sample_names}
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
    assert found["tk_request_success_total", "length"] == 1
    assert found["tk_request_failures_total", "CANCELLED"] == 1
    assert found["tk_request_rejections_total", "RESOURCE_EXHAUSTED"] == 1
    names = ("requests", "prompt_tokens", "generation_tokens", "rejections")
    assert [found[f"tk_principal_{name}_total", "alice"] for name in names] == [1, 5, 2, 1]
    for entry in CATALOG:
        if entry.bounds:
            assert found[f"{entry.name}_bucket", "+Inf"] == found[f"{entry.name}_count", ""] == 1
            assert found[f"{entry.name}_bucket", str(entry.bounds[-1])] == 1
