"""The configuration of a run's last start, and what differs from it."""

import json
from pathlib import Path

import pytest

from tk.core.config import parse
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.records.run_files import SETTINGS
from tk.train.records.run_settings import changes_since, write_settings


def test_keys_that_differ_from_the_last_start_are_found(configure: Configure, tmp_path: Path) -> None:
    before = parse(configure(train={"steps": 6}), TrainConfig, "test")
    before.run_folder.mkdir()
    assert changes_since(before.run_folder, before) == {}
    write_settings(before, "0000dead")
    assert changes_since(before.run_folder, before) == {}
    now = parse(configure(train={"steps": 9, "freeze": ["lm_head"]}, optimizer={"lr": 0.5}), TrainConfig, "test")
    assert changes_since(before.run_folder, now) == {
        "train.steps": (6, 9),
        "train.freeze": ([], ["lm_head"]),
        "optimizer.lr": (before.optimizer.lr, 0.5),
    }
    write_settings(now, "0000dead")
    assert changes_since(before.run_folder, now) == {}


@pytest.mark.parametrize("text", ["", "[3]", '{"train": {"st'])
def test_a_file_that_says_nothing_changes_nothing(configure: Configure, text: str) -> None:
    config = parse(configure(), TrainConfig, "test")
    config.run_folder.mkdir()
    (config.run_folder / SETTINGS).write_text(text)
    assert changes_since(config.run_folder, config) == {}


def test_a_key_of_one_side_alone_is_null_on_the_other(configure: Configure) -> None:
    config = parse(configure(), TrainConfig, "test")
    config.run_folder.mkdir()
    stored = config.model_dump(mode="json")
    stored["train"] = {"old_key": 1} | {key: value for key, value in stored["train"].items() if key != "seed"}
    (config.run_folder / SETTINGS).write_text(json.dumps(stored))
    assert changes_since(config.run_folder, config) == {"train.seed": (None, 0), "train.old_key": (1, None)}
