"""DeepSpeed's JSON: keys of tk are mapped exactly, batch sizes are explained, all other keys are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.cli.main import main
from tk.core.errors import ConfigError
from tk.tests.train.conftest import Configure
from tk.train.config.deepspeed.config import Mapped, map_deepspeed, merge, read_deepspeed

FILES = Path(__file__).parent / "deepspeed_files"  # typical files of DeepSpeed users
USUAL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1,
    "steps_per_print": 2000,
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none"},
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "contiguous_gradients": True,
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "wall_clock_breakdown": False,
}


def _map(data: dict[str, Any], dp: int = 8, micro_batch_size: int = 2) -> Mapped:
    return map_deepspeed(data, "ds.json", dp, micro_batch_size)


def _values(mapped: Mapped) -> dict[str, Any]:
    """Returns the settings of keys that the file has."""
    return {setting.key: setting.value for setting in mapped.settings if not setting.absent}


def _defaults(data: dict[str, Any]) -> dict[str, Any]:
    return {setting.key: setting.value for setting in _map(data).settings if setting.absent}


def test_a_usual_file_maps_key_by_key() -> None:
    mapped = _map(USUAL)
    assert _values(mapped) == {
        "zero.stage": 2,
        "zero.bucket_size": 500_000_000,
        "zero.overlap": True,
        "offload.optimizer": "none",
        "offload.activations": "none",
        "optimizer.name": "adamw",
        "optimizer.grad_clip": 1.0,
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "optimizer.schedule": "linear",
        "optimizer.min_lr_ratio": 0.0,
        "optimizer.warmup_steps": 100,
        "precision.params": "fp16",
        "precision.initial_loss_scale": 4096.0,
        "precision.loss_scale_window": 500,
        "precision.min_loss_scale": 1.0,
        "train.steps": 1000,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 64,
    }
    notes = " ".join(mapped.notes)
    for part in ("halves the loss scale", "linear, not logarithmic", "zero_optimization.contiguous_gradients"):
        assert part in notes


def test_precision_follows_the_enabled_section() -> None:
    assert _values(_map({"bf16": {"enabled": True}, "fp16": {"enabled": False}})) == {"precision.params": "bf16"}
    assert _values(_map({"fp16": {"enabled": False}})) == {"precision.params": "fp32"}
    assert _values(_map({"fp16": {"enabled": "auto"}})) == {}
    with pytest.raises(ConfigError, match="both true"):
        _map({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_a_cosine_keeps_its_floor() -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "cos_min_ratio": 0.05}}
    assert _values(_map({"scheduler": scheduler})) == {
        "optimizer.schedule": "cosine",
        "optimizer.min_lr_ratio": 0.05,
        "train.steps": 10,
    }


@given(micro=st.integers(1, 64), steps=st.integers(1, 64), dp=st.integers(1, 64), left_out=st.integers(0, 3))
def test_any_two_batch_sizes_give_the_third(micro: int, steps: int, dp: int, left_out: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = dict(zip(names, (micro * steps * dp, micro, steps), strict=True))
    if left_out < 3:
        del data[names[left_out]]
    values = _values(_map(data, dp, micro_batch_size=7))
    total, at_once = values["train.global_batch_size"], values.get("train.micro_batch_size", 7)
    assert total == micro * steps * dp
    assert at_once == micro
    assert -(-total // (at_once * dp)) == steps, "as many micro-batches as DeepSpeed would accumulate"


def test_batch_sizes_that_disagree_are_explained_with_every_fix() -> None:
    data = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    with pytest.raises(ConfigError) as error:
        _map(data, dp=1)
    text = str(error.value)
    for part in (
        "ds.json: train_batch_size = 64 must be micro-batch x gradient_accumulation_steps x dp = 4 x 8 x 1 = 32",
        "The micro-batch is train_micro_batch_size_per_gpu",
        "dp is the number of ranks / (tp x pp)",
        "train_batch_size = 32, gradient_accumulation_steps = 16, a micro-batch of 8, dp = 2",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale = 128 is not supported, only 0: tk's loss"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type = 'OneBitAdam' is not supported"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type = 'OneCycle' is not supported; supported are WarmupLR"),
        ({"elasticity": {"enabled": True}}, 'elasticity is not supported: set [parallel] dp = "auto"'),
        ({"compression_training": {"weight": {"on": [1]}}}, "compression_training is not supported"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients = True is not supported"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            "adam_w_mode = false with optimizer.params.weight_decay = 0.1 adds the decay to the gradient",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 2e-4}}, "scheduler": {"type": "WarmupLR"}},
            "warmup_max_lr = 0.001, DeepSpeed's default, and optimizer.params.lr = 0.0002 differ; tk has one peak",
        ),
        ({"zero_optimization": {"stagee": 2}}, "unknown key 'zero_optimization.stagee'; did you mean 'zero_optimi"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage = 'two' must be a whole number"),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled = 'true' must be true or false"),
        ({"train_batch_size": 0}, "train_batch_size = 0 must be 1 or more"),
        ({"gradient_clipping": True}, "gradient_clipping = True must be a number"),
    ],
)
def test_unsupported_values_are_refused_by_name(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _map(data)
    assert message in str(error.value)


def test_all_refusals_are_reported_at_once() -> None:
    with pytest.raises(ConfigError, match=r"amp is not supported.*tp_size = 4.*unknown key 'foo'.*Lamb"):
        _map({"amp": {"enabled": True}, "tensor_parallel": {"autotp_size": 4}, "foo": 1, "optimizer": {"type": "Lamb"}})


def test_a_conflict_names_both_files() -> None:
    data = {"zero": {"stage": 1}, "optimizer": {"eps": 1e-8}}
    with pytest.raises(ConfigError) as error:
        merge(data, _map(USUAL), "run.toml", "ds.json")
    text = str(error.value)
    assert "run.toml has [zero] stage = 1, but zero_optimization.stage of ds.json sets it to 2" in text
    assert "eps" not in text, "equal values are no conflict"


def test_the_command_takes_both_files_and_overrides(
    configure: Configure, write_toml: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(parallel={"tp": 2})
    del config["optimizer"], config["zero"]
    for key in ("steps", "global_batch_size", "micro_batch_size"):
        del config["train"][key]
    json_file = tmp_path / "ds.json"
    json_file.write_text(json.dumps(USUAL))
    words = ["train", str(write_toml(config)), "--deepspeed", str(json_file), "--nproc", "16", "--dry-run"]
    assert main([*words, "--set", "train.steps=107"]) == 0
    shown = capsys.readouterr()
    assert "tp 2 x dp 8 = 16 ranks, ZeRO-2" in shown.out
    assert "2 micro-batches per rank" in shown.out
    assert "training   107 steps" in shown.out
    assert f"{json_file}: warmup is linear" in shown.err
    json_file.write_text(json.dumps(USUAL | {"gradient_accumulation_steps": 3}))
    assert main(words) == 2
    assert "= 4 x 3 x 8 = 96" in capsys.readouterr().err


def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path) -> None:
    for text, message in (("{", "not valid JSON"), ("[]", "must be a JSON object")):
        (tmp_path / "ds.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_deepspeed(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match="Cannot read"):
        read_deepspeed(tmp_path / "absent.json")


def test_absent_keys_have_the_defaults_of_deepspeed() -> None:
    assert _defaults({}) == {
        "optimizer.lr": 1e-3,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "optimizer.schedule": "constant",
        "optimizer.grad_clip": 0.0,
    }
    everything = {"gradient_clipping": 1.0, "scheduler": "auto", "optimizer": {"type": "Adam", "params": "auto"}}
    assert _defaults(everything) == {}
    some = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}, "gradient_clipping": "auto"}
    assert _defaults(some)["optimizer.weight_decay"] == 0.01, "torch's AdamW has another default"
    assert "optimizer.lr" not in _defaults(some)
    warmed = {"scheduler": {"type": "WarmupLR", "params": {}}}
    assert _defaults(warmed)["optimizer.warmup_steps"] == 1000
    alone = {"train_micro_batch_size_per_gpu": 4}
    assert _defaults(alone)["train.global_batch_size"] == 4 * 8, "nothing is accumulated"
    assert "train.global_batch_size" not in _defaults(alone | {"gradient_accumulation_steps": "auto"})


def test_the_toml_overrides_defaults_and_a_note_lists_the_others() -> None:
    data: dict[str, Any] = {"optimizer": {"weight_decay": 0.1, "schedule": "cosine"}}
    notes = merge(data, _map({"gradient_clipping": 1.0}), "run.toml", "ds.json")
    assert data["optimizer"] == {
        "weight_decay": 0.1,
        "schedule": "cosine",
        "grad_clip": 1.0,
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
    }
    assert len(notes) == 1
    assert "[optimizer] betas = [0.9, 0.999]" in notes[0]
    assert "grad_clip" not in notes[0], "the file sets it"


def test_adam_without_decay_is_adamw() -> None:
    for params in ({"adam_w_mode": False}, {"adam_w_mode": False, "weight_decay": 0}):
        assert _values(_map({"optimizer": {"type": "Adam", "params": params}}))["optimizer.name"] == "adamw"


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_ten_typical_files_run(
    path: Path, configure: Configure, write_toml: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure()
    config["train"] = {"steps": 40, "seq_len": 16}
    del config["optimizer"], config["zero"]
    code = main(["train", str(write_toml(config)), "--deepspeed", str(path), "--nproc", "4", "--dry-run"])
    assert code == 0, capsys.readouterr().err


def test_settings_of_typical_files() -> None:
    paths = sorted(FILES.glob("*.json"))
    assert len(paths) == 10
    found = {path.stem: map_deepspeed(read_deepspeed(path), path.name, 4, 2) for path in paths}
    assert _values(found["mics"])["zero.shard_size"] == 2
    assert _values(found["fp16-tutorial"])["zero.shard_size"] == 0, "-1 is off"
    assert _values(found["accelerate-zero2"])["precision.params"] == "bf16", "fp16 is off, its static scale too"
    assert _values(found["profiled"])["train.seed"] == 42
    offloaded = _values(found["hf-zero3-offload"])
    assert offloaded["offload.optimizer"] == offloaded["offload.parameters"] == "cpu"
    assert any("activation_checkpointing.number_checkpoints has no effect" in note for note in found["neox-like"].notes)
    assert any('left to the TOML file ("auto"): bf16.enabled' in note for note in found["hf-zero3-auto"].notes)
