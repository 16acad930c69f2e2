"""A run that trains an adapter: its steps hold no base, continue at any layout, and know the base that they need."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, reshard
from tk.core.config import parse
from tk.core.errors import CheckpointError, ConfigError
from tk.core.layout import Layout
from tk.model.adapter_export import prepare_peft_export
from tk.model.stored_adapter import StoredAdapter
from tk.model.stored_config import stored_config
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.run_training import run_training
from tk.train.config.train_config import TrainConfig
from tk.train.run.trainer import Trainer

LORA = {"rank": 4, "alpha": 8, "modules_to_save": ["model.norm"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"parallel": {"tp": 2, "dp": 1}},
    "zero 3": {"parallel": {"dp": 2}, "zero": {"stage": 3}},
    "pp": {"parallel": {"pp": 2, "dp": 1}},
    "tp and zero 3": {"parallel": {"tp": 2, "dp": 2}, "zero": {"stage": 3}},
    "sequence parallel, zero 2": {"parallel": {"tp": 2, "dp": 2, "sequence_parallel": True}, "zero": {"stage": 2}},
}


@pytest.fixture
def base(configure: Configure) -> Path:
    """The run folder of a base."""
    Trainer(parse(configure("base", train={"steps": 2}), TrainConfig, "test")).fit()
    return Path(configure("base")["checkpoint"]["dir"])


def adapting(configure: Configure, base: Path, run: str, steps: int = 4, **sections: Any) -> dict[str, Any]:
    """Returns the configuration of a run that adapts a base."""
    sections = {"lora": LORA, "checkpoint": {"every": 2}} | sections
    config = configure(run, train={"steps": steps}, **sections)
    config["model"] = {"init": str(base)}
    return config


def train(config: dict[str, Any], resume: str = "auto") -> None:
    Trainer(parse(config, TrainConfig, "test"), resume=resume).fit()


def bytes_of(step: Checkpoint) -> int:
    """Returns the bytes of all values of a step."""
    sizes = {"F32": 4, "BF16": 2}
    return sum(
        math.prod(tensor.shape) * sizes[code] for tensor in step.tensors.values() for code in tensor.slots.values()
    )


def test_a_step_holds_the_adapter_and_its_slots_alone(configure: Configure, base: Path, tmp_path: Path) -> None:
    train(adapting(configure, base, "adapted"))
    step, stored = Checkpoint.open(tmp_path / "adapted"), Checkpoint.open(base)
    assert step.verify().ok
    assert "model.layers.1.mlp.down_proj.lora_A.weight" in step.tensors
    whole = {name for name in step.tensors if "lora_" not in name}
    assert whole == {"model.norm.weight"}
    assert all(set(tensor.slots) == {"weight", "exp_avg", "exp_avg_sq"} for tensor in step.tensors.values())
    record = step.manifest.adapter
    assert record is not None
    assert (record.base.path, record.base.weight_dtype) == (str(stored.path), "fp32")
    assert record.config["r"] == 4
    assert record.config["target_modules"] == "all-linear"
    on_disk = sum(path.stat().st_size for path in step.path.rglob("*") if path.is_file())
    side_files = sum(len(data) for data in step.side_files().values())
    num_chunks = sum(len(list(chunks)) for chunks in step.chunks.values())
    assert on_disk <= bytes_of(step) + 2**16 + 512 * num_chunks + side_files
    assert not (step.path / "model.safetensors.index.json").exists(), "no other program may take it for a model"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "tp and zero 3" else pytest.mark.matrix) for name in LAYOUTS]
)
def test_steps_of_any_layout_continue_at_any_other(
    rank_pool: RankPool, configure: Configure, base: Path, tmp_path: Path, name: str
) -> None:
    world = math.prod(LAYOUTS[name]["parallel"].get(axis, 1) for axis in ("tp", "pp", "dp"))
    expected = run_training(adapting(configure, base, "one"))["loss"]
    config = adapting(configure, base, "split", **LAYOUTS[name])
    found = rank_pool.run(run_training, world, config=config)[-1]["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    one, split = ({step: tmp_path / run / f"step-{step:08d}" for step in (2, 4)} for run in ("one", "split"))
    from_one = adapting(configure, base, "one to split", **LAYOUTS[name])
    continued = rank_pool.run(run_training, world, config=from_one, resume=str(one[2]))[-1]["loss"]
    np.testing.assert_allclose(continued, expected[2:], rtol=1e-5)
    continued = run_training(adapting(configure, base, "split to one"), resume=str(split[2]))["loss"]
    np.testing.assert_allclose(continued, expected[2:], rtol=1e-5)
    saved, again = Checkpoint.open(split[2]), Checkpoint.open(reshard(split[2], tmp_path / "copy", layout=Layout(tp=2)))
    for key, slot in saved.chunks:
        assert torch.equal(saved.read(key, slot=slot).torch(), again.read(key, slot=slot).torch()), (key, slot)


def test_a_resharded_base_is_the_same_base(configure: Configure, base: Path, tmp_path: Path) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    again = reshard(base, tmp_path / "resharded", layout=Layout(tp=2))
    train(adapting(configure, again, "adapted", steps=4))
    assert Checkpoint.open(tmp_path / "adapted").step == 4


def test_another_base_is_refused_with_both_names(configure: Configure, base: Path, tmp_path: Path) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    train(configure("other", train={"steps": 2, "seed": 7}))
    with pytest.raises(CheckpointError, match=r"another base than .*other.*it was trained on .*base.*step-00000002"):
        train(adapting(configure, tmp_path / "other", "adapted"))
    with pytest.raises(CheckpointError, match="another base than"):
        train(adapting(configure, tmp_path / "other", "new", lora=LORA | {"init": str(tmp_path / "adapted")}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, r"rank 4 and alpha / rank 2, and the configuration rank 8"),
        ({"alpha": 4}, r"alpha / rank 2, and the configuration rank 4 and alpha / rank 1"),
        ({"targets": ["q_proj"]}, r"and the configuration none"),
        ({"modules_to_save": []}, r"for model.norm.weight it has the whole tensor, and the configuration none"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    configure: Configure, base: Path, change: dict[str, Any], message: str
) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    with pytest.raises(CheckpointError, match=message):
        train(adapting(configure, base, "adapted", lora=LORA | change))


def test_dropout_may_change_and_an_adapter_begins_another_run(configure: Configure, base: Path, tmp_path: Path) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    train(adapting(configure, base, "adapted", lora=LORA | {"dropout": 0.1}))
    first = adapting(configure, base, "next", steps=1, lora=LORA | {"init": str(tmp_path / "adapted")})
    begun = Trainer(parse(first, TrainConfig, "test"))
    begun.fit()
    before, after = (Checkpoint.open(tmp_path / run) for run in ("adapted", "next"))
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    difference = (before.read(name).torch() - after.read(name).torch()).abs().max()
    assert 0 < difference <= first["optimizer"]["lr"] * 1.1, "one step away from the adapter that it began with"


def test_a_folder_of_peft_begins_a_run_and_one_that_is_not_finite_is_refused(
    configure: Configure, base: Path, tmp_path: Path
) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    step = Checkpoint.open(tmp_path / "adapted")
    exported = prepare_peft_export(
        StoredAdapter.of(step), stored_config(Checkpoint.open(base)), tmp_path / "peft"
    ).run()
    config = adapting(configure, base, "next", steps=1, lora=LORA | {"init": str(exported)})
    trainer = Trainer(parse(config, TrainConfig, "test"))
    trainer.fit()
    [path] = exported.glob("*.safetensors")
    values = load_file(path)
    next(iter(values.values())).view(-1)[1] = float("nan")
    save_file(values, path)
    with pytest.raises(CheckpointError, match="holds NaN or an infinity"):
        train(adapting(configure, base, "third", lora=LORA | {"init": str(exported)}))


def test_neither_kind_of_run_goes_on_with_steps_of_the_other(configure: Configure, base: Path, tmp_path: Path) -> None:
    train(adapting(configure, base, "adapted", steps=2))
    with pytest.raises(ConfigError, match=r"holds an adapter, and the configuration has no \[lora\]"):
        train(configure("adapted", train={"steps": 4}))
    with pytest.raises(ConfigError, match=r"holds a model, and \[lora\] trains an adapter"):
        train(adapting(configure, base, "base"))
    with pytest.raises(ConfigError, match=r"\[model\] init = .* holds an adapter, not a model"):
        train(adapting(configure, tmp_path / "adapted", "third"))
    config = adapting(configure, base, "fourth")
    config["model"] = configure("fourth")["model"]
    with pytest.raises(ConfigError, match=r"\[lora\] trains an adapter of a base"):
        train(config)
