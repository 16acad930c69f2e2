"""The choice of a mode for context parallelism from a configuration."""

from typing import Any

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.planning.plan import RunPlan, make_plan

LONG: dict[str, Any] = {"max_position_embeddings": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def plan_of_rows(configure: Configure, data: dict[str, Any] | None = None, **model: Any) -> RunPlan:
    train = {"seq_len": 256, "micro_batch_size": 1}
    config = configure(model=LONG | model, train=train, data=data or {}, parallel={"cp": 4})
    return make_plan(parse(config, TrainConfig, "test"), None)


def test_auto_counts_only_the_keys_in_windows(configure: Configure) -> None:
    """Ulysses moves as much in any window; gathering moves a window's keys for each run of a rank's positions."""
    whole = plan_of_rows(configure, architecture="mistral", sliding_window=None)
    narrow = plan_of_rows(configure, architecture="mistral", sliding_window=8)
    assert (whole.cp_mode, narrow.cp_mode) == ("ulysses", "gather")
    assert narrow.cp_bytes["ulysses"] == whole.cp_bytes["ulysses"]
    assert narrow.cp_bytes["gather"] < whole.cp_bytes["gather"] / 4
    (one, *_) = (each for each in narrow.traffic if each.axis == "cp")
    assert one.what == "keys and values"


def test_each_layer_counts_with_its_window(configure: Configure) -> None:
    mixed = plan_of_rows(configure, architecture="qwen2", sliding_window=8, max_window_layers=1)
    whole = plan_of_rows(configure, architecture="qwen2")
    assert mixed.cp_bytes["gather"] == pytest.approx(whole.cp_bytes["gather"] / 2, rel=0.25), "one layer of two"


def test_documents_of_the_data_do_not_change_the_choice(configure: Configure) -> None:
    """The mode is the same wherever a run is planned, also without its data, and whichever rows come."""
    whole, packed = plan_of_rows(configure), plan_of_rows(configure, {"packing": "documents"})
    assert (packed.cp_mode, packed.cp_bytes) == (whole.cp_mode, whole.cp_bytes)
