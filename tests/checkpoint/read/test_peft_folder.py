"""An adapter's folder of peft as a checkpoint: opened, inspected, verified and compared, and its names checked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.locate import open_folder
from tk.checkpoint.read.peft_folder import PeftFolder
from tk.cli.main import main
from tk.core.errors import CheckpointError, ManifestError

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = {f"{MODULE}.lora_A.weight": torch.ones(2, 32), f"{MODULE}.lora_B.weight": torch.ones(32, 2) * 3}
CONFIG = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "some/base"}


def peft_folder(folder: Path, tensors: Mapping[str, torch.Tensor] = TENSORS, **changes: Any) -> Path:
    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def test_tensors_have_their_names_in_the_model(tmp_path: Path) -> None:
    found = Checkpoint.open(peft_folder(tmp_path / "a"))
    assert sorted(found.tensors) == [f"model.layers.0.self_attn.q_proj.lora_{each}.weight" for each in "AB"]
    assert (found.read("model.layers.0.self_attn.q_proj.lora_B.weight").values == 3).all()
    record = found.manifest.adapter
    assert record is not None
    assert record.config == CONFIG
    assert (record.base.identity, record.base.path, record.base.weight_dtype) == ("", "some/base", "")
    nameless = Checkpoint.open(peft_folder(tmp_path / "b", base_model_name_or_path=None)).manifest.adapter
    assert nameless is not None
    assert nameless.base.path == ""
    with pytest.raises(CheckpointError, match=r"holds an adapter and no model: it has no config.json. Name the model"):
        found.config()


def test_a_wrapped_bias_and_whole_modules_have_the_names_of_the_base(tmp_path: Path) -> None:
    more = {f"{MODULE}.base_layer.bias": torch.zeros(32), "base_model.model.lm_head.weight": torch.zeros(3, 32)}
    found = Checkpoint.open(peft_folder(tmp_path / "a", TENSORS | more))
    assert {"model.layers.0.self_attn.q_proj.bias", "lm_head.weight"} < set(found.tensors)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.layers.0.self_attn.k_proj.lora_A.weight", "holds 'model.layers.0.self_attn.k_proj.lora_A.weight'; the"),
        ("base_model.q_proj.lora_A.weight", "names that begin with 'base_model.model.'"),
        ("base_model.model.", "holds 'base_model.model.'"),
        (f"{MODULE}.bias", "base_layer.bias' and .*q_proj.bias', which are both model.layers.0.self_attn.q_proj.bias"),
        (f"{MODULE}\n.lora_A.weight", "must be a printable string"),
        (f"{MODULE}\u202e.lora_A.weight", "must be a printable string"),
    ],
)
def test_other_names_are_refused_by_name(tmp_path: Path, key: str, words: str) -> None:
    bias = {f"{MODULE}.base_layer.bias": torch.zeros(1)} if key.endswith(".bias") else {}
    with pytest.raises(ManifestError, match=words):
        Checkpoint.open(peft_folder(tmp_path / "a", TENSORS | bias | {key: torch.zeros(1)}))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    for content, words in (
        (data[:-1], "adapter_model.safetensors: its header describes 512 bytes of data; the file has 511"),
        (data[:5], "adapter_model.safetensors has 5 bytes"),
        (b"\x02" + b"\0" * 7 + b"{}", "holds no tensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            Checkpoint.open(folder)
    weights.write_bytes(data)
    for text, words in (
        ("[]", "must be an object"),
        ("{", "is not JSON"),
        ('{"base_model_name_or_path": 3}', "= '3' must"),
    ):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(ManifestError, match=words):
            Checkpoint.open(folder)


def test_a_folder_answers_as_others_do(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a")
    for name in ("README.md", "tokenizer.json", "training_args.bin", "optimizer.pt", ".hidden"):
        (folder / name).write_text("{}")
    found = open_folder(folder)
    assert isinstance(found, PeftFolder)
    assert (found.kind, found.has_checksums, found.has_splits) == ("peft", False, False)
    assert found.file_sizes() == {"adapter_model.safetensors": (folder / "adapter_model.safetensors").stat().st_size}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= found.removable_files()
    assert found.left_behind() == ["optimizer.pt", "training_args.bin"]
    assert sorted(found.notes()) == [
        f"{folder / name} is not read: adapter_model.safetensors holds the adapter."
        for name in ("optimizer.pt", "training_args.bin")
    ]
    assert open_folder(folder).fingerprint == found.fingerprint  # type: ignore[union-attr]
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"lora_alpha": 3}))
    assert open_folder(folder).fingerprint != found.fingerprint  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"adapter_config.json was replaced or changed"):
        found.require_unchanged()


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        peft_folder(tmp_path / "a"),
        peft_folder(tmp_path / "b", {**TENSORS, f"{MODULE}.lora_A.weight": torch.zeros(2, 32)}),
    )
    assert main(["inspect", str(one)]) == 0
    said = capsys.readouterr().out
    assert f"{one} (PEFT folder)" in said
    assert "adapter     LORA, rank 2, of some/base, unverified" in said
    assert main(["inspect", str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapter"]["adapter"] == CONFIG
    assert main(["verify", str(one)]) == 0
    assert main(["diff", str(one), str(one)]) == 0
    assert main(["diff", str(one), str(two)]) == 1
    assert "q_proj.lora_A.weight" in capsys.readouterr().out


def test_it_becomes_a_step_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = peft_folder(tmp_path / "a")
    assert main(["reshard", str(folder), str(tmp_path / "step"), "--tp", "1"]) == 0
    found = Checkpoint.open(tmp_path / "step")
    assert found.manifest.adapter == Checkpoint.open(folder).manifest.adapter
    assert found.verify().ok
    assert main(["reshard", str(folder), str(tmp_path / "two"), "--tp", "2"]) == 2
    assert "does not record how its tensors may be cut" in " ".join(capsys.readouterr().err.split())
