"""Percentiles, throughput and goodput of given observations."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.infer.client.load_test import Observation, Targets, draw, percentile, summary, table

# Due at 1, sent late; 5 tokens in 3 messages.
SLOW = Observation(1.0, 1.5, 3.0, [(2.0, 1), (2.4, 2), (3.0, 2)])
FAST = Observation(0.0, 0.0, 0.5, [(0.1, 1), (0.2, 1)])
REFUSED = Observation(0.0, 0.0, 0.01, [], "RESOURCE_EXHAUSTED")
CUT = Observation(0.0, 0.0, 4.0, [(0.1, 1)], "UNAVAILABLE")


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(0, 100))
def test_a_percentile_is_the_nearest_rank(values: list[float], percent: int) -> None:
    if percent:
        assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")
    else:
        assert percentile(values, 0) == min(values)


def test_latencies_count_from_the_time_a_request_was_due() -> None:
    assert SLOW.first_token_seconds == 1.0
    assert SLOW.token_seconds == pytest.approx(0.25)
    assert SLOW.gaps == pytest.approx([0.4, 0.6])
    result = summary([SLOW, FAST], Targets())
    assert result["latencies"]["first token"]["p50"] == pytest.approx(0.1)
    assert result["latencies"]["first token"]["p99"] == 1.0
    assert result["latencies"]["between tokens"]["p99"] == pytest.approx(0.6)
    assert result["latencies"]["whole request"]["mean"] == pytest.approx(1.25)
    assert result["latest_send_seconds"] == 0.5


def test_throughput_counts_what_came_and_goodput_what_met_the_targets() -> None:
    observed = [SLOW, FAST, REFUSED, CUT]
    result = summary(observed, Targets(first_token_seconds=0.5))
    assert result["seconds"] == 4.0
    assert result["statuses"] == {"OK": 2, "RESOURCE_EXHAUSTED": 1, "UNAVAILABLE": 1}
    assert result["requests_per_second"] == 0.5
    assert result["tokens_per_second"] == 2.0, "those of the stream that broke were computed too"
    assert (result["goodput_per_second"], result["met_targets"]) == (0.25, 0.25)
    assert summary(observed, Targets(token_seconds=0.2))["met_targets"] == 0.25
    assert summary(observed, Targets())["met_targets"] == 0.5
    json.dumps(result, allow_nan=False)


def test_a_test_in_which_all_was_refused_has_a_report_too() -> None:
    result = summary([REFUSED], Targets())
    assert result["latencies"]["first token"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert "1 RESOURCE_EXHAUSTED" in table(result)
    assert draw([REFUSED]).count("nothing recorded") == 4


def test_the_table_and_the_picture_show_the_latencies() -> None:
    text = table(summary([SLOW, FAST, CUT], Targets()))
    assert "3 requests in 4.0 s: 2 OK, 1 UNAVAILABLE" in text
    assert text.splitlines()[3].split() == ["first", "token", "550.0", "100.0", "1000.0", "1000.0"]
    assert "up to 500 ms late" in text
    root = ElementTree.fromstring(draw([SLOW, FAST]))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 4
