"""Runs with adapters: those of one process in every layout, a base that stays as it is, and one dropout for all."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tk.checkpoint.read.reader import Checkpoint
from tk.core.config import parse
from tk.core.local_params import Piece
from tk.parity.measure import ParityTrainer
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import make_trainer, run_training
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer
from tk.train.state.progress import StepResult

STEPS, FEW_STEPS = 50, 4
LORA: dict[str, Any] = {"rank": 4, "alpha": 8}
EXPERTS = {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"architecture": "glm4_moe", "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2}},
    "sequence parallel, ZeRO": {"parallel": {"tp": 2, "dp": 2, "sequence_parallel": True}, "zero": {"stage": 2}},
    "zb-h1": {"parallel": {"pp": 2, "schedule": "zb-h1"}, "recompute": {"mode": "selective"}},
    "dp": {"parallel": {"dp": 2}, "zero": {"stage": 1}},
    "cp": {"parallel": {"cp": 2}, "zero": {"stage": 3}},
    "offload": {"parallel": {"dp": 2}, "zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "experts": {"model": EXPERTS, "parallel": {"tp": 2, "dp": 2, "ep": 2}, "zero": {"stage": 3}},
    "experts alone": {
        "model": EXPERTS,
        "lora": {"targets": r".*experts\.\d\.w[12]"},
        "parallel": {"tp": 2, "dp": 2, "ep": 2, "expert_tp": 2},
        "recompute": {"mode": "full"},
    },
    "a stage without adapters": {"lora": {"targets": r".*layers\.1\..*"}, "parallel": {"pp": 2, "dp": 2}},
    "modules trained whole": {
        "lora": {"targets": ["q_proj", "v_proj"], "modules_to_save": ["norm", "lm_head"]},
        "parallel": {"tp": 2, "dp": 2},
        "zero": {"stage": 2},
    },
}
FAST = ("sequence parallel, ZeRO",)
MODEL = ("model", "lora", "data", "precision")  # the sections that a run on one process has too


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the bases."""
    return tmp_path_factory.mktemp("bases")


def run_on_ranks(rank_pool: RankPool, config: dict[str, Any]) -> dict[str, Any]:
    """Runs a configuration on as many ranks as its layout has; returns what the first one found."""
    world = math.prod(config["parallel"].setdefault(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    found: list[dict[str, Any]] = rank_pool.run(train_adapter, world, config=config)
    assert not any(each["changed"] for each in found)
    return found[0]


def base_of(bases: Path, configure: Configure, sections: dict[str, Any]) -> Path:
    """Returns the run folder of a base of the model in `sections`, which is trained once."""
    model = sections.get("model", {})
    folder = bases / "-".join(["base", *map(str, model.values())])
    if not folder.exists():
        config = configure("base", model=model, train={"steps": 1, "eval_rows": 1})
        config["checkpoint"]["dir"] = str(folder)
        run_training(config)
    return folder


def adapting(base: Path, configure: Configure, run: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of a run that adapts a base."""
    config = configure(run, **{key: values for key, values in sections.items() if key != "model"})
    config["model"] = {"init": str(base)}
    return config


def changed(trainer: Trainer, base: Checkpoint) -> list[str]:
    """Returns the frozen tensors of this rank that are not those of the base."""
    buffers, found = trainer.engine.buffers, []

    def compare(piece: Piece, begin: int, values: torch.Tensor) -> None:
        expected = base.read(piece.tensor.alias or piece.tensor.name).torch()[piece.box.slices].reshape(-1)
        if not torch.equal(values, expected[begin : begin + values.numel()].to(values.dtype)):
            found.append(piece.tensor.name)

    for shard in buffers.frozen_shards:
        compare(shard.piece, shard.flat[0], buffers.read_frozen(shard, *shard.flat))
    for local in buffers.unsharded:
        flat = buffers.unsharded_tensor(local).detach().view(-1)
        for piece in local.pieces:
            compare(piece, 0, flat[piece.start : piece.start + piece.box.size])
    assert buffers.frozen_shards or buffers.unsharded
    return found


def train_adapter(config: dict[str, Any]) -> dict[str, Any]:
    """Trains on this rank; returns losses and gradient norms, and the frozen tensors that are not those of the base."""
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "changed": []}

    def on_step(step: int, result: StepResult) -> None:
        found["loss"].append(result.loss)
        found["grad_norm"].append(result.grad_norm)

    trainer = make_trainer(config, on_step=on_step)
    trainer.fit()
    found["changed"] = changed(trainer, Checkpoint.open(config["model"]["init"]))
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.matrix) for name in LAYOUTS]
)
def test_a_run_with_adapters_is_that_of_one_process(
    rank_pool: RankPool, configure: Configure, bases: Path, name: str
) -> None:
    sections = {"lora": LORA, "optimizer": {"lr": 1e-2}} | LAYOUTS[name]
    sections["lora"] = LORA | sections["lora"]
    sections["train"] = {"steps": FEW_STEPS if name in FAST else STEPS}
    base = base_of(bases, configure, sections)
    alike = {key: values for key, values in sections.items() if key in (*MODEL, "train", "optimizer")}
    expected = train_adapter(adapting(base, configure, "one", alike))
    assert not expected["changed"]
    found = run_on_ranks(rank_pool, adapting(base, configure, "split", sections))
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-4)


SPLIT: dict[str, dict[str, Any]] = {
    "dp": {"parallel": {"dp": 2}},
    "tp": {"parallel": {"tp": 2}},
    "sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}, "recompute": {"mlp_block": 5}},
    "cp": {"parallel": {"cp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "documents, ulysses": {
        "data": {"packing": "documents"},
        "parallel": {"cp": 2, "tp": 2, "cp_mode": "ulysses"},
        "model": {"num_key_value_heads": 4},
    },
    "accumulation": {"train": {"micro_batch_size": 1}},
    "recomputed": {"recompute": {"mode": "full"}},
    "all of these": {"parallel": {"cp": 2}, "recompute": {"mode": "full"}, "train": {"micro_batch_size": 1}},
    "in parts": {"recompute": {"mode": "selective", "mlp_block": 5}},
    "a shared expert": {"model": SHARED, "parallel": {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}},
    "a shared expert, split": {"model": SHARED, "parallel": {"tp": 2}},
}
FAST_SPLIT = ("all of these",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_SPLIT else pytest.mark.matrix) for name in SPLIT]
)
def test_dropout_leaves_out_the_same_values_in_every_layout(
    rank_pool: RankPool, configure: Configure, bases: Path, name: str
) -> None:
    drops = LORA | {"alpha": 64, "dropout": 0.1} | ({"exclude": r".*\.experts\..*"} if "expert" in name else {})
    alike = {"lora": drops, "optimizer": {"lr": 2e-2, "warmup_steps": 0}, "checkpoint": {"every": 0}}
    sections = alike | SPLIT[name]
    sections["train"] = {"steps": 2, "eval_rows": 1} | sections.get("train", {})
    one = alike | {key: values for key, values in sections.items() if key in MODEL}
    one["train"] = {"steps": 2, "eval_rows": 1}
    base = base_of(bases, configure, sections)
    expected = train_adapter(adapting(base, configure, "one", one))["loss"]
    config = adapting(base, configure, "split", sections)
    found = run_on_ranks(rank_pool, config) if "parallel" in sections else train_adapter(config)
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)
    without = train_adapter(adapting(base, configure, "without", one | {"lora": drops | {"dropout": 0.0}}))["loss"]
    assert abs(without[-1] / expected[-1] - 1) > 1e-4


def test_an_evaluation_and_each_step_have_the_dropout_that_they_should(configure: Configure) -> None:
    trainers = [
        ParityTrainer(parse(configure(lora=LORA | {"dropout": share}), TrainConfig, "test")) for share in (0.5, 0.0)
    ]
    first, second = (trainer._evaluate() for trainer in trainers)
    assert first == second
    drops, plain = (trainer.step().loss for trainer in trainers)
    assert abs(drops / plain - 1) > 1e-4


@pytest.mark.matrix  # tests/parallel/test_adapters.py has the products
def test_half_precision_trains_adapters_over_ranks(rank_pool: RankPool, configure: Configure, bases: Path) -> None:
    sections: dict[str, Any] = {"lora": LORA | {"dropout": 0.1}, "precision": {"params": "bf16"}}
    sections |= {"optimizer": {"lr": 1e-2}, "train": {"steps": FEW_STEPS}}
    base = base_of(bases, configure, sections)
    expected = train_adapter(adapting(base, configure, "one", sections))["loss"]
    layout = {"parallel": {"tp": 2, "sequence_parallel": True}, "zero": {"stage": 3}}
    found = run_on_ranks(rank_pool, adapting(base, configure, "split", sections | layout))
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-3)
