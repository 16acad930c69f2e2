"""The folder of packed weights: who may write it, what stays in it, what is said when it cannot be used."""

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tk.core.casts import Array
from tk.core.errors import ConfigError
from tk.infer.engine.kernels.native.packed import folder as folder_module
from tk.infer.engine.kernels.native.packed.folder import KEPT, PackedFolder

KEYS = [format(n, "032x") for n in range(6)]
ABOUT = {"weights": "of a test"}
VALUES: dict[str, Array] = {"matrix a": np.arange(9, dtype=np.uint8)}


def names(folder: PackedFolder) -> set[str]:
    return {path.name for path in folder.path.iterdir()}


def test_what_was_added_is_found_by_key_and_rank(tmp_path: Path) -> None:
    folder = PackedFolder(tmp_path / "made" / "on the way")
    folder.add(KEYS[0], 1, VALUES, ABOUT)
    found = folder.find(KEYS[0], 1, ABOUT, 1)
    assert found is not None
    np.testing.assert_array_equal(found["matrix a"], VALUES["matrix a"])
    assert folder.find(KEYS[0], 0, ABOUT, 1) is None
    assert folder.find(KEYS[1], 1, ABOUT, 1) is None


def test_a_link_leads_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert PackedFolder(tmp_path / "link").path == tmp_path / "folder"
    assert (tmp_path / "folder").is_dir()


def test_a_damaged_file_is_said_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = PackedFolder(tmp_path)
    folder.add(KEYS[0], 0, VALUES, ABOUT)
    path = tmp_path / f"{KEYS[0]}.0.packed"
    path.write_bytes(b"\0" + path.read_bytes()[1:].replace(b"\1", b"\2", 1))
    assert folder.find(KEYS[0], 0, ABOUT, 1) is None
    assert f"{path} cannot be used, so the weights are packed again: its bytes from 0 on" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"--packed .*open cannot hold packed weights: .*chmod go-w"):
        PackedFolder(path)


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = PackedFolder(tmp_path)
    folder.add(KEYS[0], 0, VALUES, ABOUT)
    (tmp_path / f"{KEYS[0]}.0.packed").chmod(0o666)
    with pytest.raises(ConfigError, match="may be written by other users"):
        folder.find(KEYS[0], 0, ABOUT, 1)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot hold packed weights"):
        PackedFolder(tmp_path / "file")


def test_a_full_disk_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "write_arrays", full)
    folder = PackedFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"no room .*9 B: No space left on device\. Free space there"):
        folder.add(KEYS[0], 0, VALUES, ABOUT)
    assert not names(folder)


def test_old_models_go_and_used_ones_stay(tmp_path: Path) -> None:
    """Of five older models one is mapped and one is being packed; of the others the last two stay."""
    folder = PackedFolder(tmp_path)
    for age, key in enumerate(KEYS):
        folder.add(key, 0, VALUES, ABOUT)
        (tmp_path / f"{key}.lock").touch()
        os.utime(tmp_path / f"{key}.0.packed", (age, age))
        os.utime(tmp_path / f"{key}.lock", (age, age))
    for name in ("notes.txt", "model.safetensors", f"{KEYS[1]}", f"{KEYS[5]}.1.k3x_9"):
        (tmp_path / name).touch()
    mapped = folder.find(KEYS[0], 0, ABOUT, 1)
    os.utime(tmp_path / f"{KEYS[0]}.0.packed", (0, 0))
    with folder.locked(KEYS[1]):
        folder.remove_old(KEYS[5])
    assert KEPT == 2
    kept = {name for key in (0, 1, 3, 4, 5) for name in (f"{KEYS[key]}.0.packed", f"{KEYS[key]}.lock")}
    assert names(folder) == kept | {"notes.txt", "model.safetensors", KEYS[1]}
    del mapped
    folder.remove_old(KEYS[5])
    assert {f"{KEYS[key]}.0.packed" for key in (3, 4, 5)} == {name for name in names(folder) if "packed" in name}


def test_one_packs_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder, order = PackedFolder(tmp_path), list[str]()

    def second() -> None:
        with folder.locked(KEYS[0]):
            order.append("second")

    thread = threading.Thread(target=second)
    with folder.locked(KEYS[0]), folder.locked(KEYS[1]):
        thread.start()
        while "Waits for another server" not in caplog.text:
            thread.join(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
