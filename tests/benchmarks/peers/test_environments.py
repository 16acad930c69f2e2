"""The order in which a peer's packages are installed, and when they are installed again."""

import subprocess
import venv
from pathlib import Path

import pytest

from tk.benchmarks.peers import environments


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ends of pip's commands, which are not run; PEER's files have the texts of their names."""
    commands: list[list[str]] = []
    for name in ("peer-build.txt", "peer-alone.txt", "peer.txt", "plain.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setattr(environments, "BUILD", tmp_path / "build")
    monkeypatch.setattr(venv, "create", lambda folder, **_: Path(folder).mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[-3:]))
    return commands


def test_files_are_installed_in_order_and_once(installed: list[list[str]], tmp_path: Path) -> None:
    expected = [
        ["--no-build-isolation", "-r", str(tmp_path / "peer-build.txt")],
        ["--no-deps", "-r", str(tmp_path / "peer-alone.txt")],
        ["--no-build-isolation", "-r", str(tmp_path / "peer.txt")],
    ]
    assert environments.python_of("peer") == tmp_path / "build" / "peers" / "peer" / "bin" / "python"
    assert installed == expected
    environments.python_of("peer")
    assert installed == expected
    (tmp_path / "peer-alone.txt").write_text("another version\n")
    environments.python_of("peer")
    assert installed == expected * 2


def test_a_peer_may_have_one_file(installed: list[list[str]], tmp_path: Path) -> None:
    environments.python_of("plain")
    assert installed == [["--no-build-isolation", "-r", str(tmp_path / "plain.txt")]]


def test_a_peer_that_pip_cannot_install_is_left_out(
    installed: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert environments.python_if_possible("plain") is None
    assert "plain is left out, because it could not be installed: `" in capsys.readouterr().err


def test_an_interrupted_build_of_an_extension_does_not_block_the_next_run(
    installed: list[list[str]], tmp_path: Path
) -> None:
    folder = Path(environments.peer_environment()["TORCH_EXTENSIONS_DIR"])
    assert folder.is_relative_to(tmp_path), "not the user's own extensions"
    lock = folder / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "shm.so").touch()
    environments.python_of("plain")
    assert [path.name for path in lock.parent.iterdir()] == ["shm.so"]
