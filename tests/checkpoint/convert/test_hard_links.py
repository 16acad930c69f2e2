"""Copies that link files instead of writing them again."""

import errno
import json
import os
from pathlib import Path

import pytest

from tk.checkpoint import Checkpoint
from tk.checkpoint.files import folders, storage
from tk.cli.main import main
from tk.core.layout import Layout
from tk.tests.checkpoint.saving import LLAMA, LLAMA_CONFIG, save_step


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
def test_links_that_cannot_be_are_refused_before_the_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    source = save_step(tmp_path / "run", LLAMA, Layout())
    monkeypatch.setattr(folders, "link", refuse)
    monkeypatch.setattr(storage, "open_new", lambda path: pytest.fail(f"{path} is written"))
    for command in (["reshard", "--tp", "1", "--dtype", "fp16"], ["export"]):
        assert main([*command, str(source), str(tmp_path / "new"), "--link"]) == 2
        assert "leave out --link" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_export_by_links(llama_step: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(llama_step), str(tmp_path / "out"), "--link"]) == 2
    assert "leave out --link" in capsys.readouterr().err
    assert main(["reshard", str(llama_step), str(tmp_path / "tp1"), "--tp", "1"]) == 0
    assert main(["export", str(tmp_path / "tp1"), str(tmp_path / "out"), "--link"]) == 0
    assert "copied without a check" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "tp1"), str(tmp_path / "out2"), "--link", "--plain"]) == 2


def test_reshard_links_files_that_do_not_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights kept and its optimizer states left out: every file that is left is one of the source's."""
    source = save_step(tmp_path / "run", LLAMA, Layout(tp=2))
    plain = ["reshard", str(source), "--tp", "2", "--weights-only"]
    assert main([*plain[:2], str(tmp_path / "copy"), *plain[2:]]) == 0
    assert main([*plain[:2], str(tmp_path / "link"), *plain[2:], "--link"]) == 0
    assert "linked 2 files: checksums were copied without a check" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "link").glob("*.safetensors"))
    assert names == ["model-00000.safetensors", "model-00001.safetensors"]
    assert all((tmp_path / "link" / name).samefile(source / name) for name in names)
    assert main(["diff", str(tmp_path / "copy"), str(tmp_path / "link")]) == 0
    assert main(["verify", str(tmp_path / "link")]) == 0
    flipped = tmp_path / "link" / names[1]
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    assert main(["verify", str(tmp_path / "link")]) != 0, "the checksums are those of the source"


def test_reshard_copies_files_that_change_and_links_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --dtype the weights are new, the states are not; at another tp nothing is as it was."""
    source = save_step(
        tmp_path / "run", LLAMA, Layout(tp=2), side_files={"config.json": json.dumps(LLAMA_CONFIG).encode()}
    )
    assert main(["reshard", str(source), str(tmp_path / "cast"), "--tp", "2", "--dtype", "fp16", "--link"]) == 0
    found = Checkpoint.open(tmp_path / "cast")
    assert found.verify().ok
    linked = {path.name for path in (tmp_path / "cast").glob("*.safetensors") if path.stat().st_nlink > 1}
    assert linked == {path.name for path in source.glob("optim-*")}
    old = Checkpoint.open(source)
    for name, slot in found.chunks:
        if slot != "weight":
            assert found.read(name, slot=slot).values.tobytes() == old.read(name, slot=slot).values.tobytes()
    assert main(["reshard", str(source), str(tmp_path / "one"), "--tp", "1", "--link"]) == 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "one").glob("*.safetensors"))
    assert main(["export", str(source), str(tmp_path / "plain"), "--plain"]) == 0
    capsys.readouterr()
    assert main(["reshard", str(tmp_path / "plain"), str(tmp_path / "two"), "--tp", "1", "--link"]) == 2
    assert "no checksums to carry over; leave out --link" in capsys.readouterr().err
