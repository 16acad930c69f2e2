"""The start of a run: from nothing, from its own newest step, from a given step, or from another model's weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint import Checkpoint, RunFolder
from tk.checkpoint.format.step_names import step_name
from tk.core.config import parse
from tk.core.errors import CheckpointError, ConfigError
from tk.tests.train.conftest import Configure
from tk.train.config.train_config import TrainConfig
from tk.train.run.run_start import RunStart
from tk.train.run.trainer import Trainer
from tk.train.state.progress import TrainState


def trained(configure: Configure, steps: int, run: str = "run") -> Path:
    """Trains to a step, of which the run folder keeps every one; returns the folder."""
    config = parse(configure(run, train={"steps": steps}, checkpoint={"every": 1}), TrainConfig, "test")
    Trainer(config).fit()
    return config.run_folder


def started(config: dict[str, Any], resume: str = "auto", fork: bool = False) -> tuple[TrainState, Trainer]:
    """Starts a run without a step of training; returns its state and its trainer."""
    trainer = Trainer(parse(config, TrainConfig, "test"))
    with trainer.checkpointer.open(trainer.save_options()) as run:
        return RunStart(trainer.checkpointer, run, trainer.config, trainer.inputs).begin(resume, fork), trainer


def stored_embedding(step: Path) -> torch.Tensor:
    return Checkpoint.open(step).read("model.embed_tokens.weight").torch()


def embedding(trainer: Trainer) -> torch.Tensor:
    [found] = [value for name, value in trainer.stages[0].named_parameters() if "embed_tokens" in name]
    return found.detach()[:301]


def test_an_empty_folder_starts_at_step_0(configure: Configure) -> None:
    for resume in ("auto", "never"):
        assert started(configure(), resume)[0] == TrainState()


def test_the_newest_step_is_loaded_and_reported(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    folder = trained(configure, 2)
    with caplog.at_level("INFO"):
        state, trainer = started(configure(train={"steps": 9}))
    assert (state.step, state.samples) == (2, 12)
    assert trainer.engine.optimizer.step_count == 2
    assert torch.equal(embedding(trainer), stored_embedding(folder / step_name(2)))
    assert f"resuming from {folder / step_name(2)}" in caplog.text
    assert "nothing to do" not in caplog.text
    assert "changed train.steps: 2 -> 9" in caplog.text
    assert "changed checkpoint.every: 1 -> 0" in caplog.text
    with caplog.at_level("INFO"):
        started(configure(train={"steps": 2}))
    assert "train.steps = 2 leaves nothing to do" in caplog.text


def test_a_given_step_is_loaded_and_newer_ones_are_moved_if_that_is_asked_for(configure: Configure) -> None:
    folder = trained(configure, 2)
    given = str(folder / step_name(1))
    with pytest.raises(CheckpointError, match=r"holds step 2, newer than step 1"):
        started(configure(), given)
    assert started(configure(), given, fork=True)[0].step == 1
    assert [step for step, _ in RunFolder(folder).steps()] == [1]
    with pytest.raises(CheckpointError, match="does not exist"):
        started(configure(), str(folder / "absent"))


def test_a_run_that_has_steps_is_not_begun_anew(configure: Configure) -> None:
    folder = trained(configure, 1)
    with pytest.raises(ConfigError, match=r"holds step 1 .*--resume never"):
        started(configure(), "never")
    assert [step for step, _ in RunFolder(folder).steps()] == [1]


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("train", "seq_len", 20, "was trained on other data"),
        ("train", "seed", 7, "was trained with train.seed = 0"),
        ("model", "rope_theta", 77, "has model.rope_theta = 10000.0, and the configuration 77.0"),
    ],
)
def test_a_run_goes_on_with_its_data_its_seed_and_its_model(
    configure: Configure, section: str, key: str, value: int, message: str
) -> None:
    trained(configure, 1)
    with pytest.raises(ConfigError, match=re.escape(message)):
        started(configure(**{section: {key: value}}))


def test_the_weights_of_another_model_begin_a_run_of_its_own(configure: Configure) -> None:
    step = trained(configure, 1, "first") / step_name(1)
    config = configure("second", train={"seed": 5, "seq_len": 20})
    config["model"] = {"init": str(step)}
    state, trainer = started(config)
    assert state == TrainState()
    assert trainer.engine.optimizer.step_count == 0
    assert torch.equal(embedding(trainer), stored_embedding(step))
