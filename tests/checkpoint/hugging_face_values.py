"""Hugging Face folders of given tensors: made, read back by the safetensors library, and compared."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STORED = {
    "half": torch.linspace(-3, 3, 12).reshape(3, 4).half(),
    "brain": torch.linspace(-3, 3, 12).reshape(3, 4).bfloat16(),
    "single": torch.linspace(-3, 3, 12).reshape(3, 4),
    "position_ids": torch.arange(7).reshape(1, 7),
    "mask": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3, dtype=torch.int32),
    "no_rows": torch.zeros(0, 4),
    "no_columns": torch.zeros(4, 0, dtype=torch.int64),
    "none": torch.zeros(0, dtype=torch.bfloat16),
}


def folder_of(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def exported(path: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a folder by its index, as the safetensors library reads them."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(path / file)[name] for name, file in index.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        bits = torch.uint8 if values.itemsize == 1 else values.dtype
        assert torch.equal(found[name].view(bits), values.view(bits)), name
