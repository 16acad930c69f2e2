"""The names of metrics beside vLLM's, and the Grafana dashboard that asks for them."""

import json
import re
from pathlib import Path

from tk.infer.serve.metrics.catalog import CATALOG, PREFIX

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
    f"principal_{name}" for name in ("requests", "prompt_tokens", "generation_tokens", "rejections")
}


def test_the_names_are_those_of_vllm_and_a_few_of_our_own() -> None:
    names = {entry.name.removeprefix(PREFIX): entry.label for entry in CATALOG}
    assert {name: names[name] for name in VLLM} == VLLM
    assert set(names) - set(VLLM) == OURS
    assert len(names) == len(CATALOG)
    assert all(entry.name.startswith(PREFIX) and entry.help.endswith(".") for entry in CATALOG)


def test_histograms_have_the_bounds_of_vllm() -> None:
    bounds = {entry.name.removeprefix(PREFIX): entry.bounds for entry in CATALOG if entry.bounds}
    assert set(bounds) == set(VLLM_BOUNDS)
    for name, own in bounds.items():
        assert VLLM_BOUNDS[name] <= set(own)
        assert list(own) == sorted(set(own))


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(rf"{PREFIX}\w+", expression)}
    offered = {name for entry in CATALOG for name in entry.sample_names}
    assert asked <= offered
    assert [entry.name for entry in CATALOG if not asked & set(entry.sample_names)] == []
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for text in expressions for name in re.findall(r"\$(\w+)", text)}
    assert used - {"__rate_interval"} <= variables
