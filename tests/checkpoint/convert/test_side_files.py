"""Config, tokenizer and other small files that a copy takes along."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import disk_facts, storage
from tk.cli.main import main


def _odd_name(folder: Path) -> None:
    (folder / "my notes.txt").write_text("")


def _dangling(folder: Path) -> None:
    (folder / "vocab.txt").symlink_to("nowhere")


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "vocab.txt")


def _folder(folder: Path) -> None:
    (folder / "vocab.json").mkdir()


def _too_large(folder: Path) -> None:
    (folder / "vocab.txt").touch()
    os.truncate(folder / "vocab.txt", 2**29)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_odd_name, "'my notes.txt' is not a plain file name (letters, digits, dot, dash and underscore). Rename it"),
        (_dangling, "nowhere"),
        (_pipe, "not a regular file"),
        (_folder, "not a regular file"),
        (_too_large, "at most"),
    ],
)
def test_side_files_that_cannot_be_taken_along_are_refused_before_the_copy(
    llama_step: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    spoil(tmp_path / "hf")
    assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new"), "--dry-run"]) == 3
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


def test_side_files_are_counted_streamed_and_checked(
    llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "hf"), "--plain"]) == 0
    data = os.urandom(5 * 2**20)
    (tmp_path / "hf" / "vocab.txt").write_bytes(data)
    (tmp_path / "hf" / ".hidden.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(disk_facts, "free_bytes", lambda folder: 5 * 2**20)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 1
    assert "5 MiB are free there" in " ".join(capsys.readouterr().err.split())
    pread, most = storage.pread, [0]

    def watched(fd: int, buffer: memoryview, offset: int, once: bool = False) -> int:
        most.append(len(buffer))
        return pread(fd, buffer, offset, once)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "pread", watched)
        assert main(["export", str(tmp_path / "hf"), str(tmp_path / "new")]) == 0
    assert max(most) <= 2**20
    assert (tmp_path / "new" / "vocab.txt").read_bytes() == data
    assert not (tmp_path / "new" / ".hidden.json").exists()
    assert Checkpoint.open(tmp_path / "new").verify().ok
    (tmp_path / "new" / "vocab.txt").write_bytes(data[::-1])
    assert main(["reshard", str(tmp_path / "new"), str(tmp_path / "newer"), "--tp", "1"]) == 3
    assert "vocab.txt is not the file that was saved" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["hf", "new", "run"]
