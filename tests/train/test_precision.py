"""fp16 with its loss scale, and steps that are not finite: decided alike by all ranks, nothing updated."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.core.config import parse
from tk.core.errors import TkError
from tk.model.config import ModelConfig
from tk.parallel.mesh import Mesh
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.train import initialize
from tk.train.config.sections import PrecisionSection
from tk.train.config.train_config import TrainConfig
from tk.train.engine.loss_scale import LossScale
from tk.train.run.trainer import Trainer
from tk.train.state.progress import StepResult
from tk.train.state.stored_state import LossScaleState

FP16: dict[str, Any] = {"params": "fp16", "initial_loss_scale": 2.0**30, "loss_scale_window": 4}


def test_the_loss_scale_halves_at_once_and_doubles_after_a_window() -> None:
    scale = LossScale.of(PrecisionSection(params="fp16", initial_loss_scale=8, loss_scale_window=2, min_loss_scale=2))
    seen = []
    for good in (True, True, True, False, True, False, False, False, True):
        assert scale.can_shrink == (scale.value > 2)
        scale.succeeded() if good else scale.overflowed()
        seen.append(scale.value)
    assert seen == [8, 16, 16, 8, 8, 4, 2, 2, 2]
    again = LossScale.of(scale.options)
    again.restore(scale.state)
    assert again == scale
    for small in (1.0, 0.25):  # where min_loss_scale allows it, a run goes on with its scale
        again.restore(LossScaleState(small, 3))
        assert (again.value, again.good_steps) == (small, 3)
    fresh = LossScale.of(scale.options)
    fresh.restore(LossScale.of(PrecisionSection(params="bf16")).state)
    assert fresh.value == 8, "a run in bf16 has no scale to go on with"
    plain = LossScale.of(PrecisionSection())
    plain.succeeded()
    assert (plain.value, plain.can_shrink) == (1.0, False)


def train(config: dict[str, Any], poison: dict[str, int] | None = None) -> dict[str, Any]:
    """Trains on this rank; with `poison`, rank `rank`'s gradients or loss are not finite at step `step`."""
    parsed = parse(config, TrainConfig, "test")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    mesh = Mesh.build(parsed.layout(world), parsed.model.num_key_value_heads)
    results: list[StepResult] = []
    trainer = Trainer(parsed, mesh, on_step=lambda step, result: results.append(result))
    if poison and mesh.world.rank == poison["rank"]:
        _poison(trainer, poison["step"])
    try:
        trainer.fit()
        error = ""
    except TkError as caught:
        error = str(caught)
    return {
        "loss": [result.loss if math.isfinite(result.loss) else None for result in results],
        "scale": [result.loss_scale for result in results],
        "lr": [result.lr for result in results],
        "updated": [result.updated for result in results],
        "error": error,
    }


def _poison(trainer: Trainer, step: int) -> None:
    """One rank's rows of a step give a loss that is not a number."""
    run = trainer.pipeline.train

    def poisoned(micro_batches: Any, loss_factor: float) -> torch.Tensor:
        return run(micro_batches, math.nan if trainer.state.step + 1 == step else loss_factor)

    trainer.pipeline.train = poisoned  # type: ignore[method-assign]


def test_fp16_layouts_skip_the_same_steps(rank_pool: RankPool, configure: Configure, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": FP16, "train": {"steps": 16, "log_every": 1}}
    saving = {"checkpoint": {"every": 8}}
    expected = train(configure("one", **options | saving))
    assert expected["updated"].count(False) >= 2, "no overflow: nothing is shown"
    assert any(later > now for now, later in zip(expected["scale"], expected["scale"][1:], strict=False))
    for name, layout, zero in (("tp2dp2", {"tp": 2, "dp": 2}, 3), ("pp2", {"pp": 2}, 0)):
        config = configure(name, **options | {"parallel": {"dp": 1} | layout, "zero": {"stage": zero}})
        for result in rank_pool.run(train, math.prod(layout.values()), config=config):
            assert result["scale"] == expected["scale"], name
            assert result["updated"] == expected["updated"], name
            np.testing.assert_allclose(result["loss"], expected["loss"], rtol=2e-3, err_msg=name)
    checkpoint = Checkpoint.open(tmp_path / "tp2dp2")
    assert checkpoint.tensors["model.norm.weight"].slots["weight"] == "F16"
    assert ModelConfig.from_json(checkpoint.config()).dtype == "float16"
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines if "loss" in line] == expected["scale"]
    # The scale is part of a checkpoint: the steps after step 8 are the same again.
    for path in tmp_path.glob("one/step-00000016*/COMMIT"):
        path.unlink()
    resumed = train(configure("one", **options | saving))
    assert resumed["scale"] == expected["scale"][8:]
    np.testing.assert_allclose(resumed["loss"], expected["loss"][8:], rtol=0)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2, "dp": 1}], ids=["dp2", "pp2"])
def test_a_step_that_is_not_finite_ends_the_run_and_names_its_ranks(
    rank_pool: RankPool, configure: Configure, layout: dict[str, int]
) -> None:
    config = configure("stop", train={"steps": 4}, parallel=layout)
    for result in rank_pool.run(train, 2, config=config, poison={"rank": 1, "step": 3}):
        assert len(result["loss"]) == 2
        assert "Step 3: loss nan" in result["error"]
        assert "The loss of rank 1 is not finite" in result["error"]
        holders = "ranks 0-1" if layout["dp"] == 2 else "rank 0"
        assert re.search(rf"The gradient of model\.\S+, as reduced on {holders}, is not finite", result["error"])


def test_steps_that_are_not_finite_are_skipped_so_often_and_no_more(
    rank_pool: RankPool, configure: Configure, tmp_path: Path
) -> None:
    options = {"steps": 5, "on_nonfinite": "skip", "max_skipped_steps": 1, "log_every": 5}
    config = configure("skip", train=options, parallel={"dp": 2}, zero={"stage": 2})
    for result in rank_pool.run(train, 2, config=config, poison={"rank": 0, "step": 2}):
        assert result["updated"] == [True, False, True, True, True]
        assert not result["error"]
    line = json.loads((tmp_path / "skip" / "metrics.jsonl").read_text().splitlines()[1])
    assert (line["step"], line["skipped_steps"]) == (5, 1)
    alone = configure("alone", train=options | {"max_skipped_steps": 2})
    trainer = Trainer(parse(alone, TrainConfig, "test"))
    run = trainer.pipeline.train
    trainer.pipeline.train = lambda micro_batches, loss_factor: run(micro_batches, math.inf)  # type: ignore[method-assign]
    with pytest.raises(TkError, match=r"Step 3: .* 3 steps in a row were not finite"):
        trainer.fit()


def torch_loop(updated: list[bool], first_scale: float, window: int, warmup: int) -> tuple[list[float], list[float]]:
    """Returns the learning rate and the loss scale of each step of torch's GradScaler, with its scheduler."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=window)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    rates, scales = [], []
    for is_finite in updated:
        rates.append(optimizer.param_groups[0]["lr"])
        scales.append(scaler.get_scale())
        scaler.scale(parameter.sum()).backward()
        if not is_finite:
            parameter.grad = torch.tensor([math.inf])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() >= scales[-1]:
            warm_up.step()
    return rates, scales


def test_overflows_take_no_warm_up_from_a_run_as_in_torchs_loop(configure: Configure, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "precision": FP16,
        "train": {"steps": 12},
        "optimizer": {"schedule": "constant", "warmup_steps": 6},
        "checkpoint": {"every": 4},
    }
    trained = train(configure(**options))
    assert trained["updated"].count(False) >= 2, "no overflow: nothing is shown"
    rates, scales = torch_loop(trained["updated"], FP16["initial_loss_scale"], FP16["loss_scale_window"], 6)
    np.testing.assert_allclose(trained["lr"], rates, rtol=1e-6)
    assert trained["scale"] == scales
    for path in tmp_path.glob("run/step-000000[01]*/COMMIT"):
        if "04" not in path.parent.name:
            path.unlink()
    assert train(configure(**options))["lr"] == trained["lr"][4:], "the count of updates is in the checkpoint"


def test_overflows_take_no_warm_up_from_an_engine_as_in_torchs_loop() -> None:
    module = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(module.bias)  # small numbers have small steps between them in fp16
    engine = initialize(module, {"lr": 3e-3, "warmup_steps": 6, "weight_decay": 0.0}, precision="fp16")
    updated, moved = [], []
    for _ in range(12):
        before = engine.state_dict()["bias"].float()
        engine.backward(8 * engine(torch.ones(2, 2, dtype=torch.float16)).sum())
        updated.append(engine.step())
        moved.append(float((engine.state_dict()["bias"].float() - before).abs().max()))
    assert updated.count(False) >= 2, "no overflow: nothing is shown"
    rates, _ = torch_loop(updated, 65536.0, 1000, 6)
    expected = [rate if finite else 0.0 for rate, finite in zip(rates, updated, strict=True)]
    np.testing.assert_allclose(moved, expected, rtol=0.02)  # AdamW moves by the rate on an equal gradient
