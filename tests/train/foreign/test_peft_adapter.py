"""Which parameters of a module that `peft` wrapped are its adapter's, and what is refused, or saved whole instead."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tk.checkpoint.format.adapter_record import BaseRecord
from tk.checkpoint.read.reader import Checkpoint
from tk.core.errors import ConfigError
from tk.tests.train.frozen_steps import OPTIMIZER, small_llama
from tk.train import initialize
from tk.train.foreign.peft_adapter import PeftAdapter

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


def lora(model: nn.Module, **options: Any) -> Any:
    """Returns a model with adapters on its projections q."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | options))


def adapter_of(model: nn.Module) -> PeftAdapter:
    found = PeftAdapter.of(model, log=True)
    assert found is not None
    return found


def test_the_active_adapter_has_the_names_of_its_base() -> None:
    from peft import LoraConfig

    model = lora(small_llama(), layers_to_transform=[0], modules_to_save=["norm"], rank_pattern={"q_proj": 3})
    norms = [name for name, _ in small_llama().named_parameters() if "norm" in name]
    found = adapter_of(model)
    assert sorted(found.names.values()) == sorted([f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", *norms])
    assert found.names[f"base_model.model.{Q}.lora_A.default.weight"] == f"{Q}.lora_A.weight"
    assert (found.modules, found.options.rank_pattern) == ((Q,), {"q_proj": 3})
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"], layers_to_transform=[0]))
    model.set_adapter("second")
    assert sorted(adapter_of(model).names.values()) == [f"{V}.lora_A.weight", f"{V}.lora_B.weight"]
    plain = small_llama()
    plain.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), "own")
    assert adapter_of(plain).names[f"{Q}.lora_A.own.weight"] == f"{Q}.lora_A.weight"


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ("lora_only", ["h.0.attn.c_attn"]),
        ("all", ["h.0.attn.c_attn", "h.0.attn.c_proj", "h.0.ln_1", "h.0.ln_2", "ln_f"]),
    ],
)
def test_biases_of_the_base_belong_to_the_adapter(bias: str, expected: list[str]) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, bos_token_id=0, eos_token_id=0))
    wrapped = lora(model, target_modules=["c_attn"], bias=bias, modules_to_save=["ln_f"], fan_in_fan_out=True)
    biases = {name.removesuffix(".bias") for name in adapter_of(wrapped).names.values() if name.endswith(".bias")}
    mlp = {f"transformer.h.0.mlp.{name}" for name in ("c_fc", "c_proj")} if bias == "all" else set()
    assert biases == {f"transformer.{name}" for name in expected} | mlp | {"transformer.ln_f"}


def _freeze(*ends: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(ends):
                parameter.requires_grad_(False)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _freeze("lora_A.default.weight", "lora_B.default.weight"),
            r"adapter 'default' is frozen, .*is_trainable=True",
        ),
        (
            _freeze(f"{Q}.lora_A.default.weight"),
            rf"{Q}.lora_A.default.weight is frozen, and other parts of the adapter",
        ),
        (_freeze("lora_A.default.weight"), rf"{Q}.lora_A.default.weight is frozen, .* \(so are 2 more\)"),
    ],
)
def test_a_frozen_adapter_is_refused_by_name(change: Callable[[nn.Module], None], message: str) -> None:
    model = lora(small_llama())
    change(model)
    with pytest.raises(ConfigError, match=message):
        initialize(model, OPTIMIZER)
    assert type(model.base_model.model.lm_head.weight) is nn.Parameter, "nothing was changed"


def test_an_adapter_that_was_read_to_be_used_is_refused(tmp_path: Path) -> None:
    from peft import PeftModel

    lora(small_llama()).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its adapter 'default' is frozen.* Load it with .*is_trainable=True"):
        initialize(PeftModel.from_pretrained(small_llama(), tmp_path), OPTIMIZER)
    assert adapter_of(PeftModel.from_pretrained(small_llama(), tmp_path, is_trainable=True)).modules[0] == Q


class Normed(nn.Module):
    """A linear layer and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.q_proj(rows)).square().mean()
        return found


def _with_trained_head() -> Any:
    model = lora(small_llama())
    model.base_model.model.lm_head.weight.requires_grad_(True)
    return model


def _of_two() -> Any:
    from peft import LoraConfig

    model = lora(small_llama())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def _of_another_kind() -> Any:
    from peft import IA3Config, get_peft_model

    return get_peft_model(small_llama(), IA3Config(target_modules=["q_proj"], feedforward_modules=[]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: lora(small_llama(), use_dora=True), "use_dora = 'True', and tk builds adapters without it"),
        (_of_two, "only one active adapter of type LORA can be saved alone"),
        (_of_another_kind, "only one active adapter of type LORA can be saved alone"),
        (lambda: lora(small_llama(), target_modules=["embed_tokens"]), "it has no factors lora_A and lora_B of linear"),
        (_with_trained_head, "lm_head.weight is trained, too, and no part of the adapter"),
        (lambda: lora(Normed()), "passes change the running statistics of base_model.model.norm"),
    ],
)
def test_what_no_adapter_holds_is_saved_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any], reason: str
) -> None:
    model = make()
    engine = initialize(model, OPTIMIZER)
    assert f"stores the base of this {type(model).__name__} with its adapter: " in caplog.text
    assert reason in caplog.text
    engine.save(tmp_path / "run", wait=True)
    step = Checkpoint.open(tmp_path / "run")
    assert step.manifest.adapter is None
    assert step.tensors.keys() == engine.state_dict().keys()


def test_modules_that_peft_did_not_wrap_have_no_adapter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert PeftAdapter.of(small_llama(), log=True) is None
        assert PeftAdapter.of(nn.Linear(2, 2), log=True) is None
    assert not caplog.text


def test_a_base_without_a_folder_that_tk_knows_has_no_identity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora(small_llama())
    for base, expected in (("", ""), ("who/model", "who/model"), (str(tmp_path), str(tmp_path))):
        model.peft_config["default"].base_model_name_or_path = base
        record = adapter_of(model).record("bf16", known=True)
        assert record.base == BaseRecord("", expected, "bf16")
    assert f"name its base {tmp_path} without its identity: " in caplog.text
