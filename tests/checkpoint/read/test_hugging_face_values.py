"""Every tensor of a Hugging Face folder comes through with its values, whatever its dtype and size, or is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tk.checkpoint import Checkpoint, Options, compare, prepare_export, prepare_reshard, reshard
from tk.core import dtypes
from tk.core.casts import cast, widen
from tk.core.errors import CheckpointError, ManifestError
from tk.core.layout import Layout
from tk.tests.checkpoint.hugging_face_values import STORED, assert_same, exported, folder_of
from tk.tests.checkpoint.saving import MIXED, llama_table, save_step, true_values

TABLE = llama_table(layers=1)

FP8 = {
    "e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
    "scales": torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu),
}


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
    with pytest.raises(
        CheckpointError, match=r" is stored as F8_E\dM\d, which tk cannot cast to bf16 .*leave out --dtype"
    ):
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
