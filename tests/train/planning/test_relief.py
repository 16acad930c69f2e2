"""The keys that a run is told to use: a run with them, planned anew, takes what the text says, which fits."""

import re
from typing import Any

import pytest

from tk.core.config import apply_overrides, parse
from tk.core.progress import format_bytes
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.planned_run import PlannedRun, prepare_run
from tk.train.planning.relief import needed_here, relief

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}  # planned, and never made


def prepared(config: dict[str, Any]) -> PlannedRun:
    return prepare_run(parse(config, TrainConfig, "test"), None)


@pytest.mark.parametrize(
    ("sections", "share", "keys"),
    [
        ({"train": {"micro_batch_size": 64, "global_batch_size": 64}}, 0.5, {"train.micro_batch_size"}),
        ({"parallel": {"dp": 4}, "model": LARGE}, 0.6, {"zero.stage"}),
        (
            {"parallel": {"dp": 4}, "model": LARGE},
            0.25,
            {"zero.stage", "offload.optimizer"},
        ),
    ],
)
def test_the_keys_that_are_named_make_the_run_fit(
    configure: Configure, sections: dict[str, dict[str, Any]], share: float, keys: set[str]
) -> None:
    config = configure(**sections)
    available = int(needed_here(prepared(config)) * share)
    text = relief(prepared(config), available)
    named = re.findall(r"\[(\w+)\] (\w+) = (\"\w+\"|\d+)", text)
    assert {f"{section}.{key}" for section, key, _ in named} >= keys, text
    apply_overrides(config, [f"{section}.{key}={value}" for section, key, value in named])
    again = needed_here(prepared(config))
    assert again <= available, text
    assert f"that needs {format_bytes(again)}." in text


def test_what_no_key_makes_fit_needs_more_machines(configure: Configure) -> None:
    run = prepared(configure())
    text = relief(run, needed_here(run) // 50)
    assert text.startswith("Use a smaller model or more machines")
    largest = max({**run.memory()[0].host, **run.memory()[0].device}.items(), key=lambda part: part[1])[0]
    assert f"The largest part is {largest}" in text
