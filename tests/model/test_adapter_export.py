"""Adapters to peft and from peft: equal logits both ways, for every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tk.checkpoint import Checkpoint
from tk.core.errors import ConfigError
from tk.core.layout import Layout
from tk.model.adapter_export import explicit_targets, prepare_peft_export
from tk.model.config import ModelConfig
from tk.model.lora.options import LoraOptions
from tk.model.lora.table import with_adapters
from tk.model.registry import decoder_spec
from tk.model.stored_adapter import StoredAdapter
from tk.tests.model.architectures import ENTRIES
from tk.tests.model.lora.peft_adapters import (
    logits_of,
    make_with_peft,
    our_logits,
    read_with_peft,
    save_as_step,
)

# peft 0.21 asks transformers 5 for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FIRST = ("llama3", "gpt2")  # in `make test`


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = r".*\.experts\..*"
# peft with transformers 5 knows no dense block or shared expert beside experts with the same names of weights, and no
# experts of Qwen2-MoE at all.
TARGETS = {"qwen2_moe": (ATTENTION,)} | dict.fromkeys(
    ("qwen3_moe", "glm4_moe", "glm4_moe ungrouped"), (ATTENTION, EXPERTS)
)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param(name, targets, marks=() if name in FIRST else pytest.mark.matrix)
        for name in ENTRIES
        for targets in TARGETS.get(name, ("all-linear",))
    ],
)
def test_an_export_gives_the_same_logits_in_peft(tmp_path: Path, name: str, targets: Any) -> None:
    base = tmp_path / "base"
    ENTRIES[name].make(base)
    step = save_as_step(tmp_path / "run", base, LoraOptions(rank=4, alpha=6, targets=targets), Layout())
    adapter = StoredAdapter.of(Checkpoint.open(step))
    out = prepare_peft_export(adapter, ModelConfig.from_folder(base), tmp_path / "out").run()
    torch.testing.assert_close(logits_of(read_with_peft(base, out)), our_logits(base, step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in ENTRIES]
)
def test_an_adapter_of_peft_gives_the_same_logits_here(tmp_path: Path, name: str) -> None:
    targets = list(ATTENTION) if "moe" in name or name == "mixtral" else "all-linear"
    base, adapter, expected = make_with_peft(name, tmp_path, target_modules=targets, use_rslora=True)
    torch.testing.assert_close(our_logits(base, adapter), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.matrix
@pytest.mark.parametrize("bias", ["all", "lora_only"])
@pytest.mark.parametrize(("name", "saved"), [("llama3", "lm_head"), ("gpt2", "wpe"), ("glm4_moe", "embed_tokens")])
def test_whole_modules_biases_and_patterns_pass_both_ways(tmp_path: Path, name: str, saved: str, bias: str) -> None:
    targets = ["c_attn", "c_proj"] if name == "gpt2" else ["q_proj", "v_proj", "k_proj"]
    options = {"rank_pattern": {targets[0]: 2}, "alpha_pattern": {f"1.*{targets[1]}": 3}, "bias": bias}
    base, adapter, expected = make_with_peft(
        name, tmp_path, biases=True, target_modules=targets, modules_to_save=[saved], **options
    )
    torch.testing.assert_close(our_logits(base, adapter), expected, rtol=1e-4, atol=1e-4)
    ours = LoraOptions(
        rank=4,
        alpha=6,
        targets=tuple(targets),
        modules_to_save=(saved,),
        **options,  # type: ignore[arg-type]
    )
    step = save_as_step(tmp_path / "run", base, ours, Layout(tp=2))
    stored = StoredAdapter.of(Checkpoint.open(step))
    out = prepare_peft_export(stored, ModelConfig.from_folder(base), tmp_path / "out").run()
    torch.testing.assert_close(logits_of(read_with_peft(base, out)), our_logits(base, step), rtol=1e-4, atol=1e-4)


def test_the_folder_names_base_modules_and_orientation(tmp_path: Path) -> None:
    ENTRIES["gpt2"].make(tmp_path / "base")
    files = {"tokenizer_config.json": b"{}", "generation_config.json": b"{}"}
    options = LoraOptions(rank=4, alpha=6, targets=("c_attn", "mlp.c_fc"), exclude=("1.mlp.c_fc",))
    step = save_as_step(tmp_path / "run", tmp_path / "base", options, Layout(tp=2, pp=3), side_files=files)
    prepared = prepare_peft_export(
        StoredAdapter.of(Checkpoint.open(step)), ModelConfig.from_folder(tmp_path / "base"), tmp_path / "out"
    )
    out = prepared.run()
    names = ["adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    config = json.loads((out / "adapter_config.json").read_text())
    modules = [f"transformer.h.{layer}.attn.c_attn" for layer in range(3)]
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tmp_path / "base"),
        "r": 4,
        "lora_alpha": 6.0,
        "lora_dropout": 0.0,
        "target_modules": sorted([*modules, "transformer.h.0.mlp.c_fc", "transformer.h.2.mlp.c_fc"]),
        "exclude_modules": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "bias": "none",
        "modules_to_save": None,
        "fan_in_fan_out": True,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    theirs, ours = Checkpoint.open(out), Checkpoint.open(step)
    assert all((theirs.read(name).values == ours.read(name).values).all() for name in ours.tensors)
    with pytest.raises(ConfigError, match="is a folder that peft wrote"):
        prepare_peft_export(StoredAdapter.of(theirs), ModelConfig.from_folder(tmp_path / "base"), tmp_path / "again")


def test_ends_of_names_are_targets_only_if_they_select_the_same_modules() -> None:
    spec = decoder_spec(ModelConfig.from_json(ENTRIES["llama3"].make_config().to_dict()))
    for options, wanted in (
        (LoraOptions(targets=("q_proj", "v_proj")), ["q_proj", "v_proj"]),
        (LoraOptions(targets="all-linear"), [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]),
        (LoraOptions(targets=("0.self_attn.q_proj",)), ["model.layers.0.self_attn.q_proj"]),
        (
            LoraOptions(targets=("q_proj",), modules_to_save=("model.layers.2.self_attn",)),
            ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
        ),
    ):
        assert explicit_targets(with_adapters(spec, options)) == wanted


def test_adapters_of_experts_are_exported_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = tmp_path / "base"
    ENTRIES["mixtral"].make(base)
    for targets, said in ((("q_proj",), False), (("w1", "w2", "w3"), True)):
        step = save_as_step(tmp_path / str(said), base, LoraOptions(rank=2, targets=targets), Layout())
        stored = StoredAdapter.of(Checkpoint.open(step))
        prepare_peft_export(stored, ModelConfig.from_folder(base), tmp_path / "out")
        assert ("adapters of experts" in caplog.text) == said
