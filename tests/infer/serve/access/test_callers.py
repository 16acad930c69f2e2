"""Who calls, by the token of the call; a file that changes while the server runs."""

import os
from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer.serve.access import tokens as tokens_module
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, Callers, TokenCallers, line_of, token_digest
from tk.infer.serve.errors import Unauthenticated

ALICE = Caller("alice", frozenset({GENERATE}))
OPS = Caller("ops", frozenset({GENERATE, ADMIN}), 4)


def write(path: Path, **tokens: Caller) -> None:
    """Replaces the file at once, as an operator's tool does."""
    text = "".join(line_of(token_digest(token), caller) for token, caller in tokens.items())
    path.with_name("new").write_text(text)
    os.replace(path.with_name("new"), path)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tokens_module, "RELOAD_SECONDS", 0)
    write(tmp_path / "tokens", first=ALICE, second=OPS)
    return tmp_path / "tokens"


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {token}")]


def test_without_tokens_every_caller_is_the_same_and_has_every_role() -> None:
    assert Callers().identify([]) == Caller("", frozenset({GENERATE, ADMIN}))


def test_a_token_names_its_caller(path: Path) -> None:
    callers = TokenCallers(path)
    assert callers.identify(bearer("first")) == ALICE
    assert callers.identify(bearer("second")) == OPS
    assert callers.identify([("authorization", "bearer  first ")]) == ALICE


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "first")],
        [("authorization", "Basic first")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer third")],
        [("authorization", f"Bearer {token_digest('first')}")],
        [("authorization", "Bearer first"), ("authorization", "Bearer second")],
        [("authorization", b"Bearer first")],
        [("authorization-bin", b"Bearer first")],
    ],
)
def test_other_metadata_are_no_token(path: Path, metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated):
        TokenCallers(path).identify(metadata)


def test_a_changed_file_takes_effect_and_a_wrong_one_does_not(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callers = TokenCallers(path)
    write(path, third=ALICE)
    assert callers.identify(bearer("third")) == ALICE
    with pytest.raises(Unauthenticated):
        callers.identify(bearer("first"))

    path.write_text("alice generate")
    assert callers.identify(bearer("third")) == ALICE
    path.unlink()
    assert callers.identify(bearer("third")) == ALICE
    assert sum("the tokens read before stay valid" in record.message for record in caplog.records) == 2
    assert "third" not in caplog.text

    write(path, fourth=OPS)
    assert callers.identify(bearer("fourth")) == OPS


def test_a_file_is_looked_at_once_a_second_at_most(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_module, "RELOAD_SECONDS", 3600)
    callers = TokenCallers(path)
    write(path, third=ALICE)
    assert callers.identify(bearer("first")) == ALICE


def test_a_server_does_not_start_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the tokens"):
        TokenCallers(tmp_path / "absent")
