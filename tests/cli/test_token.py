"""`tk token`: the token on stdout, its hash in the file, and a call that it admits."""

from pathlib import Path

import pytest

from tk.cli.main import main
from tk.infer.serve.access.tokens import Caller, parse_tokens, token_digest
from tk.tests.infer.serve.fake_engine import FakeEngine, ServerThread


def test_a_made_token_admits_a_call(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens"
    assert main(["token", "alice", "--tokens", str(path)]) == 0
    token = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    server = ServerThread(engine, tokens=path)
    try:
        monkeypatch.delenv("TK_TOKEN", raising=False)
        assert main(["generate", server.target, "hi"]) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err
        monkeypatch.setenv("TK_TOKEN", token)
        assert main(["generate", server.target, "hi"]) == 0
        assert capsys.readouterr().out == "abc\n"
    finally:
        server.close()


def test_lines_are_added_to_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# by hand\nbob generate {token_digest('his')}")  # without a newline
    roles = ("--role", "admin", "--role", "generate")
    words = ["token", "ops", *roles, "--weight", "2", "--adapter", "sql", "--tokens", str(path)]
    assert main(words) == 0
    token = capsys.readouterr().out.strip()
    assert parse_tokens(path.read_text(), path) == {
        token_digest("his"): Caller("bob", frozenset({"generate"})),
        token_digest(token): Caller("ops", frozenset({"admin", "generate"}), 2.0, frozenset({"sql"})),
    }


def test_a_wrong_name_leaves_the_file_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens"
    assert main(["token", "al ice", "--tokens", str(path)]) == 2
    assert not path.exists()
    for name in ("a b", "a,b", "a#b"):
        assert main(["token", "alice", "--adapter", name, "--tokens", str(path)]) == 2
    assert not path.exists()
    path.write_text("wrong\n")
    assert main(["token", "alice", "--tokens", str(path)]) == 2
    assert path.read_text() == "wrong\n"
    assert "line 1" in capsys.readouterr().err
