"""Every tensor of a Hugging Face folder comes through with its values, whatever its dtype and size, or is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tk.checkpoint import Checkpoint, Options, compare, prepare_export, prepare_reshard, reshard
from tk.core import dtypes
from tk.core.casts import cast, widen
from tk.core.errors import CheckpointError, ManifestError
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import MIXED, llama_table, save_step, true_values

TABLE = llama_table(layers=1)

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

FP8 = {
    "e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
    "scales": torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu),
}


def folder_of(path: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def exported(path: Path) -> dict[str, torch.Tensor]:
    """What lies in a folder by its index, as the safetensors library reads it."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(path / file)[name] for name, file in index.items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        bits = torch.uint8 if values.itemsize == 1 else values.dtype
        assert torch.equal(found[name].view(bits), values.view(bits)), name


def test_every_dtype_and_empty_tensors_come_through(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", STORED | FP8)
    prepare_export(Checkpoint.open(source), tmp_path / "plain", plain=True).run()
    reshard(source, tmp_path / "tk", layout=Layout())
    prepare_export(Checkpoint.open(tmp_path / "tk"), tmp_path / "again").run()
    for out in ("plain", "tk", "again"):
        assert_same(exported(tmp_path / out), STORED | FP8)
    assert Checkpoint.open(tmp_path / "again").verify().ok
    assert compare(Checkpoint.open(source), Checkpoint.open(tmp_path / "again")).same
    reshard(tmp_path / "again", tmp_path / "pp1", layout=Layout())
    assert_same(exported(tmp_path / "pp1"), STORED | FP8)


def test_a_change_of_dtype_leaves_integers_alone(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", STORED, dtype="float32")
    reshard(source, tmp_path / "bf16", layout=Layout(), dtype=dtypes.BF16)
    floats = {name: values.bfloat16() for name, values in STORED.items() if values.is_floating_point()}
    assert_same(exported(tmp_path / "bf16"), STORED | floats)
    assert Checkpoint.open(tmp_path / "bf16").config() == {"dtype": "bfloat16"}


def test_quantized_values_are_not_cast_without_their_scales(tmp_path: Path) -> None:
    source = Checkpoint.open(folder_of(tmp_path / "source", FP8))
    with pytest.raises(CheckpointError, match=r" is stored as F8_E\dM\d, .* no cast to bf16 .*leave out --dtype"):
        prepare_reshard(source, tmp_path / "x", Options(Layout(), dtypes.BF16))


@pytest.mark.parametrize("dtype", [dtypes.FP16, dtypes.FP32], ids=lambda dtype: dtype.name)
def test_a_read_in_another_dtype_is_cast_from_the_master(tmp_path: Path, dtype: dtypes.DType) -> None:
    found = Checkpoint.open(save_step(tmp_path / "run", TABLE, Layout(tp=2), MIXED))
    for spec in TABLE[:4]:
        wanted = cast(true_values(spec, "master", "F32"), dtypes.FP32, dtype)
        assert np.array_equal(found.read(spec.name, dtype=dtype).values, wanted)
        stored = found.read(spec.name, dtype=dtypes.BF16).values
        assert np.array_equal(stored, true_values(spec, "weight", "BF16"))


def test_an_empty_name_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", {"": torch.ones(2), "a": torch.ones(3)})
    with pytest.raises(ManifestError, match="a tensor's name is empty"):
        Checkpoint.open(source)
    with pytest.raises(ManifestError, match="holds no tensors"):
        Checkpoint.open(folder_of(tmp_path / "nothing", {}))


def test_fp8_is_compared_by_value(tmp_path: Path) -> None:
    scales = FP8["scales"]
    powers = widen(scales.view(torch.uint8).numpy(), dtypes.FP8_E8M0)
    assert np.array_equal(powers, scales.float().double().numpy(), equal_nan=True)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        bits = torch.arange(256).to(torch.uint8)
        code = {torch.float8_e4m3fn: dtypes.FP8_E4M3, torch.float8_e5m2: dtypes.FP8_E5M2}[dtype]
        wanted = bits.view(dtype).double().numpy()
        assert np.array_equal(widen(bits.numpy(), code), wanted, equal_nan=True)
        nan = torch.tensor([0x7F], dtype=torch.uint8)
        one = torch.cat([torch.tensor([0.0, 1.0, 2.0]).to(dtype).view(torch.uint8), nan])
        two = torch.cat([torch.tensor([-0.0, 1.0, 2.5]).to(dtype).view(torch.uint8), nan | 0x80])
        names = [f"{code.code}_{side}" for side in "ab"]
        folders = [
            folder_of(tmp_path / name, {"zero": values[:1].view(dtype), "nan": values[3:].view(dtype),
                                        "rest": values[1:3].view(dtype)})
            for name, values in zip(names, (one, two), strict=True)
        ]  # fmt: skip
        found = compare(Checkpoint.open(folders[0]), Checkpoint.open(folders[1]))
        assert {d.tensor: (d.num_different, d.max_difference) for d in found.differences} == {
            "zero": (1, 0.0),
            "nan": (1, 0.0),
            "rest": (1, 0.5),
        }
