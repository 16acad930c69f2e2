"""Folders of other programs, of a model and of an adapter: one behaviour, and every change of a file is seen."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tk.checkpoint import Checkpoint
from tk.checkpoint.read.checkpoint_folder import CheckpointFolder
from tk.checkpoint.read.locate import open_folder
from tk.core.errors import CheckpointError
from tk.tests.checkpoint.read.test_peft_folder import peft_folder


@pytest.fixture(params=["model", "adapter"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model in two dtypes, or an adapter."""
    if request.param == "adapter":
        return peft_folder(tmp_path / "adapter")
    (tmp_path / "model").mkdir()
    tensors = {"a": torch.ones(2, 3), "b": torch.arange(3).bfloat16()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def opened(folder: Path) -> CheckpointFolder:
    found = open_folder(folder)
    assert found is not None
    return found


def test_it_has_one_slot_and_nothing_of_a_run(folder: Path) -> None:
    found = opened(folder)
    found.check()
    found.end_lease()
    assert (found.manifest.step, found.manifest.resume, found.parts, found.sealed_files) == (0, {}, {}, {})
    assert all(tuple(tensor.slots) == ("weight",) for tensor in found.manifest.tensors.values())
    assert Checkpoint.open(folder).verify().ok


def test_a_replaced_file_is_not_read_with_the_header_of_the_old_one(folder: Path) -> None:
    found = opened(folder)
    [name] = found.file_sizes()
    shutil.copy(folder / name, folder / "copy")
    (folder / "copy").replace(folder / name)
    with pytest.raises(CheckpointError, match=f"{name} was replaced or changed after its header was read"):
        found.open_data(name)
    with pytest.raises(CheckpointError, match=f"{name} was replaced or changed while it was read"):
        found.require_unchanged()
    assert opened(folder).fingerprint != found.fingerprint


def test_another_configuration_is_another_fingerprint(folder: Path) -> None:
    before = opened(folder)
    [path] = (each for each in folder.iterdir() if each.name in ("config.json", "adapter_config.json"))
    path.write_text(json.dumps({"peft_type": "LORA", "r": 3}))
    assert opened(folder).digest == before.digest
    assert opened(folder).fingerprint != before.fingerprint
    with pytest.raises(CheckpointError, match=f"{path.name} was replaced or changed"):
        before.require_unchanged()


def test_other_weights_are_noted_and_hidden_files_are_not(folder: Path) -> None:
    for name in ("old.safetensors", ".DS_Store", "notes"):
        (folder / name).write_bytes(b"")
    found = opened(folder)
    assert found.left_behind() == ["notes", "old.safetensors"]
    [note] = found.notes()
    assert note.startswith(f"{folder / 'old.safetensors'} is not read: ")
    assert not {"notes", "old.safetensors"} & found.removable_files()
