"""The state of training to and from a manifest: the keys on disk, and errors that name file and key."""

import json
from typing import Any

import pytest

from tk.core.errors import CheckpointError
from tk.train.state.progress import TrainState
from tk.train.state.stored_state import LossScaleState, ModuleResume, RunResume

STORED: dict[str, Any] = {
    "step": 3,
    "tokens": 700,
    "samples": 18,
    "optimizer_step": 2,
    "loss_scale": {"value": 1024.0, "good_steps": 7},
    "seed": 5,
    "data_fingerprint": "abc",
}


def test_a_run_is_stored_under_these_keys() -> None:
    resume = RunResume(TrainState(2, 600, 12).advance(100, 6), 2, LossScaleState(1024.0, 7), 5, "abc")
    assert json.dumps(resume.to_json()) == json.dumps(STORED)
    assert RunResume.from_json(STORED, "here") == resume
    assert ModuleResume.from_json(STORED, "here") == ModuleResume(3, 2, resume.loss_scale)


def test_a_module_is_stored_under_these_keys() -> None:
    for resume, stored in (
        (ModuleResume(4, 4, None), {"step": 4, "loss_scale": {}}),
        (ModuleResume(4, 3, None), {"step": 4, "optimizer_step": 3, "loss_scale": {}}),
        (ModuleResume(4, 4, LossScaleState(0.25, 0)), {"step": 4, "loss_scale": {"value": 0.25, "good_steps": 0}}),
    ):
        assert json.dumps(resume.to_json()) == json.dumps(stored)
        assert ModuleResume.from_json(stored, "here") == resume
    assert ModuleResume.from_json({"step": 4}, "here") == ModuleResume(4, 4, None), "steps of early versions"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "at/step: tokens of the state to resume is None; it must be a whole number, 0 or more"),
        ({"samples": -1}, "samples of the state to resume is -1"),
        ({"optimizer_step": 2.0}, "optimizer_step of the state to resume is 2.0"),
        ({"seed": True}, "seed of the state to resume is True"),
        ({"step": "3"}, "step of the state to resume is '3'"),
        ({"loss_scale": [1]}, r"loss_scale of the state to resume is \[1\]; it must be an object"),
        ({"loss_scale": {"value": float("nan"), "good_steps": 1}}, "loss_scale.value of the state to resume is nan"),
        ({"loss_scale": {"value": 2.0}}, "good_steps of the state to resume is None"),
        (
            {"data_fingerprint": None},
            "at/step does not name the data .*`initialize` saved is resumed by its",
        ),
    ],
)
def test_a_state_that_cannot_be_resumed_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RunResume.from_json(STORED | change, "at/step")


def test_weights_alone_are_not_resumed() -> None:
    for kind in (RunResume, ModuleResume):
        with pytest.raises(CheckpointError, match="at/step holds weights only: there is nothing to resume"):
            kind.from_json({}, "at/step")
