"""A client's credentials before any connection; tests/infer/serve/access/test_tls.py uses them."""

from pathlib import Path

import pytest

from tk.core.errors import ConfigError
from tk.infer.client.client import Client
from tk.infer.client.connection import Credentials


def test_the_token_is_sent_with_every_call_and_not_shown() -> None:
    assert Credentials().metadata == ()
    credentials = Credentials(token="secret")
    assert credentials.metadata == (("authorization", "Bearer secret"),)
    assert "secret" not in repr(credentials)


@pytest.mark.parametrize("token", ["", " ", "secret\n", "geheimnüs"])
def test_a_text_that_is_no_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError, match="characters that no token has") as caught:
        Credentials(token=token)
    assert "secret" not in str(caught.value)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    for cert, key in ((tmp_path, None), (None, tmp_path)):
        with pytest.raises(ConfigError, match="give both or neither"):
            Credentials(cert=cert, key=key)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read .*absent\.pem"):
        Client("127.0.0.1:1", credentials=Credentials(ca=tmp_path / "absent.pem"))
