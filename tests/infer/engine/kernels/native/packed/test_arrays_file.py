"""Files of named arrays: every byte comes back or the file is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from tk.core.casts import Array
from tk.infer.engine.kernels.native.binding.memory import CACHE_LINE
from tk.infer.engine.kernels.native.packed.arrays_file import DamagedArrays, map_arrays, write_arrays

ABOUT = {"weights": "those of a test"}
ARRAYS = st.sampled_from([np.uint8, np.uint16, np.int32]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(max_dims=3, max_side=9))
)


def write(path: Path, values: dict[str, Array]) -> Path:
    with path.open("wb") as file:
        write_arrays(file, values, ABOUT)
    return path


def read(path: Path, about: dict[str, str] = ABOUT) -> dict[str, Array]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return map_arrays(descriptor, about, threads=2)
    finally:
        os.close(descriptor)


@given(st.dictionaries(st.text(max_size=9), ARRAYS, max_size=4))
def test_arrays_come_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Array]) -> None:
    found = read(write(tmp_path_factory.mktemp("arrays") / "file", values))
    assert list(found) == list(values)
    for name, each in values.items():
        np.testing.assert_array_equal(found[name], each)
        assert found[name].dtype == each.dtype
        assert found[name].ctypes.data % CACHE_LINE == 0
        assert not found[name].flags.writeable


def test_many_blocks_have_checksums_of_their_own(tmp_path: Path) -> None:
    """40 MB in three arrays are three blocks of 16 MiB, which no array's border meets."""
    values: dict[str, Array] = {str(n): np.arange(n, n + 3_333_333, dtype=np.uint32) for n in range(3)}
    path = write(tmp_path / "file", values)
    found = read(path)
    assert all(np.array_equal(found[name], each) for name, each in values.items())
    with path.open("r+b") as file:
        file.seek(2**24 + 5)
        file.write(b"\xaa")
    with pytest.raises(DamagedArrays, match="its bytes from 16777216 on do not match"):
        read(path)


def test_no_changed_byte_is_read(tmp_path: Path) -> None:
    values: dict[str, Array] = {"a": np.arange(50, dtype=np.float32), "b": np.arange(7, dtype=np.uint8)}
    content = write(tmp_path / "file", values).read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        (tmp_path / "file").write_bytes(changed)
        with pytest.raises(DamagedArrays):
            read(tmp_path / "file")


@pytest.mark.parametrize("kept", [0, 5, 23, 24, 200, -24, -1])
def test_no_part_of_a_file_is_read(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "file", {"a": np.arange(50, dtype=np.float32)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedArrays):
        read(path)


def test_a_file_about_something_else_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "file", {"a": np.zeros(3)})
    with pytest.raises(DamagedArrays, match="other weights"):
        read(path, {"weights": "of another test"})


def test_a_file_without_values_is_one(tmp_path: Path) -> None:
    assert read(write(tmp_path / "file", {})) == {}
