"""The file of tokens: what it may say, and the error for everything else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk.core.errors import ConfigError
from tk.infer.serve.access.tokens import ADMIN, GENERATE, Caller, line_of, parse_tokens, read_text, token_digest
from tk.infer.serve.errors import RoleMissing

DIGEST = token_digest("a token")
PATH = Path("tokens")


def test_a_line_gives_a_principal_its_roles_and_weight() -> None:
    other = token_digest("another token")
    text = f"# a comment\n\nalice generate {DIGEST} # hers\n  ops  generate,admin  {other.upper()}  2.5\r\n"
    assert parse_tokens(text, PATH) == {
        DIGEST: Caller("alice", frozenset({GENERATE})),
        other: Caller("ops", frozenset({GENERATE, ADMIN}), 2.5),
    }


def test_a_line_may_name_the_adapters_that_are_allowed() -> None:
    for words, expected, weight in (("", None, 1), (" 2 adapters=b,a", {"a", "b"}, 2), (" adapters=", set(), 1)):
        [caller] = parse_tokens(f"alice generate {DIGEST}{words}", PATH).values()
        assert (caller.adapters, caller.weight) == (expected, weight)
        assert parse_tokens(line_of(DIGEST, caller), PATH) == {DIGEST: caller}
        assert caller.may_use("")
        assert [caller.may_use(name) for name in "abc"] == [expected is None or name in expected for name in "abc"]


def test_a_principal_may_have_two_tokens_while_one_replaces_the_other() -> None:
    text = f"alice generate {DIGEST}\nalice generate {token_digest('new')}\n"
    assert {caller.principal for caller in parse_tokens(text, PATH).values()} == {"alice"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no token"),
        ("# only a comment", "lists no token"),
        (f"alice {DIGEST}", "line 1: it has 2 words"),
        (f"alice generate {DIGEST} 1 2", "line 1: it has 5 words"),
        (f"alice generate {DIGEST} adapters=a 2", "line 1: it has 5 words"),
        (f"al/ice generate {DIGEST}", "line 1: principal 'al/ice'"),
        (f"{'a' * 65} generate {DIGEST}", "use 1 to 64 of the characters"),
        (f"\nalice root {DIGEST}", "line 2: roles 'root'"),
        (f"alice generate, {DIGEST}", "line 1: roles 'generate,'"),
        (f"alice generate {DIGEST[:-1]}", "SHA-256"),
        ("alice generate the-token-itself", "SHA-256"),
        (f"alice generate {DIGEST} 0", "weight '0'"),
        (f"alice generate {DIGEST} nan", "weight 'nan'"),
        (f"alice generate {DIGEST} much", "weight 'much'"),
        (f"alice generate {DIGEST}\nbob generate {DIGEST}", "line 2: an earlier line has the same token"),
        (f"alice generate {DIGEST}\nalice admin {token_digest('b')} 2", "another weight in an earlier line"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"tokens") as caught:
        parse_tokens(text, PATH)
    assert message in str(caught.value)
    assert "the-token-itself" not in str(caught.value)


@given(
    st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    st.sets(st.sampled_from([GENERATE, ADMIN]), min_size=1),
    st.integers(1, 10_000),
)
def test_a_written_line_is_read_as_it_was(principal: str, roles: set[str], hundredths: int) -> None:
    caller = Caller(principal, frozenset(roles), hundredths / 100)
    assert parse_tokens(line_of(DIGEST, caller), PATH) == {DIGEST: caller}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        read_text(tmp_path / "absent")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary"):
        read_text(tmp_path / "binary")


def test_a_role_that_the_caller_lacks_is_named() -> None:
    caller = Caller("alice", frozenset({GENERATE}))
    caller.require(GENERATE)
    with pytest.raises(RoleMissing, match="the role admin, which the token of 'alice' does not have"):
        caller.require(ADMIN)
