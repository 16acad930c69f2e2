"""What `make triton` installs: each version once, and whole or not at all."""

from pathlib import Path
from typing import Any

import pytest

from tk.scripts import triton_versions
from tk.scripts.real_parts import PartMissing


def test_a_version_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[Any, ...]] = []

    def run(*words: Any) -> None:
        commands.append(words)
        Path(words[words.index("--target") + 1]).mkdir()

    monkeypatch.setattr(triton_versions, "run", run)
    triton_versions.install("9.9", tmp_path)
    triton_versions.install("9.9", tmp_path)
    assert [words[-1] for words in commands] == ["triton==9.9"]
    assert [path.name for path in tmp_path.iterdir()] == ["9.9"]


def test_half_a_version_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: Any) -> None:
        Path(words[words.index("--target") + 1], "triton").mkdir(parents=True)
        raise PartMissing("no network")

    monkeypatch.setattr(triton_versions, "run", run)
    with pytest.raises(PartMissing):
        triton_versions.install("9.9", tmp_path)
    assert not (tmp_path / "9.9").exists()


def test_without_a_network_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def install(version: str) -> None:
        raise PartMissing(f"no {version}")

    monkeypatch.setattr(triton_versions, "install", install)
    assert triton_versions.main() == 1
    assert capsys.readouterr().err == f"make triton leaves out its tests: no {triton_versions.VERSIONS[0]}\n"
