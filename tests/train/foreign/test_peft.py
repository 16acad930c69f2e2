"""`initialize` around a model that `peft` wrapped: every ZeRO stage trains the adapters, and peft saves them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tk.checkpoint.format.adapter_record import BaseRecord
from tk.checkpoint.read.reader import Checkpoint
from tk.cli.main import main
from tk.core.errors import CheckpointError, ConfigError
from tk.model.stored_adapter import base_identity
from tk.model.stored_config import stored_config
from tk.tests.rank_pool import RankPool
from tk.tests.train.conftest import Configure
from tk.tests.train.frozen_steps import OPTIMIZER, batch, small_llama, steps_of_engine, steps_of_torch
from tk.tests.train.run_training import run_training
from tk.train import initialize

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def wrapped(head: bool) -> Any:
    """Returns a model with adapters on all linears but the head, whose B is not zero; `head`: it is trained, too."""
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules="all-linear",
        modules_to_save=["lm_head"] if head else None,
        init_lora_weights=False,
    )
    return get_peft_model(small_llama(), options)


def train_adapters(zero: Any, checkpointing: bool, head: bool, save: str) -> dict[str, Any]:
    """Returns what `steps_of_engine` does; peft saves the adapters."""
    model = wrapped(head)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    engine = initialize(model, OPTIMIZER, zero=zero, bucket_size=1500)
    found = steps_of_engine(engine)
    if head:  # peft takes `modules_to_save` from the module itself
        with engine.full_parameters():
            if dist.get_rank() == 0:
                model.save_pretrained(save)
    else:
        state = engine.state_dict()
        if dist.get_rank() == 0:
            model.save_pretrained(save, state_dict=state)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_adapters_of_peft_train_as_torch_trains_them_and_load_into_peft(
    rank_pool: RankPool, tmp_path: Path, zero: int, checkpointing: bool, head: bool
) -> None:
    from peft import PeftModel

    plain = wrapped(head)
    losses = steps_of_torch(plain)
    folder = str(tmp_path / "adapters")
    options = {"zero": zero, "checkpointing": checkpointing, "head": head}
    for result in rank_pool.run(train_adapters, 2, **options, save=folder):
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-5)
        assert zero < 3 or max(result["held"]) < 100, "between passes a rank has its part of the base alone"
    loaded = PeftModel.from_pretrained(small_llama(), folder)
    with torch.no_grad():
        expected, found, bare = (each(input_ids=batch(9)).logits for each in (plain, loaded, small_llama()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, bare, rtol=1e-2, atol=1e-2), "the adapters matter"


def wrapped_again(base: str, **options: Any) -> Any:
    """Returns a stored base with adapters of peft, whose B begins as zeros."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["lm_head"]} | options
    return get_peft_model(model, LoraConfig(**chosen))


def train_and_save(zero: Any, base: str, run: str, load: str = "", state: str = "", **options: Any) -> dict[str, Any]:
    """Returns what `steps_of_engine` does, after `load`; saves every step, and the module's whole state at the end."""
    engine = initialize(wrapped_again(base, **options), OPTIMIZER, zero=zero, bucket_size=1500)
    if load:
        engine.load(load)
    found = steps_of_engine(engine, each=lambda: engine.save(run, keep=0, wait=True))
    engine.close()
    whole = engine.state_dict()
    if state and dist.get_rank() == 0:
        save_file(whole, state)
    return found


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a base."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=batch(9)).logits
    return found


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.matrix) for zero in (0, 1, 2)), 3])
def test_a_step_holds_the_adapter_alone_and_goes_to_peft(
    rank_pool: RankPool, tmp_path: Path, base: Path, zero: int
) -> None:
    from peft import PeftModel

    run, state = tmp_path / "run", tmp_path / "state"
    losses = rank_pool.run(train_and_save, 2, zero=zero, base=str(base), run=str(run), state=str(state))[0]["losses"]
    step, trained = Checkpoint.open(run), wrapped_again(str(base))
    trained.load_state_dict(load_file(state))
    assert step.verify().ok
    named = {key: value for key, value in trained.named_parameters() if value.requires_grad}
    written = {key.removeprefix("base_model.model.").replace(".modules_to_save", ""): key for key in named}
    assert step.tensors.keys() == {name.replace(".default", "") for name in written}
    assert all(set(tensor.slots) == {"weight", "exp_avg", "exp_avg_sq"} for tensor in step.tensors.values())
    for name, key in written.items():
        assert torch.equal(step.read(name.replace(".default", "")).torch(), named[key]), name
    record = step.manifest.adapter
    assert record is not None
    assert record.base == BaseRecord(
        base_identity(Checkpoint.open(base), stored_config(Checkpoint.open(base))), str(base), "fp32"
    )

    assert main(["export", str(run), str(tmp_path / "peft")]) == 0
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "peft")
    assert torch.equal(logits_of(loaded), logits_of(trained))
    assert main(["export", "--merge", str(run), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), logits_of(trained), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(merged), logits_of(small_llama()), rtol=1e-2, atol=1e-2)

    again = rank_pool.run(
        train_and_save, 1, zero=(zero + 1) % 4, base=str(base), run=str(tmp_path / "on"), load=f"{run}/step-00000001"
    )
    np.testing.assert_allclose(again[0]["losses"], losses[1:], rtol=1e-5)
    for name in step.tensors:
        other = Checkpoint.open(tmp_path / "on").read(name).torch()
        torch.testing.assert_close(other, step.read(name).torch(), rtol=1e-3, atol=1e-5)


def test_steps_go_from_tk_train_to_initialize_and_back(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_training(configure("base", train={"steps": 1}))
    folder = str(tmp_path / "base" / "step-00000001")
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "model.norm"]}
    config = configure("adapter", train={"steps": 2}, lora=lora) | {"model": {"init": folder}}
    run_training(config)
    trained = Checkpoint.open(tmp_path / "adapter")
    options = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "model.norm"]}
    engine = initialize(wrapped_again(folder, **options), OPTIMIZER)
    engine.load(trained.path)
    assert engine.step_count == 2
    engine.save(tmp_path / "by hand", wait=True)
    saved = Checkpoint.open(tmp_path / "by hand")
    assert saved.manifest.adapter.base == trained.manifest.adapter.base  # type: ignore[union-attr]
    for name, slot in trained.chunks:
        assert torch.equal(saved.read(name, slot=slot).torch(), trained.read(name, slot=slot).torch()), (name, slot)
    more = configure("more", train={"steps": 1}, lora=lora | {"init": str(saved.path)}, optimizer={"lr": 1e-30})
    run_training(more | {"model": {"init": folder}})
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(Checkpoint.open(tmp_path / "more").read(name).torch(), saved.read(name).torch())


def test_an_adapter_of_another_kind_or_base_is_not_loaded(tmp_path: Path, base: Path) -> None:
    initialize(wrapped_again(str(base)), OPTIMIZER).save(tmp_path / "run", wait=True)
    engine = initialize(wrapped_again(str(base), lora_alpha=16), OPTIMIZER)
    with pytest.raises(CheckpointError, match="down_proj rank 4 and alpha / rank 2, and the module rank 4 and 4"):
        engine.load(tmp_path / "run")
    other = small_llama()
    other.lm_head.weight.data.add_(1)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another base than .*other: it was trained on .*base"):
        initialize(wrapped_again(str(tmp_path / "other")), OPTIMIZER).load(tmp_path / "run")
    initialize(small_llama(), OPTIMIZER).save(tmp_path / "whole", wait=True)
    with pytest.raises(CheckpointError, match="holds a model, not an adapter"):
        engine.load(tmp_path / "whole")


class Parts(nn.Module):
    """Two experts, of which a batch's rows choose one, and a part that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.idle = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        found: torch.Tensor = self.experts[expert](rows).square().mean()
        return found


def step_of_parts(zero: Any, targets: list[str], run: str) -> str:
    """Makes one step in which all ranks choose expert 0; returns the error of `step`, "" if there is none."""
    from peft import LoraConfig, get_peft_model

    engine = initialize(get_peft_model(Parts(), LoraConfig(target_modules=targets)), OPTIMIZER, zero=zero)
    engine.backward(engine((torch.ones(2, 4), 0)))
    try:
        engine.step()
    except ConfigError as error:
        return str(error)
    engine.save(run, wait=True)
    return ""


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.matrix), 3])
def test_keys_without_a_gradient_are_named(rank_pool: RankPool, tmp_path: Path, zero: int) -> None:
    targets, run = ["experts.0", "experts.1", "idle"], str(tmp_path / "run")
    for error in rank_pool.run(step_of_parts, 2, zero=zero, targets=targets, run=run):
        assert "Nothing was updated: base_model.model.idle.lora_A.default.weight and 1 more of its keys got no" in error
    assert rank_pool.run(step_of_parts, 2, zero=zero, targets=targets[:2], run=run) == ["", ""]
    assert Checkpoint.open(run).verify().ok


def test_an_expert_that_got_no_token_is_named_by_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert step_of_parts(0, ["experts.0", "experts.1"], str(tmp_path / "run")) == ""
    assert "experts.1.lora_A.weight and 1 more of its keys got no gradient since initialize" in caplog.text
